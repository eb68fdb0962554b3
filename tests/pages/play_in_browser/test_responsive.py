"""The page draws frames and takes keys while the worker computes."""

import pytest
from selenium.webdriver.common.keys import Keys

from mini_gpt.data.tokenizers import ByteTokenizer
from mini_gpt.pages.play import page as playground
from tests.conftest import make_text
from tests.pages.play_in_browser.play_page import Page
from tests.pages.test_play import shown

pytestmark = pytest.mark.slow
LARGE = {"model__num_layers": 6, "model__d_model": 256, "context_length": 512}

# Milliseconds of computation after another first letter, and the longest time between two frames.
FRAMES = """
const [done] = arguments;
const field = document.getElementById("text");
const frame = () => new Promise(requestAnimationFrame);
(async () => {
  let [began, longest, last] = [performance.now(), 0, await frame()];
  field.value = "#" + field.value.slice(1);
  field.dispatchEvent(new InputEvent("input", { bubbles: true }));
  do {
    const now = await frame();
    longest = Math.max(longest, now - last);
    last = now;
  } while (document.documentElement.dataset.busy === "yes");
  done([performance.now() - began, longest]);
})();
"""


@pytest.fixture
def large(browser, tmp_path):
    text = make_text(0, 200)[:512]
    (tmp_path / "large.html").write_text(playground.play([shown(**LARGE)], ByteTokenizer(), text, title="large"))
    return Page(browser, tmp_path).open("large", view="loss")


def test_frames_are_drawn_while_the_model_computes(large):
    computed, longest = large.browser.execute_async_script(FRAMES)
    assert computed > 200 and longest < computed / 3


def test_keys_are_taken_while_the_model_computes(large):
    field, count = large.find("text"), lambda: int(large.find("count-of-tokens").text.split()[0])
    before = count()
    field.send_keys(Keys.CONTROL, Keys.HOME)
    field.send_keys("abc")
    assert large.js("return document.documentElement.dataset.busy") == "yes"
    assert field.get_attribute("value").startswith("abc")
    large.settle()
    assert count() == before + 3


def test_the_unedited_pass_is_asked_once_for_a_text(page):
    page.open("one", edits0='{"heads": {"0.1": "off"}}')
    page.js("window.asked = []; const { send } = engines; engines.send = (request, reply) => {"
            "if (request.kind === 'run') asked.push(request.slot); return send(request, reply); };")  # fmt: skip
    page.click("head-0.2")
    page.click("head-1.3")
    assert page.js("return asked") == ["main", "main"]
    page.write("the dog")
    assert page.js("return asked.at(-1)") == "plain"
