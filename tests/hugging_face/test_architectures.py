"""A config.json of Transformers 4 or 5 gives the right config; unsupported settings are refused."""

import json
import math

import pytest

from mini_gpt.config import loading
from mini_gpt.hugging_face import architectures, settings
from mini_gpt.runtime.errors import UserError
from tests.hugging_face import models

# As written by save_pretrained of Transformers 5, without the fields that do not describe the model.
NEW = {
    "gpt2": {
        "activation_function": "gelu_new",
        "add_cross_attention": False,
        "layer_norm_epsilon": 1e-05,
        "n_embd": 24,
        "n_head": 4,
        "n_inner": None,
        "n_layer": 3,
        "n_positions": 16,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
    },
    "llama": {
        "attention_bias": True,
        "head_dim": 6,
        "hidden_act": "silu",
        "hidden_size": 24,
        "intermediate_size": 40,
        "max_position_embeddings": 16,
        "mlp_bias": True,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"factor": 2.5, "rope_theta": 5000.0, "rope_type": "linear"},
        "tie_word_embeddings": True,
    },
    "gpt_neox": {
        "attention_bias": True,
        "hidden_act": "gelu",
        "hidden_size": 32,
        "intermediate_size": 50,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 16,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 5000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "use_parallel_residual": False,
    },
    "mpt": {
        "attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_type": "multihead_attention", "clip_qkv": None},
        "d_model": 24,
        "expansion_ratio": 4,
        "layer_norm_epsilon": 1e-05,
        "learned_pos_emb": True,
        "max_seq_len": 16,
        "n_heads": 3,
        "n_layers": 3,
        "no_bias": True,
        "tie_word_embeddings": True,
    },
}
T5_FIELDS = {
    "d_ff": 40,
    "d_kv": 6,
    "d_model": 24,
    "decoder_start_token_id": None,
    "eos_token_id": 1,
    "feed_forward_proj": "gated-gelu",
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "num_layers": 2,
    "pad_token_id": 0,
    "relative_attention_max_distance": 20,
    "relative_attention_num_buckets": 8,
    "tie_word_embeddings": False,
}
BERT_FIELDS = {
    "hidden_act": "gelu",
    "hidden_size": 24,
    "intermediate_size": 40,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 16,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "type_vocab_size": 2,
}
OF_ENCODERS = {"t5": T5_FIELDS, "bert": BERT_FIELDS, "roberta": BERT_FIELDS | {"pad_token_id": 1}}


def read(directory, model_type, **changes):
    values = {"model_type": model_type} | (NEW | OF_ENCODERS).get(model_type, {}) | changes
    values = {name: value for name, value in values.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(values))
    described = settings.read(directory / "config.json")
    fields = architectures.find(described).fields(described)
    return loading.load("configs/default.py", models.FURTHER.get(model_type, {}) | fields)


def test_encoders_give_their_configs(tmp_path):
    t5, bert, roberta = (read(tmp_path, name) for name in OF_ENCODERS)
    assert (t5.model.encoder_layers, t5.model.num_layers, t5.model.activation) == (2, 3, "geglu")
    assert (t5.model.t5.num_buckets, t5.model.t5.max_distance) == (8, 20)
    assert not (t5.model.tie_embeddings or t5.model.scale_attention or t5.model.use_bias)
    assert (t5.model.norm, t5.model.norm_epsilon, t5.context_length) == ("rmsnorm", 1e-6, 512)
    alike = read(tmp_path, "t5", num_decoder_layers=..., feed_forward_proj=..., tie_word_embeddings=..., n_positions=9)
    assert (alike.model.num_layers, alike.model.activation, alike.model.tie_embeddings) == (2, "relu", True)
    assert alike.context_length == 9
    assert (bert.context_length, bert.model.max_positions, bert.train.objective) == (16, 16, "masked")
    assert (roberta.context_length, roberta.model.max_positions) == (14, 14)
    assert bert.model.norm_placement == "post" and bert.model.embedding_norm and bert.model.prediction_head
    assert bert.model.norm_epsilon == 1e-12 and bert.model.activation == "gelu_exact" and not bert.model.causal
    assert read(tmp_path, "llama").model.norm_epsilon == 1e-5
    assert read(tmp_path, "llama", rms_norm_eps=...).model.norm_epsilon == 1e-6, "Llama's own default"


