"""C4: the schedules against their formulas; what decays."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt import config as configs
from mini_gpt.training.optimizer import decays, make_optimizer, make_schedule

PEAK, WARMUP, STEPS = 3e-3, 20, 200


def rates(schedule, **overrides):
    values = {"learning_rate": PEAK, "warmup_steps": WARMUP, "schedule": schedule} | overrides
    config = configs.load("configs/default.py", {f"optimizer.{name}": value for name, value in values.items()})
    made = make_schedule(config.optimizer, STEPS)
    return np.array([float(made(jnp.int32(count))) for count in range(STEPS)])


def warmed_up(t, after):
    return PEAK * t / WARMUP if t <= WARMUP else after


FORMULAS = {
    "inverse_sqrt": lambda t: PEAK * min(t / WARMUP, math.sqrt(WARMUP / t)),
    "cosine": lambda t: warmed_up(
        t, PEAK * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (t - WARMUP) / (STEPS - WARMUP))))
    ),
    "wsd": lambda t: warmed_up(t, PEAK if t <= 160 else PEAK * (1 - 0.9 * (t - 160) / 40)),
    "constant": lambda t: warmed_up(t, PEAK),
}


@pytest.mark.parametrize("schedule", FORMULAS)
def test_C4_schedules_equal_their_formulas(schedule):
    expected = [FORMULAS[schedule](t) for t in range(1, STEPS + 1)]
    np.testing.assert_allclose(rates(schedule), expected, rtol=2e-5)
    assert max(expected) == PEAK and rates(schedule)[0] > 0


def test_C4_the_papers_schedule_peaks_at_seven_ten_thousandths():
    """Vaswani et al., eq. 3, with d=512 and 4,000 steps of warm-up: d^-0.5 min(t^-0.5, t w^-1.5)."""
    peak = 512**-0.5 * 4000**-0.5
    assert peak == pytest.approx(7.0e-4, rel=2e-3)
    config = configs.load("configs/default.py", {"optimizer.learning_rate": peak, "optimizer.warmup_steps": 4000})
    schedule = make_schedule(config.optimizer, 100_000)
    for t in (1, 399, 4000, 4001, 90_000):
        paper = 512**-0.5 * min(t**-0.5, t * 4000**-1.5)
        assert float(schedule(t - 1)) == pytest.approx(paper, rel=1e-4)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_C4_without_warm_up_the_first_step_is_at_the_peak(schedule):
    assert rates(schedule, warmup_steps=0)[0] == pytest.approx(PEAK, rel=1e-3)


@pytest.mark.parametrize("schedule", FORMULAS)
@pytest.mark.parametrize("warmup", [STEPS, STEPS + 1, 3 * STEPS])
def test_C4_a_run_shorter_than_its_warm_up_ends_in_it(schedule, warmup):
    expected = [PEAK * t / warmup for t in range(1, STEPS + 1)]
    np.testing.assert_allclose(rates(schedule, warmup_steps=warmup), expected, rtol=2e-5)


def test_only_matrices_decay():
    config = configs.load(
        "configs/default.py",
        {"optimizer.weight_decay": 0.5, "optimizer.learning_rate": 0.1, "optimizer.warmup_steps": 1, "train.steps": 10},
    )
    parameters = {
        "embedding": jnp.ones((3, 2)),
        "positions": {"t5": {"bias_table": jnp.ones((4, 2))}, "learned": {"embedding": jnp.ones((4, 2))}},
        "blocks": {
            0: {"mlp": {"up": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}}, "norm": {"scale": jnp.ones(2)}}
        },
    }
    assert jax.tree.leaves(decays(parameters)) == [False, True, False, True, True, False]
    optimizer = make_optimizer(config)
    zero = jax.tree.map(jnp.zeros_like, parameters)
    updates, _ = optimizer.update(zero, optimizer.init(parameters), parameters)
    for decaying, update in zip(jax.tree.leaves(decays(parameters)), jax.tree.leaves(updates), strict=True):
        np.testing.assert_allclose(update, -0.1 * 0.5 if decaying else 0.0, rtol=1e-5)


def test_adamw_equals_the_paper_by_hand():
    """Loshchilov and Hutter 2019, algorithm 2, behind clipping: three steps of one matrix, in float64."""
    config = configs.load(
        "configs/default.py",
        {"optimizer.schedule": "constant", "optimizer.warmup_steps": 0, "optimizer.learning_rate": 0.01},
    )
    o, optimizer = config.optimizer, make_optimizer(config)
    kernel = {"kernel": jnp.array([[1.0, -2.0], [0.5, 3.0]])}
    theta, m, v = np.asarray(kernel["kernel"], np.float64), 0.0, 0.0
    state = optimizer.init(kernel)
    for t in range(1, 4):
        gradient = np.array([[0.3, -0.1], [2.0, 0.0]]) * t
        updates, state = optimizer.update({"kernel": jnp.array(gradient)}, state, kernel)
        kernel = jax.tree.map(jnp.add, kernel, updates)
        clipped = gradient * min(1.0, o.clip_norm / np.linalg.norm(gradient))
        m, v = o.b1 * m + (1 - o.b1) * clipped, o.b2 * v + (1 - o.b2) * clipped**2
        adam = (m / (1 - o.b1**t)) / (np.sqrt(v / (1 - o.b2**t)) + 1e-8)
        theta = theta - o.learning_rate * (adam + o.weight_decay * theta)
        np.testing.assert_allclose(kernel["kernel"], theta, rtol=1e-5)
