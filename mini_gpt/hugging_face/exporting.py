"""Write a run's model as a directory that Transformers loads: config, weights, tokenizer, model card."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from mini_gpt.config import loading as configs
from mini_gpt.config.model import ModelConfig
from mini_gpt.config.schema import SENTINELS
from mini_gpt.data.tokenizers import SubwordTokenizer
from mini_gpt.hugging_face import architectures, model_card, source_files, tokenizer_files
from mini_gpt.hugging_face.architecture import OF_TOKENS, Architecture, Arrays, Ids
from mini_gpt.hugging_face.settings import CONFIG, WEIGHTS
from mini_gpt.hugging_face.tensors import Tensor
from mini_gpt.model import gpt
from mini_gpt.model import parameters as model_parameters
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.training import workdir as workdirs
from mini_gpt.training.run import Run

DTYPES = {name: jnp.dtype(name) for name in ("float32", "bfloat16", "float16")}  # of the weights


def export(run: Run, output: Path, model_type: str | None = None, dtype: str = "float32") -> str:
    """Write the run's model and return the title of its Transformers architecture. A failed export leaves no files.

    model_type: see `architectures.choose`. dtype: see `write_model`. Raises UserError if the directory exists, and the
    errors of `write_model`.
    """
    tokenizer = run.tokenizer
    order = tokenizer.inverse if isinstance(tokenizer, SubwordTokenizer) and tokenizer.separator is not None else None
    with files.directory_written_whole(output) as draft:
        sentinels = SENTINELS if run.config.train.objective == "span_corruption" else 0
        # The import may have chosen a shorter context than that of the model, which has not changed.
        of_model = (workdirs.imported_from(run.workdir) or {}).get("context_length", 0)
        length, masked = max(run.config.context_length, of_model), run.model.masked
        model = dataclasses.replace(run.model, config=configs.override(run.config, {"context_length": length}))
        ids = tokenizer_files.write(tokenizer, draft, length, masked=masked, sentinels=sentinels)
        if not masked:
            source_files.write(tokenizer.source, draft, ids)
        architecture = write_model(model, draft, order=order, ids=ids, model_type=model_type, dtype=dtype)
        (draft / "README.md").write_text(model_card.text(run, architecture, dtype), encoding="utf-8")
    return architecture.title


def write_model(
    model: LoadedModel,
    directory: Path,
    *,
    order: np.ndarray | None = None,
    ids: Ids = architectures.NO_IDS,
    model_type: str | None = None,
    dtype: str = "float32",
) -> Architecture:
    """Write config.json and model.safetensors; return the Transformers architecture.

    order: mini_gpt's id of each exported token id; later ones are equal, and all if it is None. ids: the token ids in
    config.json. model_type: see `architectures.choose`. dtype: one of DTYPES, to which weights are rounded. Raises
    UserError if the architecture can't express the model, or a weight is too large for the dtype.
    """
    architecture = architectures.choose(model.config.model, ids, model_type)
    position_ids = model.config.data.position_ids
    require(position_ids == "sequence", "data.position_ids", position_ids, "must be sequence to be exported")
    config, arrays = _equivalent(model, architecture)
    if order is not None:
        order = np.concatenate([order, np.arange(len(order), len(arrays["embedding"]), dtype=order.dtype)])
        arrays |= {name: arrays[name][order] for name in OF_TOKENS if name in arrays}
    described = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": len(arrays["embedding"]),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **ids,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,  # all versions of Transformers read this name; 4.56 and later write `dtype`
        "use_cache": True,
        **architecture.describe(dataclasses.replace(model.config, model=config), ids),
    }
    (directory / CONFIG).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    tensors, arrays = architecture.tensors(config), architecture.unfold(arrays, config)
    packed = {tensor.name: _rounded(tensor, arrays, dtype) for tensor in tensors}
    save_file(packed, directory / WEIGHTS, metadata={"format": "pt"})
    (directory / WEIGHTS).chmod(0o644)  # safetensors makes it readable only by its owner
    return architecture


def _rounded(tensor: Tensor, arrays: Arrays, dtype: str) -> np.ndarray:
    """Return a tensor of the files. Raises UserError if one of its values is finite, but not in `dtype`."""
    packed = tensor.pack([arrays[path] for path in tensor.paths])
    with np.errstate(over="ignore"):
        rounded = packed.astype(DTYPES[dtype])
    if dtype != "float32" and np.isfinite(packed).all() and not np.isfinite(rounded).all():
        largest = f"found {float(np.abs(packed).max()):g} in {tensor.name}"
        raise UserError(f"--dtype: {largest}, too large for {dtype}; use bfloat16 or float32")
    return rounded


def _equivalent(model: LoadedModel, architecture: Architecture) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """Return an equivalent model in the form of the architecture, and its parameters by path."""
    config = model.config.model
    one_by_one = jax.device_get(model_parameters.with_layers(model.parameters, stacked=False))
    arrays = {name: np.asarray(leaf) for name, leaf in model_parameters.by_name(one_by_one).items()}
    if (
        config.scale_embeddings and not architecture.scales_embeddings
    ):  # the output layer can't share a scaled embedding table
        arrays.setdefault("unembedding", arrays["embedding"])
        arrays["embedding"] = arrays["embedding"] * np.float32(math.sqrt(config.d_model))
        config = dataclasses.replace(config, scale_embeddings=False, tie_embeddings=False)
    config = dataclasses.replace(config, scan_layers=False)
    if architecture.always_biased:
        config = dataclasses.replace(config, use_bias=True, qkv_bias=True, attention_out_bias=True)
    for name, leaf in model_parameters.by_name(gpt.abstract(config, len(arrays["embedding"]))[1]).items():
        arrays.setdefault(name, np.zeros(leaf.shape, leaf.dtype))  # biases that the model lacks
    return config, arrays
