"""Import a model of Transformers as a run, to evaluate it, sample from it or train it further."""

import contextlib
import dataclasses
import functools
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.config import loading
from mini_gpt.config.attention import pattern
from mini_gpt.config.model import ModelConfig
from mini_gpt.config.schema import Config
from mini_gpt.data import corpora
from mini_gpt.data.subwords import SubwordTokenizer
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation import memory
from mini_gpt.hugging_face import architectures, settings, stored, tokenizer_files
from mini_gpt.hugging_face.architecture import Architecture
from mini_gpt.hugging_face.origin import record_import
from mini_gpt.hugging_face.settings import CONFIG, Settings
from mini_gpt.hugging_face.stored import FLOATS, Stored
from mini_gpt.hugging_face.tensors import Shape, Tensor
from mini_gpt.model import build
from mini_gpt.model import parameters as model_parameters
from mini_gpt.model.parameters import Parameters
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, printable, require, shown
from mini_gpt.training import run_directory, train_state
from mini_gpt.training.checkpoint import Checkpoints, Record
from mini_gpt.training.train_state import TrainState

MOST_CONTEXT = 2048  # tokens; with BATCH_TOKENS for a laptop, unless an override says otherwise
BATCH_TOKENS = 4096  # of one pass through the model in training
MOST_NAMES = 5  # of tensors in a message
log = logging.getLogger(__name__)


def import_run(
    source: Path,
    workdir: Path,
    config_path: str,
    overrides: Mapping[str, str],
    origin: Mapping[str, str] = MappingProxyType({}),
) -> Config:
    """Import a model as a run at step 0, and return the config. A failed import leaves no files.

    Model and tokenizer come from `source`. Other fields come from the config file and the overrides. The checkpoint has
    no optimizer state.

    origin: for the record: the model's name and commit on the Hub, or the path of a GGUF file.

    Raises UserError if the run exists, a file can't be read, or a setting is not supported.
    """
    described = settings.read(source / CONFIG)
    architecture, vocab_size, fields = settings.read_all(described, functools.partial(_architecture, source))
    masked, length = architecture.objective == "masked", fields["context_length"]
    start = described.get("decoder_start_token_id") if architecture.has_targets else None
    end, values = described.get("eos_token_id"), described.values
    tokenizer = tokenizer_files.read(source, vocab_size, end, start=start, masked=masked, config=values)
    config = _config(fields, tokenizer, config_path, overrides)
    arrays = read_weights(source, architecture, config.model, vocab_size)
    if config.model.prediction_head is None:
        log.info(f"{source}: no prediction head, so that only tools for activations and attention can read the run")
    corpus = corpora.open_corpus(config.data)
    shapes = train_state.parameter_shapes(config, vocab_size)[1]
    with files.directory_written_whole(workdir) as draft:
        run_directory.claim(draft, config, corpus, tokenizer)
        with contextlib.closing(Checkpoints(draft / run_directory.CHECKPOINTS)) as checkpoints:
            parameters = _tree(arrays, shapes, stacked=config.model.scan_layers)
            checkpoints.save(0, TrainState(jnp.int32(0), parameters, None, jnp.bool(False)), Record())
        record_import(draft, source, {"architecture": architecture.title, "context_length": length, **origin})
    return config


def _architecture(source: Path, described: Settings) -> tuple[Architecture, int, dict[str, Any]]:
    """Return the architecture that a config.json names, the number of tokens, and the fields of mini_gpt's config."""
    architecture = architectures.find(described)
    return architecture, described.whole("vocab_size"), read_fields(source, architecture, described)


def read_fields(source: Path, architecture: Architecture, described: Settings) -> dict[str, Any]:
    """Return the fields of mini_gpt's config.

    The files tell whether an encoder has a prediction head; and whether the model is tied, if config.json does not.
    """
    fields = architecture.fields(described)
    if fields["model.tie_embeddings"] is None:
        fields["model.tie_embeddings"] = architecture.head_tensor not in stored.find(source)
    of_head = architecture.head.partition(".")[0] + "."
    if fields["model.prediction_head"] and not any(name.startswith(of_head) for name in stored.find(source)):
        fields |= {"model.prediction_head": None, "model.tie_embeddings": True}
    return fields


