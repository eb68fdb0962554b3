"""Settings that cannot take effect are named, with the value that is reached; the project's own configs have none."""

import collections
import fnmatch
import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import presets
from mini_gpt.config import loading
from mini_gpt.config.fields import specs
from mini_gpt.config.schema import Config
from mini_gpt.data import tasks
from mini_gpt.data.task_batches import TaskBatches
from mini_gpt.data.text_batches import TextBatches
from mini_gpt.model import build
from mini_gpt.study import definition, new_runs
from mini_gpt.training import loop, settings
from mini_gpt.training.inputs import make_model_inputs
from mini_gpt.training.optimizer import make_schedule
from tests.conftest import REPOSITORY
from tests.training.interruption import rows as rows_of

PEAK, STEPS = 2e-3, 200
TASK = {"data__corpus": "task:parity", "data__tokenizer": "characters", "data__task_length": 4}

POSITION, ROPE, VARIANTS = "model.position", "model.rope.scaling", "model.variants."
FACTOR = {"model.rope.factor": 4.0, "model.rope.original_context": 500}
YARN, LLAMA3 = {ROPE: "yarn"} | FACTOR, {ROPE: "llama3"} | FACTOR
COPY = {"data.corpus": "task:copy", "data.tokenizer": "characters"}
TEXT, BPE = {"data.corpus": "text", "data.path": "unread/*.txt"}, {"data.tokenizer": "bpe"}
MASKED = {"train.objective": "masked", "model.causal": False}
PAIRS = {"model.encoder_layers": 1, "data.corpus": "pairs", "data.path": "unread.tsv"}
SPANS = TEXT | {"model.encoder_layers": 1, "train.objective": "span_corruption"}
ALL_RATES = {f"model.{name}_dropout": 0.1 for name in ("embedding", "sublayer", "attention")}
# (field, another value than its default, fields of a config that does not read it, fields of one that does)
CASES = [
    ("source_length", 99, {}, PAIRS),
    ("model.max_positions", 300, {}, {POSITION: "learned"}),
    ("model.dropout", 0.2, ALL_RATES, dict(list(ALL_RATES.items())[1:])),
    ("model.scale_width", 9.0, {"model.scale_attention": False}, {}),
    ("model.alibi_exponent", 4.0, {POSITION: "hard_alibi"}, {POSITION: ("alibi", "rope")}),
    ("model.random_positions", 400, {POSITION: ("none", "fox")}, {POSITION: ("none", "alibi")}),
    ("model.random_positions", 20_000, {POSITION: "none"}, {POSITION: "none", f"{VARIANTS}query_scale": "llama4"}),
    ("train.random_offsets", 400, {POSITION: "cope"}, {POSITION: "sinusoidal"}),
    ("model.rope.base", 50.0, {POSITION: "none"}, {POSITION: "pope"}),
    ("model.rope.base", (50.0, 70.0), {POSITION: "learned"}, {}),
    ("model.rope.fraction", 0.5, {POSITION: "alibi"}, {}),
    ("model.rope.factor", 2.0, {}, {ROPE: "dynamic"}),
    ("model.rope.original_context", 5, {}, {ROPE: "dynamic"}),
    ("model.rope.beta_slow", 2.0, {ROPE: "linear", "model.rope.factor": 2.0}, YARN),
    ("model.rope.beta_fast", 9.0, {ROPE: "ntk", "model.rope.factor": 2.0}, LLAMA3),
    ("model.rope.attention_factor", 2.0, LLAMA3, YARN),
    ("model.sinusoidal.base", 50.0, {}, {POSITION: "sinusoidal"}),
    ("model.sinusoidal.amplitude", 2.0, {POSITION: "learned"}, {POSITION: "sinusoidal"}),
    ("model.hard_alibi.heads", 1, {POSITION: "alibi"}, {POSITION: "hard_alibi"}),
    ("model.t5.num_buckets", 64, {}, {POSITION: "t5"}),
    ("model.t5.max_distance", 33, {POSITION: "kerple"}, {POSITION: ("t5", "none")}),
    ("model.fire.width", 9, {}, {POSITION: "fire"}),
    ("model.fire.threshold", 9.0, {POSITION: "kerple"}, {POSITION: "fire"}),
    ("model.cope.positions", 9, {POSITION: "fox"}, {POSITION: "cope"}),
    (f"{VARIANTS}qk_norm_epsilon", 1e-2, {}, {f"{VARIANTS}qk_norm": "plain"}),
    (f"{VARIANTS}ssmax_start", 9.0, {f"{VARIANTS}query_scale": "llama4"}, {f"{VARIANTS}query_scale": "ssmax"}),
    ("data.text_field", "body", {}, TEXT),
    ("data.document_separator", "###", COPY, {"data.corpus": "tokens", "data.path": "unread"}),
    ("data.on_error", "skip", {"data.corpus": "english"}, TEXT),
    ("data.split", "contiguous", COPY, {}),
    ("data.split_fractions", (0.8, 0.1, 0.1), {"data.corpus": "english"}, {"data.corpus": "tiny_shakespeare"}),
    ("data.vocab_size", 300, {}, BPE),
    ("data.vocab_size", 300, {"data.tokenizer": "words"}, {"data.tokenizer": "imported"}),
    ("data.tokenizer_sample", 9, {"data.tokenizer": "characters"}, BPE),
    ("data.task_length", 9, TEXT, COPY),
    ("train.mask_rate", 0.3, {}, MASKED),
    ("train.mean_span", 2.0, MASKED, SPANS),
    ("train.lora_alpha", 4.0, {}, {"train.lora_rank": 2}),
    ("train.lora_layers", "query", {}, {"train.lora_rank": 2}),
    ("train.nonfinite_limit", 3, {}, {"train.nonfinite": "rewind"}),
    ("optimizer.decay_fraction", 0.5, {"optimizer.schedule": "cosine"}, {"optimizer.schedule": "wsd"}),
    ("optimizer.final_fraction", 0.5, {"optimizer.schedule": "constant"}, {"optimizer.schedule": "cosine"}),
    *((f"optimizer.muon.{name}", value, {}, {"optimizer.name": "muon"}) for name, value in [
        ("momentum", 0.5), ("newton_schulz_steps", 3), ("adam_learning_rate", 1e-4)
    ]),
]  # fmt: skip
IDS = [case[0] for case in CASES]


