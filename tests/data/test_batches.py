"""Batches: their windows, and spans of masked tokens."""

import itertools

import grain
import numpy as np
import pytest

from mini_gpt.data import batches, spans, tokenizers
from mini_gpt.data.batches import PADDING, in_full_batches
from mini_gpt.data.spans import SENTINELS
from mini_gpt.data.text_batches import TextBatches, Vocab, corrupted_blocks
from mini_gpt.generation.streaming_text import Writer
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import loop
from tests.conftest import slow

# Batches as a function of seed and step: windows, rows of a host, masks.

VOCAB = 5_000  # above every token id, so the id of the mask is too
MASK = VOCAB
MASK_INSIDE = 700  # of an imported tokenizer


def numbered(count):
    """Return a split in which token i has the id i."""
    return np.arange(count)


def rows_of(train_batches, steps):
    return np.concatenate([train_batches[step]["inputs"] for step in steps])


def test_resuming_at_any_step_gives_the_same_batches(small):
    config = small(train__steps=12, train__batch_size=4, train__objective="masked", model__causal=False)
    train_batches = TextBatches(numbered(1000), config, vocab=Vocab(VOCAB, MASK))
    complete = list(batches.iterate(train_batches, 0, 12))
    assert len(complete) == 12
    for start in range(13):
        again = TextBatches(numbered(1000), config, vocab=Vocab(VOCAB, MASK))
        tail = list(batches.iterate(again, start, 12 - start)) if start < 12 else []
        assert len(tail) == 12 - start
        for left, right in zip(complete[start:], tail, strict=True):
            for name in left:
                np.testing.assert_array_equal(left[name], right[name])


