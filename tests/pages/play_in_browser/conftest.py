"""Fixtures of tests of the playground in Chromium: the runs, the files of the pages, and a page to open."""

import pytest

from mini_gpt.data.subwords import BpeTokenizer
from mini_gpt.data.tokenizers import ByteTokenizer
from mini_gpt.pages.play import page as playground
from tests.conftest import make_text
from tests.pages.play_in_browser.play_page import COPY, LETTERS, TEXT, WORDS, Page
from tests.pages.test_play import shown

MODEL = {"model__num_layers": 2, "model__position": "rope"}
SSMAX = {"model__position": "alibi", "model__variants__query_scale": "ssmax", "model__attention_window": 5}


@pytest.fixture(scope="package")
def runs():
    return [shown("one", **MODEL), shown("two", **MODEL | {"model__position": "alibi"})]


@pytest.fixture(scope="package")
def pages(tmp_path_factory, runs):
    """Write a page of one run, of two runs, of a run with learned positions, and of one with subwords."""
    root, byte = tmp_path_factory.mktemp("pages"), ByteTokenizer()
    bpe = BpeTokenizer.train([make_text(0, 500)], 300)
    written = {
        "one": playground.play(runs[:1], byte, TEXT, title="one"),
        "two": playground.play(runs, byte, make_text(0, 40)[:128], title="two"),
        "learned": playground.play([shown(model__position="learned")], byte, TEXT, title="learned"),
        "words": playground.play([shown("words", WORDS)], WORDS, "the cat sat", title="words", other="the dog ran"),
        "task": playground.play([shown("task", LETTERS, **COPY)], LETTERS, "abc=abc\n", title="task"),
        "ssmax": playground.play([shown("ssmax", **SSMAX)], byte, TEXT, title="ssmax"),
        "bpe": playground.play([shown("bpe", bpe)], bpe, TEXT, title="bpe"),
    }
    for name, page in written.items():
        (root / f"{name}.html").write_text(page, encoding="utf-8")
    return root


@pytest.fixture
def page(browser, pages):
    yield Page(browser, pages)
    logged = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not logged
