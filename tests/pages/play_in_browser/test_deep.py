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


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(deep, width, theme):
    with chromium.screen(deep.browser, width, theme):
        for name in ("play", "explorer"):
            for tab in ("Heads", "Map"):
                deep.browser.get("about:blank")
                deep.browser.get((deep.root / f"{name}.html").as_uri() + f"#tab={tab}&view=map")
                deep.wait(lambda: deep.js(COUNT, ".band"))
                assert chromium.axe_violations(deep.browser) == [], (name, tab)
                assert deep.js("return document.documentElement.scrollWidth <= innerWidth"), (name, tab)
