"""Imported Unigram, WordPiece and WordLevel tokenizers give the ids of the tokenizers library."""

import json
import re

import numpy as np
import pytest
import tokenizers as library
from scipy.special import logsumexp

from mini_gpt import objectives
from mini_gpt.config import loading
from mini_gpt.data import token_store, tokenizers
from mini_gpt.data.layout import Layout
from mini_gpt.data.pairs import StoredPairs
from mini_gpt.data.subwords import ImportedTokenizer
from mini_gpt.data.tokenizers import ByteTokenizer, CharacterTokenizer
from mini_gpt.evaluation import scoring, task_accuracy
from mini_gpt.hugging_face import importing, tokenizer_files
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.suites.diagnose import Diagnose
from mini_gpt.suites.translation import Translation
from mini_gpt.training.inputs import layout_of
from mini_gpt.training.run import Run
from tests.conftest import SMALL
from tests.hugging_face.foreign_tokenizers import (
    HARD,
    HARD_TEXTS,
    NAMES,
    TEXT,
    unigram,
    wordpiece,
    words,
)
from tests.hugging_face.models import logits, written

# Name: (tokenizer, separator, mask, fields of tokenizer_config.json, text of "the cat, größer").
KINDS = {
    "wordpiece": (
        wordpiece,
        "[SEP]",
        "[MASK]",
        {"unk_token": "[UNK]", "sep_token": "[SEP]", "cls_token": "[CLS]", "mask_token": "[MASK]"},
        " the cat, großer",
    ),
    "unigram": (unigram, "</s>", None, {"eos_token": "</s>", "pad_token": "<pad>"}, " the cat, größer"),
    "words": (words, "</s>", "<mask>", {"eos_token": "</s>", "mask_token": "<mask>"}, " the cat , größer"),
}


@pytest.fixture(params=KINDS)
def kind(request, tmp_path):
    """Return (tokenizer of the library, tokenizer read from its files, directory, KINDS of it)."""
    make, separator, mask, named, _ = KINDS[request.param]
    model = make()
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    rows = model.get_vocab_size() + 2
    end = model.token_to_id(separator)
    read = tokenizer_files.read(tmp_path, rows, end, masked=mask is not None)
    assert tokenizers.vocab_size(read) == rows and isinstance(read, ImportedTokenizer)
    return model, read, tmp_path, KINDS[request.param]


def without_names(texts):
    return [text for name, text in texts.items() if name != "names"]


def without_end(ids, end):
    return ids[:-1] if ids[-1:] == [end] else ids


def test_ids_and_texts_are_those_of_the_library(kind):
    model, read, _, (_, separator, _, _, shown) = kind
    end = model.token_to_id(separator)
    for text in (HARD, TEXT, "", "a" * 500, "the cat", *without_names(HARD_TEXTS)):
        assert read.encode(text).tolist() == without_end(model.encode(text).ids, end)
        assert tokenizers.separator(read) not in read.encode(text), "a separator ends documents only"
    assert read.decode(read.encode("the cat, größer")) == shown
    assert "\ufffd" in read.decode(read.encode("\U0001f642")), "the unknown token is shown"


def test_the_names_of_special_tokens_are_read_as_text(kind):
    model, read, *_ = kind
    special = {token["id"] for token in json.loads(model.to_str())["added_tokens"] if token["special"]}
    special -= {model.token_to_id(name) for name in ("<unk>", "[UNK]", "[CLS]")}
    model.encode_special_tokens = False
    assert special & set(model.encode(NAMES).ids[1:-1]), "the library reads them as tokens"
    assert not special & set(read.encode(NAMES).tolist())
    assert read.decode(read.encode(NAMES)).endswith(" cat")


def test_the_files_of_an_export_give_the_same_ids(kind):
    model, read, directory, (_, separator, mask, named, _) = kind
    tokenizers.save(read, directory / "saved")
    loaded = tokenizers.load(directory / "saved")
    assert loaded.to_dict() == read.to_dict() and loaded.encode(HARD).tolist() == read.encode(HARD).tolist()
    ids = tokenizer_files.write(loaded, directory / "saved", 32, masked=mask is not None)
    assert ids["eos_token_id"] == model.token_to_id(separator)
    exported = library.Tokenizer.from_file(str(directory / "saved" / "tokenizer.json"))
    for text in (HARD, NAMES):
        assert exported.encode(text).ids == library.Tokenizer.from_str(model.to_str()).encode(text).ids
    written = json.loads((directory / "saved" / "tokenizer_config.json").read_text())
    assert {name: written[name] for name in named} == named
    assert json.loads(exported.to_str())["added_tokens"] == json.loads(model.to_str())["added_tokens"]


def test_bits_per_byte_are_not_measured(kind):
    _, read, *_ = kind
    ids = read.encode(TEXT)
    score = scoring.score(np.ones(len(ids)), ids, read.token_bytes)
    assert score.bytes == 0 and "bits_per_byte" not in score.items and score.tokens == len(ids)
    assert not read.token_bytes.any() and len(read.token_bytes) == tokenizers.vocab_size(read)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"unk_id": None}, r"model\.unk_id, unk_token: found None"),
        ({"unk_id": 10**6}, r".*UnkIdNotInVocabulary"),
    ],
)
def test_unigram_models_without_an_unknown_token_are_refused(changes, message, tmp_path):
    described = json.loads(unigram().to_str())
    described["model"] |= changes
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=rf"tokenizer\.json: {message}"):
        tokenizer_files.read(tmp_path, 200, 1)


