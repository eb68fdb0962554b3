"""The text and the head that pages show first."""

from types import SimpleNamespace

import numpy as np
import pytest

from mini_gpt.data.tokenizers import ByteTokenizer, CharacterTokenizer
from mini_gpt.hugging_face import origin
from mini_gpt.insight import examples, samples
from mini_gpt.insight.heads import typical
from mini_gpt.suites import base
from mini_gpt.suites.base import SuiteOptions

BYTES = ByteTokenizer()


def test_a_split_opens_at_the_start_of_a_document_that_is_like_the_others():
    texts = [
        "the end of a text that is cut",
        "+----+----+----+----+----+",
        *(f"the cat {n} sat on the mat" for n in "1234"),
    ]
    tokens = BYTES.encode("\0".join(texts)).astype(np.int32)
    tokens[tokens == 0] = 256  # the separator
    start = samples.typical_start(tokens, 256, 20)
    assert BYTES.decode(tokens[start : start + 7]) == "the cat"
    assert samples.typical_start(tokens[:10], 256, 20) == 0  # one document
    assert samples.typical_start(tokens, 256, 1000) > 0  # none is as long


@pytest.mark.parametrize(
    "is_imported, step, corpus, tokenizer, given, expected, labelled_on",
    [
        (True, 0, "python_stdlib", BYTES, None, examples.ENGLISH, "english"),
        (True, 0, "python_stdlib", BYTES, "a text", "a text", "english"),
        (True, 0, "text", BYTES, None, None, "text"),
        (True, 9, "python_stdlib", BYTES, None, None, "python_stdlib"),  # trained on it
        (False, 0, "python_stdlib", BYTES, None, None, "python_stdlib"),
        # of proteins
        (True, 0, "python_stdlib", CharacterTokenizer("ACDEFGHIKLMNPQRSTVWY"), None, None, "python_stdlib"),
    ],
)
def test_an_imported_model_without_a_corpus_opens_on_english_and_is_labelled_on_stories(
    small, tmp_path, is_imported, step, corpus, tokenizer, given, expected, labelled_on
):
    if is_imported:
        origin.record_import(tmp_path, tmp_path, {"architecture": "LlamaForCausalLM"})
    config = small(data__corpus=corpus)
    run = SimpleNamespace(step=step, config=config, workdir=tmp_path, tokenizer=tokenizer)
    assert base.own_text(run, SuiteOptions(text=given)) == expected
    labelled = base.with_stories(run)
    assert labelled.config.data.corpus == labelled_on and run.config.data.corpus == corpus


def test_the_telling_head_reads_one_token_that_is_neither_the_first_nor_its_own():
    weights_NHLS = np.zeros((2, 2, 4, 4))
    weights_NHLS[0, 0, :, 0] = 1  # the first token
    weights_NHLS[0, 1] = np.eye(4)  # itself
    weights_NHLS[1, 0] = np.tri(4) / np.arange(1, 5)[:, None]  # all alike
    weights_NHLS[1, 1] = np.eye(4, k=-1)  # the previous one
    assert typical.telling_head(typical.telling(weights_NHLS, of_itself=True)) == (1, 1)
    assert typical.telling_head(typical.telling(weights_NHLS, of_itself=False)) == (0, 1)
