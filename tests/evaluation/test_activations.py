"""`LoadedModel.cache`: its names cover the model, and each activation is recomputed from others in float64."""

import dataclasses

import jax
import numpy as np
import pytest

from mini_gpt.config import loading
from mini_gpt.data.layout import PLAIN
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.model import editing, parameters
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.training.run import Run
from tests.conftest import slow
from tests.model import test_encoder_decoder
from tests.model.test_gpt import VOCAB
from tests.random_models import random_parameters

ATTENTION = ("attention_in", "queries", "keys", "values", "logits", "visible", "weights", "heads", "attention")
BLOCK = ("stream", *ATTENTION, "middle", "feed_forward_in", "units", "feed_forward", "after")
TOKENS = np.random.default_rng(0).integers(VOCAB, size=(3, 12))


def names(layers, block=BLOCK, prefix=""):
    return {f"{prefix}token_embedding"} | {f"{prefix}blocks.{n}.{name}" for n in range(layers) for name in block}


def load(**fields):
    small = {"num_layers": 2, "d_model": 16, "num_heads": 4, "dtype": "float32"} | fields
    data = {"data.corpus": "task:copy", "data.tokenizer": "characters"} if "encoder_layers" in fields else {}
    model_fields = {f"model.{name}": value for name, value in small.items()}
    config = loading.load("configs/default.py", {"context_length": 12} | data | model_fields)
    definition, params = random_parameters(config.model, VOCAB, noise=0.3)
    return LoadedModel(params, definition, config, sharding.make_mesh(1, 1, 1), 1024, PLAIN)


def close(found, expected):
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2e-4, atol=2e-4)


def linear(x, layer):
    return x @ layer["kernel"] + layer.get("bias", 0)


def norm(x, layer):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * layer["scale"] + layer["bias"]


@pytest.mark.parametrize(
    "fields",
    [
        {"position": "rope", "num_kv_heads": 2, "attention_window": 5},
        *slow({"position": "learned", "scan_layers": True}, {"position": "alibi", "parallel_residual": "two_norms"}),
    ],
    ids=str,
)
def test_each_activation_follows_from_earlier_ones(fields):
    model = load(**fields)
    found = {name: np.asarray(x, np.float64) for name, x in model.cache(TOKENS).items()}
    is_parallel = "parallel_residual" in fields
    block = [name for name in BLOCK if not (is_parallel and name == "middle")]
    assert found.keys() == {"tokens", "hidden", "logits"} | names(2, block)
    of_heads = lambda x: np.repeat(x, 4 // x.shape[2], axis=2)  # groups of heads share keys and values
    unstacked = parameters.with_layers(model.parameters, stacked=False)
    module = jax.tree.map(lambda x: np.asarray(x, np.float64), unstacked)
    close(found["tokens"], TOKENS)
    close(found["token_embedding"], module["embedding"][TOKENS])
    if fields["position"] != "learned":
        close(found["blocks.0.stream"], found["token_embedding"])
    for layer in range(2):
        here = {name: found[f"blocks.{layer}.{name}"] for name in block}
        weights = module["blocks"][layer]
        attention, mlp = weights["attention"], weights["mlp"]
        close(here["attention_in"], norm(here["stream"], weights["attention_norm"]))
        close(here["values"].reshape(3, 12, -1), linear(here["attention_in"], attention["value"]))
        logits = np.einsum("blhk,bshk->bhls", here["queries"], of_heads(here["keys"])) / 2  # sqrt of the width 4
        distance = np.arange(12)[:, None] - np.arange(12)
        seen = (distance >= 0) & (distance < fields.get("attention_window", 12))
        np.testing.assert_array_equal(here["visible"], seen[None])  # one segment: the same for all rows
        if fields["position"] != "alibi":
            close(here["logits"], logits)
        exp = np.exp(here["logits"]) * seen
        close(here["weights"], exp / exp.sum(-1, keepdims=True))
        close(here["heads"], np.einsum("bhls,bshk->blhk", here["weights"], of_heads(here["values"])))
        close(here["attention"], linear(here["heads"].reshape(3, 12, -1), attention["out"]))
        middle = here["stream"] if is_parallel else here["middle"]
        close(here["feed_forward_in"], norm(middle, weights["mlp_norm"]))
        close(here["feed_forward"], linear(here["units"], mlp["down"]))
        if not is_parallel:
            close(here["middle"], here["stream"] + here["attention"])
        close(here["after"], here["stream"] + here["attention"] + here["feed_forward"])
        if layer == 0:
            np.testing.assert_array_equal(here["after"], found["blocks.1.stream"])
    close(found["hidden"], norm(found["blocks.1.after"], module["final_norm"]))
    close(found["logits"], found["hidden"] @ module["embedding"].T)
    close(found["logits"], model(TOKENS))


@pytest.mark.slow
def test_an_encoder_decoder_names_the_three_kinds_of_attention():
    model = load(encoder_layers=3, position="sinusoidal")
    tokens_BL, source_BS = test_encoder_decoder.batch()
    found = model.cache(tokens_BL, source_BS)
    cross = [f"cross_{name}" for name in ATTENTION]
    encoder = names(3, prefix="encoder.")
    assert found.keys() == {"tokens", "hidden", "logits"} | encoder | names(2, (*BLOCK, *cross))
    close(found["logits"], np.asarray(model(tokens_BL, source_BS), np.float64))
    here = {name: np.asarray(found[f"blocks.1.{name}"], np.float64) for name in (*BLOCK, *cross)}
    close(here["cross_heads"], np.einsum("bhls,bshk->blhk", here["cross_weights"], here["cross_values"]))
    close(here["middle"], here["stream"] + here["attention"] + here["cross_attention"])


def test_activations_are_those_after_the_edits():
    model = load()
    mask_NBH = np.ones((2, 1, 4))
    mask_NBH[0, 0, 1] = 0
    moved_NBLD = np.ones((2, 1, 1, 16))
    moved_NBLD[0] = 0
    edits = editing.head_mask(mask_NBH)._replace(stream=editing.Edit(np.ones((2, 1, 1, 1)), moved_NBLD))
    plain, edited = model.cache(TOKENS), dataclasses.replace(model, edits=edits).cache(TOKENS)
    assert plain.keys() == edited.keys()
    close(edited["blocks.0.heads"], np.asarray(plain["blocks.0.heads"]) * mask_NBH[0, :, None, :, None])
    out = np.asarray(model.parameters["blocks"][0]["attention"]["out"]["kernel"])
    close(edited["blocks.0.attention"] - plain["blocks.0.attention"], -plain["blocks.0.heads"][:, :, 1] @ out[4:8])
    close(edited["blocks.1.stream"] - edited["blocks.0.after"], np.ones((3, 12, 16)))


def test_a_loaded_run_takes_a_text(trained):
    run = Run(trained())
    found = run.model.cache("the cat")
    assert bytes(np.asarray(found["tokens"][0], np.uint8)) == b"the cat"
    assert found["blocks.0.weights"].shape == (1, 4, 7, 7)
    close(found["logits"], run.model(run.tokenizer.encode("the cat")[None]))
    with pytest.raises(UserError, match=r"text: found a text, but this model has no tokenizer; give token ids"):
        dataclasses.replace(run.model, tokenizer=None).cache("the cat")
