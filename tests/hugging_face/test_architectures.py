"""A config.json of Transformers 4 or 5 gives the right config; unsupported settings are refused."""

import json
import math
import re

import pytest

from mini_gpt.config import loading
from mini_gpt.hugging_face import architectures, settings
from mini_gpt.runtime.errors import UserError
from tests.hugging_face import models

# As written by save_pretrained of Transformers 5, without the fields that do not describe the model.
SIZES = {"num_attention_heads": 4, "num_hidden_layers": 3, "max_position_embeddings": 16}
LLAMA = SIZES | {"hidden_size": 24, "intermediate_size": 40, "head_dim": 6, "num_key_value_heads": 2}
LLAMA |= {"attention_bias": True, "mlp_bias": True, "hidden_act": "silu", "rms_norm_eps": 1e-05}
LLAMA |= {"rope_parameters": {"factor": 2.5, "rope_theta": 5000.0, "rope_type": "linear"}, "tie_word_embeddings": True}
NEOX = SIZES | {"hidden_size": 32, "intermediate_size": 50, "attention_bias": True, "hidden_act": "gelu"}
NEOX |= {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 5000.0, "rope_type": "default"}}
NEW = {"llama": LLAMA, "gpt_neox": NEOX | {"use_parallel_residual": False, "tie_word_embeddings": False}}


def read(directory, model_type, **changes):
    values = {"model_type": model_type} | NEW.get(model_type, {}) | changes
    values = {name: value for name, value in values.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(values))
    described = settings.read(directory / "config.json")
    fields = architectures.find(described).fields(described)
    return loading.load("configs/default.py", models.FURTHER.get(model_type, {}) | fields)


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


ORIGINAL = "original_max_position_embeddings"
LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6}
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


def test_missing_fields_of_nanochat_have_its_defaults(tmp_path):
    config = read(tmp_path, "nanochat")
    model, sizes = config.model, (768, 12, 6, 6, 8192)
    assert (model.d_model, model.num_layers, model.num_heads, model.num_kv_heads, model.d_ff) == sizes
    assert (config.context_length, model.output_soft_cap, model.rope.base, model.norm_epsilon) == (2048, 15, 1e4, 1e-6)
    assert (model.activation, model.tie_embeddings, model.variants.qk_norm_epsilon) == ("relu2", False, 1e-6)
    assert read(tmp_path, "nanochat", final_logit_softcapping=None).model.output_soft_cap is None


def test_the_proportional_rope_of_gemma_4_is_p_rope(tmp_path):
    rope = lambda **changes: read(tmp_path, "llama", rope_parameters=PROPORTIONAL | changes).model.rope
    assert (rope().turning, rope().fraction, rope().base, rope().scaling) == (0.5, 1.0, 1e6, "none")
    assert (rope(factor=8.0).scaling, rope(factor=8.0).factor) == ("linear", 8.0)
    assert rope(partial_rotary_factor=None).turning == 1, "Transformers' default"