def test_each_architecture_gives_its_config(tmp_path):
    gpt2, llama, neox, mpt = (read(tmp_path, name) for name in NEW)
    assert all(each.context_length == 16 and each.model.num_layers == 3 for each in (gpt2, llama, neox, mpt))
    assert [each.model.position for each in (gpt2, llama, neox, mpt)] == ["learned", "rope", "rope", "alibi"]
    assert [each.model.d_ff for each in (gpt2, llama, neox, mpt)] == [96, 40, 50, 96]
    assert [each.model.num_kv_heads for each in (gpt2, llama, neox, mpt)] == [4, 2, 4, 3]
    assert [each.model.activation for each in (gpt2, llama, neox, mpt)] == [
        "gelu",
        "swiglu",
        "gelu_exact",
        "gelu_exact",
    ]
    assert [each.model.use_bias for each in (gpt2, llama, neox, mpt)] == [True, True, True, False]
    assert [each.model.tie_embeddings for each in (gpt2, llama, neox, mpt)] == [True, True, False, True]
    assert (llama.model.rope.base, llama.model.rope.scaling, llama.model.rope.factor) == (5000, "linear", 2.5)
    assert (neox.model.rope.base, neox.model.rope.scaling, neox.model.rope.fraction) == (5000, "none", 0.5)


def test_the_base_of_rope_has_the_default_of_the_architecture(tmp_path):
    bases = {name: read(tmp_path, name, rope_parameters=..., rope_theta=...) for name in ("llama", "gpt_neox")}
    assert {each.model.rope.base for each in bases.values()} == {1e4}
    for name, base in (("smollm3", 2e6), ("gemma3_text", (1e4, 1e4, 1e4, 1e4, 1e4, 1e6))):
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": name, "vocab_size": 29, "num_hidden_layers": 12})
        )
        described = settings.read(tmp_path / "config.json")
        assert architectures.find(described).fields(described)["model.rope.base"] == base


def test_fields_of_transformers_4_give_the_same_config(tmp_path):
    new = read(tmp_path, "llama")
    for scaling in ({"type": "linear", "factor": 2.5}, {"rope_type": "linear", "factor": 2.5}):
        assert read(tmp_path, "llama", rope_parameters=..., rope_theta=5000.0, rope_scaling=scaling) == new
    new = read(tmp_path, "gpt_neox")
    old = {"rope_parameters": ..., "rotary_pct": 0.5, "rotary_emb_base": 5000, "rope_scaling": None}
    assert read(tmp_path, "gpt_neox", **old) == new
    without_a_fraction = read(tmp_path, "gpt_neox", rope_parameters={"rope_theta": 5000.0, "rope_type": "default"})
    assert without_a_fraction.model.rope.fraction == 0.25, "GPT-NeoX's own default"


def test_a_byte_order_mark_is_left_out(tmp_path):
    plain = read(tmp_path, "gpt2")
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    described = settings.read(path)
    assert loading.load("configs/default.py", architectures.find(described).fields(described)) == plain


def test_equivalent_settings_give_equal_configs(tmp_path):
    plain = read(tmp_path, "llama", rope_parameters={"rope_type": "default", "rope_theta": 5000})
    for scaling in ({"type": "linear", "factor": 1.0}, {"rope_type": "default"}):
        assert read(tmp_path, "llama", rope_parameters=..., rope_theta=5000, rope_scaling=scaling) == plain
    both = read(tmp_path, "llama", rope_scaling={"rope_type": "linear", "factor": 4.0}, rope_theta=700)
    assert (both.model.rope.factor, both.model.rope.base) == (4.0, 700), "rope_scaling wins, as in Transformers 5"
    assert read(tmp_path, "llama", hidden_act="swish") == read(tmp_path, "llama")
    assert read(tmp_path, "gpt_neox", hidden_act="gelu_fast").model.activation == "gelu"


YARN = {"rope_type": "yarn", "factor": 4.0}
SMALL = {"num_hidden_layers": 2}


def test_fields_of_yarn_give_its_scale_and_its_bounds(tmp_path):
    rope = lambda **changes: read(tmp_path, "llama", rope_parameters=YARN | changes).model.rope
    assert (rope().scaling, rope().attention_factor) == ("yarn_by_index", None)
    assert rope(attention_factor=1.5).attention_factor == rope(attention_factor=1.5, mscale=9.0).attention_factor == 1.5
    assert rope(mscale=0.5).attention_factor is None, "Transformers needs both"
    share = (1 + 0.05 * math.log(4)) / (1 + 0.2 * math.log(4))
    assert rope(mscale=0.5, mscale_all_dim=2.0).attention_factor == pytest.approx(share, rel=1e-12)
    assert rope(truncate=False).scaling == rope(truncate=None).scaling == "yarn_unrounded"