def _config(fields: dict[str, Any], tokenizer: Tokenizer, config_path: str, overrides: Mapping[str, str]) -> Config:
    """Return the run's config, with a context and batches that a laptop holds; log both.

    It computes in float32, as Transformers does, unless the config file or an override says otherwise.
    """
    given, length = fields | {"data.tokenizer": tokenizer.kind}, fields["context_length"]
    if isinstance(tokenizer, SubwordTokenizer):
        given["data.vocab_size"] = len(tokenizer.token_bytes) - (tokenizer.mask_id is not None)  # see `extra_tokens`
    if "rope" in pattern(fields["model.position"]):  # what follows from the model's context, not from a shorter one
        before_scaling = max(1, round(length / max(pattern(fields.get("model.rope.factor", 1.0)))))
        given.setdefault("model.rope.original_context", before_scaling)
    given["context_length"] = min(length, MOST_CONTEXT)
    try:
        config = loading.load(config_path, given | dict(overrides))
    except UserError as error:
        if not fields.get("model.encoder_layers") or not str(error).startswith("data."):
            raise
        pairs = "--config.data.corpus=pairs --config.data.path=FILE, a TSV file of sources and targets"
        raise UserError(f"{error}. An imported model with an encoder needs pairs: give {pairs}") from None
    rank = config.train.lora_rank
    require(rank == 0, "train.lora_rank", rank, "must be 0 for an import; give it to train.py, with --init_from")
    found = loading.flatten(loading.to_dict(config))
    for name, value in given.items():
        if found[name] != value and name != "context_length":
            raise UserError(f"{name}: found {shown(found[name])}; the imported model has {shown(value)}")
    shares = max(1, config.mesh.data) * config.mesh.fsdp
    fitting = memory.rows_in_budget(config.model, len(tokenizer.token_bytes), config.longest_row, "gradients")
    rows = min(fitting, max(1, BATCH_TOKENS // config.longest_row // shares)) * shares * config.train.accumulation_steps
    if rows < config.train.batch_size and "train.batch_size" not in overrides:
        config = loading.override(config, {"train.batch_size": rows})
    if config.model.dtype == "auto" and "model.dtype" not in overrides:
        config = loading.override(config, {"model.dtype": "float32"})
    log.info(
        f"context_length is {config.context_length:,}; the model was made for {length:,} tokens. train.batch_size is "
        f"{config.train.batch_size}, and model.dtype is {config.model.dtype}. To change them: "
        "--config.context_length=N --config.train.batch_size=N --config.model.dtype=bfloat16"
    )
    return config


def read_weights(source: Path, architecture: Architecture, model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Return all parameters of a model by path, float32, layers not stacked.

    Names, shapes and dtypes are compared with the headers of the files before any value is read. Raises UserError if
    one is wrong, or if a value is not finite.
    """
    wanted, found = _match(source, architecture, model, stored.find(source))  # its cost grows with the files only
    one_by_one = dataclasses.replace(model, scan_layers=False)
    leaves = build.abstract(one_by_one, vocab_size)[1]
    shapes = {name: leaf.shape for name, leaf in model_parameters.by_name(leaves).items()}
    shapes |= architecture.shapes(model)
    for name, tensor in wanted.items():
        _check(found[name], tensor.shape([shapes[path] for path in tensor.paths]))
    originals = {tensor.paths: tensor.name for tensor in wanted.values() if not tensor.optional}
    copies = {tensor.name: originals[tensor.paths] for tensor in wanted.values() if tensor.optional}
    copies |= dict.fromkeys(_copies(architecture) & found.keys() - wanted.keys(), originals["embedding",])
    for name, original in copies.items():
        if not found[name].equals(found[original]):
            reason = "and Transformers uses one of them" if name in wanted else f"but {CONFIG} ties them"
            raise UserError(f"{source}: {name}: it differs from {original}, {reason}")
    arrays: dict[str, Any] = {}
    for name, tensor in wanted.items():
        parts = tensor.unpack(found[name].read(), [shapes[path] for path in tensor.paths])
        arrays |= dict(zip(tensor.paths, parts, strict=True))
    return architecture.fold(arrays, model)


def _copies(architecture: Architecture) -> set[str]:
    """Return the names of tensors that a file may have, if they repeat the table of embeddings."""
    return {architecture.head_tensor, *architecture.table_copies}


def _match(
    source: Path, architecture: Architecture, model: ModelConfig, in_files: Mapping[str, Stored]
) -> tuple[dict[str, Tensor], dict[str, Stored]]:
    """Return the tensors that the model needs, and the stored ones with their full names.

    Raises UserError for a missing or an unexpected tensor.
    """
    wanted = {tensor.name: tensor for tensor in architecture.tensors(model)}
    found: dict[str, Stored] = {}
    for stored_name, values in in_files.items():
        name = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", stored_name))  # of norms in old files of BERT
        prefixed = architecture.prefix + name  # if the model was saved without its output layer
        found[name if name in wanted or prefixed not in wanted else prefixed] = values
    wanted = {name: tensor for name, tensor in wanted.items() if name in found or not tensor.optional}
    known = wanted.keys() | _copies(architecture)
    unexpected = [
        name
        for name in found
        if name not in known and not re.fullmatch(architecture.buffers, name.removeprefix(architecture.prefix))
    ]
    missing, title = [name for name in wanted if name not in found], f"this {architecture.title} config"
    problems = []
    if missing:
        several, them = ("s", "them") if len(missing) > 1 else ("", "it")
        problems.append(f"{_listed(missing)}: tensor{several} not found; {title} needs {them}")
    if unexpected:
        problems.append(f"{_listed(unexpected)}: unexpected tensor{'s' if len(unexpected) > 1 else ''} for {title}")
    if problems:
        raise UserError(f"{source}: {'; '.join(problems)}")
    return wanted, found


def _listed(names: list[str]) -> str:
    others = f" and {len(names) - MOST_NAMES} others" if len(names) > MOST_NAMES else ""
    return printable(", ".join(names[:MOST_NAMES])) + others


def _check(found: Stored, wanted: Shape) -> None:
    if found.shape != wanted:
        raise UserError(f"{found.label}: found the shape {found.shape}; {CONFIG} requires {wanted}")
    if found.dtype not in FLOATS:
        raise UserError(f"{found.label}: found {found.dtype}; must be one of {', '.join(FLOATS)}")


def _tree(arrays: Mapping[str, np.ndarray], shapes: Parameters, *, stacked: bool) -> Parameters:
    """Return the parameters as a pytree, in the layout and the dtype of `shapes`."""

    def leaf(path: tuple, wanted: jax.ShapeDtypeStruct) -> np.ndarray:
        name = model_parameters.path_name(path)
        if stacked and (block := re.fullmatch(r"(.*\bblocks)/(.*)", name)):
            layers = [arrays[f"{block[1]}/{layer}/{block[2]}"] for layer in range(wanted.shape[0])]
            return np.stack(layers).astype(wanted.dtype, copy=False)
        return np.asarray(arrays[name], wanted.dtype)

    return jax.tree_util.tree_map_with_path(leaf, shapes)
