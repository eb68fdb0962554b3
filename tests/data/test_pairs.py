"""Pairs of source and target, and the layout of documents in rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow_datasets as tfds

from mini_gpt.config.schema import Config
from mini_gpt.data import corpora, pairs, splits, token_store, tokenizers
from mini_gpt.data.layout import PLAIN, Layout
from mini_gpt.data.pairs import Pair, PairBatches, StoredPairs, batch_of
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import loop
from tests import oracle
from tests.model.test_gpt import VOCAB, make_model, run

# Pairs of a source and a target: files, splits, TFDS, rows, and errors for invalid files.

MODEL = {"model__encoder_layers": 1, "data__corpus": "pairs"}


@pytest.fixture
def config(small, tmp_path):
    """Return a function that writes the files of a config of pairs."""

    def make(sources: list[str], targets: list[str] | None = None, **fields) -> Config:
        paths = {"data__path": str(tmp_path / "sources.txt")}
        (tmp_path / "sources.txt").write_bytes("".join(sources).encode())
        if targets is not None:
            (tmp_path / "targets.txt").write_bytes("".join(targets).encode())
            paths["data__target_path"] = str(tmp_path / "targets.txt")
        return small(**MODEL | {"data__tokenizer": "bytes"} | paths | fields)

    return make


def texts_of(config):
    return [text for _, text in corpora.open_corpus(config.data).documents()]


def test_two_files_and_one_tsv_file_give_the_same_pairs(config):
    two = config(["a b\n", "\n", "c\r\n", " d \n"], ["A\n", "no source\n", "C\n", "D\tE"])
    assert texts_of(two) == ["a b", "A", "c", "C", "d", "D\tE"]
    one = config(["\ufeffa b\tA\n", "\tno source\n", "\n", "no target\t\n", "c\tC\tfurther column\r\n", "d\tD"])
    assert texts_of(one) == ["a b", "A", "c", "C", "d", "D"]


def test_only_a_newline_ends_a_line(config):
    strange = "a\u2028b\x0bc\x85d"
    assert texts_of(config([strange + "\n"], ["x\ry\n"])) == [strange, "x\ry"]


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        (["a\n", "b\n", "c\n"], ["A\n", "B\n"], r"targets.txt: after 2 texts: one of the files has more lines"),
        (["a\n"], ["A\n", "\n"], r"targets.txt: after 1 texts: one of the files has more lines"),
        (["a\tA\n", "b B\n"], None, r"sources.txt: after 1 texts: the next line has no tab"),
        (["\n", "a\t\n"], None, r"^data\.corpus: pairs holds no text"),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_line_that_names_it(config, sources, targets, message):
    with pytest.raises(UserError, match=message):
        texts_of(config(sources, targets))


def test_bytes_that_are_not_utf8_and_missing_files_are_errors(config, tmp_path):
    made = config(["a\n"], ["A\n"])
    (tmp_path / "targets.txt").write_bytes(b"\xff\n")
    with pytest.raises(UserError, match=r"targets.txt: .*can't decode byte 0xff in position 0"):
        texts_of(made)
    (tmp_path / "targets.txt").unlink()
    with pytest.raises(UserError, match=r"data\.target_path: \S+targets.txt is not a file"):
        texts_of(made)
    (tmp_path / "sources.txt").unlink()
    with pytest.raises(UserError, match=r"^data\.path.*: \S+sources.txt is not a file"):
        texts_of(made)


def test_the_fingerprint_depends_on_which_side_has_a_text(config):
    found = [
        corpora.open_corpus(config(*files).data).fingerprint
        for files in ((["a\n"], ["b\n"]), (["b\n"], ["a\n"]), (["a\tb\n"],), (["a\n", "c\n"], ["b\n", "d\n"]))
    ]
    assert len(set(found)) == 4


def test_a_file_that_changes_while_it_is_read_is_an_error(config, tmp_path):
    corpus = corpora.open_corpus(config(["a\n"], ["A\n"]).data)
    (tmp_path / "targets.txt").write_text("B\n")
    with pytest.raises(UserError, match=r"^data\.path: \S+targets.txt has changed while it was read; start again"):
        list(corpus.documents())


def lines(count):
    return [f"source {i}\n" for i in range(count)], [f"target {i}\n" for i in range(count)]


@pytest.mark.parametrize(("count", "kind"), [(400, "documents"), (400, "contiguous"), (50, "contiguous")])
def test_a_pair_is_never_cut_and_its_split_depends_on_its_source_or_its_place(config, count, kind):
    data = config(*lines(count), data__split=kind).data
    corpus = corpora.open_corpus(data)
    assert splits.split_kind(corpus, data) == kind
    found = [(split, piece.text) for split, piece in splits.split_pieces(corpus, data)]
    of_pairs = [(split, source, target) for (split, source), (_, target) in zip(found[::2], found[1::2], strict=True)]
    assert [split for split, _ in found[::2]] == [split for split, _ in found[1::2]]
    assert [pair[1:] for pair in of_pairs] == [(f"source {i}", f"target {i}") for i in range(count)]
    shares = [sum(split == name for split, *_ in of_pairs) / count for name in splits.SPLITS]
    np.testing.assert_allclose(shares, data.split_fractions, atol=0.04)
    if kind == "contiguous":
        assert [split for split, *_ in of_pairs] == sorted((split for split, *_ in of_pairs), key=splits.SPLITS.index)


@pytest.fixture
def stored(config):
    """The config, the tokenizer and the training pairs of 400 lines."""
    made = config(*lines(400), source_length=32, context_length=40, train__batch_size=4)
    corpus = corpora.open_corpus(made.data)
    tokenizer = token_store.fit_tokenizer(corpus, made.data)
    tokens = token_store.open_store(corpus, made.data, tokenizer).tokens("train")
    return made, tokenizer, StoredPairs(tokens, tokenizers.separator(tokenizer))


def test_each_epoch_has_each_pair_once_in_rows_that_no_further_pair_fits(stored):
    made, tokenizer, found = stored
    separator, batches = tokenizers.separator(tokenizer), PairBatches(stored[2], made, tokenizers.separator(tokenizer))

    def texts(tokens):
        parts = np.split(tokens, np.flatnonzero(tokens == separator))[1:]
        return [tokenizer.decode(part[1:][part[1:] >= 0]) for part in parts]

    rows_of_an_epoch, seen, orders = batches.rows_per_epoch, [], []
    for epoch in (0, 1):
        pairs_seen = []
        for number in range(epoch * rows_of_an_epoch, (epoch + 1) * rows_of_an_epoch):
            batch = batches[number // 4]
            sources, targets = texts(batch["source"][number % 4]), texts(batch["inputs"][number % 4])
            assert [source.replace("source", "target") for source in sources] == targets[: len(sources)]
            assert not any(targets[len(sources) :])
            pairs_seen += sources
        seen.append(sorted(pairs_seen))
        orders.append(pairs_seen)
    assert seen[0] == seen[1] == sorted(tokenizer.decode(pair.source) for pair in found) and orders[0] != orders[1]
    again = PairBatches(found, made, separator, rows=range(2, 4))[3]
    np.testing.assert_array_equal(again["source"], batches[3]["source"][2:])


def test_rows_by_lengths_are_those_of_in_rows(stored):
    made, _, found = stored
    batches, limits = PairBatches(found, made, 256), (32, 40)
    in_order = [found[int(index)] for index in batches.order]
    expected = np.cumsum([0, *(len(row) for row in pairs.in_rows(in_order, limits))])
    np.testing.assert_array_equal(batches.starts, expected)


def test_pairs_longer_than_a_row_are_left_out_with_a_warning(config, caplog):
    sources, targets = lines(200)
    made = config([*sources, "x" * 10_000_000 + "\n"], [*targets, "y\n"], source_length=32, context_length=40)
    corpus = corpora.open_corpus(made.data)
    tokenizer = tokenizers.ByteTokenizer()
    tokens = token_store.open_store(corpus, made.data, tokenizer).tokens("train")
    found = StoredPairs(tokens, 256)
    assert max(len(pair.source) for pair in found) == 10_000_000
    batches = PairBatches(found, made, 256)
    assert len(batches.order) == len(found) - 1
    assert f"1 of {len(found)} training pairs are not used" in caplog.text
    with pytest.raises(UserError, match=r"^source_length, context_length: found \(4, 40\); no pair of the train split"):
        PairBatches(found, config(sources, targets, source_length=4, context_length=40), 256)


def test_an_empty_split_and_a_single_pair_are_pairs():
    assert list(StoredPairs(np.array([], np.int32), 9)) == []
    (only,) = StoredPairs(np.array([1, 2, 9, 3]), 9)
    assert (list(only.source), list(only.target)) == ([1, 2], [3])
    assert StoredPairs(np.array([1, 2, 9, 3]), 9).sizes_P2.tolist() == [[3, 2]] == [Pair(*only).sizes.tolist()]


@pytest.mark.slow
def test_a_run_on_files_writes_targets_of_its_sources(config, tmp_path, capsys):
    of_sample = {"eval__sample_tokens": 128, "model__position": "learned"}  # more tokens than positions
    made = config(*lines(200), source_length=32, context_length=40, train__steps=3, **of_sample)
    loop.train(made, tmp_path / "run")
    printed = capsys.readouterr().out
    assert "nats per token of the targets" in printed and "--suite=translation" in printed
    assert "    source 1" in printed and " → " in printed


class _Translations(tfds.core.GeneratorBasedBuilder):
    """Translations in three languages."""

    VERSION = tfds.core.Version("1.0.0")
    name = "mini_translations"

    def _info(self):
        return self.dataset_info_from_configs(features=tfds.features.Translation(languages=["de", "en", "fr"]))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(150), "validation": self._generate_examples(7)}

    def _generate_examples(self, count):
        for i in range(count):
            yield i, {"de": "" if i == 3 else f"de {i}", "en": f"en {i}", "fr": f"fr {i}"}


def test_a_translation_set_of_tfds_gives_the_pair_of_its_keys(small, tmp_path):
    _Translations(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    fields = {"model__encoder_layers": 1, "data__corpus": "tfds:mini_translations", "data__path": str(tmp_path)}
    data = small(**fields, data__pair=("de", "fr")).data
    corpus = corpora.open_corpus(data)
    found = [(split, piece.text) for split, piece in splits.split_pieces(corpus, data)]
    texts = [text for split, text in found if split == "validation"]
    numbers = [text.removeprefix("de ") for text in texts[::2]]
    assert sorted(numbers) == list("012456") and texts[1::2] == [f"fr {number}" for number in numbers]
    assert corpora.open_corpus(small(**fields, data__pair=("fr", "de")).data).fingerprint != corpus.fingerprint
    with pytest.raises(UserError, match=r"^data\.pair: found \('de', 'it'\); tfds:\S+ has the text features de, en"):
        corpora.open_corpus(small(**fields, data__pair=("de", "it")).data)


# The positions and segments of a text: documents, and random positions.


def test_positions_restart_at_document_separators():
    tokens = jnp.array([[7, 7, 9, 7, 7, 7, 9, 9], [9, 7, 7, 7, 7, 7, 7, 7]])
    positions, segments = Layout(9).positions_and_segments(make_model()[0], tokens)
    np.testing.assert_array_equal(segments, [[0, 0, 1, 1, 1, 1, 2, 3], [1] * 8])
    np.testing.assert_array_equal(positions, [[0, 1, 0, 1, 2, 3, 0, 0], list(range(8))])
    assert PLAIN.positions_and_segments(make_model()[0], tokens) == (None, None)


def test_random_positions_are_ordered_distinct_and_uniform():
    config = make_model(random_positions=50)[0]
    tokens = jnp.array(np.random.default_rng(0).integers(2**20, size=(2000, 12)))
    for keys in (None, jax.random.split(jax.random.key(3), 2000)):
        drawn, segments = PLAIN.positions_and_segments(config, tokens, keys)
        drawn = np.asarray(drawn)
        assert segments is None and drawn.shape == (2000, 12)
        assert (np.diff(drawn, axis=1) > 0).all() and drawn.min() == 0 and drawn.max() == 49
        # n sorted draws without replacement from N: draw i has mean (i + 1)(N + 1)/(n + 1) - 1. P(a value) = n/N.
        expected = [(i + 1) * 51 / 13 - 1 for i in range(12)]
        np.testing.assert_allclose(drawn.mean(0), expected, atol=0.6)
        np.testing.assert_allclose(np.bincount(drawn.ravel(), minlength=50) / 2000, 12 / 50, atol=0.05)
    assert len({tuple(row) for row in drawn[:20].tolist()}) == 20, "rows differ"


def test_random_positions_depend_on_the_first_token_or_key():
    config = make_model(random_positions=50)[0]
    tokens = jnp.array(np.random.default_rng(0).integers(VOCAB, size=(4, 12)))
    drawn = PLAIN.positions_and_segments(config, tokens)[0]
    for row in range(4):
        np.testing.assert_array_equal(PLAIN.positions_and_segments(config, tokens[row : row + 1])[0][0], drawn[row])
    np.testing.assert_array_equal(PLAIN.positions_and_segments(config, tokens.at[:, 1:].add(1))[0], drawn)
    assert not np.array_equal(PLAIN.positions_and_segments(config, tokens.at[:, 0].add(1))[0], drawn)
    one, same, other = (
        PLAIN.positions_and_segments(config, tokens, jax.random.split(jax.random.key(seed), 4))[0] for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)
    np.testing.assert_array_equal(Layout(5).positions_and_segments(config, tokens)[1], jnp.cumsum(tokens == 5, axis=1))


def test_a_learned_table_works_with_random_positions():
    config, definition, params = make_model(position="learned", random_positions=50)
    assert params["positions"]["learned"]["embedding"].shape == (50, 16)
    tokens = jnp.array(np.random.default_rng(0).integers(VOCAB, size=(1, 40)))  # longer than the context of 12
    places = PLAIN.positions_and_segments(config, tokens)[0]
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    expected = oracle.forward(config, exact, np.asarray(tokens[0]), np.asarray(places[0]))
    np.testing.assert_allclose(run(definition, params, tokens, places)[0], expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("seed", range(8))
def test_targets_start_with_their_own_token_and_sources_end_with_the_separator(seed):
    rng, separator, start = np.random.default_rng(seed), 9, 0
    sides = [[rng.integers(0, 9, rng.integers(1, 6)) for _ in range(2)] for _ in range(rng.integers(1, 5))]
    limits = tuple(sum(len(pair[side]) + 1 for pair in sides) + int(rng.integers(0, 3)) for side in (0, 1))
    batch = batch_of([[Pair(*pair) for pair in sides]], separator, limits)
    layout = Layout(separator, start_id=start)
    read_BS, read_BL = (
        layout.encoder_tokens(jnp.array(batch["source"])),
        layout.decoder_tokens(jnp.array(batch["inputs"])),
    )
    sources = np.concatenate([[*source, separator] for source, _ in sides])
    targets = np.concatenate([[start, *target] for _, target in sides])
    assert read_BS[0].tolist() == [*sources, *[-1] * (batch["source"].shape[1] - len(sources))]
    assert read_BL[0, : len(targets)].tolist() == targets.tolist()
    assert batch["targets"][0][batch["weights"][0] > 0].tolist() == [
        token for _, target in sides for token in (*target, separator)
    ]
    positions_BS, segments_BS = layout.source_positions_and_segments(jnp.array(batch["source"]))
    assert positions_BS[0, : len(sources)].tolist() == [at for source, _ in sides for at in range(len(source) + 1)]
    numbers = [number for number, (source, _) in enumerate(sides, 1) for _ in range(len(source) + 1)]
    assert segments_BS[0, : len(sources)].tolist() == numbers


def test_tokens_are_read_as_they_are_without_a_start_token():
    source_BS = jnp.array([[9, 1, -1]])
    assert Layout(9).encoder_tokens(source_BS) is source_BS and Layout(9).decoder_tokens(source_BS) is source_BS
