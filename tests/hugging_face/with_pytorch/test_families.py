"""Families of models compute the same here and in Transformers, also with a changed field of config.json."""

import json

import numpy as np
import pytest
import torch
import transformers

from mini_gpt.hugging_face.architectures import ARCHITECTURES
from mini_gpt.model.positions.biases import alibi_slopes
from mini_gpt.runtime.errors import UserError
from tests.hugging_face import families

# Each family of models computes the same here and in Transformers (`make test-hugging-face`).


def test_the_table_has_each_family_and_each_architecture():
    rows = [line.split(" | ") for line in families.TABLE.read_text().splitlines() if line.startswith("| ")]
    assert [row[0].removeprefix("| ") for row in rows[1:]] == list(families.FAMILIES)
    assert rows[0] == ["| family", *families.COLUMNS[:-1], f"{families.COLUMNS[-1]} |"]
    compared = {kind for kind, _ in families.FAMILIES.values()}
    assert all(any(each.class_name.startswith(kind) for kind in compared) for each in ARCHITECTURES.values())


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_family_computes_the_same_as_in_transformers(family, seed, tmp_path):
    if not hasattr(transformers, f"{families.FAMILIES[family][0]}Config"):
        pytest.skip(f"Transformers {transformers.__version__} has no {family}")
    results = families.measure(family, seed, tmp_path)
    errors = {name: value for name, value in results.items() if isinstance(value, float)}
    assert max(errors.values()) < 1e-4, errors
    assert results["greedy text"] is not False, results
    assert results["same bits"] or family == "T5, T5 1.1", "only the last norm of T5 is rounded"


# A field of config.json that changes Transformers' logits changes the import too, or is refused.

LLAMA, QWEN, SMOLLM = "Llama 1, 2, TinyLlama, SmolLM2", "Qwen2, Qwen2.5", "SmolLM3"
MISSING = "missing"
YARN = families.YARN | {"original_max_position_embeddings": 64}
# (family, changed fields, whether the import must be possible)
CHANGES = [
    (LLAMA, {"is_causal": False}, False),
    ("T5, T5 1.1", {"is_causal": False}, False),
    ("Pythia", {"is_causal": False}, False),
    ("Mistral", {"layer_types": ["full_attention", "sliding_attention"]}, False),
    ("Gemma 3, text", {"layer_types": MISSING, "sliding_window_pattern": 3}, True),
    ("Gemma 3, text", {"layer_types": MISSING, "sliding_window_pattern": MISSING}, True),
    ("Gemma 2", {"layer_types": MISSING}, True),
    (SMOLLM, {"rope_theta": MISSING, "rope_parameters": MISSING}, True),
    ("GPT-2", {"num_attention_heads": 1}, False),
    ("GPT-2", {"n_head": MISSING, "num_attention_heads": 1}, True),
    ("Bloom", {"n_head": MISSING, "num_attention_heads": 2}, True),
    ("MPT", {"n_heads": MISSING, "num_attention_heads": 1}, True),
    ("GPT-Neo, TinyStories", {"num_heads": MISSING, "num_attention_heads": 1}, True),
    ("GPT-Neo, TinyStories", {"attention_layers": ["global", "global", "global"]}, False),
    ("T5, T5 1.1", {"dense_act_fn": "silu"}, False),
    ("T5, T5 1.1", {"scale_decoder_outputs": None}, False),
    ("Llama 3.1, 3.2", {"original_max_position_embeddings": 4}, True),
    (LLAMA, {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, False),
    ("StarCoder2", {"partial_rotary_factor": 0.5}, False),
    ("Gemma 3, text", {"rope_parameters": {"full_attention": {"type": "linear", "factor": 4.0}}}, True),
    ("Gemma 3, text", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, False),
    (LLAMA, {"rope_scaling": {"rope_type": "dynamic", "factor": 1.0}}, True),
    (LLAMA, {"rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0}}, True),
    ("OLMo 1", {"clip_qkv": 0.0}, False),
    (QWEN, {"use_sliding_window": True, "sliding_window": None, "layer_types": MISSING}, True),
    (QWEN, {"num_key_value_heads": None}, False),
    ("Gemma 1", {"use_bidirectional_attention": False}, True),
    ("Llama with YaRN", {"rope_scaling": YARN | {"attention_factor": 1.7}}, True),
    ("Llama with YaRN", {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 2.0, "truncate": False}}, True),
    ("Llama with YaRN", {"rope_scaling": YARN | {"mscale": 3.0, "truncate": None}}, True),
    ("Llama with YaRN", {"rope_scaling": YARN | {"attention_factor": 1.7, "factor": 1.0}}, False),
]


@pytest.mark.parametrize("family, changes, possible", CHANGES, ids=str)
def test_a_changed_field_is_read_or_refused(family, changes, possible, tmp_path):
    if transformers.__version__.startswith("4.") and changes.keys() & {
        "rope_parameters",
        "original_max_position_embeddings",
    }:
        pytest.skip("Transformers 4 does not read these fields")
    kind, draw = families.FAMILIES[family]
    torch.manual_seed(0)
    rng = np.random.default_rng(1)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=families.VOCAB, bos_token_id=0, eos_token_id=1, **draw(rng)
    )
    model = families._auto_class(config.model_type).from_config(config)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.1 * torch.randn_like(tensor))
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text()) | changes
    if "rope_scaling" in changes:  # the new name would hide it
        values = {"rope_theta": 500.0} | {name: value for name, value in values.items() if name != "rope_parameters"}
    path.write_text(json.dumps({name: value for name, value in values.items() if value != MISSING}))
    try:
        mine, _ = families.imported(tmp_path)
    except (UserError, AssertionError) as error:
        assert not possible, error
        return
    tokens_BL = np.random.default_rng(2).integers(4, families.VOCAB, (2, 30))
    tokens_BL[:, 0] = 0
    source_BS = tokens_BL[:, 5:15] if mine.config.model.encoder_layers else None
    given = () if source_BS is None else (None, None, source_BS)
    wanted_BLV = families._logits(families._loaded(tmp_path, kind), tokens_BL, source_BS)
    found_BLV = np.asarray(mine.logits(tokens_BL, *given))
    assert np.abs(found_BLV - wanted_BLV).max() < 1e-4 * np.abs(wanted_BLV).max()


@pytest.mark.parametrize("heads, exponent", [(4, 16), (6, 3), (12, 8)])
def test_slopes_of_alibi_are_those_of_mpt(heads, exponent):
    """Transformers' MPT always passes 8; the code of the published MPT passes alibi_bias_max."""
    build = transformers.models.mpt.modeling_mpt.build_mpt_alibi_tensor
    wanted_HS = build(heads, 9, alibi_bias_max=exponent)[:, 0].numpy()
    slopes_H1 = np.array(alibi_slopes(heads, exponent))[:, None]
    np.testing.assert_allclose(-slopes_H1 * np.arange(8, -1, -1), wanted_HS, rtol=1e-6)
