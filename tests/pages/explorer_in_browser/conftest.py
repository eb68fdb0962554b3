"""Fixtures of tests of the explorer in Chromium: the files of the pages, and the size of the window."""

import numpy as np
import pytest

from mini_gpt.config import loading
from mini_gpt.data import tasks
from mini_gpt.data.tokenizers import ByteTokenizer, CharacterTokenizer, WordTokenizer, separator
from mini_gpt.insight import examples
from mini_gpt.pages.explorer import page as explorer
from tests.conftest import SMALL
from tests.insight.test_maps import PAIRS
from tests.pages.explorer_in_browser.explorer_page import STORIES, TEXT
from tests.random_models import random_model

SIZES = {"model__num_layers": 2, "model__position": "learned"}


@pytest.fixture(scope="package")
def pages(tmp_path_factory):
    """Write a page of a text, with labels; of stories; and of a pair with a known alignment, without labels."""
    dotted = lambda fields: {name.replace("__", "."): value for name, value in fields.items()}
    make = lambda fields: loading.load(
        "configs/default.py", SMALL | {"data.path": "unused", "mesh.data": -1} | dotted(fields)
    )
    root, tokenizer = tmp_path_factory.mktemp("pages"), ByteTokenizer()
    model = random_model(make(SIZES), tokenizer.token_bytes, noise=0.3)
    tokens = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int32)
    strengths = {"previous token": 0.91, "local window": 0.5, "mixed": None, "induction": 0.25}
    layer = [explorer.HeadLabel(*label) for label in strengths.items()]
    keys = lambda length: {"decoder": {"previous token": np.eye(length, k=-1, dtype=bool)[None]}}
    labels = explorer.HeadLabels({"decoder": [layer] * 2}, "a text", keys(len(tokens)))
    text = explorer.explorer(model, tokenizer, tokens, title="A text", subtitle="step 1", labels=labels)
    (root / "text.html").write_text(text, encoding="utf-8")
    words = WordTokenizer.of_texts(list(STORIES))
    tokens = np.concatenate([[*words.encode(story), separator(words)] for story in STORIES]).astype(np.int32)
    model = random_model(make(SIZES | {"data__isolate_documents": True}), words.token_bytes, noise=0.3)
    stories = explorer.explorer(
        model, words, tokens, title="Stories", subtitle="", labels=labels._replace(templates=keys(len(tokens)))
    )
    (root / "stories.html").write_text(stories, encoding="utf-8")
    characters = CharacterTokenizer(tasks.ALPHABET)
    config = make(PAIRS | {"model__encoder_layers": 1, "source_length": 12, "context_length": 12})
    pair = examples.of_problem(("ab c", "cab"), config, characters, (((0, 2), (1, 3)), ((3, 4), (0, 1))))
    held = explorer.explorer(
        random_model(config, characters.token_bytes, noise=0.3), characters, pair, title="A pair", subtitle=""
    )
    (root / "pair.html").write_text(held, encoding="utf-8")
    return root


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
