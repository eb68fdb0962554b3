"""Several seeds trained in one step give the same numbers as each seed alone."""

import jax
import numpy as np
import pytest

from benchmarks.seeds_together import Training
from tests.conftest import slow


@pytest.mark.slow
@pytest.mark.parametrize("optimizer, objective", [("adamw", "next_token"), *slow(("muon", "masked"))])
def test_seeds_in_one_step_equal_separate_runs(small, optimizer, objective):
    """Each seed has its own first weights, data order, masks and dropout. Tolerance: rounding of float32.

    No biases: the gradient of a key bias is zero but for rounding, and Adam divides it by its own size.
    """
    fields = {"optimizer__name": optimizer, "train__objective": objective, "model__causal": objective == "next_token"}
    fields |= {"model__dropout": 0.2, "model__use_bias": False, "model__position": "none"}
    seeds = [small(seed=seed, **fields) for seed in (3, 4)]
    together, apart = Training(seeds), [Training([config]) for config in seeds]
    for training in (together, *apart):
        training.advance()
        training.advance()
    for number, alone in enumerate(apart):
        assert alone.state.step == 2
        for stacked, expected in zip(jax.tree.leaves(together.state), jax.tree.leaves(alone.state), strict=True):
            np.testing.assert_allclose(stacked[number], expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
