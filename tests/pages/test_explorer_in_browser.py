"""The explorer page in headless Chromium: its controls, its colours and its position page."""

import json
import re

import numpy as np
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from docs.figures import toy_heads
from mini_gpt.commands import suites
from mini_gpt.commands.suites.base import SuiteOptions
from mini_gpt.config import loading as configs
from mini_gpt.insight.attention import attention_maps
from mini_gpt.pages import document
from mini_gpt.pages.explorer import largest, toy
from mini_gpt.pages.explorer import page as explorer
from mini_gpt.training import loop
from mini_gpt.training.run import Run
from tests.conftest import SMALL
from tests.pages.browser import pixels, press, show
from tests.pages.test_explorer import HOSTILE, data_of


@pytest.fixture(scope="module")
def opened(browser, tmp_path_factory):
    """Open a page with hostile text; return the browser, a function that finds elements, and the run."""
    root = tmp_path_factory.mktemp("explorer")
    (root / "text").mkdir()
    for number in range(120):
        (root / "text" / f"{number}.txt").write_text(HOSTILE * (1 + number % 3), encoding="utf-8")
    paths = {"data.path": f"{root}/text/*.txt", "data.cache_dir": f"{root}/cache", "data.tokenizer": "bpe"}
    fields = paths | {"data.vocab_size": 300, "model.num_layers": 2, "mesh.data": 8}
    loop.train(configs.load("configs/default.py", SMALL | fields), root / "run", conclude=False)
    suites.evaluate(Run(root / "run"), "heads", SuiteOptions())
    suites.evaluate(Run(root / "run"), "explorer", SuiteOptions())
    show(browser, root / "run" / "eval" / "explorer.html")
    return browser, lambda name: browser.find_element(By.ID, name), Run(root / "run")


@pytest.mark.slow
def test_the_page_opens_offline_and_parses_no_text_as_markup(opened):
    browser, find, run = opened
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert browser.title == "run: what 2 × 4 heads attend to" and browser.find_elements(By.TAG_NAME, "img") == []
    press(browser, "1")
    tokens = run.store.tokens("validation")[:32]
    for place in range(32):
        text = run.tokenizer.decode([tokens[place]]).replace("\n", "⏎")
        assert find(f"query-{place}").get_property("textContent").replace("·", " ") == (text or "∅")


def blank(browser):
    """Return the pixels of an empty canvas."""
    return browser.execute_script("return document.createElement('canvas').toDataURL()")


@pytest.mark.slow
def test_controls_change_the_page(opened):
    browser, find, run = opened
    until = lambda condition: WebDriverWait(browser, 10).until(lambda _: condition())
    press(browser, "1")
    first = pixels(browser, "lines")
    find("head-2").click()
    until(lambda: find("head-2").get_attribute("aria-pressed") == "true" and pixels(browser, "lines") != first)
    before = pixels(browser, "lines")
    ActionChains(browser).move_to_element(find("query-9")).perform()
    until(lambda: pixels(browser, "lines") != before and "on" in find("query-9").get_attribute("class"))
    press(browser, "2")
    find("thumb-1-3").click()
    until(lambda: browser.find_elements(By.ID, "map") and pixels(browser, "map") != blank(browser))
    assert find("layer-1").get_attribute("aria-pressed") == find("head-3").get_attribute("aria-pressed") == "true"
    weights = pixels(browser, "map")
    press(browser, "l")
    until(lambda: pixels(browser, "map") != weights and find("range").text.startswith("logits from"))
    canvas = find("map")
    half = canvas.size["width"] / 2
    cell = canvas.size["width"] / 32
    ActionChains(browser).move_to_element_with_offset(canvas, int(4.5 * cell - half), int(20.5 * cell - half)).perform()
    until(lambda: find("pointed").text.startswith("query 20"))
    shown = find("pointed").text
    pattern = r"query (\d+) .*\nkey +(\d+) .*\nlogit (\S+) ± (\S+) +weight (\S+) ± (\S+)"
    query, key, *numbers = re.fullmatch(pattern, shown, re.DOTALL).groups()
    logit, logit_error, weight, weight_error = map(float, numbers)
    tokens_BL = np.asarray(run.store.tokens("validation")[:32], np.int32)[None].repeat(8, axis=0)
    maps = attention_maps(run.model, tokens_BL)[1]
    assert (int(query), int(key)) == (20, 4)
    assert weight == pytest.approx(maps.weights_BHLS[0, 3, 20, 4], abs=weight_error)
    assert logit == pytest.approx(maps.logits_BHLS[0, 3, 20, 4], abs=logit_error)
    assert max(logit_error, weight_error) < 0.05
    press(browser, "\ue012")  # left
    until(lambda: find("head-2").get_attribute("aria-pressed") == "true")
    label = json.loads((run.workdir / "eval" / "heads.json").read_text())["heads"][4 + 2]["label"]
    assert find("label").text == label
    colour = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    press(browser, "t")
    until(lambda: browser.execute_script("return getComputedStyle(document.body).backgroundColor") != colour)


