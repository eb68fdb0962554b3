"""Write a run's model as a directory that Transformers loads: config, weights, tokenizer, model card."""

import dataclasses
import json
import math
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mini_gpt.config import loading
from mini_gpt.config.model import ModelConfig
from mini_gpt.data.spans import SENTINELS
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.hugging_face import architectures, model_card, origin, source_files, stored, tokenizer_files
from mini_gpt.hugging_face.architecture import Architecture, Arrays, Ids
from mini_gpt.hugging_face.settings import CONFIG, WEIGHTS
from mini_gpt.hugging_face.tensors import Tensor
from mini_gpt.model import build, positions
from mini_gpt.model import parameters as model_parameters
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.training.run import Run

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # of the weights, and their names in the file
MOST_POSITIONS = 2**20
LEARNED = "positions/learned/embedding"


class Options(NamedTuple):
    """The options of an export.

    model_type: see `architectures.choose`.
    dtype: one of DTYPES, to which weights are rounded.
    length: the most tokens of a text in Transformers; None: the context length. Only for models whose architecture in
      Transformers needs a limit that they do not have here.
    """

    model_type: str | None = None
    dtype: str = "float32"
    length: int | None = None


def export(run: Run, output: Path, options: Options = Options()) -> str:  # noqa: B008  immutable
    """Write the run's model and return the title of its Transformers architecture. A failed export leaves no files.

    Raises UserError if the directory exists, and the errors of `write_model`.
    """
    with files.directory_written_whole(output) as draft:
        sentinels = SENTINELS if run.config.train.objective == "span_corruption" else 0
        length, masked = origin.trained_context(run), run.model.masked
        model = dataclasses.replace(run.model, config=loading.override(run.config, {"context_length": length}))
        ids = tokenizer_files.write(run.tokenizer, draft, options.length or length, masked=masked, sentinels=sentinels)
        if not masked:
            source_files.write(run.tokenizer.source, draft, ids)
        architecture = write_model(model, draft, ids=ids, options=options)
        context = files.read_json(draft / CONFIG)[architecture.context[0]]
        card = model_card.text(run, architecture, options.dtype, context)
        (draft / "README.md").write_text(card, encoding="utf-8")
    return architecture.title


def write_model(
    model: LoadedModel,
    directory: Path,
    *,
    ids: Ids = architectures.NO_IDS,
    options: Options = Options(),  # noqa: B008  immutable
) -> Architecture:
    """Write config.json and model.safetensors; return the Transformers architecture.

    ids: the token ids in config.json.

    Raises UserError if the architecture can't express the model, a weight is too large for the dtype, or the length
    can't be chosen.
    """
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, model=_renumbered(model.config.model)))
    architecture = architectures.choose(model.config.model, ids, options.model_type)
    length = _length(model, architecture, options.length)
    position_ids = model.config.data.position_ids
    require(position_ids == "sequence", "data.position_ids", position_ids, "must be sequence to be exported")
    config, arrays = _equivalent(model, architecture, length)
    described = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": arrays["embedding"].shape[0],
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **ids,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": options.dtype,  # all versions of Transformers read this name; 4.56 and later write `dtype`
        "use_cache": True,
        **architecture.describe(dataclasses.replace(model.config, model=config, context_length=length), ids),
    }
    (directory / CONFIG).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    tensors, arrays = architecture.tensors(config), architecture.unfold(arrays, config)
    tensors = sorted(tensors, key=lambda tensor: tensor.name)
    shapes = (tensor.shape([arrays[path].shape for path in tensor.paths]) for tensor in tensors)
    layout = {tensor.name: (DTYPES[options.dtype], shape) for tensor, shape in zip(tensors, shapes, strict=True)}
    stored.write(directory / WEIGHTS, layout, (_rounded(tensor, arrays, options.dtype) for tensor in tensors))
    return architecture


def _renumbered(config: ModelConfig) -> ModelConfig:
    """Return the config without `heads`, if all layers keep equally many and a head's number has no meaning."""
    counts = {(each.num_heads, each.num_kv_heads) for each in map(config.of_layer, config.layer_kinds)}
    if len(counts) > 1 or config.heads is None or {"alibi", "hard_alibi"} & set(config.position_pattern):
        return config
    ((heads, groups),) = counts
    return dataclasses.replace(config, heads=None, num_heads=heads, num_kv_heads=groups)


def _rounded(tensor: Tensor, arrays: Arrays, dtype: str) -> np.ndarray:
    """Return a tensor of the files. Raises UserError if one of its values is finite, but not in `dtype`."""
    packed = tensor.pack([np.asarray(arrays[path]) for path in tensor.paths])
    with np.errstate(over="ignore"):
        rounded = packed.astype(jnp.dtype(dtype), copy=False)
    if dtype != "float32" and np.isfinite(packed).all() and not np.isfinite(rounded).all():
        largest = f"found {float(np.abs(packed).max()):g} in {tensor.name}"
        raise UserError(f"--dtype: {largest}, too large for {dtype}; use bfloat16 or float32")
    return rounded


def _length(model: LoadedModel, architecture: Architecture, asked: int | None) -> int:
    """Return the most tokens of a text in Transformers. Raises UserError if the architecture's can't be chosen."""
    context = model.config.context_length
    if asked is None:
        return context
    can_choose = architecture.limits_length or architecture.needs_table(model.config.model)
    remedy = "is only for models with positions none, sinusoidal or alibi that become GPT-2 or MPT"
    require(can_choose, "--length", asked, remedy)
    require(context <= asked <= MOST_POSITIONS, "--length", asked, f"must be in {context}..{MOST_POSITIONS}")
    return asked


def _positions(config: ModelConfig, length: int) -> np.ndarray:
    """Return positions_PD, which the model adds to the embeddings of tokens; zeros if it adds none."""
    name = positions.input_encoding(config)
    if name is None:
        return np.zeros((length, config.d_model), np.float32)
    encoding = config.encodings[name](config, rngs=nnx.Rngs(0))
    return np.asarray(encoding.vectors(jnp.arange(length), config.d_model))


def _equivalent(model: LoadedModel, architecture: Architecture, length: int) -> tuple[ModelConfig, Arrays]:
    """Return an equivalent model in the form of the architecture, and its parameters by path.

    length: rows of a table of positions, if the model has none.
    """
    config = model.config.model
    fetched = jax.device_get(model.parameters)
    arrays = model_parameters.by_name(model_parameters.with_layers(fetched, stacked=False))
    # The output layer can't share a scaled embedding table.
    if config.scale_embeddings and not architecture.scales_embeddings:
        arrays.setdefault("unembedding", arrays["embedding"])
        arrays["embedding"] = arrays["embedding"] * np.float32(math.sqrt(config.d_model))
        config = dataclasses.replace(config, scale_embeddings=False, tie_embeddings=False)
    if architecture.needs_table(config):
        arrays[LEARNED] = _positions(model.config.model, length)
        config = dataclasses.replace(config, position="learned", max_positions=length)
    config = dataclasses.replace(config, scan_layers=False)
    if architecture.always_biased:
        config = dataclasses.replace(config, use_bias=True, qkv_bias=True, attention_out_bias=True)
    for name, leaf in model_parameters.by_name(build.abstract(config, arrays["embedding"].shape[0])[1]).items():
        arrays.setdefault(name, np.zeros(leaf.shape, leaf.dtype))  # biases that the model lacks
    return config, arrays
