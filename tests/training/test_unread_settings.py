"""Fields that nothing reads are named, and change no bit of a model or of a training."""

import fnmatch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mini_gpt.config import loading
from mini_gpt.config.fields import specs
from mini_gpt.config.schema import Config
from mini_gpt.model import build
from mini_gpt.training import loop, settings
from mini_gpt.training.inputs import make_model_inputs
from tests.training.interruption import rows
from tests.training.test_settings import TASK

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
    ("data.token_dtype", "uint32", {}, {"data.corpus": "tokens", "data.path": "unread"}),
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
    ("train.nonfinite_limit", 3, {}, {"train.nonfinite": "skip"}),
    ("optimizer.decay_fraction", 0.5, {"optimizer.schedule": "cosine"}, {"optimizer.schedule": "wsd"}),
    ("optimizer.final_fraction", 0.5, {"optimizer.schedule": "constant"}, {"optimizer.schedule": "cosine"}),
    *((f"optimizer.muon.{name}", value, {}, {"optimizer.name": "muon"}) for name, value in [
        ("momentum", 0.5), ("newton_schulz_steps", 3), ("adam_learning_rate", 1e-4)
    ]),
]  # fmt: skip
IDS = [case[0] for case in CASES]


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
QUICK = "model.alibi_exponent"


@pytest.mark.parametrize(
    "name, value, unread, read",
    [pytest.param(*case, id=case[0], marks=[pytest.mark.slow] * (case[0] != QUICK)) for case in OF_MODEL],
)
def test_a_named_field_changes_no_bit_of_the_model(name, value, unread, read):
    assert not differ(computed(unread), computed(unread | {name: value}))
    assert differ(computed(read), computed(read | {name: value})), "where it is read, it changes the model"


OF_TEXTS = ("data.text_field", "data.document_separator", "data.split", "data.split_fractions")


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
        losses.append([row["train/loss"] for row in rows(run) if "train/loss" in row])
    assert len(losses[0]) == 3 and losses[0] == losses[1]