def slide(browser, name, value):
    browser.execute_script(
        "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
        "e.dispatchEvent(new Event('input', {bubbles: true}))",
        name,
        str(value),
    )


@pytest.mark.slow
def test_the_position_page_follows_its_sliders(opened):
    browser, find, _ = opened
    press(browser, "4")
    assert find("longest").text == f"{2 * np.pi * 10_000 ** (30 / 32):,.0f}"
    circle = browser.execute_script(
        "const c = document.querySelector('circle'); return [c.cx, c.cy, c.r].map((v) => v.baseVal.value)"
    )
    tip = lambda pair, place: [float(find(f"turn-{pair}-{place}").get_attribute(end)) for end in ("x2", "y2")]
    for pair, place in [(0, 3), (0, 7)]:  # pair 0 rotates by one radian per token
        turned = [circle[0] + circle[2] * np.cos(place), circle[1] - circle[2] * np.sin(place)]
        np.testing.assert_allclose(tip(pair, place), turned, atol=1e-3)
    far = tip(3, 7)
    before = pixels(browser, "waves")
    until = lambda condition: WebDriverWait(browser, 10).until(lambda _: condition())
    slide(browser, "base", 3)
    until(lambda: find("longest").text == f"{2 * np.pi * 1_000 ** (30 / 32):,.0f}")
    until(lambda: pixels(browser, "waves") != before)
    until(lambda: tip(3, 7) != far)
    slide(browser, "length", 256)
    until(lambda: find("length-value").text == "256 tokens")
    until(lambda: browser.execute_script("return document.getElementById('waves').height") == 256)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1200, 420])
def test_the_map_stays_in_place_under_the_pointer(opened, width):
    browser, find, _ = opened
    browser.set_window_size(width, 1500)
    press(browser, "3")
    place = lambda: browser.execute_script("return document.getElementById('map').getBoundingClientRect().toJSON()")
    before = place()
    for row in (0, 1, 31):
        x, y = (int((at + 0.5) / 32 * before["width"] - before["width"] / 2) for at in (0, row))
        ActionChains(browser).move_to_element_with_offset(find("map"), x, y).perform()
        WebDriverWait(browser, 10).until(lambda _, row=row: find("pointed").text.startswith(f"query {row} "))
        assert place() == before and "weight" in find("pointed").text
        box = browser.execute_script(
            "const e = document.getElementById('pointed'); return [e.scrollHeight, e.clientHeight]"
        )
        assert box[0] <= box[1], "the whole text is visible"
    browser.set_window_size(1200, 1500)


@pytest.mark.slow
def test_a_key_has_the_colour_of_its_strongest_head(opened, tmp_path):
    browser, find, run = opened
    data = data_of((run.workdir / "eval" / "explorer.html").read_text(encoding="utf-8"))
    logits_NHLS = np.random.default_rng(0).normal(0, 3, (2, 4, 32, 32)).astype(np.float32)
    visible_LS = np.tril(np.ones((32, 32), bool))
    weights_NHLS = np.where(visible_LS, np.exp(logits_NHLS), 0)
    weights_NHLS /= weights_NHLS.sum(-1, keepdims=True)
    data["attention"] |= explorer.packed(logits_NHLS, weights_NHLS, visible_LS, causal=True)
    (tmp_path / "page.html").write_text(document.build(explorer.PAGE, data), encoding="utf-8")
    show(browser, tmp_path / "page.html")
    press(browser, "1")
    for head in (1, 2, 3):
        ActionChains(browser).key_down("\ue008").click(find(f"head-{head}")).key_up("\ue008").perform()
    colour = lambda name, style: browser.execute_script(
        "return getComputedStyle(document.getElementById(arguments[0]))[arguments[1]]", name, style
    )
    parts = lambda text: np.array([float(number) for number in re.findall(r"[\d.]+", text)][:3])
    heads = [parts(colour(f"head-{head}", "color")) / 255 for head in range(4)]
    for pointed, others, weights_HS in (
        ("query-20", "key", weights_NHLS[0, :, 20]),
        ("key-9", "query", weights_NHLS[0, :, :, 9]),
    ):
        ActionChains(browser).move_to_element(find(pointed)).perform()
        WebDriverWait(browser, 10).until(lambda _, name=pointed: "on" in find(name).get_attribute("class"))
        clear = [
            j for j in range(32) if weights_HS[:, j].max() > 0.02 and np.diff(np.sort(weights_HS[:, j]))[-1] > 0.01
        ]
        assert len({int(weights_HS[:, j].argmax()) for j in clear}) == 4
        for j in clear:
            shown = parts(colour(f"{others}-{j}", "backgroundColor").removeprefix("color(srgb"))
            assert np.abs(heads - shown).sum(axis=1).argmin() == weights_HS[:, j].argmax()
    show(browser, run.workdir / "eval" / "explorer.html")


