"""The explorer page in headless Chromium: its controls, its colours and its position page."""

import json
import re

import numpy as np
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from mini_gpt import suites
from mini_gpt.config import loading
from mini_gpt.insight.attention import attention_maps
from mini_gpt.pages import document
from mini_gpt.pages.explorer import largest
from mini_gpt.pages.explorer import page as explorer
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import loop
from mini_gpt.training.run import Run
from tests.conftest import SMALL
from tests.pages.browser import pixels, press, show
from tests.pages.explorer_in_browser.explorer_page import go
from tests.pages.test_explorer import HOSTILE, data_of


@pytest.fixture(scope="module")
def opened(browser, tmp_path_factory):
    """Open a page with hostile text; return the browser, a function that finds elements, and the run."""
    root = tmp_path_factory.mktemp("explorer")
    (root / "text").mkdir()
    for number in range(120):
        (root / "text" / f"{number}.txt").write_text(HOSTILE * (1 + number % 3), encoding="utf-8")
    paths = {"data.path": f"{root}/text/*.txt", "data.tokenizer": "bpe"}
    fields = paths | {"data.vocab_size": 300, "model.num_layers": 2, "mesh.data": 8}
    loop.train(loading.load("configs/default.py", SMALL | fields), root / "run", conclude=False)
    suites.evaluate(Run(root / "run"), "heads", SuiteOptions())
    suites.evaluate(Run(root / "run"), "explorer", SuiteOptions())
    show(browser, root / "run" / "eval" / "explorer.html")
    return browser, lambda name: browser.find_element(By.ID, name), Run(root / "run")


@pytest.mark.slow
def test_the_page_opens_offline_and_parses_no_text_as_markup(opened):
    browser, find, run = opened
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert browser.title == "run: attention, 2 layers × 4 heads" and browser.find_elements(By.TAG_NAME, "img") == []
    press(browser, "1")
    tokens = run.store.tokens("validation")[:32]
    for place in range(32):
        text = run.tokenizer.decode([tokens[place]]).replace("\n", "⏎\n")
        assert find(f"queries-{place}").get_property("textContent") == (text or "∅")


def point_at(browser, row, column):
    """Move the mouse to the middle of a cell of the map, and wait until the page names it."""
    canvas = browser.find_element(By.ID, "map")
    left, top, cell = (float(canvas.get_attribute(f"data-{name}")) for name in ("left", "top", "cell"))
    x, y = left + (column + 0.5) * cell, top + (row + 0.5) * cell
    shift = x - canvas.size["width"] / 2, y - canvas.size["height"] / 2
    ActionChains(browser).move_to_element_with_offset(canvas, *map(round, shift)).perform()
    pointed = lambda: browser.find_element(By.ID, "pointed").text
    WebDriverWait(browser, 10).until(lambda _: re.search(rf"^query {row} .*\nkey {column} ", pointed()))
    return pointed()


@pytest.mark.slow
def test_controls_change_the_page(opened):
    browser, find, run = opened
    until = lambda condition: WebDriverWait(browser, 10).until(lambda _: condition())
    press(browser, "2")
    find("thumb-1-3").click()
    until(lambda: browser.find_elements(By.ID, "map"))
    assert find("layer-1").get_attribute("aria-pressed") == find("head-3").get_attribute("aria-pressed") == "true"
    weights = pixels(browser, "map")
    press(browser, "v")
    until(lambda: pixels(browser, "map") != weights and find("range").text.startswith("logits from"))
    shown = point_at(browser, 20, 4).split("\n")[-1]
    weight, weight_error, logit, logit_error = map(
        float, re.fullmatch(r"weight (\S+) ± (\S+) +logit (\S+) ± (\S+)", shown).groups()
    )
    maps = maps_of(run)[1]
    assert weight == pytest.approx(maps.weights_BHLS[0, 3, 20, 4], abs=weight_error)
    assert logit == pytest.approx(maps.logits_BHLS[0, 3, 20, 4], abs=logit_error)
    assert max(logit_error, weight_error) < 0.05
    assert f"the error of a weight is at most {shown.split()[3]} (±)" in find("precision").text
    press(browser, "H")
    until(lambda: find("head-2").get_attribute("aria-pressed") == "true")
    label = json.loads((run.workdir / "eval" / "heads.json").read_text())["heads"][4 + 2]["label"]
    assert find("label").text == label
    colour = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    press(browser, "t")
    until(lambda: browser.execute_script("return getComputedStyle(document.body).backgroundColor") != colour)


