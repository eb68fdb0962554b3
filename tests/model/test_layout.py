"""The positions and segments of a text: documents, and random positions."""

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.config import loading as configs
from mini_gpt.data import tasks, tokenizers
from mini_gpt.model.layout import PLAIN, Layout, layout_of
from tests import oracle
from tests.model.test_gpt import VOCAB, make_model, run


def test_positions_restart_at_document_separators():
    tokens = jnp.array([[7, 7, 9, 7, 7, 7, 9, 9], [9, 7, 7, 7, 7, 7, 7, 7]])
    positions, segments = Layout(9).of(make_model()[0], tokens)
    np.testing.assert_array_equal(segments, [[0, 0, 1, 1, 1, 1, 2, 3], [1] * 8])
    np.testing.assert_array_equal(positions, [[0, 1, 0, 1, 2, 3, 0, 0], list(range(8))])
    assert PLAIN.of(make_model()[0], tokens) == (None, None)


def test_position_ids_count_from_the_last_operator():
    tokenizer = tokenizers.CharacterTokenizer(tasks.ALPHABET)
    tokens = jnp.array([tokenizer.encode(text) for text in ("12+34=46\n\n", "+7a=A7\n123")])
    expected = [[1, 2, 0, 1, 2, 0, 1, 2, 0, 0], [0, 1, 2, 0, 1, 2, 0, 1, 2, 3]]
    fields = {"data.corpus": "task:copy", "data.tokenizer": "characters", "model.position": "learned"}
    data = lambda ids: configs.load("configs/default.py", fields | {"data.position_ids": ids})
    for ids in ("coupled", "abacus"):
        layout = layout_of(data(ids), tokenizer)
        positions, segments = layout.of(make_model()[0], tokens)
        np.testing.assert_array_equal(positions, expected)
        assert segments is None
    assert layout_of(data("sequence"), tokenizer) == PLAIN


def test_random_positions_are_ordered_distinct_and_uniform():
    config = make_model(random_positions=50)[0]
    tokens = jnp.array(np.random.default_rng(0).integers(2**20, size=(2000, 12)))
    for keys in (None, jax.random.split(jax.random.key(3), 2000)):
        drawn, segments = PLAIN.of(config, tokens, keys)
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
    drawn = PLAIN.of(config, tokens)[0]
    for row in range(4):
        np.testing.assert_array_equal(PLAIN.of(config, tokens[row : row + 1])[0][0], drawn[row])
    np.testing.assert_array_equal(PLAIN.of(config, tokens.at[:, 1:].add(1))[0], drawn)
    assert not np.array_equal(PLAIN.of(config, tokens.at[:, 0].add(1))[0], drawn)
    one, same, other = (PLAIN.of(config, tokens, jax.random.split(jax.random.key(seed), 4))[0] for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)
    np.testing.assert_array_equal(Layout(5).of(config, tokens)[1], jnp.cumsum(tokens == 5, axis=1))


def test_a_learned_table_works_with_random_positions():
    config, definition, params = make_model(position="learned", random_positions=50)
    assert params["positions"]["learned"]["embedding"].shape == (50, 16)
    tokens = jnp.array(np.random.default_rng(0).integers(VOCAB, size=(1, 40)))  # longer than the context of 12
    places = PLAIN.of(config, tokens)[0]
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    expected = oracle.forward(config, exact, np.asarray(tokens[0]), np.asarray(places[0]))
    np.testing.assert_allclose(run(definition, params, tokens, places)[0], expected, atol=2e-4, rtol=2e-4)
