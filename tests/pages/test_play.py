"""The playground page holds a run, parses no text as markup, needs no network, and refuses what it can't show."""

import json
import re

import numpy as np
import pytest

from mini_gpt import suites
from mini_gpt.config import loading
from mini_gpt.data import tokenizers
from mini_gpt.data.tokenizers import ByteTokenizer, CharacterTokenizer
from mini_gpt.model import parameters
from mini_gpt.pages import document
from mini_gpt.pages.play import pack
from mini_gpt.pages.play import page as playground
from mini_gpt.pages.play.page import Shown
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training.run import Run
from tests.conftest import SMALL
from tests.pages.test_explorer import HOSTILE, data_of
from tests.random_models import random_model


def shown(name="run", tokenizer=None, **fields):
    """Return a random model of a small config, as a run on the page."""
    dotted = {field.replace("__", "."): value for field, value in fields.items()}
    config = loading.load("configs/default.py", SMALL | {"data.path": "unused", "mesh.data": -1} | dotted)
    return Shown(name, 7, random_model(config, (tokenizer or ByteTokenizer()).token_bytes, noise=0.3))


def test_the_page_holds_runs_tokenizer_engine_and_text():
    runs = [shown("one"), shown("two", model__position="alibi", context_length=200, model__heads=((0, 3),))]
    page = playground.play(runs, ByteTokenizer(), "the cat", title="both")
    data = data_of(page)
    assert (data["title"], data["text"]) == ("both", "the cat")
    assert [model["name"] for model in data["models"]] == ["one", "two"]
    sizes = [(parameters.count(run.model.parameters), run.model.config.model.heads) for run in runs]
    assert json.dumps([(model["parameters"], model["kept"]) for model in data["models"]]) == json.dumps(sizes)
    assert [model["trained_context"] for model in data["models"]] == [32, 200]
    assert data["models"][0]["packed"] == json.loads(json.dumps(pack.packed(runs[0].model)))
    assert data["answer"] is None and data["other"] == ""
    assert data["most_tokens"] == playground.TIMES * 200
    engine = document.bundle(playground.PAGE.parent / "engine/worker.js")
    assert f'<script type="text/js-worker">\n{engine}</script>' in page


def test_hostile_titles_texts_and_tokens_are_data():
    tokenizer = CharacterTokenizer("".join(sorted(set(HOSTILE))))
    run = shown(HOSTILE, tokenizer)
    page = playground.play([run], tokenizer, HOSTILE, title=HOSTILE)
    data = data_of(page)
    assert data["title"] == data["text"] == data["models"][0]["name"] == HOSTILE
    assert HOSTILE not in page and "<img" not in page
    assert page.count("</script>") == page.count("<script")


def test_the_page_may_not_use_a_network():
    page = playground.play([shown()], ByteTokenizer(), "a", title="")
    policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]+)">', page)[1]
    assert policy.startswith("default-src 'none';") and "connect-src" not in policy and "http" not in policy
    assert page.index(policy) < page.index("<script")
    assert not re.search(r"""(src|href)=["']?(https?:)?//|url\(|@import|XMLHttpRequest|WebSocket""", page)
    assert page.count("fetch(") == 1  # of engines.js, which only a page of a server uses; the policy forbids it here


def test_unsupported_or_non_finite_runs_are_refused():
    with pytest.raises(UserError, match=r"model\.causal: found False"):
        fields = {"model__causal": False, "train__objective": "masked"}
        playground.play([shown(**fields)], ByteTokenizer(), "a", title="")
    run = shown()
    run.model.parameters["embedding"] = run.model.parameters["embedding"].at[0, 0].set(float("nan"))
    with pytest.raises(UserError, match=r"step 7 of run has .*--checkpoint"):
        playground.play([run], ByteTokenizer(), "a", title="")


@pytest.mark.slow
def test_the_suite_writes_a_page_with_the_start_of_a_document(trained):
    run = Run(trained(model__position="rope"))
    suites.evaluate(run, "play", SuiteOptions())
    suites.evaluate(run, "play", SuiteOptions(text="two <b>"))
    pages = {path.name: data_of(path.read_text(encoding="utf-8")) for path in (run.workdir / "eval").glob("play*.html")}
    assert sorted(page["text"] for page in pages.values())[1] == "two <b>"
    text = pages["play.html"]["text"]
    tokens = run.store.tokens("validation")
    documents = np.split(tokens, np.flatnonzero(tokens == tokenizers.separator(run.tokenizer)))
    assert any(run.tokenizer.decode(document).startswith(text) for document in documents)
    assert 0 < len(run.tokenizer.encode(text)) <= 32
    assert pages["play.html"]["title"] == "run: playground"


@pytest.mark.slow
def test_a_run_beside_another_needs_its_tokenizer(trained, tmp_path):
    first = trained(model__position="rope").rename(tmp_path / "first")
    alike = trained(model__position="alibi").rename(tmp_path / "alike")
    other = trained(data__tokenizer="characters").rename(tmp_path / "other")
    suites.evaluate(Run(first), "play", SuiteOptions(beside=str(alike)))
    (page,) = (first / "eval").glob("play,beside=alike-*.html")
    data = data_of(page.read_text(encoding="utf-8"))
    assert [model["name"] for model in data["models"]] == ["first", "alike"]
    assert 32 < len(data["text"].encode()) <= playground.COMPARED * 32
    with pytest.raises(UserError, match=r"--beside=.*other: found another tokenizer"):
        suites.evaluate(Run(first), "play", SuiteOptions(beside=str(other)))
    with pytest.raises(UserError, match="--beside is not supported by --suite=explorer; use it with play"):
        suites.check(["explorer"], SuiteOptions(beside=str(other)))