def scheduled(small, schedule, **fields):
    """Return the config of a schedule over 200 steps, and its learning rate in each step, in float64."""
    given = {"schedule": schedule, "learning_rate": PEAK} | fields
    config = small(train__steps=STEPS, **{f"optimizer__{name}": value for name, value in given.items()})
    return config, np.asarray(make_schedule(config.optimizer, STEPS)(jnp.arange(STEPS)), np.float64)


def falling(rates):
    """Return the steps, from 1, whose rate is lower than that of the step before, by more than rounding."""
    return (np.diff(rates) < -1e-5 * PEAK).nonzero()[0] + 2


@pytest.mark.parametrize("schedule", ["inverse_sqrt", "cosine", "wsd", "constant"])
@pytest.mark.parametrize("warmup", [STEPS + 1, 5 * STEPS])
def test_a_warmup_above_the_steps_names_the_rate_reached(small, schedule, warmup):
    config, rates = scheduled(small, schedule, warmup_steps=warmup)
    assert rates.max() == pytest.approx(PEAK * STEPS / warmup, rel=1e-6)
    assert settings.without_effect(config, None) == [
        f"optimizer.warmup_steps: found {warmup}, above train.steps=200; the learning rate reaches "
        f"{rates.max():.4g} of 0.002, at step 200; lower it, or raise train.steps"
    ]


@pytest.mark.parametrize("schedule", ["inverse_sqrt", "cosine", "wsd"])
def test_a_decay_that_never_begins_is_named(small, schedule):
    config, rates = scheduled(small, schedule, warmup_steps=STEPS)
    assert np.all(np.diff(rates) > 0), "no step has a lower rate than the step before"
    (found,) = settings.without_effect(config, None)
    assert found.startswith("optimizer.warmup_steps: found 200, as many as train.steps; the learning rate is 0.002 at")
    assert f"its decay ({schedule}) never begins" in found and "\n" not in found


@pytest.mark.parametrize("warmup", [20, 150, 199])
def test_a_shortened_decay_names_its_steps(small, warmup):
    config, rates = scheduled(small, "wsd", warmup_steps=warmup, decay_fraction=0.95)
    falls = len(falling(rates))
    assert falls < 190
    (found,) = settings.without_effect(config, None)
    assert found == (
        f"optimizer.decay_fraction: found 0.95, 190 of 200 steps; the decay takes only {falls}, from "
        f"{rates.max():.4g} to {rates[-1]:.4g}; lower it or optimizer.warmup_steps={warmup}, or raise train.steps"
    )


