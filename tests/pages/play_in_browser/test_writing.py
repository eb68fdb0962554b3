"""Writing on in Chromium: greedy or with a seed, until the separator, a stop or a typed key."""

import numpy as np
import pytest

from mini_gpt.data.tokenizers import ByteTokenizer
from tests.pages.play_in_browser.play_page import TEXT

pytestmark = pytest.mark.slow

# Write on, and stop in the frame in which the text has so many characters; return what was sent to the engines.
STOP = """
const [characters, done] = arguments;
const sent = [], { send } = engines;
engines.send = (...all) => { sent.push(all[0]); send(...all); };
document.getElementById("write").click();
(function frame() {
  if (document.getElementById("text").value.length < characters) return requestAnimationFrame(frame);
  document.getElementById("stop").click();
  done(sent);
})();
"""


def test_writing_on_is_greedy_at_temperature_zero(page, runs):
    page.open("one", temperature=0, count=6)
    page.click("write")
    page.wait(lambda: page.js("return !document.getElementById('stop')"))
    tokens = ByteTokenizer().encode(TEXT).tolist()
    for _ in range(6):
        tokens.append(int(np.asarray(runs[0].model.logits(np.array([tokens], np.int32)))[0, -1].argmax()))
    page.settle()
    assert page.find("text").get_attribute("value") == ByteTokenizer().decode(tokens).replace("\r", "\n")


def test_writing_on_repeats_with_a_seed_and_stops(page):
    texts = []
    for seed in (1, 1, 2):
        page.open("one", seed=seed, count=20).click("write")
        page.wait(lambda: page.js("return !document.getElementById('stop')"))
        texts.append(page.settle().find("text").get_attribute("value"))
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith(TEXT)
    page.open("one", count=480)
    sent = page.browser.execute_async_script(STOP, len(TEXT) + 8)
    assert {"kind": "cancel", "model": 0, "slot": "generated"} in sent
    page.wait(lambda: page.js("return !document.getElementById('stop')"))
    size = len(page.settle().find("text").get_attribute("value"))
    assert size <= len(TEXT) + 480
    page.settle()
    assert len(page.find("text").get_attribute("value")) == size


def test_a_chosen_bar_is_appended(page):
    page.open("one")
    token = page.js("const bar = document.querySelector('#next-0 button'); bar.click(); return +bar.dataset.token")
    assert page.settle().find("text").get_attribute("value") == TEXT + ByteTokenizer().decode([token]).replace(
        "\r", "\n"
    )
