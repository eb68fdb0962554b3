"""The compiled step gives the same numbers with gradient accumulation and on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mini_gpt.data.layout import Layout
from mini_gpt.model import loss as losses
from mini_gpt.model import parameters
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import train_state
from mini_gpt.training.step import make_step
from tests.conftest import slow

VOCAB = 40


def make_batch(config, step=0):
    rng = np.random.default_rng(step)
    shape = (config.train.batch_size, config.context_length)
    weights = (rng.random(shape) < 0.5).astype(np.float32)
    weights[:3] = 0  # rows without weight must not change the mean
    ids = lambda: rng.integers(VOCAB, size=shape, dtype=np.int32)
    return {"inputs": ids(), "targets": ids(), "weights": weights}


def start(config, *layout):
    """Return the model's definition, the first state, the step, and a function that puts a batch on the devices."""
    mesh = sharding.make_mesh(*config.mesh.sizes)
    definition, abstract = train_state.abstract(config, VOCAB, mesh)
    train_step = make_step(definition, config, abstract, *layout)
    return definition, train_state.first(config, VOCAB, abstract), train_step, lambda x: sharding.put_batch(x, mesh)


def run(config, steps=3):
    _, state, train_step, put = start(config)
    history = []
    for step in range(steps):
        state, metrics = train_step(state, put(make_batch(config, step)))
        history.append({name: float(value) for name, value in metrics.items()})
    return state, history, train_step


def assert_close(a, b, tolerance=2e-5):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(left, right, atol=tolerance, rtol=1e-3)


@pytest.mark.parametrize("parts", [4, *slow(2)])
def test_accumulation_changes_nothing_but_rounding(small, parts):
    single, history, _ = run(small(train__label_smoothing=0.1))
    accumulated, accumulated_history, _ = run(small(train__accumulation_steps=parts, train__label_smoothing=0.1))
    assert_close(single.parameters, accumulated.parameters)
    assert_close(history, accumulated_history)


@pytest.mark.slow
def test_random_offsets_train_all_positions_and_change_no_relative_encoding(small):
    offsets = {"train__random_offsets": 90, "optimizer__weight_decay": 0.0, "model__max_positions": 100}
    state, _, _ = run(small(model__position="learned", **offsets), steps=10)
    fresh, _, _ = run(small(model__position="learned", **offsets), steps=0)
    table = lambda state: np.asarray(state.parameters["positions"]["learned"]["embedding"])
    trained = np.flatnonzero((table(state) != table(fresh)).any(axis=1))  # by 10 batches of 8 rows of 32 positions
    assert trained.min() < 5 and 85 <= trained.max() < 90 and len(trained) > 80
    assert_close(*[run(small(model__position="alibi", **fields))[1] for fields in ({}, offsets)])


