"""The explorer page of a model with an encoder holds and shows all three kinds of attention."""

import re

import numpy as np
import pytest
from selenium.webdriver.support.ui import WebDriverWait

from mini_gpt import suites
from mini_gpt.data import tasks
from mini_gpt.data.tokenizers import CharacterTokenizer
from mini_gpt.insight import attention, examples
from mini_gpt.insight.heads import inputs
from mini_gpt.pages.explorer import page
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites import base
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import loop
from mini_gpt.training.run import Run
from tests.insight.test_maps_by_kind import PAIRS
from tests.pages.browser import pixels, press, show
from tests.pages.explorer_in_browser.test_controls import point_at
from tests.pages.test_explorer import data_of, unpacked
from tests.random_models import random_model

TOKENIZER = CharacterTokenizer(tasks.ALPHABET)
SIZE = {"model__encoder_layers": 1, "source_length": 12, "context_length": 12}


@pytest.fixture
def run(small, tmp_path):
    loop.train(small(**PAIRS | SIZE, train__steps=2, eval__tokens=64), tmp_path / "run", conclude=False)
    return Run(tmp_path / "run")


def opened(run, text="abcde=edc"):
    suites.evaluate(run, "explorer", SuiteOptions(text=text))
    (path,) = (run.workdir / "eval").glob("explorer,*.html")
    return path


@pytest.mark.slow
def test_the_page_holds_the_maps_of_all_kinds(run, monkeypatch):
    monkeypatch.setattr(inputs, "TOKENS", 200)
    suites.evaluate(run, "heads", SuiteOptions())
    data = data_of(opened(run).read_text(encoding="utf-8"))
    pair = base.example(run, SuiteOptions(text="abcde=edc"))
    maps = attention.maps_by_kind(run.model, pair.inputs[None], pair.source[None])
    tokens = {"encoder": ("abcde", "abcde"), "decoder": ("edc", "edc"), "cross": ("edc", "abcde")}
    assert list(data["kinds"]) == list(maps) and "attention" not in data
    assert data["title"] == "run: attention, 5 layers × 4 heads"
    for kind, held in data["kinds"].items():
        assert ("".join(held["tokens"]), "".join(held.get("keys", held["tokens"]))) == tokens[kind]
        assert (held["layers"], held["heads"]) == (len(maps[kind]), 4)
        assert [len(labels) for labels in held["labels"]] == [4] * held["layers"]
        assert all(name for labels in held["labels"] for name, _ in labels)
        assert np.shape(held["typical"]) == (held["layers"], 4) and np.max(held["typical"]) < len(held["tokens"])
        weights = np.concatenate([layer.weights_BHLS[0] for layer in maps[kind]])
        _, shown = unpacked(held, *weights.shape)
        assert np.abs(shown - weights).max() == pytest.approx(held["error"], abs=1e-6) and held["error"] < 0.005


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_the_page_holds_the_known_alignment_of_cross_attention(small, known):
    config = small(**PAIRS | SIZE)
    model = random_model(config, TOKENIZER.token_bytes)
    alignment = (((0, 2), (1, 3)), ((3, 4), (0, 1)))  # of characters
    pair = examples.of_problem(("ab c", "cab"), config, TOKENIZER, alignment if known else ())
    kinds = data_of(page.explorer(model, TOKENIZER, pair, title="", subtitle=""))["kinds"]
    assert list(kinds) == ["encoder", "decoder", "cross"], "the page opens on the last"
    assert [kind for kind, held in kinds.items() if "alignment" in held] == ["cross"] * known
    if not known:
        return
    marked_LS = np.zeros((4, 5), bool)
    for key, end_key, query, end_query in kinds["cross"]["alignment"]:
        marked_LS[query:end_query, key:end_key] = True
    found = [(kinds["cross"]["tokens"][i], kinds["cross"]["keys"][j]) for i, j in np.argwhere(marked_LS)]
    assert found == [("c", "c"), ("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")]


def test_a_pair_that_does_not_fit_is_refused(small, monkeypatch):
    config = small(**PAIRS | SIZE)
    pair = examples.of_problem(("abcde", "edc"), config, TOKENIZER)
    page.check_fits(config, pair)
    entries = 1 * 4 * 6 * 6 + 2 * 4 * 10 + 2 * 4 * 4 * 6
    for name, value in (("MOST_PAIRS", entries - 1), ("LONGEST", 5)):
        with monkeypatch.context() as patch:
            patch.setattr(page, "MOST_PAIRS", entries)
            page.check_fits(config, pair)
            patch.setattr(page, name, value)
            with pytest.raises(UserError, match=r"^--suite=explorer: found a source or target of 6 tokens, too many"):
                page.check_fits(config, pair)


