"""Training with an encoder: batches, learning, resuming, eight devices, and commands that read the run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mini_gpt import suites
from mini_gpt.config import loading
from mini_gpt.data import batches, pairs, task_batches, tasks, tokenizers
from mini_gpt.data.pairs import Pair
from mini_gpt.generation import decoding
from mini_gpt.generation.sampling import Sampling
from mini_gpt.model import build
from mini_gpt.model.loss import nll
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import loop, train_state
from mini_gpt.training.inputs import layout_of
from mini_gpt.training.run import Run
from mini_gpt.training.step import make_step
from tests.conftest import slow
from tests.training.interruption import assert_same_bits, kill_after
from tests.training.test_step import assert_close

PAIRS = {
    "model__encoder_layers": 1,
    "data__corpus": "task:reverse",
    "data__tokenizer": "characters",
    "data__task_length": 3,
    "context_length": 8,
    "source_length": 9,
}
TOKENIZER = tokenizers.CharacterTokenizer(tasks.ALPHABET)
AXES = ("mesh__data", "mesh__fsdp", "mesh__tensor")


def test_the_source_is_the_question_and_the_target_the_answer(small):
    config = small(**PAIRS)
    batch, separator = task_batches.TaskBatches(config, TOKENIZER)[3], tokenizers.separator(TOKENIZER)
    assert {name: array.shape for name, array in batch.items()} == {
        name: shape for name, (shape, _) in batches.shapes(config).items()
    }
    assert {name: array.dtype for name, array in batch.items()} == {
        name: dtype for name, (_, dtype) in batches.shapes(config).items()
    }
    questions = []
    for inputs, targets, weights, source in zip(*(batch[name] for name in batch), strict=True):
        sources, answers = texts(source[source >= 0]), texts([*inputs[weights == 1], separator])[:-1]
        assert (source[sum(len(text) + 1 for text in sources) :] == pairs.PADDING).all()
        assert answers == [question[::-1] for question in sources] and {len(text) for text in sources} <= {2, 3}
        np.testing.assert_array_equal(targets[weights == 1], [*inputs[weights == 1][1:], separator])
        assert (targets[weights == 0] == separator).all()
        assert len(weights) - weights.sum() < 4 or len(source) - (source >= 0).sum() < 4  # no other pair fits
        questions += sources
    first = 3 * task_batches.MOST_IN_A_BATCH
    drawn = [tasks.problem("task:reverse", "train", 0, first + i, shortest=2, longest=3) for i in range(len(questions))]
    assert questions == [question for question, _ in drawn] and len(questions) > len(batch["source"])
    of_one_host = task_batches.TaskBatches(config, TOKENIZER, rows=[2, 0])[3]
    for name, array in batch.items():
        np.testing.assert_array_equal(of_one_host[name], array[[2, 0]])


def texts(tokens):
    """Return the texts after each separator."""
    parts, separator = [], tokenizers.separator(TOKENIZER)
    for token in tokens:
        if token == separator:
            parts.append([])
        else:
            parts[-1].append(token)
    return list(map(TOKENIZER.decode, parts))


@pytest.mark.slow
@pytest.mark.parametrize("position", ["rope", *slow("learned", "t5", "none", "sinusoidal", "alibi", "kerple", "fire")])
@pytest.mark.parametrize("fields", [{}, *slow({"model__attention": "blockwise"}, {"model__attention_window": 3})])
def test_pairs_in_one_row_do_not_see_each_other(small, position, fields):
    fields = fields | {"model__cross_positions": position in ("rope", "t5")}
    config = small(**PAIRS | {"context_length": 16, "source_length": 18}, **fields, model__position=position)
    definition, parameters = build.split(build.make(config.model, len(TOKENIZER.token_bytes), rngs=nnx.Rngs(1)))
    model = nnx.merge(definition, jax.tree.map(lambda x: x + 0.1, parameters))
    separator, layout = tokenizers.separator(TOKENIZER), layout_of(config, TOKENIZER)

    def losses(rows, limits):
        batch = pairs.batch_of(rows, separator, limits)
        source_BS = jnp.array(batch["source"])
        of_target, of_source = (
            layout.positions_and_segments(config.model, batch["inputs"]),
            layout.source_positions_and_segments(source_BS),
        )
        x_BLD = model.hidden(batch["inputs"], *of_target, source_BS, *of_source)
        nll_BL = nll(model.logits(x_BLD), batch["targets"])
        return np.asarray(nll_BL)[batch["weights"] == 1]

    found = [Pair(*map(TOKENIZER.encode, pair)) for pair in (("ab", "ba"), ("c", "ddee"), ("fgh", ""), ("", "x"))]
    alone = [losses([[pair]], (7, 6)) for pair in found]
    np.testing.assert_allclose(losses([found], (18, 16)), np.concatenate(alone), rtol=2e-5)


def test_sources_longer_than_in_training_are_padded_in_steps(small):
    config = small(**PAIRS)
    sizes = {
        length: task_batches.problem_batch([("a" * length, "b")], config, TOKENIZER, 8)["source"].shape[1]
        for length in (1, 8, 9, 24, 25)
    }
    assert sizes == {1: 9, 8: 9, 9: 25, 24: 25, 25: 41}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source_length": 8}, r"^source_length: found 8; task:reverse with data\.task_length=3 needs at least 9"),
        ({"context_length": 7}, r"^context_length: found 7; task:reverse with data\.task_length=3 needs at least 8"),
    ],
)
def test_lengths_that_are_too_short_are_refused(small, fields, message):
    with pytest.raises(UserError, match=message):
        task_batches.TaskBatches(small(**PAIRS | fields), TOKENIZER)


def test_the_default_config_has_little_padding():
    config = loading.load("configs/seq2seq.py")
    tokenizer = tokenizers.CharacterTokenizer(tasks.find(config.data.corpus).alphabet)
    assert max(batches.padding_shares(task_batches.TaskBatches(config, tokenizer)[0])) < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"model__position": "t5"}, *slow({"optimizer__name": "muon"})], ids=str)
def test_a_run_learns_resumes_with_the_same_bits_and_writes_answers(small, tmp_path, fields):
    config = small(
        **PAIRS | fields, model__dropout=0.1, train__steps=9, optimizer__learning_rate=3e-3, eval__sample_tokens=4
    )
    whole = loop.train(config, tmp_path / "whole")
    kill_after(6, config, tmp_path / "cut")
    assert_same_bits(whole, loop.train(config, tmp_path / "cut"))
    run = Run(tmp_path / "cut")
    suites.evaluate(run, "tasks", SuiteOptions(lengths="1x,2x"))
    assert sorted(path.suffix for path in (tmp_path / "cut" / "eval").iterdir()) == [".csv", ".json", ".png"]
    prompt = [tokenizers.separator(run.tokenizer)]
    written = decoding.generate(
        run.model, [prompt], length=4, sampling=Sampling(0.0), sources=[run.tokenizer.encode("abc")]
    )
    assert written.shape == (1, 4)


@pytest.mark.slow
def test_queries_that_see_no_key_give_finite_gradients(small):
    """With padding, some queries of cross-attention see no key; ssmax takes the logarithm of their number."""
    config = small(**PAIRS | {"context_length": 14, "model__variants__query_scale": "ssmax"})
    mesh, vocab_size = sharding.make_mesh(1, 1, 1), len(TOKENIZER.token_bytes)
    definition, places = train_state.abstract(config, vocab_size, mesh)
    step = make_step(definition, config, places, layout_of(config, TOKENIZER))
    batch = task_batches.TaskBatches(config, TOKENIZER)[0]
    assert (batch["weights"] == 0).any()
    _, metrics = step(train_state.first(config, vocab_size, places), sharding.put_batch(batch, mesh))
    assert metrics["finite"] and metrics["gradient_norm"] > 0


@pytest.mark.slow
def test_a_small_model_learns_to_reverse(small, tmp_path):
    rate = {"optimizer__schedule": "constant", "optimizer__learning_rate": 5e-3, "optimizer__warmup_steps": 50}
    once = {"eval__every": 1000, "checkpoint__every": 1000}
    config = small(**PAIRS, **rate, **once, model__position="rope", train__steps=1000, train__batch_size=64)
    loop.train(config, tmp_path, conclude=False)
    rows = suites.SUITES["tasks"].measure(Run(tmp_path), SuiteOptions(lengths="1x"))["rows"]
    assert rows[0]["exact_match"] > 0.9


@pytest.mark.parametrize("suite", ["perplexity", "needles"])
def test_other_suites_refuse_the_model(small, suite):
    with pytest.raises(UserError, match=rf"^--suite={suite} does not support model\.encoder_layers with data\.corpus="):
        suites.SUITES[suite].check(small(**PAIRS), SuiteOptions())


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{"model__position": "learned"}, *slow({"model__scan_layers": True}, {"model__share_embeddings": False})]
)
def test_eight_devices_equal_one(small, fields):
    size = {"model__d_model": 16, "model__num_heads": 8, "model__d_ff": 32, "model__dropout": 0.2, "source_length": 16}

    def train(mesh):
        config = small(**PAIRS | size | fields, **dict(zip(AXES, mesh, strict=True)))
        vocab_size, devices = len(TOKENIZER.token_bytes), sharding.make_mesh(*mesh)
        definition, places = train_state.abstract(config, vocab_size, devices)
        state, losses = train_state.first(config, vocab_size, places), []
        step = make_step(definition, config, places)
        for number in range(3):
            batch = task_batches.TaskBatches(config, TOKENIZER)[number]
            state, metrics = step(state, sharding.put_batch(batch, devices))
            losses.append(float(metrics["loss"]))
        return jax.tree.map(np.asarray, state), losses

    one, many = train((1, 1, 1)), train((2, 2, 2))
    assert_close(many, one)
