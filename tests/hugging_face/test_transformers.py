"""Exported and imported models compute the same as Transformers (`make test-hugging-face`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mini_gpt.config import loading
from mini_gpt.hugging_face import architectures, importing, settings
from mini_gpt.hugging_face.architectures import ARCHITECTURES
from mini_gpt.model import gpt, parameters
from mini_gpt.model.positions.biases import t5_bucket
from tests.hugging_face.models import EXPORTABLE, FURTHER, VOCAB, written

torch = pytest.importorskip("torch", reason="PyTorch and Transformers: make test-hugging-face")
transformers = pytest.importorskip("transformers", reason="PyTorch and Transformers: make test-hugging-face")
TOKENS_BL = np.random.default_rng(5).integers(4, VOCAB, (2, 16))
SOURCE_BS = np.random.default_rng(6).integers(0, VOCAB, (2, 40))
SOURCE_BS[1, 9:] = -1


def ours(config, arrays):
    definition, shapes = gpt.abstract(config.model, VOCAB)
    named = lambda path, _: jnp.asarray(arrays[parameters.path_name(path)])
    model = nnx.merge(definition, jax.tree_util.tree_map_with_path(named, shapes))
    source_BS = jnp.asarray(SOURCE_BS) if config.model.encoder_layers else None
    run = jax.jit(lambda model, tokens_BL, source_BS: model(tokens_BL, source_BS=source_BS))
    return np.asarray(run(model, jnp.asarray(TOKENS_BL), source_BS))


def theirs(model):
    tokens_BL, source_BS = torch.from_numpy(TOKENS_BL), torch.from_numpy(SOURCE_BS)
    inputs = {"input_ids": tokens_BL}
    if model.config.is_encoder_decoder:
        inputs = {"input_ids": source_BS.clamp(min=0), "attention_mask": source_BS >= 0, "decoder_input_ids": tokens_BL}
    with torch.inference_mode():
        return model.eval()(**inputs).logits.float().numpy()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_transformers_reads_rounded_weights(dtype, tmp_path):
    config, _ = written("llama, grouped, biased", tmp_path / "out", dtype=dtype)
    model = loaded(tmp_path / "out", dtype="auto")
    assert {tensor.dtype for tensor in model.parameters()} == {getattr(torch, dtype)}
    assert model.config.dtype == getattr(torch, dtype)
    described = settings.read(tmp_path / "out" / "config.json")
    architecture = architectures.find(described)
    arrays = importing.read_weights(tmp_path / "out", architecture, config.model, VOCAB)
    assert_equal_logits(theirs(loaded(tmp_path / "out", dtype=torch.float32)), ours(config, arrays), config)


def auto_class(model_type):
    return getattr(transformers, ARCHITECTURES[model_type].auto_class)


def loaded(directory, **options):
    """Load a model. Raise AssertionError if a tensor is missing, unexpected or of another shape."""
    model_type = settings.read(directory / "config.json").values["model_type"]
    load = auto_class(model_type).from_pretrained
    if model_type == "gemma2":  # other implementations of some versions leave the soft cap out
        options["attn_implementation"] = "eager"
    model, about = load(directory, output_loading_info=True, **options)
    assert not any(about.values()), about
    return model


def assert_equal_logits(found_BLV, expected_BLV, config):
    largest = np.abs(expected_BLV).max()
    assert largest > 3
    # T5 does not scale its scores, so that the rounding errors of random weights grow.
    atol = 1e-4 * (largest if config.model.encoder_layers else 1)
    np.testing.assert_allclose(found_BLV, expected_BLV, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("name", EXPORTABLE)
def test_transformers_computes_the_same_logits(name, tmp_path):
    config, drawn = written(name, tmp_path / "out")
    listed = jax.tree_util.tree_leaves_with_path(drawn)
    expected_BLV = ours(config, {parameters.path_name(path): leaf for path, leaf in listed})
    assert_equal_logits(theirs(loaded(tmp_path / "out")), expected_BLV, config)


COMMON = {"vocab_size": VOCAB, "eos_token_id": 1, "bos_token_id": 0}
NEOX = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 50}
T5 = {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 50}
BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 50}
BERT |= {"max_position_embeddings": 16, "type_vocab_size": 2, "pad_token_id": 0}
LLAMA = NEOX | {"rms_norm_eps": 1e-5}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
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
    "pythia": ("GPTNeoX", NEOX | {"use_parallel_residual": True}),
    "phi": ("Phi", NEOX | {"num_key_value_heads": 2}),
    "starcoder2": ("Starcoder2", NEOX | {"num_key_value_heads": 2, "sliding_window": 5}),
    "mistral": ("Mistral", NEOX | {"num_key_value_heads": 2, "sliding_window": 6, "head_dim": 10}),
    "llama 3.1": (
        "Llama",
        LLAMA
        | {"num_key_value_heads": 2, "rope_theta": 5000.0, "rope_scaling": LLAMA3}
        | {"head_dim": 12, "attention_bias": True},
    ),
    "qwen2": ("Qwen2", NEOX | {"num_key_value_heads": 2}),
    "qwen2, windows": (
        "Qwen2",
        NEOX
        | {"num_key_value_heads": 4, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
        | {"num_hidden_layers": 3, "tie_word_embeddings": True},
    ),
    "qwen3": ("Qwen3", NEOX | {"num_key_value_heads": 2, "head_dim": 12}),
    "smollm3": ("SmolLM3", NEOX | {"num_key_value_heads": 2, "no_rope_layer_interval": 2, "pad_token_id": 0}),
    "gemma": ("Gemma", NEOX | {"num_key_value_heads": 1, "head_dim": 12}),
    "gemma2": (
        "Gemma2",
        NEOX
        | {"num_key_value_heads": 2, "head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 20}
        | {"final_logit_softcapping": 20.0, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": (
        "Gemma3Text",
        NEOX
        | {"num_key_value_heads": 1, "head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 20}
        | {"num_hidden_layers": 7, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "olmo": ("Olmo", NEOX | {"num_key_value_heads": 2, "clip_qkv": 0.1}),
    "olmo2": ("Olmo2", NEOX | {"num_key_value_heads": 2}),
    "llama, yarn": (
        "Llama",
        LLAMA
        | {"max_position_embeddings": 40, "rope_theta": 5000.0, "head_dim": 16}
        | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10}},
    ),
    "llama, dynamic": (
        "Llama",
        LLAMA | {"max_position_embeddings": 8, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    ),
    "opt": ("OPT", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 50}),
    "gpt_neo": (
        "GPTNeo",
        {"hidden_size": 32, "num_layers": 3, "num_heads": 4, "window_size": 5}
        | {"attention_types": [[["global", "local"], 1], [["local"], 1]], "max_position_embeddings": 20},
    ),
    "bloom": ("Bloom", {"hidden_size": 48, "n_layer": 2, "n_head": 6}),
    "t5": ("T5", T5),
    "t5, odd": ("T5", T5 | {"d_model": 22, "num_heads": 3, "d_kv": 9, "num_decoder_layers": 3, "d_ff": 11}),
    "t5 1.1": ("T5", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "t5 1.1, small buckets": (
        "T5",
        T5
        | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "d_ff": 13}
        | {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 11, "layer_norm_epsilon": 1e-3},
    ),
    "bert": ("Bert", BERT),
    "bert, odd": ("Bert", BERT | {"hidden_size": 21, "num_attention_heads": 3, "hidden_act": "gelu_new"}),
    "bert, untied": ("Bert", BERT | {"tie_word_embeddings": False, "type_vocab_size": 3, "layer_norm_eps": 1e-3}),
    "roberta": ("Roberta", BERT | {"max_position_embeddings": 18, "pad_token_id": 1, "type_vocab_size": 1}),
    "roberta, far, untied": (
        "Roberta",
        BERT | {"max_position_embeddings": 21, "pad_token_id": 3, "tie_word_embeddings": False},
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", TRANSFORMERS_MODELS)
def test_imported_models_compute_the_same_logits(name, dtype, tmp_path):
    kind, fields = TRANSFORMERS_MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**COMMON, **fields)
    model = auto_class(config.model_type).from_config(config)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.3 * torch.randn_like(tensor))
        head = getattr(model, "cls", None) or getattr(model, "lm_head", None)
        head = getattr(head, "predictions", head)
        if kind in ("Bert", "Roberta"):  # two parameters in some versions; the first is not used
            head.bias.copy_(head.decoder.bias)
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path / "there")
    described = settings.read(tmp_path / "there" / "config.json")
    architecture = architectures.find(described)
    fields = importing.read_fields(tmp_path / "there", architecture, described)
    read = loading.load("configs/default.py", FURTHER.get(architecture.model_type, {}) | fields)
    read = loading.override(read, {"model.dtype": "float32"})
    arrays = importing.read_weights(tmp_path / "there", architecture, read.model, VOCAB)
    expected_BLV = theirs(loaded(tmp_path / "there", dtype=torch.float32))
    assert_equal_logits(ours(read, arrays), expected_BLV, read)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("num_buckets, max_distance", [(32, 128), (8, 9), (16, 300), (64, 100), (4, 1000)])
def test_the_buckets_of_t5_are_equal(bidirectional, num_buckets, max_distance):
    from transformers.models.t5.modeling_t5 import T5Attention

    offsets, sizes = np.arange(-1500, 1501), {"num_buckets": num_buckets, "max_distance": max_distance}
    found = t5_bucket(jnp.asarray(offsets), causal=not bidirectional, **sizes)
    wanted = T5Attention._relative_position_bucket(torch.from_numpy(offsets), bidirectional=bidirectional, **sizes)
    np.testing.assert_array_equal(found, wanted.numpy())