@pytest.mark.parametrize("ids", ["abacus", *slow("coupled")])
def test_offsets_of_position_ids_leave_out_operators_only_in_abacus(small, ids):
    offsets = {"train__random_offsets": 90, "optimizer__weight_decay": 0.0, "model__position": "learned"}
    config = small(data__corpus="task:copy", data__tokenizer="characters", data__position_ids=ids, **offsets)
    batch = make_batch(config)
    batch["inputs"] = np.where(np.arange(32) % 4 == 0, 5, 7) + np.zeros((len(batch["inputs"]), 1), np.int32)
    batch["weights"][:-1] = 0  # one row has a gradient
    table = lambda state: np.array(state.parameters["positions"]["learned"]["embedding"])
    _, state, train_step, put = start(config, Layout(None, (5,)))
    before = table(state)
    after = table(train_step(state, put(batch))[0])
    trained = np.flatnonzero((after != before).any(axis=1))
    first = trained[-1] - 3
    assert trained.tolist() == [0 if ids == "abacus" else first, first + 1, first + 2, first + 3] and first > 0


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"train__random_offsets": 31}, r"found 31; must be at least context_length \(32\)"),
        ({"model__max_positions": 40, "model__position": "learned"}, r"found 90; learned positions end at .* \(40\)"),
        ({"model__random_positions": 300}, "found 90; must be None with model.random_positions"),
    ],
)
def test_offsets_that_do_not_fit_are_refused(small, fields, message):
    with pytest.raises(UserError, match=f"^train.random_offsets: {message}"):
        run(small(**{"train__random_offsets": 90} | fields), steps=0)
    assert small(model__position="learned", train__random_offsets=90).model.max_positions == 90


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["next_token", "masked"])
def test_documents_are_split_at_unmasked_separators(small, objective):
    """The loss of a batch with separators equals that of its documents, each run alone."""
    config = small(train__objective=objective, model__causal=objective == "next_token", model__position="alibi")
    batch = make_batch(config)
    text = "inputs" if objective == "next_token" else "targets"
    batch[text][:, [5, 20]] = VOCAB - 1
    batch[text] = np.where(np.isin(np.arange(32), [5, 20]), batch[text], batch[text] % (VOCAB - 1))
    definition, state, train_step, put = start(config, Layout(VOCAB - 1))
    model, total = jax.jit(nnx.merge(definition, state.parameters)), 0.0
    for cut in (slice(0, 5), slice(5, 20), slice(20, 32)):
        nll = losses.nll(model(jnp.array(batch["inputs"][:, cut])), jnp.array(batch["targets"][:, cut]))
        total += float((nll * batch["weights"][:, cut]).sum())
    _, metrics = train_step(state, put(batch))
    assert float(metrics["loss"]) == pytest.approx(total / batch["weights"].sum(), rel=1e-5)


def test_later_steps_do_not_recompile(small):
    _, _, train_step = run(small(), steps=4)
    assert train_step._cache_size() == 1


def test_the_old_state_is_donated(small):
    _, state, train_step, put = start(small())
    train_step(state, put(make_batch(small())))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.parameters))


@pytest.mark.slow
def test_label_smoothing_changes_only_the_objective(small):
    config = small(train__label_smoothing=0.3)
    definition, state, train_step, put = start(config)
    batch = make_batch(config)
    logits = nnx.merge(definition, state.parameters)(jnp.array(batch["inputs"]))
    means = []
    for per_token in (
        losses.nll(logits, batch["targets"]),
        optax.softmax_cross_entropy(logits, optax.smooth_labels(jax.nn.one_hot(batch["targets"], VOCAB), 0.3)),
    ):
        means.append(float((per_token * batch["weights"]).sum() / batch["weights"].sum()))
    _, metrics = train_step(state, put(batch))
    assert [float(metrics["loss"]), float(metrics["objective"])] == pytest.approx(means, rel=1e-5)


@pytest.mark.slow
def test_dropout_depends_on_the_step_only(small):
    config = small(model__dropout=0.5, optimizer__learning_rate=1e-30)
    seen = []
    for step in (0, 0, 1):
        _, state, train_step, put = start(config)
        seen.append(float(train_step(state._replace(step=jnp.int32(step)), put(make_batch(config)))[1]["loss"]))
    assert seen[0] == seen[1] != seen[2]


def test_the_seed_determines_a_new_state(small):
    first, again, other = (start(small(seed=seed))[1].parameters["embedding"] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.slow
def test_muon_on_eight_devices_equals_muon_on_one(small):
    fields = {
        "optimizer__name": "muon",
        "model__num_layers": 2,
        "model__dropout": 0.2,
        "optimizer__learning_rate": 0.01,
    }
    one, history, _ = run(small(**fields), steps=2)
    config = small(model__scan_layers=True, model__remat="block", mesh__data=2, mesh__fsdp=2, mesh__tensor=2, **fields)
    many, many_history, _ = run(config, steps=2)
    assert_close(one, parameters.with_layers(many, stacked=False), tolerance=2e-4)
    assert_close(history, many_history)
    for kernel in (
        many.parameters["blocks"]["mlp"]["up"]["kernel"],
        many.optimizer_state[1].inner_states["muon"].inner_state[0].mu["blocks"]["mlp"]["up"]["kernel"],
    ):
        assert kernel.sharding.shard_shape(kernel.shape) == (2, 16, 64)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("bfloat16", 0.05)])
