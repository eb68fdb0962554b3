"""Invalid configs, corpora, tokenizers and runs end in one-line errors, and nothing is written."""

import contextlib
import json
import shutil
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import train
from mini_gpt import suites
from mini_gpt.commands import command_line
from mini_gpt.config import loading
from mini_gpt.data import corpora, token_store, tokenizers
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import loop
from mini_gpt.training.run import Run
from tests.conftest import REPOSITORY

FUZZ = settings(
    max_examples=700, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
FIELDS = sorted(loading.flatten(loading.to_dict(loading.load("configs/default.py"))))
ODD = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        ["", "None", "True", "[]", "()", "(1, 2)", "{}", "'", "1e999", "nan", "-1", "0", "-0.5", "rope", "10**9"]
    ),
    st.sampled_from(
        ["__import__('os').system('touch owned')", "../..", "(" * 500, "\x00", "größer", "9" * 5000, "\ud800"]
    ),
    st.text(max_size=20),
    st.tuples(st.sampled_from(["rope", "alibi", "learned", "", "ROPE"]), st.sampled_from(["t5", "none", "x"])).map(str),
)


class Accepted(Exception):
    """The config is valid: training would start."""


@pytest.mark.slow
def test_invalid_configs_end_in_one_line_that_names_the_field(tmp_path, monkeypatch, capsys):
    invalid = []
    monkeypatch.chdir(REPOSITORY)

    def accept(*_, **__):
        raise Accepted

    monkeypatch.setattr(loop, "train", accept)
    monkeypatch.setattr(command_line, "set_up", lambda *_: None)

    @FUZZ
    @given(st.dictionaries(st.sampled_from(FIELDS), ODD, min_size=1, max_size=3))
    def check(overrides):
        flags = [f"--config.{name}={value}" for name, value in overrides.items()]
        monkeypatch.setattr(
            sys, "argv", ["train.py", "--config=configs/default.py", f"--workdir={tmp_path}/run", *flags]
        )
        with contextlib.suppress(Accepted):
            with pytest.raises(SystemExit) as ended:
                train.main()
            message = str(ended.value)
            assert message.startswith("error: ") and "\n" not in message, message
            assert any(name in message for name in overrides), message
            assert len(message) < 1000, message
            invalid.append(message)

    check()
    assert len(invalid) >= 500
    assert list(tmp_path.iterdir()) == []


def mutated(content: bytes):
    """Return a strategy for bytes: `content` with parts inserted, deleted or repeated, or arbitrary bytes."""
    place = st.integers(0, len(content))
    return st.one_of(
        st.binary(max_size=300),
        st.tuples(place, st.binary(min_size=1, max_size=8)).map(lambda x: content[: x[0]] + x[1] + content[x[0] :]),
        st.tuples(place, st.integers(1, 30)).map(lambda x: content[: x[0]] + content[x[0] + x[1] :]),
        st.tuples(place, place).map(lambda x: content[: max(x)] + content[min(x) :]),
        st.sampled_from([b"[" * 100_000, b'{"a":' * 50_000, b"9" * 100_000, b"\xff\xfe", b"", b"null", b'"\\ud800"']),
    )


def test_fuzzed_configs_load_or_are_refused(small, tmp_path):
    right = loading.to_dict(small())
    content, path = json.dumps(right, indent=2).encode(), tmp_path / "config.json"

    @FUZZ
    @given(
        st.one_of(
            mutated(content),
            st.tuples(
                st.sampled_from(FIELDS), st.one_of(st.integers(), st.floats(), st.text(), st.lists(st.none()))
            ).map(lambda change: json.dumps(changed(right, *change)).encode()),
        )
    )
    def check(raw):
        path.write_bytes(raw)
        try:
            assert loading.to_dict(loading.read(path)).keys() == right.keys()
        except UserError as error:
            assert str(path) in str(error) and "\n" not in str(error)

    check()


def changed(values, name, value):
    section, _, rest = name.partition(".")
    return values | {section: changed(values[section], rest, value) if rest else value}


@pytest.mark.parametrize("kind", ["characters", "bpe"])
def test_fuzzed_tokenizers_load_or_are_refused(small, tmp_path, kind):
    config = small(data__tokenizer=kind, data__vocab_size=300)
    tokenizer = token_store.fit_tokenizer(corpora.open_corpus(config.data), config.data)
    content = json.dumps(tokenizer.to_dict(), ensure_ascii=False).encode()  # has no checksum

    @settings(FUZZ, max_examples=400)
    @given(mutated(content))
    def check(raw):
        (tmp_path / tokenizers.FILE).write_bytes(raw)
        try:
            read = tokenizers.load(tmp_path)
        except UserError as error:
            assert str(tmp_path / tokenizers.FILE) in str(error) and "\n" not in str(error)
            return
        with contextlib.suppress(UserError):  # a character that the tokenizer lacks
            tokens = read.encode("the cat größer\n")
            assert ((tokens >= 0) & (tokens < tokenizers.vocab_size(read))).all()
            assert isinstance(read.decode(tokens), str)

    check()


@pytest.mark.slow
def test_fuzzed_corpora_load_or_are_refused(small, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    config = small(data__path=f"{folder}/*")

    @settings(FUZZ, max_examples=500)
    @given(
        st.lists(
            st.one_of(st.binary(max_size=100), st.text(max_size=50).map(lambda t: t.encode("utf-8", "replace"))),
            max_size=3,
        )
    )
    def check(contents):
        shutil.rmtree(folder)
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        folder.mkdir()
        for number, content in enumerate(contents):
            (folder / f"{number}.txt").write_bytes(content)
        try:
            corpus = corpora.open_corpus(config.data)
            store = token_store.open_store(corpus, config.data, tokenizers.ByteTokenizer())
        except UserError as error:
            assert "\n" not in str(error)
            return
        assert store.meta["splits"]["train"]["bytes"] <= sum(map(len, contents))

    check()


@pytest.fixture
def run(trained):
    return trained(train__steps=4)


@pytest.mark.parametrize(
    "place", ["eval", "tensorboard/perplexity", "eval/perplexity.json", "checkpoints/4/format/metadata"]
)
def test_a_run_with_links_out_of_its_directory_is_refused(small, run, tmp_path, place):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("precious")
    link = run / place
    link.parent.mkdir(exist_ok=True)
    if link.exists():
        link.unlink()
    link.symlink_to(outside if "." not in place else outside / "precious")
    for use in (lambda: Run(run), lambda: loop.train(small(), run)):
        with pytest.raises(UserError, match=rf"{link}: found a link to {outside}"):
            use()
    assert [path.name for path in outside.iterdir()] == ["precious"]
    assert (outside / "precious").read_text() == "precious"


def test_links_inside_a_run_and_to_a_run_are_allowed(run, tmp_path):
    (run / "last").symlink_to(run / "checkpoints" / "4")
    (tmp_path / "link").symlink_to(run)
    suites.evaluate(Run(tmp_path / "link"), "perplexity", SuiteOptions())
    assert (run / "eval" / "perplexity.json").exists()


def test_a_corpus_with_a_link_out_of_its_folder_is_refused(small, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=r"data\.path: \S+/a\.txt leads to \S+/secret, outside \S+/texts; put the"):
        corpora.open_corpus(small(data__path=f"{tmp_path}/texts/*.txt").data)
    assert corpora.open_corpus(small(data__path=f"{tmp_path}/texts/a.txt").data).num_documents == 1


def test_a_damaged_checkpoint_is_not_blamed_on_the_config(run):
    (run / "checkpoints" / "4" / "parameters" / "manifest.ocdbt").write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"checkpoints/4: damaged \("):
        Run(run)