# (model_type, changes, the field that the error names)
REFUSED = [
    ("rwkv", {}, "model_type"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2", {"layer_norm_epsilon": 0}, "model.norm_epsilon"),
    ("gpt2", {"layer_norm_epsilon": "x"}, "layer_norm_epsilon"),
    ("gpt2", {"activation_function": "quick_gelu"}, "activation_function"),
    ("gpt2", {"n_layer": "three"}, "n_layer"),
    ("gpt2", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("gpt2", {"n_head": 5}, "model.d_model"),
    ("llama", {"mlp_bias": 1}, "mlp_bias"),
    ("llama", {"vocab_size": 2**40, "hidden_size": 2**40}, "hidden_size"),
    ("llama", {"rope_parameters": 3}, "rope_parameters"),
    ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type"),
    ("llama", {"rope_scaling": {"rope_type": None, "type": "su", "factor": 4.0}}, "rope_scaling.type"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor"),
    ("llama", {"rope_parameters": {"rope_theta": 10**400}}, "rope_parameters.rope_theta"),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 2}}, "original_max_position_embeddings"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, ORIGINAL: 9}}, f"rope_scaling.{ORIGINAL}"),
    ("llama", {"rope_parameters": YARN | {"truncate": 1}}, "rope_parameters.truncate"),
    ("llama", {"rope_parameters": YARN | {"attention_factor": 0}}, "rope_parameters.attention_factor"),
    ("llama", {"rope_parameters": YARN | {"attention_factor": 2, "factor": 1}}, "rope_parameters.attention_factor"),
    ("gpt_neox", {"rope_parameters": YARN}, "rope_parameters.rope_type"),
    ("gpt_neox", {"rope_parameters": PROPORTIONAL}, "rope_parameters.rope_type"),
    ("llama", {"rope_parameters": PROPORTIONAL | {"factor": 0.5}}, "rope_parameters.factor"),
    ("llama", {"rope_parameters": PROPORTIONAL | {"partial_rotary_factor": 0.1}}, "model.rope.turning"),
    ("gemma3_text", {"rope_scaling": PROPORTIONAL}, "rope_scaling"),
    ("gemma4_text", {"rope_parameters": PROPORTIONAL}, "model_type"),
    ("mistral", {"sliding_window": 0}, "sliding_window"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
    ("qwen2", SMALL | {"layer_types": 2 * ["sliding_attention"]}, "layer_types"),
    ("smollm3", SMALL | {"no_rope_layers": [1, 2]}, "no_rope_layers"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ("gemma3_text", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping"),
    ("gemma3_text", {"rope_scaling": YARN}, "rope_scaling"),
    ("gemma3_text", {"rope_scaling": LINEAR, "rope_parameters": {"full_attention": {}}}, "rope_scaling"),
    (
        "gemma3_text",
        {"rope_parameters": {"sliding_attention": LINEAR}},
        "rope_parameters.sliding_attention.rope_type",
    ),
    ("olmo", {"clip_qkv": "8"}, "clip_qkv"),
    ("nanochat", {"hidden_act": "silu"}, "hidden_act"),
    ("nanochat", {"head_dim": 100, "num_hidden_layers": 2, "rope_parameters": YARN}, "rope_parameters"),
    ("nanochat", {"final_logit_softcapping": "15"}, "final_logit_softcapping"),
    ("gpt_neo", {"num_layers": 2, "attention_types": [[["near"], 2]]}, "attention_types"),
    ("gpt_neo", {"num_layers": 2, "attention_types": 3}, "attention_types"),
    ("opt", {"word_embed_proj_dim": 512}, "word_embed_proj_dim"),
    ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi"),
    ("mpt", {"attn_config": {"clip_qkv": -6}}, "attn_config.clip_qkv"),
    ("t5", {"feed_forward_proj": "gated-relu"}, "feed_forward_proj"),
    ("t5", {"relative_attention_num_buckets": 6}, "model.t5.num_buckets"),
    ("t5", {"scale_decoder_outputs": "no"}, "scale_decoder_outputs"),
    ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
    ("bert", {"type_vocab_size": 0}, "type_vocab_size"),
    ("roberta", {"pad_token_id": -1}, "pad_token_id"),
    ("roberta", {"max_position_embeddings": 16, "pad_token_id": 15}, "max_position_embeddings"),
]


@pytest.mark.parametrize("model_type, changes, field", REFUSED, ids=str)
def test_unsupported_settings_are_refused(model_type, changes, field, tmp_path):
    with pytest.raises(UserError, match=rf"(^|: ){re.escape(field)}: found "):
        read(tmp_path, model_type, **changes)


@pytest.mark.parametrize("text, message", [("{", "valid JSON"), ("[1]", "must be a JSON object"), (None, "not found")])
def test_a_broken_config_json_is_refused(text, message, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=rf"config.json: .*{message}"):
        settings.read(tmp_path / "config.json")
