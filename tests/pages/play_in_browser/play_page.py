"""The playground's page in Chromium as an object, and the losses that the model gives."""

import dataclasses
import urllib.parse

import jax.numpy as jnp
import numpy as np
from selenium.common.exceptions import JavascriptException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from mini_gpt.data import tasks
from mini_gpt.data.tokenizers import ByteTokenizer, CharacterTokenizer, WordTokenizer
from mini_gpt.evaluation.perplexity import make_nll_fn
from mini_gpt.evaluation.scoring import score_tokens
from mini_gpt.model import editing
from tests.conftest import make_text

TEXT = "the cat sat on the mat"
LIMIT = 1e-4
LETTERS = CharacterTokenizer(tasks.ALPHABET)
COPY = {"data__corpus": "task:copy", "data__tokenizer": "characters", "data__path": None, "data__task_length": 4}
WORDS = WordTokenizer.of_texts([make_text(0, 100)])
VIEWS = ("attention", "map", "loss", "lens", "stream")


class Page:
    """A page in the browser."""

    def __init__(self, browser, root):
        self.browser, self.root = browser, root

    def open(self, name, **state):
        """Open a page at head 0.0, unless the state has another."""
        self.browser.get("about:blank")
        fragment = urllib.parse.urlencode({"layer": 0, "head": 0} | state)
        self.browser.get(f"{(self.root / name).as_uri()}.html#{fragment}")
        self.wait(lambda: self.js("return document.documentElement.dataset.ready"))
        return self.settle()

    def js(self, script, *arguments):
        return self.browser.execute_script(script, *arguments)

    def wait(self, condition):
        not_yet = [JavascriptException]  # an element that is named in a script is not there
        WebDriverWait(self.browser, 30, poll_frequency=0.02, ignored_exceptions=not_yet).until(lambda _: condition())

    def settle(self):
        """Wait until the page shows the results of what was entered last."""
        self.browser.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 30))")
        self.wait(lambda: self.js("return document.documentElement.dataset.busy") == "no")
        return self

    def find(self, name):
        return self.browser.find_element(By.ID, name)

    def click(self, name):
        self.js("document.getElementById(arguments[0]).click()", name)
        return self.settle()

    def write(self, text):
        field = self.find("text")
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(text)
        return self.settle()

    def losses(self):
        """Return the losses of the sentences, in nats per token, by run."""
        read = "[...p.querySelectorAll('[data-loss]')].map((b) => +b.dataset.loss)"
        return self.js(f"return [...document.querySelectorAll('.headline')].map((p) => {read})")

    @property
    def said(self):
        return self.find("said").text

    @property
    def state(self):
        self.browser.execute_async_script("setTimeout(arguments[0], 250)")
        return dict(
            urllib.parse.parse_qsl(urllib.parse.urlparse(self.browser.current_url).fragment, keep_blank_values=True)
        )


def losses_of(model, text, tokenizer=None):
    tokens = (tokenizer or ByteTokenizer()).encode(text)
    size = len(tokens) - 1
    return score_tokens(make_nll_fn(model), tokens, window=size, stride=size, batch_size=1)


def without_head(model, layer, head):
    mask_NBH = np.ones((2, 1, 4), np.float32)
    mask_NBH[layer, 0, head] = 0
    return dataclasses.replace(model, edits=editing.head_mask(jnp.asarray(mask_NBH)))