@pytest.mark.parametrize("hosts", [2, 4])
def test_rows_of_all_hosts_make_up_the_global_batch(small, hosts):
    config = small(train__batch_size=8)
    complete = TextBatches(numbered(2000), config, vocab=Vocab(VOCAB, MASK))
    shares = [
        TextBatches(numbered(2000), config, vocab=Vocab(VOCAB, MASK), rows=range(h * 8 // hosts, (h + 1) * 8 // hosts))
        for h in range(hosts)
    ]
    for step in range(5):
        joined = np.concatenate([share[step]["inputs"] for share in shares])
        np.testing.assert_array_equal(joined, complete[step]["inputs"])


def test_epochs_differ_in_order_and_offset(small):
    config = small(context_length=10, train__batch_size=3)
    train_batches = TextBatches(numbered(10 * 30 + 10), config, vocab=Vocab(VOCAB, MASK))
    assert train_batches.rows_per_epoch == 30
    offsets, orders = set(), []
    for epoch in range(6):
        starts = rows_of(train_batches, range(epoch * 10, (epoch + 1) * 10))[:, 0]
        offset = starts.min()
        np.testing.assert_array_equal(np.sort(starts), offset + 10 * np.arange(30))
        offsets.add(offset)
        orders.append(tuple((starts - offset) // 10))
    assert len(offsets) > 1 and max(offsets) <= 19
    assert len(set(orders)) == 6
    other = TextBatches(numbered(310), small(context_length=10, train__batch_size=3, seed=1), vocab=Vocab(VOCAB, MASK))
    assert tuple(rows_of(other, range(10))[:, 0]) != tuple(rows_of(train_batches, range(10))[:, 0])


def test_the_order_of_the_data_has_its_own_seed(small):
    def starts(**seeds):
        config = small(context_length=10, train__batch_size=3, **seeds)
        return tuple(rows_of(TextBatches(numbered(310), config, vocab=Vocab(VOCAB, MASK)), range(10))[:, 0])

    assert starts(seed=1, data__seed=5) == starts(seed=2, data__seed=5) == starts(seed=5) != starts(seed=1)


def test_windows_equal_those_of_older_versions(small):
    """Compare with the first implementation, because a resumed run must read the same windows."""
    config = small(context_length=10, train__batch_size=3, seed=7)
    train_batches = TextBatches(numbered(205), config, vocab=Vocab(VOCAB, MASK))
    order = grain.MapDataset.range(19).shuffle(7).repeat()
    expected = [np.random.default_rng((7, place // 19)).integers(15) + order[place] * 10 for place in range(60)]
    np.testing.assert_array_equal(rows_of(train_batches, range(20)), np.array(expected)[:, None] + np.arange(10))
    assert (expected[:6], expected[57:]) == ([54, 144, 44, 84, 34, 104], [190, 130, 20])


@pytest.mark.parametrize("count", [11, 12, 20, 21, *slow(19, 29, 30, 31, 57)])
def test_windows_stay_in_the_split_and_cover_it(small, count):
    config = small(context_length=10, train__batch_size=2, train__steps=120)
    train_batches = TextBatches(numbered(count), config, vocab=Vocab(VOCAB, MASK))
    seen = set()
    for step in range(120):
        batch = train_batches[step]
        np.testing.assert_array_equal(batch["targets"], batch["inputs"] + 1)
        assert batch["targets"].max() < count
        seen |= set(batch["targets"].ravel().tolist())
    assert seen == set(range(1, count))


def test_a_split_that_is_too_short_is_refused(small):
    with pytest.raises(UserError, match=r"32 tokens; context_length=32 needs at least 33"):
        TextBatches(numbered(32), small(), vocab=Vocab(VOCAB, MASK))
    TextBatches(numbered(33), small(), vocab=Vocab(VOCAB, MASK))


def test_the_last_batch_is_filled_with_copies():
    assert list(in_full_batches("abcde", 2)) == [(2, ["a", "b"]), (2, ["c", "d"]), (1, ["e", "e"])]
    assert list(in_full_batches(range(0, 9, 3), 5)) == [(3, [0, 3, 6, 0, 0])]
    assert list(in_full_batches([], 2)) == []


def test_chosen_inputs_are_masked_replaced_or_kept(small):
    config = small(train__objective="masked", model__causal=False, train__batch_size=64, context_length=100)
    batch = TextBatches(numbered(4000), config, vocab=Vocab(VOCAB, MASK))[0]
    chosen = batch["weights"] == 1
    assert set(np.unique(batch["weights"])) == {0.0, 1.0}
    assert chosen.mean() == pytest.approx(0.15, abs=0.015)
    np.testing.assert_array_equal(batch["inputs"][~chosen], batch["targets"][~chosen])
    inputs, targets = batch["inputs"][chosen], batch["targets"][chosen]
    masked, kept = inputs == MASK, inputs == targets
    assert masked.mean() == pytest.approx(0.8, abs=0.03)
    assert kept.mean() == pytest.approx(0.1, abs=0.03)
    assert inputs[~masked].max() < MASK


def test_masks_of_evaluation_do_not_depend_on_batch_size(small):
    tokens, by_size = np.arange(95), []
    for batch_size in (2, 4, 9):
        config = small(train__objective="masked", model__causal=False, context_length=10, train__batch_size=batch_size)
        found = list(corrupted_blocks(tokens, config, vocab=Vocab(VOCAB, MASK), batch_size=batch_size, seed=0))
        assert {batch["inputs"].shape for _, batch in found} == {(batch_size, 10)}
        by_size.append({name: np.concatenate([b[name][:rows] for rows, b in found]) for name in found[0][1]})
    for a, b in itertools.pairwise(by_size):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])
    np.testing.assert_array_equal(by_size[0]["targets"], np.arange(90).reshape(9, 10))


def test_a_mask_inside_the_vocabulary_only_renames_tokens(small):
    config, others = small(train__objective="masked", model__causal=False, train__batch_size=64), np.arange(1500)
    renamed = np.append(others + (others >= MASK_INSIDE), MASK_INSIDE)  # of each id, the mask's last
    of_tokens, ids = numbered(1000), {"vocab": Vocab(1501, MASK_INSIDE)}
    plain = TextBatches(of_tokens, config, vocab=Vocab(1500, 1500))[2]
    inside = TextBatches(renamed[of_tokens], config, **ids)[2]
    blocks = {"batch_size": 8, "seed": 0}
    (_, plain_block), *_ = corrupted_blocks(of_tokens, config, vocab=Vocab(1500, 1500), **blocks)
    (_, block), *_ = corrupted_blocks(renamed[of_tokens], config, **ids, **blocks)
    for name in ("inputs", "targets"):
        np.testing.assert_array_equal(inside[name], renamed[plain[name]])
        np.testing.assert_array_equal(block[name], renamed[plain_block[name]])
    drawn = inside["inputs"][(inside["inputs"] != inside["targets"]) & (inside["inputs"] != MASK_INSIDE)]
    assert drawn.min() < MASK_INSIDE < drawn.max()


def test_a_masked_row_has_the_tokens_that_a_row_of_next_tokens_begins_with(small):
    tokens, masked = np.arange(2000) % 250, {"train__objective": "masked", "model__causal": False}
    rows = [TextBatches(tokens, small(**fields), vocab=Vocab(VOCAB, MASK))[0] for fields in ({}, masked)]
    np.testing.assert_array_equal(rows[1]["targets"], rows[0]["inputs"])


# Span corruption: sizes, the text from source and target, sentinels, and errors.

FIELDS = {"model__encoder_layers": 1, "train__objective": "span_corruption"}
TOKENIZER = tokenizers.ByteTokenizer()
BYTES = 257


def test_sizes_are_those_of_t5(small):
    """With a source of 512 tokens, T5 uses 568 tokens and its end of a text; and targets of 114 tokens."""
    config = small(**FIELDS, source_length=512, context_length=114)
    found = spans.sizes(config)
    assert (found.text, found.corrupted, found.spans) == (569, 85, 28)
    assert (found.source, found.target) == (512, 114)


def restored(source, target):
    """Return the text, from a source and its target; and the lengths of the spans. Written without `spans`."""
    text, lengths = [], []
    places = {token: place for place, token in enumerate(target) if token >= BYTES}
    for token in source:
        if token < BYTES:
            text.append(token)
            continue
        place, before = places[token] + 1, len(text)
        while place < len(target) and target[place] < BYTES - 1:
            text.append(target[place])
            place += 1
        lengths.append(len(text) - before)
    return text, lengths


@pytest.mark.parametrize(("rate", "mean"), [(0.15, 3.0), (0.5, 2.0), (0.3, 10.0)])
def test_source_and_target_restore_the_text(small, rate, mean):
    config = small(**FIELDS, train__mask_rate=rate, train__mean_span=mean, source_length=60, context_length=64)
    size, rng = spans.sizes(config), np.random.default_rng(0)
    texts_BN = rng.integers(BYTES - 1, size=(20, size.text))
    batch = spans.batch_of(texts_BN, config, BYTES, [(0, row) for row in range(20)])
    assert batch["source"].shape == (20, 60) and batch["targets"].shape == (20, 64)
    places = set()
    arrays = [batch[name] for name in ("source", "inputs", "targets", "weights")]
    for text_N, source, inputs, targets, weights in zip(texts_BN, *arrays, strict=True):
        assert (source[size.source :] == PADDING).all() and (source[: size.source] >= 0).all()
        assert weights.tolist() == [1] * size.target + [0] * (64 - size.target)
        np.testing.assert_array_equal(inputs[1:], targets[:-1])
        assert inputs[0] == BYTES - 1 and targets[size.target - 1] == BYTES - 1
        text, lengths = restored(source[: size.source], targets[: size.target - 1])
        assert text == text_N.tolist() and len(lengths) == size.spans and sum(lengths) == size.corrupted
        assert min(lengths) >= 1 and source[0] < BYTES, "a text is never corrupted at its start"
        sentinels = [token for token in source[: size.source] if token >= BYTES]
        assert sentinels == list(range(BYTES + SENTINELS - 1, BYTES + SENTINELS - 1 - size.spans, -1))
        assert targets[0] == sentinels[0]
        places.add(tuple(np.flatnonzero(source >= BYTES)))
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
    batches = TextBatches(tokens, config, vocab=Vocab(BYTES, BYTES))
    again = TextBatches(tokens, config, vocab=Vocab(BYTES, BYTES), rows=range(2, 4))
    for name, array in batches[7].items():
        np.testing.assert_array_equal(again[7][name], array[2:])
    text, _ = restored(batches[7]["source"][0], batches[7]["targets"][0])
    assert len(text) == size and (np.diff(text) % 256 == 1).all(), "a window of the text"
    assert (batches[0]["source"] != batches[1]["source"]).any()
    (count, block), *_ = corrupted_blocks(tokens, config, vocab=Vocab(BYTES, BYTES), batch_size=3, seed=0)
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
    assert [token for token in tokens.tolist() if token >= BYTES] == [BYTES + 99, BYTES + 98]
    assert spans.decode(tokens, TOKENIZER) == text
    assert spans.encode("", TOKENIZER).tolist() == []


def test_sentinels_are_streamed_as_text():
    writer = Writer(TOKENIZER)
    assert writer.add([BYTES + 99, *TOKENIZER.encode("ab"), BYTES + 98, BYTES - 1]) == "<0>ab<1>"
    assert writer.ended_by == "end of document"


@pytest.mark.slow
def test_a_run_learns_to_write_spans_and_prints_them(small, tmp_path, capsys):
    config = small(**FIELDS, source_length=30, context_length=12, train__steps=3, eval__sample_tokens=4)
    state = loop.train(config, tmp_path)
    assert len(state.parameters["embedding"]) == BYTES + SENTINELS
    printed = capsys.readouterr().out
    assert "tokens of spans" in printed and "in blocks of 33" in printed and "<0>" in printed


def test_a_token_of_a_part_of_a_character_is_shown_by_its_bytes():
    tokens = TOKENIZER.encode("né\\\n")
    assert spans.decode_each(tokens, TOKENIZER) == ["n", r"\xc3", r"\xa9", "\\", "\n"]
    assert spans.decode_in_turn(tokens, TOKENIZER) == ["n", "", "é", "\\", "\n"]
