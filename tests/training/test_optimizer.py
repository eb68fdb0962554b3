"""Schedules equal their formulas, only matrices decay, and optimizers equal NumPy versions."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt.config import loading
from mini_gpt.training.optimizer import decays, is_hidden_matrix, make_optimizer, make_schedule

PEAK, WARMUP, STEPS = 3e-3, 20, 200


def config_of(steps=STEPS, /, **fields):
    """Return the default config with these fields of the optimizer."""
    values = {f"optimizer.{name}": value for name, value in fields.items()}
    return loading.load("configs/default.py", values | {"train.steps": steps})


def rates(schedule, **overrides):
    config = config_of(**{"learning_rate": PEAK, "warmup_steps": WARMUP, "schedule": schedule} | overrides)
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
def test_schedules_equal_their_formulas(schedule):
    expected = [FORMULAS[schedule](t) for t in range(1, STEPS + 1)]
    np.testing.assert_allclose(rates(schedule), expected, rtol=2e-5)
    assert max(expected) == PEAK and rates(schedule)[0] > 0


def test_the_papers_schedule_peaks_at_0_0007():
    """Vaswani et al., eq. 3, with d=512 and 4,000 steps of warm-up: d^-0.5 min(t^-0.5, t w^-1.5)."""
    peak = 512**-0.5 * 4000**-0.5
    assert peak == pytest.approx(7.0e-4, rel=2e-3)
    schedule = make_schedule(config_of(learning_rate=peak, warmup_steps=4000).optimizer, 100_000)
    for t in (1, 399, 4000, 4001, 90_000):
        paper = 512**-0.5 * min(t**-0.5, t * 4000**-1.5)
        assert float(schedule(t - 1)) == pytest.approx(paper, rel=1e-4)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_without_warm_up_the_first_step_is_at_the_peak(schedule):
    assert rates(schedule, warmup_steps=0)[0] == pytest.approx(PEAK, rel=1e-3)


@pytest.mark.parametrize("schedule", FORMULAS)
@pytest.mark.parametrize("warmup", [STEPS, STEPS + 1, 3 * STEPS])
def test_a_short_run_ends_during_warm_up(schedule, warmup):
    expected = [PEAK * t / warmup for t in range(1, STEPS + 1)]
    np.testing.assert_allclose(rates(schedule, warmup_steps=warmup), expected, rtol=2e-5)


@pytest.mark.slow
def test_only_matrices_decay():
    config = config_of(10, weight_decay=0.5, learning_rate=0.1, warmup_steps=1)
    parameters = {
        "embedding": jnp.ones((3, 2)),
        "positions": {"t5": {"bias_table": jnp.ones((4, 2))}, "learned": {"embedding": jnp.ones((4, 2))}},
        "blocks": {
            0: {"mlp": {"up": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}}, "norm": {"scale": jnp.ones(2)}}
        },
    }
    parameters["blocks"][0]["mlp"]["up"]["lora"] = {"lora_a": jnp.ones((2, 1)), "lora_b": jnp.ones((1, 2))}
    assert jax.tree.leaves(decays(parameters)) == [False, True, True, True, False, True, True, False]
    optimizer = make_optimizer(config, parameters)
    zero = jax.tree.map(jnp.zeros_like, parameters)
    updates, _ = optimizer.update(zero, optimizer.init(parameters), parameters, norm=jnp.float32(0))
    for decaying, update in zip(jax.tree.leaves(decays(parameters)), jax.tree.leaves(updates), strict=True):
        np.testing.assert_allclose(update, -0.1 * 0.5 if decaying else 0.0, rtol=1e-5)


class AdamWByHand:
    """Loshchilov and Hutter 2019, algorithm 2, in float64."""

    def __init__(self, theta, o, rate, decay):
        self.theta, self.o, self.rate, self.decay = np.asarray(theta, np.float64), o, rate, decay
        self.m = self.v = 0.0

    def step(self, t, gradient):
        o = self.o
        self.m, self.v = o.b1 * self.m + (1 - o.b1) * gradient, o.b2 * self.v + (1 - o.b2) * gradient**2
        adam = (self.m / (1 - o.b1**t)) / (np.sqrt(self.v / (1 - o.b2**t)) + 1e-8)
        self.theta = self.theta - self.rate * (adam + self.decay * self.theta)


class MuonByHand(AdamWByHand):
    """Muon for one matrix (Jordan et al. 2024), with NAdam's bias corrections and the scale of Liu et al. 2025."""

    def step(self, t, gradient):
        beta = self.o.muon.momentum
        self.m = beta * self.m + (1 - beta) * gradient
        x = beta * self.m / (1 - beta ** (t + 1)) + (1 - beta) * gradient / (1 - beta**t)
        x = x / np.linalg.norm(x)
        for _ in range(self.o.muon.newton_schulz_steps):  # applies the polynomial to the singular values
            u, s, vh = np.linalg.svd(x, full_matrices=False)
            x = (u * (3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5)) @ vh
        self.theta = self.theta - self.rate * (0.2 * max(x.shape) ** 0.5 * x + self.decay * self.theta)


