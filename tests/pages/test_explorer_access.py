"""The explorer page for everyone: axe-core's rules, keyboard, touch, zoom, legends, and its state in the address."""

import base64
import io
import json
import re
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from mini_gpt.config import loading
from mini_gpt.data import tasks
from mini_gpt.data.tokenizers import ByteTokenizer, CharacterTokenizer, WordTokenizer, separator
from mini_gpt.insight import examples
from mini_gpt.pages.explorer import page as explorer
from tests.conftest import SMALL
from tests.evaluation.models import random_model
from tests.insight.test_maps_by_kind import PAIRS
from tests.pages import browser as chromium
from tests.pages.browser import pixels

TEXT = "def main(x):\n\treturn  x + 1\n"
STORIES = "The women find a horse that the king follows. She is polite.", "Two boxes break."
SIZES = {"model__num_layers": 2, "model__position": "learned"}
FULL = "tab=Map&layer=1&head=3&pin=7&show=key&cell=20%2C4&values=logits&length=256&theme=dark"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Write a page of a text, with labels; of stories; and of a pair with a known alignment, without labels."""
    dotted = lambda fields: {name.replace("__", "."): value for name, value in fields.items()}
    make = lambda fields: loading.load(
        "configs/default.py", SMALL | {"data.path": "unused", "mesh.data": -1} | dotted(fields)
    )
    root, tokenizer = tmp_path_factory.mktemp("pages"), ByteTokenizer()
    model = random_model(make(SIZES), tokenizer.token_bytes, noise=0.3)
    tokens = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int32)
    labels = explorer.HeadLabels({"decoder": [["previous token", "local window", "mixed", "induction"]] * 2}, "a text")
    text = explorer.explorer(model, tokenizer, tokens, title="A text", subtitle="step 1", labels=labels)
    (root / "text.html").write_text(text, encoding="utf-8")
    words = WordTokenizer.of_texts(list(STORIES))
    tokens = np.concatenate([[*words.encode(story), separator(words)] for story in STORIES]).astype(np.int32)
    model = random_model(make(SIZES | {"data__isolate_documents": True}), words.token_bytes, noise=0.3)
    stories = explorer.explorer(model, words, tokens, title="Stories", subtitle="", labels=labels)
    (root / "stories.html").write_text(stories, encoding="utf-8")
    characters = CharacterTokenizer(tasks.ALPHABET)
    config = make(PAIRS | {"model__encoder_layers": 1, "source_length": 12, "context_length": 12})
    pair = examples.of_problem(("ab c", "cab"), config, characters, (((0, 2), (1, 3)), ((3, 4), (0, 1))))
    held = explorer.explorer(
        random_model(config, characters.token_bytes, noise=0.3), characters, pair, title="A pair", subtitle=""
    )
    (root / "pair.html").write_text(held, encoding="utf-8")
    return root


def go(browser, path: Path, fragment: str) -> None:
    browser.get("about:blank")
    browser.get(f"{path.as_uri()}#{fragment}")
    WebDriverWait(browser, 20).until(lambda b: b.execute_script("return document.documentElement.dataset.ready"))
    browser.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 0))")


@pytest.fixture
def sized(browser):
    """Return a function that sets the size of the window, until the end of the test."""

    def resize(width: int, *, touch: bool = False) -> None:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": touch}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": touch})

    yield resize
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.slow
@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["text", "stories", "pair"])
def test_axe_finds_nothing(pages, browser, sized, name, theme, width):
    sized(width)
    for tab in ("Text", "Heads", "Map", "Positions"):
        for more in ("", "&pin=3&cell=2%2C1&values=logits&layer=1"):
            go(browser, pages / f"{name}.html", f"tab={tab}&theme={theme}{more}")
            found = chromium.axe_violations(browser)
            assert not found, f"{tab} {more}: {json.dumps(found, indent=1)}"
            assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth"), (
                f"{tab}: too wide"
            )


@pytest.mark.slow
def test_the_address_restores_the_page(pages, browser):
    go(browser, pages / "text.html", FULL)
    assert sorted(browser.current_url.partition("#")[2].split("&")) == sorted(FULL.split("&"))
    pressed = [e.get_attribute("id") for e in browser.find_elements(By.CSS_SELECTOR, "[aria-pressed=true]")]
    assert pressed == ["layer-1", "head-3", "show-logits"]
    assert re.match(r"query 20 .*\nkey 4 ", browser.find_element(By.ID, "pointed").text)
    assert browser.execute_script("return document.documentElement.dataset.theme") == "dark"
    before = pixels(browser, "map")
    browser.execute_script("location.hash = 'tab=Text&pin=7&show=key'")
    WebDriverWait(browser, 10).until(lambda b: b.find_elements(By.CSS_SELECTOR, "#queries-7.pinned"))
    browser.execute_script(f"location.hash = '{FULL}'")
    WebDriverWait(browser, 10).until(lambda b: b.find_elements(By.ID, "map") and pixels(b, "map") == before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fragment", ["tab=X&layer=99&head=-1&pin=1e9&cell=a,b&base=abc&length=7&theme=x", "%", "cell=99,0"]
)
def test_an_address_that_does_not_fit_is_ignored(pages, browser, fragment):
    go(browser, pages / "text.html", fragment)
    assert browser.find_element(By.ID, "tab-Text").get_attribute("aria-selected") == "true"
    assert browser.find_element(By.CSS_SELECTOR, ".pinned").get_attribute("id") == f"queries-{len(TEXT) - 1}"
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_tabs_follow_the_arrow_keys(pages, browser):
    go(browser, pages / "text.html", "tab=Text")
    browser.execute_script("document.getElementById('tab-Text').focus()")
    focused = lambda: browser.execute_script(
        "return [document.activeElement.id, document.querySelector('[role=tabpanel]').getAttribute('aria-labelledby')]"
    )
    for key, tab in (
        ("\ue014", "Heads"),
        ("\ue014", "Map"),
        ("\ue012", "Heads"),
        ("\ue010", "Positions"),
        ("\ue014", "Text"),
    ):
        ActionChains(browser).send_keys(key).perform()
        WebDriverWait(browser, 10).until(lambda _, tab=tab: focused() == [f"tab-{tab}", f"tab-{tab}"])


@pytest.mark.slow
def test_shortcuts_can_be_switched_off(pages, browser):
    tab = lambda: browser.find_element(By.CSS_SELECTOR, "[role=tab][aria-selected=true]").get_attribute("id")
    go(browser, pages / "text.html", "tab=Text")
    chromium.press(browser, "4")
    WebDriverWait(browser, 10).until(lambda _: tab() == "tab-Positions")
    browser.execute_script("document.getElementById('length').focus()")
    ActionChains(browser).send_keys("1").perform()
    assert tab() == "tab-Positions", "no shortcut while a field has the focus"
    browser.find_element(By.ID, "shortcuts").click()
    WebDriverWait(browser, 10).until(lambda b: "shortcuts=off" in b.current_url)
    chromium.press(browser, "1")
    assert tab() == "tab-Positions"
    browser.find_element(By.ID, "shortcuts").click()
    chromium.press(browser, "1")
    WebDriverWait(browser, 10).until(lambda _: tab() == "tab-Text")


def plot(browser) -> dict[str, float]:
    script = """const c = document.getElementById('map'), b = c.getBoundingClientRect();
        return {...c.dataset, left_: b.left, top_: b.top};"""
    return {name: float(value) for name, value in browser.execute_script(script).items()}


@pytest.mark.slow
def test_zoom_keeps_the_cell_under_the_pointer(pages, browser, sized):
    sized(1440)
    go(browser, pages / "text.html", "tab=Map")
    browser.execute_script("document.getElementById('map').scrollIntoView({block: 'center'})")
    before = plot(browser)
    x, y = (before[f"{side}_"] + before[side] + (n + 0.5) * before["cell"] for side, n in (("left", 4), ("top", 20)))
    wheel = {"type": "mouseWheel", "x": x, "y": y, "deltaX": 0, "deltaY": -200, "modifiers": 2}
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", wheel)
    WebDriverWait(browser, 10).until(lambda _: plot(browser)["cell"] > 1.5 * before["cell"])
    after = plot(browser)
    cell_at = [
        (at - after[f"{side}_"] - after[side]) / after["cell"] + after[axis]
        for side, axis, at in (("left", "x", x), ("top", "y", y))
    ]
    np.testing.assert_allclose(cell_at, [4.5, 20.5], atol=0.05)
    browser.find_element(By.XPATH, "//button[text()='whole map']").click()
    WebDriverWait(browser, 10).until(lambda _: plot(browser)["cell"] == before["cell"])


@pytest.mark.slow
def test_keys_move_the_crosshair(pages, browser):
    go(browser, pages / "text.html", "tab=Map&cell=3,1")
    browser.execute_script("document.querySelector('.map').focus()")
    for key, query, place in (("\ue015", 4, 1), ("\ue014", 4, 2), ("\ue013", 3, 2), ("\ue012", 3, 1)):
        ActionChains(browser).send_keys(key).perform()
        pattern = rf"query {query} .*\nkey {place} "
        WebDriverWait(browser, 10).until(lambda b, p=pattern: re.match(p, b.find_element(By.ID, "pointed").text))
    assert "cell=3%2C1" in browser.current_url


@pytest.mark.slow
def test_touch_pins_and_two_fingers_zoom(pages, browser, sized):
    sized(390, touch=True)
    touch = lambda kind, *points: browser.execute_cdp_cmd(
        "Input.dispatchTouchEvent",
        {"type": kind, "touchPoints": [{"x": x, "y": y, "id": n} for n, (x, y) in enumerate(points)]},
    )
    go(browser, pages / "text.html", "tab=Text&pin=none")
    box = browser.execute_script(
        "const b = document.getElementById('queries-5').getBoundingClientRect();"
        "return [b.x + b.width / 2, b.y + b.height / 2]"
    )
    touch("touchStart", box)
    touch("touchEnd")
    WebDriverWait(browser, 10).until(lambda b: b.find_elements(By.CSS_SELECTOR, "#queries-5.pinned"))
    go(browser, pages / "text.html", "tab=Map")
    browser.execute_script("document.getElementById('map').scrollIntoView({block: 'center'})")
    at = plot(browser)
    x, y = (at[f"{side}_"] + at[side] + (n + 0.5) * at["cell"] for side, n in (("left", 2), ("top", 9)))
    touch("touchStart", (x, y))
    touch("touchEnd")
    WebDriverWait(browser, 10).until(lambda b: "cell=9%2C2" in b.current_url)
    touch("touchStart", (x, y), (x + 40, y))
    for apart in range(50, 121, 10):
        touch("touchMove", (x, y), (x + apart, y))
    touch("touchEnd")
    WebDriverWait(browser, 10).until(lambda _: plot(browser)["cell"] > 2 * at["cell"])
    assert "cell=9%2C2" in browser.current_url, "a pinch pins nothing"


@pytest.mark.slow
def test_controls_are_large_enough_for_fingers(pages, browser, sized):
    sized(390, touch=True)
    for tab in ("Text", "Heads", "Map", "Positions"):
        go(browser, pages / "text.html", f"tab={tab}")
        small = browser.execute_script("""
            const shown = [...document.querySelectorAll("button, select, input")].filter((e) => e.offsetParent);
            const sizes = shown.map((e) => [e.id || e.textContent, e.getBoundingClientRect()]);
            return sizes.filter(([, box]) => Math.min(box.width, box.height) < 40).map(([name]) => name)""")
        assert small == [], tab
        hints = browser.find_elements(By.CLASS_NAME, "by-pointer")
        assert hints and not any(hint.is_displayed() for hint in hints)


@pytest.mark.slow
def test_heads_have_labels_or_the_reason(pages, browser):
    go(browser, pages / "text.html", "tab=Text&head=3")
    assert browser.find_element(By.ID, "label").text == "induction"
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
        "tab=Positions": "How this run knows the order of tokens",
    }
    for fragment, said in views.items():
        go(browser, pages / "stories.html", fragment)
        panel = browser.find_element(By.ID, "panel").text
        assert said in panel, fragment
        assert ("masked: the query cannot see the key" in panel) == (fragment != "tab=Positions")


@pytest.mark.slow
def test_the_first_key_is_read_by_many_queries(pages, browser):
    go(browser, pages / "text.html", "tab=Text")
    browser.find_element(By.ID, "side-key").click()
    pinned = lambda: browser.find_element(By.CSS_SELECTOR, ".pinned").get_attribute("id")
    WebDriverWait(browser, 10).until(lambda _: pinned() == f"queries-{len(TEXT) // 2}")
    browser.find_element(By.ID, "queries-3").click()
    browser.find_element(By.ID, "side-query").click()
    WebDriverWait(browser, 10).until(lambda _: pinned() == "queries-3")  # the reader's own choice stays


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
    lines = browser.find_elements(By.CSS_SELECTOR, "#card-alibi polyline")
    assert len(lines) == len(browser.find_elements(By.CSS_SELECTOR, "#card-alibi .legend li")) - 1 == 4
