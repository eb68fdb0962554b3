"""An encoder without a prediction head computes the same as in Transformers."""

import json

import numpy as np
import torch
import transformers

from mini_gpt.hugging_face import comparing
from mini_gpt.insight import observing
from tests.hugging_face.foreign_tokenizers import wordpiece
from tests.hugging_face.test_encoders_without_head import without_head
from tests.hugging_face.test_importing import imported


def test_transformers_computes_the_same_hidden_states(corpus_files, tmp_path):
    source = without_head(tmp_path / "model")
    run = imported(source, tmp_path / "run", corpus_files)
    theirs = np.random.default_rng(0).integers(5, wordpiece().get_vocab_size(), (2, 9))
    model = transformers.BertModel.from_pretrained(source, attn_implementation="eager").eval()
    with torch.inference_mode():
        wanted = model(torch.from_numpy(theirs), output_attentions=True)
    inputs = run.model.with_layout(theirs.astype(np.int32))
    np.testing.assert_allclose(run.model.edited().hidden(*inputs), wanted.last_hidden_state, atol=1e-4)
    for layer, weights_BHLS in zip(observing.layers(run.model.edited(), inputs), wanted.attentions, strict=True):
        np.testing.assert_allclose(layer.attention.weights_BHLS, weights_BHLS, atol=1e-5)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "mask_token": "[MASK]"}  # else that of the model's type
    (source / "tokenizer_config.json").write_text(json.dumps(names))
    report, are_equal = comparing.compare(run.workdir, source, "the cat sat", 1e-4)
    assert are_equal and ", equal\n" in report, report
