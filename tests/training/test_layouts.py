"""The layout of a run: where positions restart."""

import jax.numpy as jnp
import numpy as np

from mini_gpt.config import loading
from mini_gpt.data import tasks, tokenizers
from mini_gpt.data.layout import PLAIN
from mini_gpt.training.inputs import layout_of


def test_position_ids_count_from_the_last_operator():
    tokenizer = tokenizers.CharacterTokenizer(tasks.ALPHABET)
    tokens = jnp.array([tokenizer.encode(text) for text in ("12+34=46\n\n", "+7a=A7\n123")])
    expected = [[1, 2, 0, 1, 2, 0, 1, 2, 0, 0], [0, 1, 2, 0, 1, 2, 0, 1, 2, 3]]
    fields = {"data.corpus": "task:copy", "data.tokenizer": "characters", "model.position": "learned"}
    data = lambda ids: loading.load("configs/default.py", fields | {"data.position_ids": ids})
    for ids in ("coupled", "abacus"):
        positions, segments = layout_of(data(ids), tokenizer).positions_and_segments(data(ids).model, tokens)
        np.testing.assert_array_equal(positions, expected)
        assert segments is None
    assert layout_of(data("sequence"), tokenizer) == PLAIN
