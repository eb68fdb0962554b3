"""Exported and imported models compute the same as Transformers (`make test-hugging-face`)."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mini_gpt.config import loading as configs
from mini_gpt.data import spans
from mini_gpt.data.text_batches import corrupted_blocks
from mini_gpt.evaluation import perplexity
from mini_gpt.generation import decoding as generation
from mini_gpt.generation.sampling import Sampling
from mini_gpt.hugging_face import architectures, exporting, importing, settings
from mini_gpt.hugging_face.architectures import ARCHITECTURES
from mini_gpt.model import gpt, parameters
from mini_gpt.model.positions.biases import t5_bucket
from mini_gpt.training import loop
from mini_gpt.training.run import Run
from tests.conftest import SMALL
from tests.hugging_face.models import BERT as BERT_FIELDS
from tests.hugging_face.models import EXPORTABLE, FURTHER, VOCAB, written
from tests.hugging_face.models import T5 as T5_MODEL

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


T5_FIELDS = T5_MODEL | {"activation": "geglu"}
TASK_FIELDS = {"data__corpus": "task:copy", "data__tokenizer": "characters", "data__task_length": 4}


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
    read = configs.load("configs/default.py", FURTHER.get(architecture.model_type, {}) | fields)
    read = configs.override(read, {"model.dtype": "float32"})
    arrays = importing.read_weights(tmp_path / "there", architecture, read.model, VOCAB)
    expected_BLV = theirs(loaded(tmp_path / "there", dtype=torch.float32))
    assert_equal_logits(ours(read, arrays), expected_BLV, read)


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
    assert f"| longest text | {length} tokens, for which" in (tmp_path / "out" / "README.md").read_text()
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
    assert tokenizer.mask_token_id == run.model.vocab_size
    inputs = tokenizer("the c<mask>t sat", return_tensors="pt")
    ids = [*run.tokenizer.encode("the c").tolist(), run.model.vocab_size, *run.tokenizer.encode("t sat").tolist()]
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
    size = run.model.vocab_size
    _, batch = next(corrupted_blocks(run.store.tokens("validation"), run.config, vocab_size=size, batch_size=4, seed=1))
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


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("num_buckets, max_distance", [(32, 128), (8, 9), (16, 300), (64, 100), (4, 1000)])
def test_the_buckets_of_t5_are_equal(bidirectional, num_buckets, max_distance):
    from transformers.models.t5.modeling_t5 import T5Attention

    offsets, sizes = np.arange(-1500, 1501), {"num_buckets": num_buckets, "max_distance": max_distance}
    found = t5_bucket(jnp.asarray(offsets), causal=not bidirectional, **sizes)
    wanted = T5Attention._relative_position_bucket(torch.from_numpy(offsets), bidirectional=bidirectional, **sizes)
    np.testing.assert_array_equal(found, wanted.numpy())


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