@pytest.mark.parametrize("fraction", [0.0, 0.001])
def test_a_decay_of_no_step_names_the_fall_at_the_end(small, fraction):
    config, rates = scheduled(small, "wsd", warmup_steps=50, decay_fraction=fraction)
    assert falling(rates).tolist() == [200]
    (found,) = settings.without_effect(config, None)
    assert f"decay_fraction: found {fraction:g}, less than one of 200 steps" in found
    assert f"the learning rate is {rates[-2]:.4g} up to step 199, and {rates[-1]:.4g} at the last step" in found


@pytest.mark.parametrize(
    "schedule, fields",
    [
        ("constant", {"warmup_steps": STEPS}),
        ("inverse_sqrt", {"warmup_steps": STEPS - 1}),
        ("cosine", {"warmup_steps": STEPS - 1}),
        ("cosine", {"warmup_steps": 0}),
        ("wsd", {"warmup_steps": 20, "decay_fraction": 0.9}),  # no stable phase, but both are complete
        ("wsd", {"warmup_steps": 20, "decay_fraction": 1.0}),  # all steps after the warm-up
        ("wsd", {"warmup_steps": 20, "decay_fraction": 0.005}),  # one step
        ("wsd", {"warmup_steps": 20, "decay_fraction": 0.0, "final_fraction": 1.0}),  # no decay, as set
    ],
)
def test_a_schedule_that_fits_is_silent(small, schedule, fields):
    assert settings.without_effect(scheduled(small, schedule, **fields)[0], None) == []


def test_a_batch_larger_than_the_text_is_named(small):
    config = small(context_length=10, train__batch_size=64)
    train_batches = TextBatches(np.arange(10 * 20 + 10), config, vocab=(256, 256))
    places = train_batches[0]["inputs"][:, 0] // 10
    uses = len(places) / len(set(places.tolist()))
    (found,) = settings.without_effect(config, train_batches.rows_per_epoch)
    assert found.startswith(
        f"train.batch_size: found 64; the training data have 20 rows, so each is about {uses:.3g} times in a step"
    )
    assert settings.without_effect(config, 64) == settings.without_effect(config, None) == []


def test_a_batch_larger_than_a_task_is_named(small):
    questions = ["".join(bits) for bits in itertools.product("01", repeat=4)]
    count = sum(tasks.split_of(question) == "train" for question in questions)
    (found,) = settings.without_effect(small(train__batch_size=64, **TASK), None)
    assert found.startswith(f"train.batch_size: found 64; 256 training problems had only {count} different ones")
    assert settings.without_effect(small(train__batch_size=8, **TASK), None) == []


@pytest.mark.parametrize("name", ["train__random_offsets", "model__random_positions"])
def test_random_positions_without_a_choice_are_named(small, name):
    (found,) = settings.without_effect(small(**{name: 32}), None)
    assert found.startswith(f"{name.replace('__', '.')}: found 32, as much as context_length; all rows have the")
    assert settings.without_effect(small(**{name: 33}), None) == []


def test_offsets_of_documents_have_a_choice(small):
    assert settings.without_effect(small(train__random_offsets=32, data__isolate_documents=True), None) == []


def test_an_interval_above_the_steps_is_no_warning(small):
    config = small(eval__every=9, checkpoint__every=10, train__log_every=11)
    assert settings.without_effect(config, None) == []
    assert settings.long_intervals(config) == [
        "eval.every=9 is above train.steps=8: the only evaluation is at the end",
        "checkpoint.every=10 is above train.steps=8: the run is saved only at the end, or when it is stopped",
        "train.log_every=11 is above train.steps=8: only step 1, evaluations and checkpoints are logged",
    ]
    (found,) = settings.long_intervals(small(checkpoint__every=10))
    assert found.endswith("or when it is stopped, and after an evaluation with the best loss")
    assert settings.long_intervals(small(eval__every=8, checkpoint__every=8, train__log_every=8)) == []