def test_rematerialisation_saves_memory_and_keeps_gradients(small, dtype, tolerance):
    fields = {"model__scan_layers": True, "model__num_layers": 8, "model__dropout": 0.2, "model__dtype": dtype}
    moments, memory = [], []
    for remat in ("none", "dots", "block"):
        config = small(model__remat=remat, **fields)
        _, state, train_step, put = start(config)
        batch = put(make_batch(config))
        step = train_step.lower(state, batch).compile()
        moments.append(jax.tree.leaves(step(state, batch)[0].optimizer_state[1][0].mu))
        memory.append(step.memory_analysis().temp_size_in_bytes)
    for other in moments[1:]:
        for left, right in zip(moments[0], other, strict=True):
            np.testing.assert_allclose(left, right, atol=tolerance * np.abs(left).max())
    assert memory[0] > 1.5 * memory[1] > 1.5 * memory[2]


@pytest.mark.parametrize("optimizer", ["adamw", *slow("muon")])
@pytest.mark.parametrize("schedule", ["wsd", *slow("cosine", "inverse_sqrt")])
def test_the_logged_rate_is_applied_also_after_skipped_steps(small, optimizer, schedule):
    """Without gradients, an update is only weight decay: rate · decay · parameter, which gives the applied rate."""
    fields = {"name": optimizer, "schedule": schedule, "warmup_steps": 2, "weight_decay": 0.5, "final_fraction": 0.2}
    fields = {f"optimizer__{name}": value for name, value in fields.items()} | {"optimizer__decay_fraction": 0.5}
    config = small(
        optimizer__muon__adam_learning_rate=5e-3, train__nonfinite="skip", model__position="learned", **fields
    )
    _, state, train_step, put = start(config)
    peaks = {"learning_rate": 1e-3} | ({"adam_learning_rate": 5e-3} if optimizer == "muon" else {})
    for t in range(1, 9):
        batch = make_batch(config)
        batch["weights"][:] = np.inf if t in (1, 4, 5) else 0.0
        before = jax.tree.map(np.array, state.parameters)
        state, metrics = train_step(state, put(batch))
        share = {
            "wsd": min(t / 2, 1.0, 1 - 0.8 * (t - 4) / 4),
            "cosine": t / 2 if t <= 2 else 0.2 + 0.4 * (1 + np.cos(np.pi * (t - 2) / 6)),
            "inverse_sqrt": min(t / 2, (2 / t) ** 0.5),
        }[schedule]
        assert metrics.keys() & {"learning_rate", "adam_learning_rate"} == peaks.keys()
        for name, peak in peaks.items():
            assert float(metrics[name]) == pytest.approx(peak * share, rel=1e-5)
        applied = 0.0 if t in (1, 4, 5) else 0.5 * share
        for part, peak in (
            (lambda tree: tree["blocks"][0]["mlp"]["up"]["kernel"], peaks["learning_rate"]),
            (lambda tree: tree["embedding"], peaks.get("adam_learning_rate", peaks["learning_rate"])),
        ):
            expected = part(before) * (1 - applied * peak)
            np.testing.assert_allclose(part(state.parameters), expected, rtol=3e-7)


@pytest.mark.parametrize("position", ["alibi", *slow("rope", "none", "learned", "sinusoidal", "t5")])
def test_only_key_biases_have_no_gradient_without_rope(small, position):
    """The softmax cancels q·b, which is the same for all keys. Tests of meshes use RoPE, or compare losses only."""
    config = small(model__position=position)
    definition, state, _, _ = start(config)
    batch = make_batch(config)
    values = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(0), x.shape), state.parameters)
    loss = lambda values: losses.nll(nnx.merge(definition, values)(batch["inputs"]), batch["targets"]).mean()
    largest = {name: float(abs(x).max()) for name, x in parameters.by_name(jax.jit(jax.grad(loss))(values)).items()}
    without = {name for name, size in largest.items() if size < 1e-5 * max(largest.values())}
    assert without == (set() if position == "rope" else {"blocks/0/attention/key/bias"})
