"""Span corruption: sizes, the text from source and target, sentinels, and errors."""

import numpy as np
import pytest

from mini_gpt.data import spans, tokenizers
from mini_gpt.data.batches import PADDING
from mini_gpt.data.spans import SENTINELS
from mini_gpt.data.text_batches import TextBatches, Vocab, corrupted_blocks
from mini_gpt.generation.streaming_text import Writer
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import loop

FIELDS = {"model__encoder_layers": 1, "train__objective": "span_corruption"}
TOKENIZER = tokenizers.ByteTokenizer()
VOCAB = 257


def test_sizes_are_those_of_t5(small):
    """With a source of 512 tokens, T5 uses 568 tokens and its end of a text; and targets of 114 tokens."""
    config = small(**FIELDS, source_length=512, context_length=114)
    found = spans.sizes(config)
    assert (found.text, found.corrupted, found.spans) == (569, 85, 28)
    assert (found.source, found.target) == (512, 114)


def restored(source, target):
    """Return the text, from a source and its target; and the lengths of the spans. Written without `spans`."""
    text, lengths = [], []
    places = {token: place for place, token in enumerate(target) if token >= VOCAB}
    for token in source:
        if token < VOCAB:
            text.append(token)
            continue
        place, before = places[token] + 1, len(text)
        while place < len(target) and target[place] < VOCAB - 1:
            text.append(target[place])
            place += 1
        lengths.append(len(text) - before)
    return text, lengths


@pytest.mark.parametrize(("rate", "mean"), [(0.15, 3.0), (0.5, 2.0), (0.3, 10.0)])
def test_source_and_target_restore_the_text(small, rate, mean):
    config = small(**FIELDS, train__mask_rate=rate, train__mean_span=mean, source_length=60, context_length=64)
    size, rng = spans.sizes(config), np.random.default_rng(0)
    texts_BN = rng.integers(VOCAB - 1, size=(20, size.text))
    batch = spans.batch_of(texts_BN, config, VOCAB, [(0, row) for row in range(20)])
    assert batch["source"].shape == (20, 60) and batch["targets"].shape == (20, 64)
    places = set()
    arrays = [batch[name] for name in ("source", "inputs", "targets", "weights")]
    for text_N, source, inputs, targets, weights in zip(texts_BN, *arrays, strict=True):
        assert (source[size.source :] == PADDING).all() and (source[: size.source] >= 0).all()
        assert weights.tolist() == [1] * size.target + [0] * (64 - size.target)
        np.testing.assert_array_equal(inputs[1:], targets[:-1])
        assert inputs[0] == VOCAB - 1 and targets[size.target - 1] == VOCAB - 1
        text, lengths = restored(source[: size.source], targets[: size.target - 1])
        assert text == text_N.tolist() and len(lengths) == size.spans and sum(lengths) == size.corrupted
        assert min(lengths) >= 1 and source[0] < VOCAB, "a text is never corrupted at its start"
        sentinels = [token for token in source[: size.source] if token >= VOCAB]
        assert sentinels == list(range(VOCAB + SENTINELS - 1, VOCAB + SENTINELS - 1 - size.spans, -1))
        assert targets[0] == sentinels[0]
        places.add(tuple(np.flatnonzero(source >= VOCAB)))
    assert len(places) > 15, "spans are random"


def test_all_spans_of_a_length_are_equally_likely():
    rng = np.random.default_rng(0)
    found = [tuple(spans._lengths(6, 3, rng)) for _ in range(20_000)]
    counts = {lengths: found.count(lengths) for lengths in set(found)}
    assert set(counts) == {(a, b, 6 - a - b) for a in range(1, 5) for b in range(1, 6 - a)}
    np.testing.assert_allclose(list(counts.values()), 2000, atol=200)


def test_batches_depend_on_seed_and_step_and_hosts_share_them(small):
    config = small(**FIELDS, source_length=30, context_length=12, train__batch_size=4)
    size, tokens = spans.sizes(config).text, np.arange(1000) % 256
    batches = TextBatches(tokens, config, vocab=Vocab(VOCAB, VOCAB))
    again = TextBatches(tokens, config, vocab=Vocab(VOCAB, VOCAB), rows=range(2, 4))
    for name, array in batches[7].items():
        np.testing.assert_array_equal(again[7][name], array[2:])
    text, _ = restored(batches[7]["source"][0], batches[7]["targets"][0])
    assert len(text) == size and (np.diff(text) % 256 == 1).all(), "a window of the text"
    assert (batches[0]["source"] != batches[1]["source"]).any()
    (count, block), *_ = corrupted_blocks(tokens, config, vocab=Vocab(VOCAB, VOCAB), batch_size=3, seed=0)
    starts = [restored(block["source"][row], block["targets"][row])[0][0] for row in range(count)]
    assert starts == [0, size, 2 * size]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source_length": 1}, r"^source_length: found 1; must be at least 2 for span corruption"),
        ({"context_length": 7}, r"^context_length: found 7; source_length=30 needs at least 8 to predict the spans"),
        (
            {"source_length": 1500, "context_length": 1500, "train__mean_span": 1.0},
            r"^train\.mean_span: found 1\.0; gives \d+ spans, more than 100",
        ),
    ],
)
def test_rows_that_are_too_short_are_refused(small, fields, message):
    with pytest.raises(UserError, match=message):
        spans.sizes(small(**FIELDS | {"source_length": 30, "context_length": 12} | fields))


def test_sentinels_are_written_as_numbers_in_angle_brackets():
    text = "a <0> cat<1>, <x> <100> é"
    tokens = spans.encode(text, TOKENIZER)
    assert [token for token in tokens.tolist() if token >= VOCAB] == [VOCAB + 99, VOCAB + 98]
    assert spans.decode(tokens, TOKENIZER) == text
    assert spans.encode("", TOKENIZER).tolist() == []


def test_sentinels_are_streamed_as_text():
    writer = Writer(TOKENIZER)
    assert writer.add([VOCAB + 99, *TOKENIZER.encode("ab"), VOCAB + 98, VOCAB - 1]) == "<0>ab<1>"
    assert writer.ended_by == "end of document"


@pytest.mark.slow
def test_a_run_learns_to_write_spans_and_prints_them(small, tmp_path, capsys):
    config = small(**FIELDS, source_length=30, context_length=12, train__steps=3, eval__sample_tokens=4)
    state = loop.train(config, tmp_path)
    assert len(state.parameters["embedding"]) == VOCAB + SENTINELS
    printed = capsys.readouterr().out
    assert "tokens of spans" in printed and "in blocks of 33" in printed and "<0>" in printed


def test_a_token_of_a_part_of_a_character_is_shown_by_its_bytes():
    tokens = TOKENIZER.encode("né\\\n")
    assert spans.decode_each(tokens, TOKENIZER) == ["n", r"\xc3", r"\xa9", "\\", "\n"]
    assert spans.decode_in_turn(tokens, TOKENIZER) == ["n", "", "é", "\\", "\n"]
