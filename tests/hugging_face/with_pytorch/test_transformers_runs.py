"""Runs and their comparison with Transformers (`make test-hugging-face`)."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from mini_gpt.data import spans
from mini_gpt.data.text_batches import corrupted_blocks
from mini_gpt.evaluation import perplexity
from mini_gpt.generation import decoding as generation
from mini_gpt.generation.sampling import Sampling
from mini_gpt.hugging_face import comparing, exporting
from mini_gpt.insight import observing
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import loop
from mini_gpt.training.run import Run
from tests.conftest import SMALL
from tests.hugging_face.bpe_tokenizers import like_robertas
from tests.hugging_face.foreign_tokenizers import wordpiece
from tests.hugging_face.models import BERT as BERT_FIELDS
from tests.hugging_face.models import T5 as T5_MODEL
from tests.hugging_face.models import written
from tests.hugging_face.test_comparing import TEXT, first_difference, source
from tests.hugging_face.test_importing import imported, without_head
from tests.hugging_face.with_pytorch.test_transformers import loaded

# Transformers reads exported runs: losses, greedy texts, filled masks, and the code of the model cards.

T5_FIELDS = T5_MODEL | {"activation": "geglu"}
TASK_FIELDS = {"data__corpus": "task:copy", "data__tokenizer": "characters", "data__task_length": 4}


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


def run_the_card(directory):
    """Run the code of the model card."""
    code = re.search(r"```python\n(.*?)```", (directory / "README.md").read_text(), re.DOTALL)[1]
    exec(code, {"DIRECTORY": str(directory)})


def test_greedy_texts_are_equal(run):
    run, out = run
    run_the_card(out)
    prompt = run.tokenizer.encode("the cat")
    (mine,) = generation.generate(run.model, [prompt], length=12, sampling=Sampling(temperature=0.0))
    tokens_BL = torch.from_numpy(prompt.astype(np.int64))[None]
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    other = loaded(out).generate(tokens_BL, attention_mask=torch.ones_like(tokens_BL), **options)
    assert other[0, len(prompt) :].tolist() == mine.tolist()


def test_an_mpt_reads_longer_texts_as_its_card_says(small, tmp_path):
    fields = {"model__position": "alibi", "model__activation": "gelu_exact", "model__use_bias": False}
    loop.train(small(train__steps=20, data__isolate_documents=True, **fields), tmp_path, conclude=False)
    run, out = Run(tmp_path), tmp_path / "out"
    exporting.export(run, out)
    card = (out / "README.md").read_text()
    assert "| longer texts | from_pretrained with max_seq_len of their length, in tokens |" in card
    assert "| documents | attention and positions of one document only; give texts of one document |" in card
    tokens_BL = np.random.default_rng(5).integers(97, 122, (1, 3 * run.config.context_length))
    with torch.inference_mode():
        with pytest.raises(RuntimeError, match="size of tensor"):
            loaded(out).eval()(torch.from_numpy(tokens_BL))
        found_BLV = loaded(out, max_seq_len=tokens_BL.shape[1]).eval()(torch.from_numpy(tokens_BL)).logits.numpy()
    wanted_BLV = run.model.logits(jnp.array(tokens_BL))
    np.testing.assert_allclose(found_BLV, wanted_BLV, rtol=1e-4, atol=1e-4)
    for length in (tokens_BL.shape[1], 4096):
        exporting.export(run, tmp_path / str(length), exporting.Options(length=length))
        model = loaded(tmp_path / str(length)).eval()
        assert model.config.max_seq_len == length
        for tokens in (tokens_BL, tokens_BL[:, :9]):
            with torch.inference_mode():
                found_BLV = model(torch.from_numpy(tokens)).logits.numpy()
            np.testing.assert_allclose(found_BLV, wanted_BLV[:, : tokens.shape[1]], rtol=1e-4, atol=1e-4)
    prompt, context = tokens_BL[:, :9], run.config.context_length
    options = {"max_new_tokens": context, "min_new_tokens": context, "do_sample": False, "pad_token_id": 0}
    other = model.generate(torch.from_numpy(prompt), **options)[0, prompt.shape[1] :].tolist()
    (mine,) = generation.generate(run.model, prompt, length=context, sampling=Sampling(temperature=0.0))
    assert other == mine.tolist(), "the text is longer than the context"


@pytest.mark.parametrize("position", ["none", "sinusoidal"])
def test_models_without_learned_positions_become_gpt2(position, small, tmp_path):
    loop.train(small(train__steps=20, model__position=position), tmp_path, conclude=False)
    run, length = Run(tmp_path), 3 * SMALL["context_length"]
    exporting.export(run, tmp_path / "out", exporting.Options(length=length))
    assert f"| context | {length} tokens |" in (tmp_path / "out" / "README.md").read_text()
    tokens_BL = np.random.default_rng(5).integers(97, 122, (1, length))
    model = loaded(tmp_path / "out").eval()
    with torch.inference_mode():
        found_BLV = model(torch.from_numpy(tokens_BL)).logits.numpy()
    np.testing.assert_allclose(found_BLV, run.model.logits(jnp.array(tokens_BL)), rtol=1e-4, atol=1e-4)
    prompt = tokens_BL[:, :9]
    options = {"max_new_tokens": length - 9, "min_new_tokens": length - 9, "do_sample": False, "pad_token_id": 0}
    other = model.generate(torch.from_numpy(prompt), **options)[0, 9:].tolist()
    (mine,) = generation.generate(run.model, prompt, length=length - 9, sampling=Sampling(temperature=0.0))
    assert other == mine.tolist()
    run_the_card(tmp_path / "out")


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe", "characters"])
def test_masked_tokens_are_predicted_alike(tokenizer, small, tmp_path):
    fields = {f"model__{name}": value for name, value in BERT_FIELDS.items()} | {"train__objective": "masked"}
    loop.train(
        small(data__tokenizer=tokenizer, data__vocab_size=300, train__steps=20, **fields), tmp_path, conclude=False
    )
    run, out = Run(tmp_path), tmp_path / "out"
    exporting.export(run, out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.mask_token_id == run.model.mask_id
    inputs = tokenizer("the c<mask>t sat", return_tensors="pt")
    ids = [*run.tokenizer.encode("the c").tolist(), run.model.mask_id, *run.tokenizer.encode("t sat").tolist()]
    assert inputs["input_ids"].tolist() == [ids]
    with torch.inference_mode():
        found_BLV = loaded(out).eval()(**inputs).logits.numpy()
    np.testing.assert_allclose(found_BLV, run.model.logits(jnp.array([ids])), rtol=1e-4, atol=1e-4)
    run_the_card(out)


def test_greedy_targets_of_an_encoder_decoder_are_equal(small, tmp_path):
    fields = TASK_FIELDS | {f"model__{name}": value for name, value in T5_FIELDS.items()}
    loop.train(small(train__steps=600, optimizer__learning_rate=3e-3, **fields), tmp_path, conclude=False)
    run, out = Run(tmp_path), tmp_path / "out"
    exporting.export(run, out)
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(out), loaded(out)
    end = tokenizer.eos_token_id
    texts = ["abca", "b", "cccccc"]
    sources = [run.tokenizer.encode(text) for text in texts]
    start = [np.array([end])] * len(texts)
    mine = generation.generate(run.model, start, length=10, sources=sources, sampling=Sampling(temperature=0.0))
    tokenizer.padding_side = "right"
    inputs = tokenizer([tokenizer.eos_token + text for text in texts], return_tensors="pt", padding=True)
    options = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    other = model.generate(**inputs, **options)
    run_the_card(out)
    assert other[:, 0].tolist() == [end] * 3, "a target starts with the separator"
    for row, tokens in zip(other, mine, strict=True):
        until = next((at for at, token in enumerate(tokens.tolist()) if token == end), 10)  # theirs has no end here
        assert until > 0 and row[1 : 1 + until].tolist() == tokens.tolist()[:until]


@pytest.mark.parametrize("kind", ["bytes", "bpe", "characters"])
def test_runs_of_span_corruption_are_exported_with_their_sentinels(kind, small, tmp_path):
    fields = {f"model__{name}": value for name, value in T5_FIELDS.items()} | {"train__objective": "span_corruption"}
    fields |= {"data__tokenizer": kind, "data__vocab_size": 300, "source_length": 32}
    loop.train(small(train__steps=30, **fields), tmp_path, conclude=False)
    run, out = Run(tmp_path), tmp_path / "out"
    exporting.export(run, out)
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(out), loaded(out)
    text = "the <{}> sat on <{}>dog"
    source = tokenizer(text.format("extra_id_0", "extra_id_1"))["input_ids"]
    assert source == spans.encode(text.format(0, 1), run.tokenizer).tolist() and max(source) == len(tokenizer) - 1
    vocab = run.model.vocab
    _, batch = next(corrupted_blocks(run.store.tokens("validation"), run.config, vocab=vocab, batch_size=4, seed=1))
    shown = batch["source"].max(axis=1)
    assert (shown == len(tokenizer) - 1).all(), "each source has a sentinel"
    inputs, source_BS = (torch.from_numpy(batch[name].astype(np.int64)) for name in ("inputs", "source"))
    with torch.inference_mode():
        read = {"input_ids": source_BS.clamp(min=0), "attention_mask": source_BS >= 0, "decoder_input_ids": inputs}
        found_BLV = model.eval()(**read).logits.numpy()
    logits_BLV = run.model.logits(jnp.asarray(batch["inputs"]), None, None, jnp.asarray(batch["source"]))
    np.testing.assert_allclose(found_BLV, logits_BLV, rtol=1e-4, atol=1e-4 * np.abs(logits_BLV).max())
    (mine,) = generation.greedy_targets(run.model, [np.array(source)], tokenizer.eos_token_id, 12)
    other = model.generate(torch.tensor([source]), max_new_tokens=12, do_sample=False)[0].tolist()
    assert other[: 1 + len(mine)] == [tokenizer.eos_token_id, *mine] and len(mine) > 0
    assert other[1 + len(mine) :] in ([], [tokenizer.eos_token_id])
    run_the_card(out)


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


# `compare` of imported and exported models with Transformers (`make test-hugging-face`).

# {model: a tensor in its second layer}
MODELS = {
    "learned": "transformer.h.1.mlp.c_proj.weight",
    "pythia": "gpt_neox.layers.1.mlp.dense_4h_to_h.weight",
    "llama, grouped, biased": "model.layers.1.mlp.down_proj.weight",
    "gemma2": "model.layers.1.post_feedforward_layernorm.weight",
    "olmo2": "model.layers.1.post_feedforward_layernorm.weight",
    "opt": "model.decoder.layers.1.fc2.weight",
    "bloom": "transformer.h.1.mlp.dense_4h_to_h.weight",
    "alibi": "transformer.blocks.1.ffn.down_proj.weight",
}


@pytest.mark.parametrize("name", MODELS)
def test_an_import_equals_its_source_until_a_layer_is_changed(name, tmp_path, corpus_files):
    files = source(tmp_path / "files", name=name)
    run = imported(files, tmp_path / "run", corpus_files)
    report, are_equal = comparing.compare(run.workdir, files, TEXT, 1e-4)
    assert are_equal and first_difference(report) is None, report
    assert re.search(r"^right  .*: Transformers [\d.]+", report, re.M)
    report, are_equal = comparing.compare(run.workdir, source(files, changed=MODELS[name]), TEXT, 1e-4)
    rows = first_difference(report)
    assert not are_equal and rows[:2] == ["embeddings", "after layer 0"] and len(rows) == 3, report
    assert rows[2] in ("after layer 1", "after layer 1, normed")


def test_a_masked_model_is_compared(tmp_path, corpus_files):
    files, tokenizer = tmp_path / "files", like_robertas(300)
    rows = tokenizer.get_vocab_size()
    written("roberta", files, vocab_size=rows, end=rows - 1)
    tokenizer.save(str(files / "tokenizer.json"))
    names = {"bos_token": "<s>", "pad_token": "<unk>", "mask_token": "<mask>"}
    (files / "tokenizer_config.json").write_text(json.dumps(names))
    run = imported(files, tmp_path / "run", corpus_files)
    report, are_equal = comparing.compare(run.workdir, files, TEXT, 1e-4)
    assert are_equal and "of the tokens themselves: none is masked" in report, report


@pytest.mark.parametrize("kind", ["bytes", "bpe", "characters"])
def test_a_run_equals_its_export(kind, trained, tmp_path):
    run = Run(trained(data__tokenizer=kind, data__vocab_size=300, model__position="learned"))
    exporting.export(run, tmp_path / "out")
    report, are_equal = comparing.compare(run.workdir, tmp_path / "out", TEXT, 1e-4)
    assert are_equal and "tokens: " in report, report


def test_missing_tensors_and_encoders_are_refused(tmp_path, corpus_files):
    files = source(tmp_path / "files")
    run = imported(files, tmp_path / "run", corpus_files)
    (files / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"^--right: .*files: Transformers can't open it \("):
        comparing.compare(run.workdir, files, TEXT, 1e-4)
    with pytest.raises(UserError, match=r"t5: found a model with an encoder; compare needs models"):
        comparing.compare(run.workdir, source(tmp_path / "t5", name="t5"), TEXT, 1e-4)


# An encoder without a prediction head computes the same as in Transformers.


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
