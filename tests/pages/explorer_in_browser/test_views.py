"""The explorer's views in Chromium: what they say, their labels, legends and axes, and what a map draws."""

import base64
import io
import re

import matplotlib.image
import numpy as np
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tests.pages import browser as chromium
from tests.pages.browser import pixels
from tests.pages.explorer_in_browser.explorer_page import STORIES, TEXT, go, plot


@pytest.mark.slow
def test_heads_have_labels_or_the_reason(pages, browser):
    go(browser, pages / "text.html", "tab=Text&head=3")
    assert browser.find_element(By.ID, "label").text == "induction"
    said = browser.find_element(By.CSS_SELECTOR, ".controls").text
    assert said.endswith("induction attends to the token that followed an earlier occurrence; strength 0.25")
    go(browser, pages / "text.html", "tab=Heads")
    said = [browser.find_element(By.ID, f"thumb-0-{head}").text for head in range(4)]
    assert said == ["previous token 0.91", "local window 0.50", "mixed", "induction 0.25"]
    go(browser, pages / "pair.html", "tab=Text")
    assert browser.find_element(By.ID, "no-label").text.startswith("no label: not measured")
    go(browser, pages / "pair.html", "tab=Heads")
    assert "eval.py --suite=heads" in browser.find_element(By.ID, "no-labels").text


@pytest.mark.slow
def test_each_view_says_what_it_shows(pages, browser):
    views = {
        "tab=Text": "Each token is shaded by the attention weight that the marked token gives to it.",
        "tab=Text&show=key": "Each token is shaded by the attention weight that it gives to the marked token.",
        "tab=Heads": "Each small map is a head: the tokens of the text (queries) downwards, the tokens that they read",
        "tab=Map": "Each cell is the attention weight of a pair: its row is the query",
        "tab=Map&values=logits": "Each cell is the logit of a pair: its row is the query",
        "tab=Positions": "First the encodings that this run uses, then others for comparison.",
    }
    for fragment, said in views.items():
        go(browser, pages / "stories.html", fragment)
        panel = browser.find_element(By.ID, "panel").text
        assert said in panel, fragment
        assert ("masked: the query cannot see the key" in panel) == (fragment != "tab=Positions")