def test_slopes_of_mpt_and_norms_of_phi_are_read(tmp_path):
    assert read(tmp_path, "mpt", attn_config={"alibi_bias_max": 16}).model.alibi_exponent == 16
    phi = read(tmp_path, "phi", qk_layernorm=True, layer_norm_eps=1e-4, **SMALL).model
    assert (phi.variants.qk_norm, phi.variants.qk_norm_epsilon) == ("layernorm", 1e-4)


@pytest.mark.parametrize(
    "model_type, changes, message",
    [
        ("rwkv", {}, r'model_type: found "rwkv"; must be gpt2 or gpt_neo or opt or gpt_neox or '),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, r"scale_attn_by_inverse_layer_idx: found true; must be"),
        ("gpt2", {"scale_attn_weights": False}, r"scale_attn_weights: found false; must be true to be imported"),
        ("gpt2", {"layer_norm_epsilon": 0}, r"model.norm_epsilon: found 0.0; must be in 1e-15..0.01"),
        ("gpt2", {"layer_norm_epsilon": "x"}, r'layer_norm_epsilon: found "x"; must be a finite number'),
        ("gpt2", {"activation_function": "quick_gelu"}, r'activation_function: found "quick_gelu"; must be'),
        ("gpt2", {"n_layer": "three"}, r'n_layer: found "three"; must be a whole number in 1'),
        ("gpt2", {"n_inner": 0}, r"n_inner: found 0; must be a whole number in 1..16777216"),
        ("gpt2", {"quantization_config": {"bits": 4}}, r"quantization_config: found .*; must be null to be imported"),
        ("gpt2", {"n_head": 5}, r"model.d_model: found 24; must be divisible by model.num_heads \(5\)"),
        ("llama", {"head_dim": 0}, r"head_dim: found 0; must be a whole number"),
        ("llama", {"mlp_bias": 1}, r"mlp_bias: found 1; must be true or false"),
        ("llama", {"hidden_act": "gelu"}, r'hidden_act: found "gelu"; must be silu or swish to be imported'),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, r'rope_parameters.rope_type: found "longrope"; must'),
        ("llama", {"rope_parameters": YARN | {"truncate": 1}}, r"truncate: found 1; must be true or false"),
        ("llama", {"rope_parameters": YARN | {"attention_factor": 0}}, r"attention_factor: found 0; must be above 0"),
        (
            "llama",
            {"rope_parameters": YARN | {"attention_factor": 2, "factor": 1}},
            r"attention_factor: .* must be 1 t",
        ),
        ("gpt_neox", {"rope_parameters": YARN}, r'rope_type: found "yarn"; must not be yarn, because only a part of'),
        (
            "llama",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 9}},
            r"original_max_position_embeddings: found 9; must be 16 to be imported",
        ),
        ("gemma2", SMALL | {"hidden_activation": "gelu"}, r'hidden_activation: found "gelu"; must be gelu_py'),
        ("gemma2", SMALL | {"query_pre_attn_scalar": 0}, r"query_pre_attn_scalar: found 0; must be a whole number"),
        ("gemma3_text", SMALL | {"attn_logit_softcapping": 5.0}, r"attn_logit_softcapping: found 5.0; must be null"),
        (
            "gemma3_text",
            SMALL | {"rope_scaling": YARN},
            r"rope_scaling: found .*; must be null or linear to be imported",
        ),
        (
            "gemma3_text",
            SMALL | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"full_attention": {}}},
            r"rope_scaling: found .*; must be null to be imported",
        ),
        (
            "gemma3_text",
            SMALL | {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
            r'rope_parameters.sliding_attention.rope_type: found "linear"; must be default to be imported',
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "factor": 2}},
            r"original_max_position_embeddings: found n",
        ),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, r"rope_parameters.factor: found nothing; must be at l"),
        ("llama", {"rope_scaling": {"rope_type": None, "type": "su", "factor": 4.0}}, r'type: found "su"; must be'),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor: found 0.5; must be"),
        ("llama", {"rope_parameters": {"rope_theta": 10**400}}, r"rope_theta: found 1000.*; must be a finite number"),
        ("llama", {"vocab_size": 2**40, "hidden_size": 2**40}, r"hidden_size: found 1099511627776; must be a whole n"),
        ("llama", {"rope_parameters": 3}, r"rope_parameters: found 3; must be a JSON object"),
        ("gpt_neox", {"use_parallel_residual": 1}, r"use_parallel_residual: found 1; must be true or false"),
        ("mistral", SMALL | {"sliding_window": 0}, r"sliding_window: found 0; must be a whole number"),
        ("qwen2", SMALL | {"layer_types": ["full_attention"]}, r"layer_types: found .*; must be a list of 2 values"),
        (
            "qwen2",
            SMALL | {"layer_types": 2 * ["sliding_attention"]},
            r"layer_types: .*; must be full_attention without",
        ),
        ("smollm3", SMALL | {"no_rope_layers": [1, 2]}, r"no_rope_layers: found \[1, 2\]; must be a list of 2 values"),
        ("smollm3", SMALL | {"use_sliding_window": True}, r"use_sliding_window: found true; must be false"),
        (
            "gemma",
            SMALL | {"use_bidirectional_attention": True},
            r"use_bidirectional_attention: found true; must be false",
        ),
        ("olmo", SMALL | {"clip_qkv": "8"}, r'clip_qkv: found "8"; must be a finite number'),
        ("starcoder2", SMALL | {"use_bias": False}, r"use_bias: found false; must be true to be imported"),
        ("gpt_neo", {"num_layers": 2, "attention_types": [[["near"], 2]]}, r"attention_types: .*; must give global or"),
        ("gpt_neo", {"num_layers": 2, "attention_types": 3}, r"attention_types: found 3; must give global or local"),
        ("opt", {"do_layer_norm_before": False}, r"do_layer_norm_before: found false; must be true to be imported"),
        ("opt", {"word_embed_proj_dim": 512}, r"word_embed_proj_dim: found 512; must be 768 to be imported"),
        (
            "bloom",
            {"apply_residual_connection_post_layernorm": True},
            r"apply_residual_connection_post_layernorm: found",
        ),
        ("gpt_neox", {"attention_bias": False}, r"attention_bias: found false; must be true to be imported"),
        ("gpt_neox", {"rotary_pct": "x", "rope_parameters": ...}, r'rotary_pct: found "x"; must be a finite number'),
        ("mpt", {"attn_config": {"alibi": False}}, r"attn_config.alibi: found false; must be true to be imported"),
        ("mpt", {"attn_config": {"clip_qkv": -6}}, r"attn_config.clip_qkv: found -6; must be a finite number >= 0"),
        ("mpt", {"expansion_ratio": 2}, r"expansion_ratio: found 2; must be 4 to be imported"),
        ("t5", {"d_kv": 0}, r"d_kv: found 0; must be a whole number"),
        (
            "t5",
            {"feed_forward_proj": "gated-relu"},
            r'feed_forward_proj: found "gated-relu"; must be relu or gated-gelu',
        ),
        ("t5", {"is_encoder_decoder": False}, r"is_encoder_decoder: found false; must be true to be imported"),
        (
            "t5",
            {"relative_attention_num_buckets": 6},
            r"model.t5.num_buckets: found 6; must be a positive multiple of 4",
        ),
        ("t5", {"relative_attention_max_distance": 8}, r"model.t5.max_distance: found 8; must be above model.t5.num_b"),
        ("t5", {"scale_decoder_outputs": "no"}, r'scale_decoder_outputs: found "no"; must be true or false'),
        ("t5", {"num_decoder_layers": 0}, r"num_decoder_layers: found 0; must be a whole number in 1"),
        (
            "bert",
            {"position_embedding_type": "relative_key"},
            r'position_embedding_type: found "relative_key"; must be',
        ),
        ("bert", {"is_decoder": True}, r"is_decoder: found true; must be false to be imported"),
        ("bert", {"add_cross_attention": True}, r"add_cross_attention: found true; must be false to be imported"),
        ("bert", {"hidden_act": "silu"}, r'hidden_act: found "silu"; must be gelu_new or gelu or relu'),
        ("bert", {"type_vocab_size": 0}, r"type_vocab_size: found 0; must be a whole number in 1"),
        ("roberta", {"hidden_act": "relu"}, r'hidden_act: found "relu"; must be gelu to be imported'),
        ("roberta", {"pad_token_id": -1}, r"pad_token_id: found -1; must be a whole number"),
        ("roberta", {"pad_token_id": 15}, r"max_position_embeddings: found 16; must be above 16"),
    ],
)
def test_unsupported_settings_are_refused(model_type, changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        read(tmp_path, model_type, **changes)


@pytest.mark.parametrize("text, message", [("{", "valid JSON"), ("[1]", "must be a JSON object"), (None, "not found")])
def test_a_broken_config_json_is_refused(text, message, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=rf"config.json: .*{message}"):
        settings.read(tmp_path / "config.json")
