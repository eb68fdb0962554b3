"""GGUF files, compared with Transformers and the package gguf."""

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.integrations import gguf as integrations
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from mini_gpt.hugging_face import gguf_tokenizers
from tests.hugging_face import families, gguf_files
from tests.hugging_face.bpe_tokenizers import HARD, TEXT
from tests.hugging_face.foreign_tokenizers import HARD_TEXTS
from tests.hugging_face.gguf_files import CASES, VOCAB
from tests.hugging_face.test_gguf import convert, of_case, opened, written_tokenizer

QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
NOT_READ = ("n_inner", "max_position_embeddings", "sliding_window", "query_pre_attn_scalar")
NOT_READ += ("final_logit_softcapping", "attn_logit_softcapping")
TEXTS = {"text": TEXT, "hard": HARD, **HARD_TEXTS}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_tensors_are_those_of_the_package_gguf(kind, tmp_path):
    number = gguf.GGMLQuantizationType[kind]
    entries, size = gguf.GGML_QUANT_SIZES[number]
    content = np.random.default_rng(0).integers(0, 256, (6, 4 * size), np.uint8) & 0xBF  # float16 that are finite
    tensors = {"a": ((2, 3), 0, bytes(24)), "b": ((6, 4 * entries), int(number), content.tobytes())}
    found = opened(tmp_path, {"general.alignment": 64}, tensors, alignment=64).tensors["b"].read()
    (theirs,) = (each for each in gguf.GGUFReader(tmp_path / "model.gguf").tensors if each.name == "b")
    wanted = gguf.dequantize(theirs.data, theirs.tensor_type)
    assert found.shape == (6, 4 * entries) and found.dtype == np.float32 and np.abs(wanted).max() > 0
    np.testing.assert_array_equal(found, wanted)


def theirs(path, fields):
    """Return the model of a file, as Transformers reads it, with fields that it does not read from each file."""
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    config.update({key: fields[key] for key in NOT_READ if key in fields} | {"pad_token_id": None})
    if "rope_local_base_freq" in fields:
        config.rope_parameters["sliding_attention"]["rope_theta"] = fields["rope_local_base_freq"]
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and not {*missing} - {"lm_head.weight"}
    model.tie_weights()
    return model.float().eval()


def logits(model, tokens_BL):
    with torch.inference_mode():
        return model(torch.from_numpy(tokens_BL)).logits.numpy()


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_original_and_of_the_file_in_transformers(name, tmp_path):
    fields = CASES[name][2]
    mine, _ = families.imported(convert(tmp_path, *of_case(tmp_path, name, joined=name == "phi3")), VOCAB)
    tokens_BL = np.random.default_rng(0).integers(0, VOCAB, (2, 30))
    found_BLV = np.asarray(mine.logits(jnp.asarray(tokens_BL)))
    original = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in", attn_implementation="eager")
    wanted_BLV = logits(original.float().eval(), tokens_BL)
    assert np.abs(wanted_BLV).max() > 1
    np.testing.assert_allclose(found_BLV, wanted_BLV, rtol=1e-4, atol=1e-4)
    if name not in ("gemma", "phi2", "llama, biased") and "rope_scaling" not in fields:  # it refuses or ignores these
        in_file_BLV = logits(theirs(tmp_path / "model.gguf", fields), tokens_BL)
        np.testing.assert_allclose(found_BLV, in_file_BLV, rtol=1e-4, atol=1e-4)


TOKENIZERS = [("llama", "gpt2", pre) for pre in gguf_tokenizers.PRE_TOKENIZERS]
TOKENIZERS += [(architecture, "llama", "") for architecture in ("llama", "gemma", "gemma2", "phi3")]


@pytest.mark.parametrize("architecture, kind, pre", TOKENIZERS)
def test_tokens_are_those_of_the_file_in_transformers(architecture, kind, pre, tmp_path):
    found, _ = written_tokenizer(tmp_path, {"general.architecture": architecture} | gguf_files.tokenizer(kind, pre))
    name, described, _ = integrations.get_gguf_tokenizer(str(tmp_path / "model.gguf"))
    read, _ = integrations.convert_gguf_tokenizer(name, described)
    for title, text in TEXTS.items():
        if title == "names" or (pre in gguf_tokenizers.SINGLE_DIGITS and any(map(str.isnumeric, text))):
            continue  # Transformers adds names of its own, and does not split off digits
        wanted = read.encode(text, add_special_tokens=False).ids
        assert found.encode_prompt(text, add_special_tokens=False).tolist() == wanted, title