def test_adamw_equals_the_paper_by_hand():
    config = config_of(schedule="constant", warmup_steps=0, learning_rate=0.01)
    kernel = {"kernel": jnp.array([[1.0, -2.0], [0.5, 3.0]])}
    o, optimizer = config.optimizer, make_optimizer(config, kernel)
    by_hand = AdamWByHand(kernel["kernel"], o, 0.01, o.weight_decay)
    state = optimizer.init(kernel)
    for t in range(1, 4):
        gradient = np.array([[0.3, -0.1], [2.0, 0.0]]) * t
        norm = jnp.float32(np.linalg.norm(gradient))
        updates, state = optimizer.update({"kernel": jnp.array(gradient)}, state, kernel, norm=norm)
        kernel = jax.tree.map(jnp.add, kernel, updates)
        by_hand.step(t, gradient * min(1.0, o.clip_norm / np.linalg.norm(gradient)))
        np.testing.assert_allclose(kernel["kernel"], by_hand.theta, rtol=1e-5)


def test_muon_orthogonalises_only_the_hidden_matrices():
    fields = {"name": "muon", "schedule": "cosine", "warmup_steps": 2, "learning_rate": 0.02, "weight_decay": 0.3}
    fields |= {"muon.adam_learning_rate": 0.004, "muon.newton_schulz_steps": 4, "muon.momentum": 0.9, "clip_norm": 5.0}
    config = config_of(9, **fields)
    rng = np.random.default_rng(0)
    shapes = {
        "embedding": (5, 4),
        "positions": {"t5": {"bias_table": (4, 2)}, "learned": {"embedding": (4, 4)}},
        "unembedding": (5, 4),
        "blocks": {
            "0": {"mlp": {"up": {"kernel": (3, 6), "bias": (6,)}}, "mlp_norm": {"scale": (3,)}},
            "attention": {"query": {"kernel": (2, 6, 4), "bias": (2, 4)}},  # two stacked layers
        },
    }
    random = lambda: jax.tree.map(lambda shape: rng.normal(size=shape), shapes, is_leaf=lambda x: isinstance(x, tuple))
    parameters = jax.tree.map(lambda x: jnp.array(x, jnp.float32), random())
    hidden = jax.tree.leaves(is_hidden_matrix(parameters))
    assert hidden == [False, True, False, False, True, False, False, False, False]
    by_hand = []
    for leaf, is_hidden, decaying in zip(*map(jax.tree.leaves, (parameters, hidden, decays(parameters))), strict=True):
        matrices = leaf if is_hidden and leaf.ndim == 3 else leaf[None]
        make, rate = (MuonByHand, 0.02) if is_hidden else (AdamWByHand, 0.004)
        by_hand.append([make(matrix, config.optimizer, rate, 0.3 * decaying) for matrix in matrices])
    optimizer = make_optimizer(config, parameters)
    update, state = jax.jit(optimizer.update), optimizer.init(parameters)
    for t in range(1, 5):
        gradients = random()
        length = np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(gradients)))
        rounded = jax.tree.map(lambda x: jnp.array(x, jnp.float32), gradients)
        updates, state = update(rounded, state, parameters, norm=jnp.float32(length))
        parameters = jax.tree.map(jnp.add, parameters, updates)
        share = t / 2 if t <= 2 else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (t - 2) / 7))
        for leaf, gradient, hands in zip(*map(jax.tree.leaves, (parameters, gradients)), by_hand, strict=True):
            matrices = gradient if len(hands) > 1 else gradient[None]
            for hand, matrix in zip(hands, matrices, strict=True):
                peak, hand.rate = hand.rate, hand.rate * share
                hand.step(t, matrix * min(1.0, 5.0 / length))
                hand.rate = peak
            expected = np.stack([hand.theta for hand in hands]).reshape(leaf.shape)
            np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-6)
