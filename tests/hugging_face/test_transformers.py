"""Exported and imported models compute the same as Transformers (`make test-hugging-face`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mini_gpt.config import loading as configs
from mini_gpt.evaluation import perplexity
from mini_gpt.generation import decoding as generation
from mini_gpt.generation.sampling import Sampling
from mini_gpt.hugging_face import architectures, exporting, importing, settings
from mini_gpt.model import gpt, parameters
from mini_gpt.training import loop
from mini_gpt.training.run import Run
from tests.hugging_face.models import EXPORTABLE, VOCAB, written

torch = pytest.importorskip("torch", reason="PyTorch and Transformers: make test-hugging-face")
transformers = pytest.importorskip("transformers", reason="PyTorch and Transformers: make test-hugging-face")

TOKENS_BL = np.random.default_rng(5).integers(0, VOCAB, (2, 16))


def ours(config, arrays):
    definition, shapes = gpt.abstract(config.model, VOCAB)
    named = lambda path, _: jnp.asarray(arrays[parameters.path_name(path)])
    model = nnx.merge(definition, jax.tree_util.tree_map_with_path(named, shapes))
    return np.asarray(jax.jit(lambda model, tokens_BL: model(tokens_BL))(model, jnp.asarray(TOKENS_BL)))


def theirs(model):
    with torch.inference_mode():
        return model.eval()(torch.from_numpy(TOKENS_BL)).logits.float().numpy()


def loaded(directory, **options):
    """Load a model. Raise AssertionError if a tensor is missing, unexpected or of another shape."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, about = load(directory, output_loading_info=True, **options)
    assert not any(about.values()), about
    return model


@pytest.mark.parametrize("name", EXPORTABLE)
def test_transformers_computes_the_same_logits(name, tmp_path):
    config, drawn = written(name, tmp_path / "out")
    listed = jax.tree_util.tree_leaves_with_path(drawn)
    expected_BLV = ours(config, {parameters.path_name(path): leaf for path, leaf in listed})
    assert np.abs(expected_BLV).max() > 3
    np.testing.assert_allclose(theirs(loaded(tmp_path / "out")), expected_BLV, rtol=1e-4, atol=1e-4)


COMMON = {"vocab_size": VOCAB, "eos_token_id": 1, "bos_token_id": 0}
NEOX = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 50}
LLAMA = NEOX | {"rms_norm_eps": 1e-5}
TRANSFORMERS_MODELS = {
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}),
    "gpt2, relu, untied": (
        "GPT2",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 40, "activation_function": "relu"}
        | {"tie_word_embeddings": False},
    ),
    "llama": ("Llama", LLAMA),
    "llama, grouped, biased": (
        "Llama",
        LLAMA | {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "gpt_neox": ("GPTNeoX", NEOX | {"use_parallel_residual": False}),
    "gpt_neox, tanh, tied": (
        "GPTNeoX",
        NEOX | {"use_parallel_residual": False, "hidden_act": "gelu_new", "tie_word_embeddings": True},
    ),
    "mpt": ("Mpt", {"d_model": 48, "n_layers": 2, "n_heads": 6}),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", TRANSFORMERS_MODELS)
def test_imported_models_compute_the_same_logits(name, dtype, tmp_path):
    kind, fields = TRANSFORMERS_MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**COMMON, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.3 * torch.randn_like(tensor))
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path / "there")
    described = settings.read(tmp_path / "there" / "config.json")
    architecture = architectures.find(described)
    read = configs.load("configs/default.py", architecture.fields(described))
    read = configs.override(read, {"model.dtype": "float32"})
    arrays = importing.read_weights(tmp_path / "there", architecture, read.model, VOCAB)
    expected_BLV = theirs(loaded(tmp_path / "there", dtype=torch.float32))
    assert np.abs(expected_BLV).max() > 3
    np.testing.assert_allclose(ours(read, arrays), expected_BLV, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(params=["bytes", "bpe", "characters"])
def run(request, small, shared):
    """Return (briefly trained run, directory of its export) for each tokenizer."""
    directory = shared / request.param
    if not directory.exists():
        fields = {"data__tokenizer": request.param, "data__vocab_size": 300, "train__steps": 60}
        loop.train(small(model__position="learned", **fields), directory, conclude=False)
        exporting.export(Run(directory), shared / f"{request.param}-out")
    return Run(directory), shared / f"{request.param}-out"


def test_tokenizers_give_the_same_ids_and_text(run):
    run, out = run
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    text = "the größer dog\n sat  on a mat then"
    ids = run.tokenizer.encode(text).tolist()
    assert tokenizer(text)["input_ids"] == ids and tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == len(run.tokenizer.token_bytes) - 1


def test_greedy_texts_are_equal(run):
    run, out = run
    prompt = run.tokenizer.encode("the cat")
    (mine,) = generation.generate(run.model, [prompt], length=12, sampling=Sampling(temperature=0.0))
    tokens_BL = torch.from_numpy(prompt.astype(np.int64))[None]
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    other = loaded(out).generate(tokens_BL, attention_mask=torch.ones_like(tokens_BL), **options)
    assert other[0, len(prompt) :].tolist() == mine.tolist()


def test_transformers_computes_the_same_loss_of_a_split(run):
    run, out = run
    model, length = loaded(out), run.config.context_length
    tokens = np.asarray(run.store.tokens("validation"), np.int64)
    total = 0.0
    for begin in range(0, len(tokens) - 1, length):
        block = torch.from_numpy(tokens[begin : begin + length + 1])[None]
        with torch.inference_mode():
            logits_BLV = model(block[:, :-1]).logits
        total += torch.nn.functional.cross_entropy(logits_BLV[0], block[0, 1:], reduction="sum").item()
    mine = perplexity.score_split(run.model, tokens.astype(np.int32), run.tokenizer.token_bytes)
    assert mine.tokens == len(tokens) - 1
    assert total / (len(tokens) - 1) == pytest.approx(mine.nll, rel=1e-5)
