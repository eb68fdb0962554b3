"""Encodings with a table of positions end with its rows."""

import jax
import numpy as np
import pytest
from flax import nnx

from mini_gpt.config import loading
from mini_gpt.config.attention import ENCODINGS
from mini_gpt.data.pairs import Pair
from mini_gpt.evaluation import task_accuracy
from mini_gpt.generation import decoding, prompts
from mini_gpt.model.positions.absolute import Sinusoidal
from mini_gpt.pages.play import answers
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import inputs
from tests.model.test_positions import make
from tests.random_models import random_model


@pytest.mark.parametrize("name", ENCODINGS)
def test_an_encoding_with_a_row_for_each_position_says_so(name):
    made = make(name, max_positions=777)
    assert any(777 in x.shape for x in jax.tree.leaves(nnx.state(made))) == made.has_table


def test_any_encoding_with_a_table_ends_with_its_rows(monkeypatch):
    """Such as one of the user's own; here sinusoids stand for it."""
    monkeypatch.setattr(Sinusoidal, "has_table", True)
    fields = {"model.position": "sinusoidal", "model.max_positions": 12, "model.num_layers": 1, "model.d_model": 16}
    fields |= {"model.num_heads": 2, "context_length": 12, "model.dtype": "float32"}
    load = lambda **more: loading.load("configs/default.py", fields | more)
    for field, refused in {"context_length": 13, "model.random_positions": 13}.items():
        with pytest.raises(UserError, match=rf"{field}: found 13; learned positions end at model.max_positions \(12\)"):
            load(**{field: refused})
    with pytest.raises(UserError, match=r"train.random_offsets: found 13; learned positions end at"):
        inputs.make_model_inputs(load(**{"train.random_offsets": 13}))
    model = random_model(load(), [b"a"] * 20)
    token = [1]
    assert model(np.array([token * 12])).shape == (1, 12, 20)
    too_long = lambda: pytest.raises(UserError, match="the learned table has 12 positions; found a length of 13")
    with too_long():
        model(np.array([token * 13]))
    with too_long():
        next(decoding.stream(model, [token * 8], length=5))
    assert prompts.prepare(model, [token * 9], None, length=3)[1].tokens_BL.shape == (1, 12)
    assert task_accuracy.row_lengths(model, [Pair(token * 3, token * 3)])[1] == 12
    with pytest.raises(UserError, match="The learned table has 12 positions: a text of 13 tokens needs 13"):
        answers._place(model, token * 13)