def maps_of(run):
    tokens_BL = np.asarray(run.store.tokens("validation")[:32], np.int32)[None].repeat(8, axis=0)
    return attention_maps(run.model, tokens_BL)


def shades(browser):
    """Return the lightness of each token's background, and the contrast of its text: WCAG's formulas."""
    script = """return [...document.querySelectorAll('#queries .token')].map((e) => {
        const s = getComputedStyle(e); return [s.backgroundColor, s.color]; })"""
    linear = lambda x: np.where(x <= 0.03928, x / 12.92, ((x + 0.055) / 1.055) ** 2.4)
    rgb = lambda text: np.array([float(number) / 255 for number in re.findall(r"[\d.]+", text)][:3])
    luminance = lambda text: float(linear(rgb(text)) @ [0.2126, 0.7152, 0.0722])
    found = browser.execute_script(script)
    is_clear = [text.startswith("rgba") and text.endswith(" 0)") for text, _ in found]
    light = np.array([np.nan if clear else luminance(text) for clear, (text, _) in zip(is_clear, found, strict=True)])
    ink = np.array([luminance(text) for _, text in found])
    return light, (np.maximum(light, ink) + 0.05) / (np.minimum(light, ink) + 0.05)


@pytest.fixture(scope="module")
def weights_NHLS(opened):
    """Write random.html, the page with other attention; return its weights."""
    folder = opened[2].workdir / "eval"
    data = data_of((folder / "explorer.html").read_text(encoding="utf-8"))
    logits_NHLS = np.random.default_rng(0).normal(0, 1.5, (2, 4, 32, 32)).astype(np.float32)
    visible_LS = np.tril(np.ones((32, 32), bool))
    weights_NHLS = np.where(visible_LS, np.exp(logits_NHLS), 0)
    weights_NHLS /= weights_NHLS.sum(-1, keepdims=True)
    data["attention"] |= explorer.packed(logits_NHLS, weights_NHLS, visible_LS, causal=True)
    (folder / "random.html").write_text(document.build(explorer.PAGE, data), encoding="utf-8")
    return weights_NHLS