def test_the_passes_are_the_uses_of_each_window(small):
    config = small(context_length=10, train__batch_size=6, train__steps=15)
    train_batches = TextBatches(np.arange(10 * 30 + 10), config, vocab=(256, 256))
    starts = np.concatenate([train_batches[step]["inputs"][:, 0] for step in range(15)])
    uses = [collections.Counter((starts[epoch : epoch + 30] // 10).tolist()) for epoch in (0, 30, 60)]
    assert all(set(used.values()) == {1} and len(used) == 30 for used in uses)
    assert settings.passes(config, train_batches.rows_per_epoch) == (
        "15 steps of 6 × 10 tokens: 3 passes over the training data"
    )


def test_the_passes_of_span_corruption_count_its_text(small):
    fields = {"model__encoder_layers": 1, "train__objective": "span_corruption", "source_length": 32}
    config = small(train__steps=100, **fields)
    train_batches = TextBatches(np.arange(5000), config, vocab=(256, 256))
    (said, unit), rows = settings.passes(config, train_batches.rows_per_epoch).split(" × "), train_batches.length
    assert unit.startswith(f"{rows} tokens: {100 * 8 / train_batches.rows_per_epoch:.3g} passes") and said[-1] == "8"
    assert rows > 32


def test_the_passes_of_pairs_count_rows(small):
    fields = {"model__encoder_layers": 1, "data__corpus": "pairs", "data__path": "unread.tsv"}
    said = settings.passes(small(train__steps=1000, **fields), 250)
    assert said == "1,000 steps of 8 rows of pairs: 32 passes over the training data"


def test_few_and_many_passes_keep_their_digits(small):
    said = [settings.passes(small(), rows).split(": ")[1] for rows in (64, 64 * 300, 2, 1)]
    found = [text.removesuffix(" over the training data") for text in said]
    assert found == ["1 pass", "0.00333 passes", "32 passes", "64 passes"]
    assert "tokens: 12,800 passes over" in settings.passes(small(train__steps=1600), 1)


def test_a_task_has_no_passes(small, caplog):
    caplog.set_level(logging.INFO, "mini_gpt")
    config = small(**TASK)
    settings.report(config, TaskBatches.rows_per_epoch, new=True)
    assert caplog.messages == []


def test_a_run_says_its_passes_once_and_its_warnings_each_time(small, tmp_path, caplog):
    caplog.set_level(logging.INFO, "mini_gpt")
    config = small(train__steps=2, optimizer__warmup_steps=10, eval__every=2, checkpoint__every=2)
    for new in (True, False):
        caplog.clear()
        loop.train(config, tmp_path, conclude=False)
        said = [record.getMessage() for record in caplog.records if record.name == settings.log.name]
        warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warned) == 1 and "reaches 0.0002 of 0.001, at step 2" in warned[0] and warned[0] in said
        assert ["2 steps of 8 × 32 tokens" in line for line in said] == [False, True][: 1 + new]


@pytest.mark.parametrize("name, value, unread, read", CASES, ids=IDS)
def test_a_field_is_named_where_nothing_reads_it(name, value, unread, read):
    plain, changed, used = (
        loading.load("configs/default.py", fields) for fields in (unread, unread | {name: value}, read | {name: value})
    )
    assert settings.without_effect(plain, None) == []
    (found,) = settings.without_effect(changed, None)
    assert found.startswith(f"{name}: found {value!r}; nothing reads it with ") and "; leave it out, or " in found
    assert not any(line.startswith(f"{name}:") for line in settings.without_effect(used, None))


def test_each_field_of_the_table_has_a_case():
    listed = {key: fnmatch.filter(specs(Config), key) for key in settings.READ_WITH}
    refused = {"model.sinusoidal.columns", "train.lora_rank"}  # where they are not read, or always read
    assert all(listed.values()) and set().union(*listed.values()) == {*IDS} | refused


def test_the_line_names_what_reads_the_field():
    given = {"model.random_positions": 256, POSITION: "none", "train.lora_alpha": 4.0, "model.t5.max_distance": 99}
    assert settings.without_effect(loading.load("configs/default.py", given), None) == [
        "model.random_positions: found 256; nothing reads it with model.position='none' and "
        "model.variants.query_scale='none'; leave it out, or change model.position",
        "model.t5.max_distance: found 99; nothing reads it with model.position='none'; leave it out, or set "
        "model.position=t5",
        "train.lora_alpha: found 4.0; nothing reads it with train.lora_rank=0; leave it out, or change train.lora_rank",
    ]


def computed(fields):
    """Return the parameters and the logits of two training rows of 40 tokens, with dropout, as a list of arrays."""
    small = {"context_length": 40, "model.d_model": 32, "model.num_layers": 2, "model.dtype": "float32"}
    config = loading.load("configs/default.py", small | fields)
    key, inputs = jax.random.key(1), make_model_inputs(config)
    definition, state = nnx.split(build.make(config.model, 20, rngs=nnx.Rngs(0)))
    state = jax.tree.map(lambda x: x + 0.1 * jnp.sin(jnp.arange(x.size)).reshape(x.shape), state)  # no table of zeros
    tokens_BL = jax.random.randint(key, (2, 40), 0, 20)

    @jax.jit
    def logits(state):
        model = nnx.merge(definition, state)
        arguments = (tokens_BL,) if inputs is None else inputs({"inputs": tokens_BL}, key)
        return model.logits(model.hidden(*arguments, dropout_key=key))

    return [*jax.tree.leaves(state), logits(state)]


def differ(first, second):
    """Return whether two lists of arrays differ in a shape or in a bit."""
    return [x.shape for x in first] != [x.shape for x in second] or any(map(np.any, map(np.not_equal, first, second)))


OF_MODEL = [case for case in CASES if case[0].startswith("model.") or case[0] == "train.random_offsets"]
QUICK = ("model.alibi_exponent", "model.scale_width")


@pytest.mark.parametrize(
    "name, value, unread, read",
    [pytest.param(*case, id=case[0], marks=[pytest.mark.slow] * (case[0] not in QUICK)) for case in OF_MODEL],
)
def test_a_named_field_changes_no_bit_of_the_model(name, value, unread, read):
    assert not differ(computed(unread), computed(unread | {name: value}))
    assert differ(computed(read), computed(read | {name: value})), "where it is read, it changes the model"


OF_TEXTS = ("data.text_field", "data.document_separator", "data.on_error", "data.split", "data.split_fractions")


@pytest.mark.slow
@pytest.mark.parametrize("fields, read", [(TASK, ("data.task_length",)), ({}, OF_TEXTS)], ids=["task", "text"])
def test_named_fields_change_no_bit_of_the_training(small, tmp_path, fields, read):
    """All named fields of data, train and optimizer at once: the third loss depends on both updates before it."""
    leave_out = (*read, "train.random_offsets")
    named = {name: value for name, value, *_ in CASES if name.startswith(("data.", "train.", "optimizer."))}
    named = {name.replace(".", "__"): value for name, value in named.items() if name not in leave_out}
    schedule = {"train__steps": 3, "eval__every": 3, "optimizer__warmup_steps": 1}
    losses = []
    for changed in ({}, named):
        config, run = small(**fields | schedule | changed), tmp_path / str(len(changed))
        lines = settings.without_effect(config, None)
        assert {line.partition(":")[0].replace(".", "__") for line in lines} == changed.keys()
        loop.train(config, run, conclude=False)
        losses.append([row["train/loss"] for row in rows_of(run) if "train/loss" in row])
    assert len(losses[0]) == 3 and losses[0] == losses[1]


def shipped():
    """Return all configs by name: a file that takes an argument, once for each of its values."""
    arguments = {"tasks": [name.removeprefix("task:") for name in tasks.TASKS], "presets": presets.SHAPES}
    arguments["positions"] = ["full", "quick"]
    files = sorted(path.stem for path in (REPOSITORY / "configs").glob("*.py") if path.stem != "__init__")
    plain = [f"configs/{name}.py" for name in files if name not in arguments]
    names = plain + [f"configs/{name}.py:{argument}" for name in arguments for argument in arguments[name]]
    return {name: loading.load(name) for name in names}


def test_the_projects_own_configs_have_no_warning():
    loaded, silent = shipped(), set()
    for path in sorted((REPOSITORY / "configs" / "studies").glob("*.py")):
        plan = definition.load(str(path), {})
        loaded |= {f"{path.name}: {condition}": config for condition, config in plan.configs.items()}
        silent |= {(f"{path.name}: {condition}", line) for condition, line in new_runs.of_other_conditions(plan)}
    assert len(loaded) > 100
    found = {(name, line) for name, config in loaded.items() for line in settings.without_effect(config, None)}
    assert found == silent, "fields that a study shares with conditions that do not read them"
    assert all("model.max_positions" in line or "optimizer.decay_fraction" in line for _, line in silent)