def test_a_separator_that_is_plain_text_is_refused(tmp_path):
    model = wordpiece()
    model.save(str(tmp_path / "tokenizer.json"))
    for name in ("the", "[UNK]"):
        with pytest.raises(UserError, match=r"not supported \(ValueError: the separator is not a special token"):
            tokenizer_files.read(tmp_path, 200, model.token_to_id(name))


def test_the_token_before_targets_is_kept(tmp_path):
    model = unigram()
    model.save(str(tmp_path / "tokenizer.json"))
    read = tokenizer_files.read(tmp_path, 100, 1, start=0)
    tokenizers.save(read, tmp_path / "saved")
    loaded = tokenizers.load(tmp_path / "saved")
    assert loaded.start == read.start == 0 and tokenizer_files.read(tmp_path, 100, 1).start is None
    assert tokenizer_files.read(tmp_path, 100, 1, start=40).start == 40
    ids = tokenizer_files.write(loaded, tmp_path / "saved", 32)
    assert ids["decoder_start_token_id"] == 0 and ids["eos_token_id"] == 1
    assert "start_token" not in json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    with pytest.raises(UserError, match=r"config\.json: decoder_start_token_id: found 99; must be the id of"):
        tokenizer_files.read(tmp_path, 100, 1, start=99)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharacterTokenizer("ab")], ids=lambda tokenizer: tokenizer.kind)
def test_targets_of_bytes_and_characters_start_with_the_separator(tokenizer, tmp_path):
    end = tokenizer_files.write(tokenizer, tmp_path, 32)["eos_token_id"]
    assert tokenizer_files.read(tmp_path, end + 1, end, start=end).kind == tokenizer.kind
    if tokenizer.kind == "characters":
        with pytest.raises(UserError, match=r"decoder_start_token_id: found 0; must be eos_token_id"):
            tokenizer_files.read(tmp_path, end + 1, end, start=0)
    else:
        read = tokenizer_files.read(tmp_path, end + 1, end, start=0)
        assert read.kind == "bpe" and read.start == 0


def test_layouts_have_the_token_before_targets(tmp_path):
    unigram().save(str(tmp_path / "tokenizer.json"))
    read = tokenizer_files.read(tmp_path, 100, 1, start=0)
    pairs = {"model.encoder_layers": 1, "data.corpus": "pairs", "data.path": "a.tsv", "data.tokenizer": "imported"}
    assert layout_of(loading.load("configs/tiny.py", pairs), read) == Layout(1, start_id=0)
    spans = {"model.encoder_layers": 1, "train.objective": "span_corruption", "data.tokenizer": "imported"}
    with pytest.raises(UserError, match=r"train\.objective: found 'span_corruption'; must be next_token"):
        objectives.make(loading.load("configs/tiny.py", spans), read, lambda split: np.zeros(99, np.int32))


@pytest.mark.slow
def test_an_imported_t5_reads_its_own_start_and_end(corpus_files, tmp_path, caplog):
    written("t5", tmp_path / "there", vocab_size=300, end=1)
    path = tmp_path / "there" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"decoder_start_token_id": 0}))
    model = unigram()
    added = library.processors.TemplateProcessing(single="</s> $A </s>", special_tokens=[("</s>", 1)])
    model.post_processor = added
    model.save(str(tmp_path / "there" / "tokenizer.json"))
    (tmp_path / "pairs.tsv").write_text(
        "".join(f"the cat {n}\tA größer dog {n * n} {'🙂' * (n % 3 > 0)}\n" for n in range(60))
    )
    fields = {name: value for name, value in SMALL.items() if name.startswith(("data.", "train.", "mesh."))}
    fields |= {"data.corpus": "pairs", "data.path": str(tmp_path / "pairs.tsv"), "source_length": 64}
    fields["model.dtype"] = "float32"
    take = lambda fields: importing.import_run(tmp_path / "there", tmp_path / "run", "configs/default.py", fields)
    with pytest.raises(UserError, match=r"train\.objective: found 'span_corruption'; the imported model has 'next_"):
        take(fields | {"train.objective": "span_corruption", "data.corpus": "text", "data.path": corpus_files})
    take(fields)
    run = Run(tmp_path / "run")
    end = tokenizers.separator(run.tokenizer)
    stored = StoredPairs(run.store.tokens("train"), end)
    assert len(stored) == run.store.meta["splits"]["train"]["documents"] / 2
    pairs = stored.take(np.arange(3))
    for pair, nll in zip(pairs, task_accuracy.predict_pairs(run.model, pairs, end).nll, strict=True):
        source, target = ([*tokens, 1] for tokens in pair)
        logits_LV = logits(tmp_path / "there", [[0, *target[:-1]]], [source])[0]
        wanted = logsumexp(logits_LV, axis=-1) - logits_LV[np.arange(len(target)), target]
        np.testing.assert_allclose(nll, wanted, rtol=1e-4, atol=1e-4 * np.abs(logits_LV).max())
    (row,) = Translation().measure(run, SuiteOptions())["rows"]
    assert row["status"] == "ok" and row["pairs"] > 0
    checks = {row["check"]: row["found"] for row in Diagnose().measure(run, SuiteOptions())["rows"]}
    assert not checks["encoder direction"] and not checks["source padding"]
    assert re.search(r"\d+ of \d+ references have text that the tokenizer lacks: an unknown token", caplog.text)


def test_an_imported_tokenizer_is_not_made_from_text():
    config = loading.load("configs/tiny.py", {"data.tokenizer": "imported"})
    with pytest.raises(UserError, match=re.escape("data.tokenizer: found 'imported'; no text makes it")):
        token_store.fit_tokenizer(None, config.data)