@pytest.mark.slow
def test_a_typical_token_is_pinned_until_the_reader_chooses_one(pages, browser):
    go(browser, pages / "text.html", "tab=Text")
    typical = browser.execute_script("return JSON.parse(document.getElementById('data').textContent).attention.typical")
    assert typical[0][0] != typical[0][1]
    pinned = lambda: browser.find_element(By.CSS_SELECTOR, ".pinned").get_attribute("id")
    until = lambda place: WebDriverWait(browser, 10).until(lambda _: pinned() == f"queries-{place}")
    click = lambda name: browser.find_element(By.ID, name).click()
    said = "At first, a token that is typical of the head is pinned."
    until(typical[0][0])
    assert browser.find_element(By.ID, "label").text == "previous token"
    first = browser.find_element(By.CSS_SELECTOR, "#strongest tbody tr").text
    assert first.split()[-3:-1] == [str(typical[0][0] - 1), "1"], "position and distance of the largest weight"
    click("head-1")
    until(typical[0][1])
    assert said in browser.find_element(By.ID, "panel").text
    click("head-0")
    click("side-key")
    until(typical[0][0] - 1)  # the key that this query reads the most
    click("head-mean")
    until(len(TEXT) // 2)  # a key that many queries see
    WebDriverWait(browser, 10).until(lambda b: "head=mean" in b.current_url)
    assert "pin=" not in browser.current_url
    click("queries-3")
    for name in ("side-query", "head-0", "layer-1"):
        click(name)
        until(3)
    assert said not in browser.find_element(By.ID, "panel").text


@pytest.mark.slow
def test_text_flows_as_it_was_written(pages, browser):
    go(browser, pages / "text.html", "tab=Text")
    script = (
        "return [...document.querySelectorAll('#queries .token')].map((e) => Math.round(e.getClientRects()[0].top))"
    )
    tops = browser.execute_script(script)
    line = [TEXT[:place].count("\n") for place in range(len(TEXT))]
    assert line[-1] == 1 and len(tops) == len(line)
    assert len({(top, n) for top, n in zip(tops, line, strict=True)}) == len(set(tops)) == 2


@pytest.mark.slow
def test_maps_have_tokens_along_both_axes(pages, browser):
    go(browser, pages / "stories.html", "tab=Map")
    keep = "window.said = []; const fill = CanvasRenderingContext2D.prototype.fillText;"
    keep += "CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {"
    keep += " said.push(text); fill.call(this, text, ...at); }"
    browser.execute_script(keep)
    chromium.press(browser, "v")  # draws the map again
    WebDriverWait(browser, 10).until(lambda b: b.find_elements(By.ID, "range"))
    said = browser.execute_script("return said")
    words = ["".join(token.split()) for token in re.findall(r"\s*(?:\w+|[.])", " ".join(STORIES))]
    for word in set(words):
        assert sum(label.strip("␣") == word for label in said) == 2 * words.count(word), word
    assert any("query" in label for label in said) and any("key" in label for label in said)


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_stand_for_the_values_at_the_ticks(pages, browser, theme):
    go(browser, pages / "text.html", f"tab=Map&theme={theme}")
    script = """const bar = document.querySelector('.bar canvas').getContext('2d').getImageData(0, 0, 256, 1).data;
        return [...document.querySelectorAll('.bar .ticks span')].map((tick) => {
            const at = Math.round(2.55 * parseFloat(tick.style.left));
            const [name, shown] = [tick.textContent, [...bar.slice(4 * at, 4 * at + 3)]];
            return [name, shown, colourOf(scales.weights, +name)]; })"""
    found = browser.execute_script(script)
    assert [tick for tick, *_ in found] == ["0", "0.01", "0.1", "0.25", "0.5", "1"]
    for tick, shown, colour in found:
        assert shown == pytest.approx(colour, abs=1), tick


def pixels_of_map(browser) -> np.ndarray:
    """Return the map's pixels [y, x, 4]."""
    png = base64.b64decode(pixels(browser, "map").partition(",")[2])
    return matplotlib.image.imread(io.BytesIO(png))


@pytest.mark.slow
def test_masked_cells_are_hatched(pages, browser):
    go(browser, pages / "stories.html", "tab=Map")
    at, shown = plot(browser), pixels_of_map(browser)
    length = len(re.findall(r"\w+|[.]", STORIES[0]))
    pairs = {"seen": (length - 1, 0), "later": (0, length - 1), "of another story": (length + 2, 0)}
    for name, (i, j) in pairs.items():
        y, x = round(at["top"] + i * at["cell"]) + 2, round(at["left"] + j * at["cell"]) + 2
        inside = shown[y : y + int(at["cell"]) - 4, x : x + int(at["cell"]) - 4]
        assert (np.ptp(inside, axis=(0, 1)).max() > 0) == (name != "seen"), name


@pytest.mark.slow
def test_the_crosshair_is_drawn_along_its_row_and_column(pages, browser):
    go(browser, pages / "stories.html", "tab=Map")
    at, before = plot(browser), pixels_of_map(browser)
    browser.execute_script("location.hash = 'tab=Map&cell=3,1'")
    WebDriverWait(browser, 10).until(lambda b: b.find_element(By.ID, "pointed").text.startswith("query 3"))
    is_changed_YX = (pixels_of_map(browser) != before).any(-1)
    y, x = (lambda n: round(at["top"] + n * at["cell"])), (lambda n: round(at["left"] + n * at["cell"]))
    for line in (y(3), y(4)):
        assert is_changed_YX[line - 2 : line + 3, x(3) : x(12)].any(0).all()
    for line in (x(1), x(2)):
        assert is_changed_YX[y(5) : y(12), line - 2 : line + 3].any(1).all()
    assert not is_changed_YX[y(5) : y(12), x(3) : x(12)].any()


@pytest.mark.slow
def test_positions_say_what_the_run_uses_and_name_their_axes(pages, browser):
    go(browser, pages / "text.html", "tab=Positions")
    badges = lambda: [
        (
            badge.find_element(By.XPATH, "ancestor::section").get_attribute("id"),
            badge.text,
            "used" in badge.get_attribute("class"),
        )
        for badge in browser.find_elements(By.CLASS_NAME, "badge")
    ]
    assert badges() == [("card-learned", "used by this run", True)]
    own, others = browser.find_elements(By.CSS_SELECTOR, ".cards")
    assert [len(group.find_elements(By.CLASS_NAME, "card")) for group in (own, others)] == [1, 5]
    axes = {
        card.get_attribute("id"): [text.text for text in card.find_elements(By.CSS_SELECTOR, "text.axis")]
        for card in browser.find_elements(By.CSS_SELECTOR, ".card")
    }
    assert axes.pop("card-turns") == [] and axes["card-learned"] == ["position (tokens)"] * 2
    assert all(len(names) == 2 and all(names) for names in axes.values())
    lines = browser.find_elements(By.CSS_SELECTOR, "#card-alibi svg > path")
    assert len(lines) == len(browser.find_elements(By.CSS_SELECTOR, "#card-alibi .legend li")) - 1 == 4


@pytest.mark.slow
def test_a_value_that_is_not_a_number_has_no_colour(pages, browser):
    go(browser, pages / "text.html", "tab=Text")
    script = """const canvas = document.createElement("canvas");
        paintCells(canvas, 1, 3, (i, j) => [NaN, null, 0.5][j], scales.weights);
        const opacity = [...canvas.getContext("2d").getImageData(0, 0, 3, 1).data].filter((_, n) => n % 4 === 3);
        return [opacity, shadeStyle(scales.weights, NaN)];"""
    assert browser.execute_script(script) == [[0, 0, 255], None]


@pytest.mark.slow
def test_small_maps_stay_small_on_a_wide_screen(pages, browser, sized):
    sizes = lambda: browser.execute_script(
        "return [...document.querySelectorAll('.thumb canvas')].map((e) => [e.clientWidth, e.clientHeight])"
    )
    for width, least, most in ((1440, 180, 220), (390, 50, 100)):
        sized(width)
        go(browser, pages / "text.html", "tab=Heads")
        assert len(sizes()) == 8 and all(least < size <= most for pair in sizes() for size in pair), sizes()