@pytest.mark.slow
def test_the_selector_shows_each_kind(run, browser):
    show(browser, opened(run))
    find = lambda name: browser.find_element("id", name)
    until = lambda condition: WebDriverWait(browser, 10).until(lambda _: condition())
    press(browser, "1")
    text_of = lambda side: "".join(token.text for token in browser.find_elements("css selector", f"#{side} .token"))
    sides = {"encoder": ("∅abcde", ""), "decoder": ("∅edc", ""), "cross": ("edc∅", "∅abcde")}
    for kind, (queries, keys) in sides.items():
        find(f"kind-{kind}").click()
        until(lambda kind=kind: find(f"kind-{kind}").get_attribute("aria-pressed") == "true")
        until(lambda queries=queries, keys=keys: (text_of("queries"), text_of("keys")) == (queries, keys))
    find("layer-1").click()
    press(browser, "3")
    until(lambda: browser.find_elements("id", "map"))
    pair = base.example(run, SuiteOptions(text="abcde=edc"))
    said = point_at(browser, 2, 4)
    pattern = r"query 2 edc\nkey 4 ∅abcd\nweight (\S+) ± (\S+) +logit (\S+) ± (\S+)"
    weight, error, logit, logit_error = map(float, re.fullmatch(pattern, said).groups())
    maps = attention.maps_by_kind(run.model, pair.inputs[None], pair.source[None])["cross"][1]
    head = int(browser.execute_script("return new URLSearchParams(location.hash.slice(1)).get('head') ?? 0"))
    assert weight == pytest.approx(maps.weights_BHLS[0, head, 2, 4], abs=error)
    assert logit == pytest.approx(maps.logits_BHLS[0, head, 2, 4], abs=logit_error)
    before = pixels(browser, "map")
    find("kind-encoder").click()  # it has one layer
    until(lambda: pixels(browser, "map") != before and not browser.find_elements("id", "layer-1"))
    assert find("layer-0").get_attribute("aria-pressed") == "true"
    press(browser, "l")  # the next layer, of one
    press(browser, "2")
    until(lambda: len(browser.find_elements("css selector", ".thumb")) == 4)
    assert browser.get_log("browser") == []


def marked_pixels(browser):
    """Return where the map's plot begins, the width of a cell, and which pixels have the colour of marks [y, x]."""
    script = """const c = document.getElementById('map'), mark = cssColour('--mark').match(/\\d+/g).map(Number);
        const data = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, found = [];
        const isMark = (n) => mark.every((v, k) => Math.abs(v - data[n + k]) < 4);
        for (let n = 0; n < data.length; n += 4) found.push(isMark(n) ? 1 : 0);
        return [...['left', 'top', 'cell'].map((name) => +c.dataset[name]), c.width, found];"""
    browser.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 0))")  # the map knows its width
    left, top, cell, width, found = browser.execute_script(script)
    return left, top, cell, np.array(found, bool).reshape(-1, width)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("known", [True, False])
def test_frames_show_the_true_alignment(small, browser, tmp_path, request, width, known):
    config = small(**PAIRS | SIZE)
    model = random_model(config, TOKENIZER.token_bytes, noise=0.3)
    alignment = (((0, 2), (1, 3)), ((3, 4), (0, 1))) if known else ()
    pair = examples.of_problem(("ab c", "cab"), config, TOKENIZER, alignment)
    (tmp_path / "page.html").write_text(page.explorer(model, TOKENIZER, pair, title="", subtitle=""), encoding="utf-8")
    request.addfinalizer(lambda: browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {}))
    metrics = {"width": width, "height": 1500, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    show(browser, tmp_path / "page.html")
    until = lambda condition: WebDriverWait(browser, 10).until(lambda _: condition())
    count = lambda selector: len(browser.find_elements("css selector", selector))
    legend = lambda: [element.text for element in browser.find_elements("id", "legend")]
    browser.find_element("id", "tab-Map").click()
    until(lambda: count("#map"))
    assert legend() == (["true alignment"] if known else [])
    left, top, cell, is_mark_YX = marked_pixels(browser)
    around = np.zeros_like(is_mark_YX)  # the borders of the frames, two pixels wide on both sides
    for key, query, end_key, end_query in [(1, 1, 3, 3), (4, 0, 5, 1)] * known:
        x, y, end_x, end_y = (
            round(start + cell * n) for start, n in zip((left, top) * 2, (key, query, end_key, end_query), strict=True)
        )
        whole, inner = np.zeros_like(around), np.zeros_like(around)
        whole[y - 2 : end_y + 3, x - 2 : end_x + 3] = inner[y + 3 : end_y - 2, x + 3 : end_x - 2] = True
        around |= whole & ~inner
        for edge in (is_mark_YX[y - 2 : y + 3, (x + end_x) // 2], is_mark_YX[(y + end_y) // 2, end_x - 3 : end_x + 3]):
            assert edge.any()
    assert not (is_mark_YX & ~around).any()
    if not known:
        return
    browser.find_element("id", "tab-Heads").click()
    until(lambda: count(".thumb .line") == 8 * len(alignment))
    browser.find_element("id", "tab-Text").click()
    until(lambda: browser.find_elements("id", "queries-1"))
    assert legend() == ["true alignment of the token"]
    for pointed, others in {"queries-1": ["keys-1", "keys-2"], "keys-4": ["queries-0"], "queries-3": []}.items():
        is_pinned = lambda pointed=pointed: "pinned" in browser.find_element("id", pointed).get_attribute("class")
        if not is_pinned():  # at first, a typical token is pinned
            browser.find_element("id", pointed).click()
        until(is_pinned)
        aligned = browser.find_elements("css selector", ".token.framed")
        assert [element.get_attribute("id") for element in aligned] == others
    browser.find_element("id", "kind-decoder").click()
    until(lambda: not legend())
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.get_log("browser") == []
