"""The positions and segments of a text: documents, and random positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt.data.layout import PLAIN, Layout
from mini_gpt.data.pairs import Pair, batch_of
from tests import oracle
from tests.model.test_gpt import VOCAB, make_model, run


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
