"""The stored logits, with which the quick tests compare, are those of Transformers.

python -m tests.hugging_face.with_pytorch.test_stored_logits

writes the file anew. Do it for a new case, or for another config.json of an export.
"""

import json
import pathlib
import tempfile

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mini_gpt.hugging_face.architectures import ARCHITECTURES
from tests.hugging_face.models import EXPORTABLE, SOURCE_BS, STORED, TOKENS_BL, fill, written


def computed(name, directory):
    """Return the exported config.json, and Transformers' logits."""
    written(name, directory)
    fill(directory)
    config = json.loads((directory / "config.json").read_text())
    load = getattr(transformers, ARCHITECTURES[config["model_type"]].auto_class).from_pretrained
    model, about = load(directory, output_loading_info=True, attn_implementation="eager")
    assert not any(about.values()), about
    tokens_BL, source_BS = torch.from_numpy(TOKENS_BL), torch.from_numpy(SOURCE_BS)
    inputs = {"input_ids": tokens_BL}
    if model.config.is_encoder_decoder:
        inputs = {"input_ids": source_BS.clamp(min=0), "attention_mask": source_BS >= 0, "decoder_input_ids": tokens_BL}
    with torch.inference_mode():
        return config, model.eval()(**inputs).logits.numpy()


@pytest.mark.parametrize("name", EXPORTABLE)
def test_transformers_computes_the_stored_logits(name, tmp_path):
    class_name = ARCHITECTURES[EXPORTABLE[name][0]].class_name
    if not hasattr(transformers, class_name):
        pytest.skip(f"Transformers {transformers.__version__} has no {class_name}")
    if name == "llama, p-RoPE" and "proportional" not in ROPE_INIT_FUNCTIONS:
        pytest.skip("this version of Transformers has no proportional RoPE")
    config, logits_BLV = computed(name, tmp_path / "out")
    stored = np.load(STORED)
    assert json.loads(str(stored["configs"]))[name] == config
    np.testing.assert_allclose(logits_BLV, stored[name], rtol=1e-4, atol=1e-5 * np.abs(logits_BLV).max())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        found = {name: computed(name, pathlib.Path(directory) / str(at)) for at, name in enumerate(EXPORTABLE)}
    configs = json.dumps({name: config for name, (config, _) in found.items()})
    np.savez_compressed(STORED, configs=configs, **{name: logits_BLV for name, (_, logits_BLV) in found.items()})
