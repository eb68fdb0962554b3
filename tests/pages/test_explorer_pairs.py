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
from tests.insight.test_maps import PAIRS
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
