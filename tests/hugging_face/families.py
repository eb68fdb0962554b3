"""Compare each family of models with Transformers, on random models of random sizes.

python -m tests.hugging_face.families [--write] [--configs=3] [NAME ...]

--write: write docs/results/families.md. It needs PyTorch and Transformers (`make test-hugging-face`).
"""

import argparse
import functools
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.config import loading
from mini_gpt.data.layout import PLAIN
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.generation import cache as caches
from mini_gpt.generation import decoding
from mini_gpt.generation.sampling import Sampling
from mini_gpt.hugging_face import architectures, exporting, importing, settings
from mini_gpt.model import build, parameters
from mini_gpt.runtime import sharding
from tests.hugging_face.models import FURTHER

TABLE = pathlib.Path("docs/results/families.md")
VOCAB, CONTEXT, LONG, PROMPT, WRITTEN = 61, 16, 45, 8, 24
PADDING = 3  # the token of RoBERTa
DTYPES = ("float32", "bfloat16", "float16")
Draw = Callable[[np.random.Generator], dict[str, Any]]
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4, "rope_theta": 500.0}


def sizes(rng: np.random.Generator, names: str, *, context: int = CONTEXT, step: int = 1) -> dict[str, Any]:
    """Return odd sizes. names: of the width, layers, heads, feed-forward width and context in config.json.

    step: the width of a head is a multiple of it.
    """
    heads = int(rng.choice([2, 3, 4, 6]))
    width, layers = heads * step * int(rng.integers(6 // step, 15 // step)), int(rng.integers(2, 5))
    return dict(zip(names.split(), (width, layers, heads, int(rng.integers(20, 60)), context), strict=True))


ROTARY = "hidden_size num_hidden_layers num_attention_heads intermediate_size max_position_embeddings"


def rotary(rng: np.random.Generator, **fields: Any) -> dict[str, Any]:
    """Return the sizes of a decoder with RoPE, with any base, tied or not."""
    base = float(rng.choice([100.0, 1e4, 5e5]))
    return sizes(rng, ROTARY, step=4) | {"tie_word_embeddings": bool(rng.integers(2)), "rope_theta": base} | fields


def grouped(rng: np.random.Generator, **fields: Any) -> dict[str, Any]:
    """Return `rotary` with grouped queries."""
    drawn = rotary(rng, **fields)
    heads = drawn["num_attention_heads"]
    groups = [each for each in range(1, heads + 1) if heads % each == 0]
    return drawn | {"num_key_value_heads": int(rng.choice(groups))}


def wide(rng: np.random.Generator, **fields: Any) -> dict[str, Any]:
    """Return `grouped` with heads of any width."""
    return grouped(rng, **fields) | {"head_dim": 2 * int(rng.integers(2, 8))}


def window(rng: np.random.Generator) -> int:
    return int(rng.integers(3, 8))


def opt(rng: np.random.Generator) -> dict[str, Any]:
    names = "hidden_size num_hidden_layers num_attention_heads ffn_dim max_position_embeddings"
    return sizes(rng, names, context=LONG)


def gpt_neo(rng: np.random.Generator) -> dict[str, Any]:
    names = "hidden_size num_layers num_heads intermediate_size max_position_embeddings"
    drawn = sizes(rng, names, context=LONG) | {"num_layers": 3}
    return drawn | {"attention_types": [[["global", "local"], 1], [["local"], 1]], "window_size": window(rng)}


def gemma(rng: np.random.Generator, **fields: Any) -> dict[str, Any]:
    return wide(rng, query_pre_attn_scalar=int(rng.integers(4, 30)), sliding_window=window(rng), **fields)


def nanochat(rng: np.random.Generator) -> dict[str, Any]:
    return grouped(rng, attention_bias=bool(rng.integers(2)), final_logit_softcapping=float(rng.choice([2.0, 15.0])))


def t5(rng: np.random.Generator) -> dict[str, Any]:
    drawn = sizes(rng, "d_model num_layers num_heads d_ff n_positions")
    gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    return drawn | {"d_kv": int(rng.integers(3, 9)), "num_decoder_layers": 2} | (gated if rng.integers(2) else {})


def bert(rng: np.random.Generator, **fields: Any) -> dict[str, Any]:
    context = LONG + PADDING + 1 if "pad_token_id" in fields else LONG  # RoBERTa counts from the padding token
    return sizes(rng, ROTARY, context=context) | {"tie_word_embeddings": bool(rng.integers(2))} | fields


# {family: (class of its config in Transformers, fields of a random model)}
FAMILIES: dict[str, tuple[str, Draw]] = {
    "GPT-2": ("GPT2", lambda rng: sizes(rng, "n_embd n_layer n_head n_inner n_positions", context=LONG)),
    "GPT-Neo, TinyStories": ("GPTNeo", gpt_neo),
    "OPT": ("OPT", opt),
    "GPT-NeoX": ("GPTNeoX", lambda rng: rotary(rng, use_parallel_residual=False, rotary_pct=1.0)),
    "Pythia": ("GPTNeoX", lambda rng: rotary(rng, rotary_pct=0.5)),
    "Phi-1, 1.5, 2": ("Phi", lambda rng: grouped(rng, partial_rotary_factor=0.5)),
    "Phi with QK-norm": ("Phi", lambda rng: grouped(rng, partial_rotary_factor=0.5, qk_layernorm=True)),
    "StarCoder2": ("Starcoder2", lambda rng: grouped(rng, sliding_window=window(rng))),
    "Llama 1, 2, TinyLlama, SmolLM2": ("Llama", wide),
    "Llama with biases": ("Llama", lambda rng: wide(rng, attention_bias=True, mlp_bias=True)),
    "Llama 3.1, 3.2": (
        "Llama",
        lambda rng: wide(rng, rope_scaling=LLAMA3 | {"original_max_position_embeddings": 8, "rope_theta": 500.0}),
    ),
    "Llama with YaRN": ("Llama", lambda rng: wide(rng, rope_scaling=YARN)),
    "Llama with dynamic NTK": ("Llama", lambda rng: wide(rng, rope_scaling={"rope_type": "dynamic", "factor": 3.0})),
    "Mistral": ("Mistral", lambda rng: wide(rng, sliding_window=window(rng))),
    "Qwen2, Qwen2.5": (
        "Qwen2",
        lambda rng: grouped(rng, use_sliding_window=True, sliding_window=window(rng), max_window_layers=1),
    ),
    "Qwen3": ("Qwen3", wide),
    "SmolLM3": ("SmolLM3", lambda rng: grouped(rng, no_rope_layer_interval=2, pad_token_id=0)),
    "OLMo 1": ("Olmo", lambda rng: grouped(rng, clip_qkv=float(rng.choice([0.1, 8.0])))),
    "OLMo 2": ("Olmo2", grouped),
    "NanoChat": ("NanoChat", nanochat),
    "Gemma 1": ("Gemma", wide),
    "Gemma 2": ("Gemma2", lambda rng: gemma(rng, final_logit_softcapping=9.0, attn_logit_softcapping=2.0)),
    "Gemma 3, text": (
        "Gemma3Text",
        lambda rng: gemma(rng, sliding_window_pattern=2, rope_scaling={"rope_type": "linear", "factor": 8.0}),
    ),
    "MPT": ("Mpt", lambda rng: sizes(rng, "d_model n_layers n_heads expansion max_seq_len", context=LONG)),
    "Bloom": ("Bloom", lambda rng: sizes(rng, "hidden_size n_layer n_head unused seq_length")),
    "T5, T5 1.1": ("T5", t5),
    "BERT": ("Bert", lambda rng: bert(rng, type_vocab_size=2)),
    "RoBERTa": ("Roberta", lambda rng: bert(rng, type_vocab_size=1, pad_token_id=PADDING)),
}
LIMITED = ("GPT-2", "GPT-Neo, TinyStories", "OPT", "BERT", "RoBERTa")  # no positions past the context
COLUMNS = ("logits", "past the context", "with a cache", "greedy text", "exported", "same bits")


def measure(family: str, seed: int, directory: pathlib.Path) -> dict[str, float | bool | None]:
    """Return the results of a random model; None: the family has no such property.

    logits, past the context: largest difference of the imported model's logits from those of Transformers, divided by
    the largest logit. with a cache: the same of its cached logits. greedy text: whether both write the same tokens.
    exported: the difference of the logits, when Transformers loads an export. same bits: of the weights, when the
    export is imported again.
    """
    import torch
    import transformers

    kind, draw = FAMILIES[family]
    rng = np.random.default_rng([seed, *family.encode()])
    config = getattr(transformers, f"{kind}Config")(vocab_size=VOCAB, eos_token_id=1, bos_token_id=0, **draw(rng))
    torch.manual_seed(seed)
    load = functools.partial(_loaded, kind=kind)
    model = _auto_class(config.model_type).from_config(config)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_((0.1 if kind == "T5" else 0.3) * torch.randn_like(tensor))  # T5 does not scale its scores
        head = getattr(model, "cls", None) or getattr(model, "lm_head", None)
        head = getattr(head, "predictions", head)
        if kind in ("Bert", "Roberta"):  # two parameters in some versions; the first is not used
            head.bias.copy_(head.decoder.bias)
    shard = {"max_shard_size": "8KB"} if rng.integers(2) else {}
    model.to(getattr(torch, DTYPES[seed % 3])).save_pretrained(directory / "there", **shard)

    mine, architecture = imported(directory / "there")
    tokens_BL = rng.integers(4, VOCAB, (2, LONG))
    source_BS = rng.integers(4, VOCAB, (2, 20)) if mine.config.model.encoder_layers else None
    if source_BS is not None:
        tokens_BL[:, 0] = 0  # the start of T5's targets, which Transformers would add
    wanted_BLV = _logits(load(directory / "there"), tokens_BL, source_BS)
    largest = float(np.abs(wanted_BLV).max())
    error = lambda found, wanted: float(np.abs(np.asarray(found) - wanted).max()) / largest
    given = () if source_BS is None else (None, None, jnp.asarray(source_BS))
    short, whole = (np.asarray(mine.logits(jnp.asarray(x_BL), *given)) for x_BL in (tokens_BL[:, :CONTEXT], tokens_BL))
    within_BLV = _logits(load(directory / "there"), tokens_BL[:, :CONTEXT], source_BS)
    results: dict[str, float | bool | None] = {
        "logits": max(error(short, within_BLV), error(whole, wanted_BLV) if family in LIMITED else 0.0),
        "past the context": None if family in LIMITED else error(whole, wanted_BLV),
        "with a cache": None,
        "greedy text": None,
    }
    if mine.config.model.causal:
        has_cache = not caches.without_cache(mine.config.model, LONG)
        if has_cache:
            results["with a cache"] = error(_cached_logits(mine, tokens_BL, source_BS), wanted_BLV[:, PROMPT - 1 :])
        prompts, sources = list(tokens_BL[:, :PROMPT]), None if source_BS is None else list(source_BS)
        options = {"length": WRITTEN, "sampling": Sampling(temperature=0.0)}
        text_BN = np.concatenate(list(decoding.stream(mine, prompts, sources=sources, **options)), axis=1)
        greedy_BN = _greedy(load(directory / "there"), tokens_BL, source_BS, use_cache=has_cache)
        results["greedy text"] = bool((text_BN == greedy_BN).all())
    (directory / "again").mkdir()
    ids = {"bos_token_id": 0, "eos_token_id": 1} | ({"pad_token_id": PADDING} if kind == "Roberta" else {})
    options = exporting.Options(architecture.model_type)
    exporting.write_model(mine, directory / "again", ids=ids, options=options)
    results["exported"] = error(_logits(load(directory / "again"), tokens_BL, source_BS), wanted_BLV)
    again, _ = imported(directory / "again")
    pairs = zip(jax.tree.leaves(mine.parameters), jax.tree.leaves(again.parameters), strict=True)
    results["same bits"] = all(np.array_equal(left, right) for left, right in pairs)
    return results


def imported(directory: pathlib.Path, vocab_size: int = VOCAB) -> tuple[LoadedModel, Any]:
    described = settings.read(directory / "config.json")
    architecture = architectures.find(described)
    fields = FURTHER.get(architecture.model_type, {}) | importing.read_fields(directory, architecture, described)
    config = loading.override(loading.load("configs/default.py", fields), {"model.dtype": "float32"})
    arrays = importing.read_weights(directory, architecture, config.model, vocab_size)
    definition, shapes = build.abstract(config.model, vocab_size)
    tree = jax.tree_util.tree_map_with_path(lambda path, _: jnp.asarray(arrays[parameters.path_name(path)]), shapes)
    mesh = sharding.make_reading_mesh(1, 1)
    return LoadedModel(tree, definition, config, mesh, config.batch_tokens, PLAIN), architecture


def _auto_class(model_type: str) -> Any:
    import transformers

    return getattr(transformers, architectures.ARCHITECTURES[model_type].auto_class)


def _loaded(directory: pathlib.Path, kind: str) -> Any:
    """Load a model. Raise AssertionError if a tensor is missing, unexpected or of another shape."""
    import torch

    options: dict[str, Any] = {"attn_implementation": "eager"} if kind == "Gemma2" else {}
    load = _auto_class(settings.read(directory / "config.json").values["model_type"]).from_pretrained
    model, about = load(directory, output_loading_info=True, dtype=torch.float32, **options)
    assert not any(about.values()), about
    return model.eval()


def _logits(model: Any, tokens_BL: np.ndarray, source_BS: np.ndarray | None) -> np.ndarray:
    import torch

    inputs = {"input_ids": torch.from_numpy(tokens_BL)}
    if source_BS is not None:
        inputs = {"input_ids": torch.from_numpy(source_BS), "decoder_input_ids": inputs["input_ids"]}
    with torch.inference_mode():
        return model(**inputs).logits.numpy()


def _greedy(model: Any, tokens_BL: np.ndarray, source_BS: np.ndarray | None, *, use_cache: bool) -> np.ndarray:
    import torch

    prompt_BP = torch.from_numpy(tokens_BL[:, :PROMPT])
    inputs = {"input_ids": prompt_BP, "attention_mask": torch.ones_like(prompt_BP)}
    if source_BS is not None:
        source = torch.from_numpy(source_BS)
        inputs = {"input_ids": source, "attention_mask": torch.ones_like(source), "decoder_input_ids": prompt_BP}
    options = {"max_new_tokens": WRITTEN, "min_new_tokens": WRITTEN, "do_sample": False, "pad_token_id": 0}
    options |= {"use_cache": use_cache}
    model.generation_config.eos_token_id = None
    return model.generate(**inputs, **options)[:, -WRITTEN:].numpy()


def _cached_logits(model: LoadedModel, tokens_BL: np.ndarray, source_BS: np.ndarray | None) -> np.ndarray:
    """Return the logits of the last token of the prompt and of each token after it, one token at a time."""
    source = None if source_BS is None else jnp.asarray(source_BS)
    lengths_B = jnp.full(len(tokens_BL), PROMPT)
    found_BV, cache = caches.prefill(model, jnp.asarray(tokens_BL[:, :PROMPT]), lengths_B, LONG, source)
    found, decode = [np.asarray(found_BV)], jax.jit(caches.decode)
    for place in range(PROMPT, LONG):
        found_BV, cache = decode(model, jnp.asarray(tokens_BL[:, place]), cache)
        found.append(np.asarray(found_BV))
    return np.stack(found, axis=1)


def table(names: list[str], count: int) -> str:
    """Return the Markdown table of families and properties, each the worst of `count` models."""
    lines = ["| family | " + " | ".join(COLUMNS) + " |", "|---" * (1 + len(COLUMNS)) + "|"]
    for name in names:
        found = []
        for seed in range(count):
            with tempfile.TemporaryDirectory() as directory:
                found.append(measure(name, seed, pathlib.Path(directory)))
        lines.append(f"| {name} | " + " | ".join(_cell([each[column] for each in found]) for column in COLUMNS) + " |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def _cell(values: list) -> str:
    if values[0] is None:
        return "–"
    if isinstance(values[0], bool):
        return "yes" if all(values) else f"{sum(values)} of {len(values)}"
    return f"{max(values):.0e}" if any(values) else "0"


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(FAMILIES))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--configs", type=int, default=3)
    flags = parser.parse_args()
    text = table(flags.names, flags.configs)
    if flags.write:
        before, after = TABLE.read_text().split("<!-- table -->\n")[::2]
        said = f"Transformers {transformers.__version__}, {flags.configs} models of each family:\n\n"
        TABLE.write_text(f"{before}<!-- table -->\n{said}{text}\n<!-- table -->\n{after}")


if __name__ == "__main__":
    main()
