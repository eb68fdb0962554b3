"""The layers of deep models fold, in the playground and in the explorer."""

import json

import numpy as np
import pytest

from mini_gpt.data.tokenizers import ByteTokenizer
from mini_gpt.pages.explorer import page as explorer
from mini_gpt.pages.play import page as playground
from tests.pages import browser as chromium
from tests.pages.play_in_browser.play_page import TEXT, Page
from tests.pages.test_play import shown

pytestmark = pytest.mark.slow
BANDS = "return [...document.querySelectorAll('.band:not([name])')].map((b) => [b.open, b.firstChild.textContent])"
OF_LAYERS = BANDS.replace(":not([name])", "[name]")
COUNT = "return document.querySelectorAll(arguments[0]).length"


@pytest.fixture
def deep(browser, tmp_path):
    run = shown(model__num_layers=14, model__scan_layers=True)
    (tmp_path / "play.html").write_text(playground.play([run], ByteTokenizer(), TEXT, title="deep"))
    tokens = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int32)
    heads = explorer.explorer(run.model, ByteTokenizer(), tokens, title="deep", subtitle="")
    (tmp_path / "explorer.html").write_text(heads)
    return Page(browser, tmp_path)


def test_the_buttons_of_a_deep_model_fold_and_say_their_edits(deep):
    page = deep.open("play", edits0=json.dumps({"heads": {"7.1": "off"}, "layers": [8]}))
    folded = [[True, "layers 0 to 5"], [True, "layers 6 to 11: 2 edits"], [False, "layers 12 to 13"]]
    assert page.js(BANDS) == folded and page.js(COUNT, ".head") == 12 * 4
    page.click("band-12").click("head-13.3")
    assert page.said.startswith("Head 7.1 off, head 13.3 off, layer 8 off: loss ")
    page.click("band-0")
    assert page.js(BANDS) == [[False, "layers 0 to 5"], folded[1], [True, "layers 12 to 13: 1 edit"]]
    assert page.js(COUNT, ".head") == 8 * 4


def test_the_maps_of_a_deep_model_fold(deep):
    deep.browser.get((deep.root / "explorer.html").as_uri() + "#tab=Heads")
    deep.wait(lambda: deep.js(BANDS))
    assert deep.js(BANDS) == [[True, "layers 0 to 5"], [False, "layers 6 to 11"], [False, "layers 12 to 13"]]
    assert deep.js(COUNT, ".thumb") == 6 * 4
    deep.js("document.getElementById('band-12').click()")
    deep.wait(lambda: deep.js(COUNT, "#thumb-13-3 canvas"))


@pytest.mark.parametrize("name", ["play", "explorer"])
def test_the_choice_of_a_layer_folds_with_one_open_band(deep, name):
    deep.browser.get((deep.root / f"{name}.html").as_uri() + "#tab=Map&view=map&layer=7")
    said = ["layers 0 to 5", "layers 6 to 11", "layers 12 to 13"]

    def has(open_, chosen, buttons):
        texts = [f"{text}: {chosen}" if n == chosen // 6 else text for n, text in enumerate(said)]
        deep.wait(lambda: deep.js(OF_LAYERS) == [[n == open_, text] for n, text in enumerate(texts)])
        deep.wait(lambda: deep.js(COUNT, "[id^=layer-]") == buttons)

    has(1, 7, 6)
    deep.js("document.getElementById('fold-12').click()")
    has(2, 7, 2)
    deep.js("document.getElementById('layer-13').click()")
    has(2, 13, 2)
    if name == "explorer":  # by a shortcut
        chromium.press(deep.browser, "l")
        has(0, 0, 6)


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(deep, width, theme):
    with chromium.screen(deep.browser, width, theme):
        for name in ("play", "explorer"):
            for tab in ("Heads", "Map"):
                deep.browser.get("about:blank")
                deep.browser.get((deep.root / f"{name}.html").as_uri() + f"#tab={tab}&view=map")
                deep.wait(lambda: deep.js(BANDS) + deep.js(OF_LAYERS))
                assert chromium.axe_violations(deep.browser) == [], (name, tab)
                assert deep.js("return document.documentElement.scrollWidth <= innerWidth"), (name, tab)