@pytest.mark.slow
def test_the_position_page_shows_an_overridden_rope(opened):
    browser, find, run = opened
    changed = {"model.rope.base": "500", "model.rope.scaling": "linear", "model.rope.factor": "4"}
    suites.evaluate(Run(run.workdir, overrides=changed), "explorer", SuiteOptions())
    (path,) = (run.workdir / "eval").glob("explorer,model.rope*.html")
    show(browser, path)
    press(browser, "4")
    assert find("scaling").text == "Frequencies with this run's scaling: linear, factor 4."
    assert find("base-value").text == "500"
    circle = browser.execute_script(
        "const c = document.querySelector('circle'); return [c.cx, c.cy, c.r].map((v) => v.baseVal.value)"
    )
    tip = [float(find("turn-0-4").get_attribute(end)) for end in ("x2", "y2")]
    turned = [circle[0] + circle[2] * np.cos(1), circle[1] - circle[2] * np.sin(1)]  # 4 tokens: 1 radian
    np.testing.assert_allclose(tip, turned, atol=1e-3)
    show(browser, run.workdir / "eval" / "explorer.html")


def toy_shown(browser, name):
    settle = "requestAnimationFrame(() => setTimeout(arguments[0], 0))"
    browser.execute_async_script(settle)
    script = "return [...document.querySelectorAll(`[id^='${arguments[0]}-']`)].map((cell) => +cell.dataset.value)"
    return np.array([browser.execute_script(script, f"{name}-{head}") for head in range(2)]).reshape(2, 4, 4)


@pytest.mark.slow
def test_the_toy_page_computes_the_same_as_the_library(opened):
    browser, find, _ = opened
    press(browser, "5")
    for preset in toy.PRESETS:
        find(f"preset-{preset.replace(' ', '-')}").click()
        for temperature in (1.0, 0.4, 3.0):
            slide(browser, "temperature", temperature)
            logits, weights = toy_heads.maps(preset, temperature=temperature)
            np.testing.assert_allclose(toy_shown(browser, "toy-logit"), logits, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(toy_shown(browser, "toy-weight"), weights, rtol=1e-5, atol=1e-6)
    find("reset").click()
    find("word-3").click()  # "down" moves before "sat"
    find("word-1").click()  # "cat" moves before "The"
    _, weights = toy_heads.maps(list(toy.PRESETS)[-1], order=(1, 0, 3, 2))
    np.testing.assert_allclose(toy_shown(browser, "toy-weight"), weights, rtol=1e-5, atol=1e-6)
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_a_long_page_says_which_weights_are_means(opened, tmp_path, monkeypatch):
    browser, find, run = opened
    for module, name, value in ((explorer, "MOST_PAIRS", 0), (largest, "KEPT", 4), (largest, "BLOCK", 8)):
        monkeypatch.setattr(module, name, value)
    tokens = np.asarray(run.store.tokens("validation")[:32], np.int32)
    page = explorer.explorer(run.model, run.tokenizer, tokens, title="long", subtitle="")
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    show(browser, tmp_path / "page.html")
    press(browser, "3")
    weights_LS = attention_maps(run.model, tokens[None].repeat(8, axis=0))[0].weights_BHLS[0, 0]
    canvas, order = find("map"), np.argsort(-weights_LS[20, :21])
    cell = canvas.size["width"] / 32
    for key, is_own in ((order[0], True), (order[-1], False)):
        at = [int((place + 0.5) * cell - canvas.size["width"] / 2) for place in (key, 20)]
        ActionChains(browser).move_to_element_with_offset(canvas, *at).perform()
        WebDriverWait(browser, 10).until(
            lambda _, key=key: re.search(rf"query 20 .*\nkey +{key} ", find("pointed").text)
        )
        said = find("pointed").text
        if is_own:
            weight, error = map(float, re.search(r"weight (\S+) ± (\S+)", said).groups())
            assert weight == pytest.approx(weights_LS[20, key], abs=error)
            continue
        most, mean = re.search(r"weight at most (\S+): not one of the query's 4 largest; .* is (\S+)$", said).groups()
        block = [j for j in range(21) if j // 8 == key // 8 and j not in order[:4]]
        assert float(most) >= weights_LS[20, key] - 1e-3
        assert float(mean) == pytest.approx(weights_LS[20, block].mean(), abs=0.003)
    press(browser, "2")
    assert browser.find_elements(By.ID, "thumb-1-3") and browser.get_log("browser") == []
    show(browser, run.workdir / "eval" / "explorer.html")