def largest_shown(browser):
    """Return the weights in the list of the largest."""
    rows = browser.find_elements(By.CSS_SELECTOR, "#strongest tbody tr")
    return [float(re.search(r"(\d\.\d{3})$", row.text)[1]) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("theme, direction", [("light", -1), ("dark", 1)])
@pytest.mark.parametrize("side, pin, others", [("query", 20, range(20)), ("key", 9, range(10, 32))])
def test_tokens_are_shaded_by_their_weights(opened, weights_NHLS, theme, direction, side, pin, others):
    browser, find, run = opened
    go(browser, run.workdir / "eval" / "random.html", f"tab=Text&layer=1&head=2&show={side}&pin={pin}&theme={theme}")
    weights_L = weights_NHLS[1, 2, pin] if side == "query" else weights_NHLS[1, 2, :, pin]
    light, contrast = shades(browser)
    order = np.argsort(weights_L[others])
    clear = np.diff(np.sqrt(weights_L[others][order])) > 0.012  # weights whose colours differ
    steps = direction * np.diff(light[others][order])
    assert clear.sum() > 4 and (steps[clear] > 0).all()
    assert np.nanmin(contrast) >= 4.5
    masked = [n for n in range(32) if "masked" in find(f"queries-{n}").get_attribute("class")]
    assert masked == [n for n in range(32) if (n > pin if side == "query" else n < pin)]
    np.testing.assert_allclose(largest_shown(browser), np.sort(weights_L)[::-1][:8], atol=0.006)


@pytest.mark.slow
def test_the_mean_of_heads_is_shown(opened, weights_NHLS):
    browser, _, run = opened
    go(browser, run.workdir / "eval" / "random.html", "tab=Text&layer=0&head=mean&pin=15")
    mean_S = weights_NHLS[0, :, 15].mean(axis=0)
    np.testing.assert_allclose(largest_shown(browser), np.sort(mean_S)[::-1][:8], atol=0.006)


@pytest.mark.slow
def test_tokens_are_pinned_by_click_and_by_keys(opened):
    browser, find, run = opened
    go(browser, run.workdir / "eval" / "explorer.html", "tab=Text&pin=none")
    pinned = lambda: [
        e.get_attribute("id") for e in browser.find_elements(By.CSS_SELECTOR, "[aria-selected=true].token")
    ]
    until = lambda condition: WebDriverWait(browser, 10).until(lambda _: condition())
    assert pinned() == [] and find("strongest").text == "No token is pinned."
    find("queries-7").click()
    until(lambda: pinned() == ["queries-7"])
    focus = lambda: browser.execute_script("return document.activeElement.id")
    browser.execute_script("document.getElementById('queries-7').focus()")
    for key, place in (("\ue014", 8), ("\ue014", 9), ("\ue012", 8), ("\ue010", 31), ("\ue011", 0)):
        ActionChains(browser).send_keys(key).perform()
        until(lambda place=place: focus() == f"queries-{place}")
    ActionChains(browser).send_keys("\ue007").perform()  # Enter
    until(lambda: pinned() == ["queries-0"] and "pin=0" in browser.current_url)
    ActionChains(browser).send_keys("\ue00c").perform()  # Escape
    until(lambda: pinned() == [] and "pin=none" in browser.current_url)
    stops = browser.find_elements(By.CSS_SELECTOR, ".token[tabindex='0']")
    assert len(stops) == 1, "one tab stop"


def slide(browser, name, value):
    browser.execute_script(
        "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
        "e.dispatchEvent(new Event('input', {bubbles: true}))",
        name,
        str(value),
    )


@pytest.mark.slow
def test_the_position_page_follows_its_sliders(opened):
    browser, find, run = opened
    go(browser, run.workdir / "eval" / "explorer.html", "tab=Positions")
    assert find("longest").text == f"{2 * np.pi * 10_000 ** (30 / 32):,.0f}"
    circle = browser.execute_script(
        "const c = document.querySelector('circle'); return [c.cx, c.cy, c.r].map((v) => v.baseVal.value)"
    )
    tip = lambda pair, place: [float(find(f"turn-{pair}-{place}").get_attribute(end)) for end in ("x2", "y2")]
    for pair, place in [(0, 3), (0, 7)]:  # pair 0 rotates by one radian per token
        turned = [circle[0] + circle[2] * np.cos(place), circle[1] - circle[2] * np.sin(place)]
        np.testing.assert_allclose(tip(pair, place), turned, atol=1e-3)
    badges = lambda: [
        (badge.text, "used" in badge.get_attribute("class").split())
        for badge in browser.find_elements(By.CSS_SELECTOR, "#card-turns .badge, #card-waves .badge")
    ]
    ((used, is_own),) = badges()
    assert is_own
    far = tip(3, 7)
    before = pixels(browser, "waves")
    until = lambda condition: WebDriverWait(browser, 10).until(lambda _: condition())
    slide(browser, "base", 3)
    until(lambda: find("longest").text == f"{2 * np.pi * 1_000 ** (30 / 32):,.0f}")
    until(lambda: pixels(browser, "waves") != before)
    until(lambda: tip(3, 7) != far)
    assert badges() == [(f"{used} with base 10,000", False)]
    slide(browser, "length", 256)
    until(lambda: find("length-value").text == "256 tokens")
    until(lambda: browser.execute_script("return document.getElementById('waves').height") == 256)


@pytest.mark.slow
def test_a_long_page_says_which_weights_are_means(opened, tmp_path, monkeypatch):
    browser, _, run = opened
    for module, name, value in ((explorer, "MOST_PAIRS", 0), (largest, "KEPT", 4), (largest, "BLOCK", 8)):
        monkeypatch.setattr(module, name, value)
    tokens = np.asarray(run.store.tokens("validation")[:32], np.int32)
    page = explorer.explorer(run.model, run.tokenizer, tokens, title="long", subtitle="")
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    show(browser, tmp_path / "page.html")
    press(browser, "2")
    browser.find_element(By.ID, "thumb-0-0").click()  # the page opens on the telling head
    press(browser, "3")
    weights_LS = attention_maps(run.model, tokens[None].repeat(8, axis=0))[0].weights_BHLS[0, 0]
    order = np.argsort(-weights_LS[20, :21])
    for key, is_own in ((order[0], True), (order[-1], False)):
        said = point_at(browser, 20, key)
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
