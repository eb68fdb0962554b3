"""Import a model of Transformers as a run, to evaluate it, sample from it or train it further."""

import contextlib
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from mini_gpt.config import loading as configs
from mini_gpt.config import places
from mini_gpt.config.model import ModelConfig
from mini_gpt.config.schema import Config
from mini_gpt.data import corpora
from mini_gpt.data.tokenizers import SubwordTokenizer, Tokenizer
from mini_gpt.hugging_face import architectures, settings, tokenizer_files
from mini_gpt.hugging_face.architecture import OF_TOKENS, Architecture
from mini_gpt.hugging_face.settings import CONFIG, WEIGHTS, Settings
from mini_gpt.hugging_face.tensors import Shape, Tensor
from mini_gpt.model import gpt
from mini_gpt.model import parameters as model_parameters
from mini_gpt.model.parameters import Parameters
from mini_gpt.runtime import files, sharding
from mini_gpt.runtime.errors import UserError, printable, shown
from mini_gpt.training import state as states
from mini_gpt.training import workdir as workdirs
from mini_gpt.training.checkpoint import Checkpoints, Record

INDEX = f"{WEIGHTS}.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")


def import_run(source: Path, workdir: Path, config_path: str, overrides: Mapping[str, str]) -> Config:
    """Import a model as a run at step 0, and return the config. A failed import leaves no files.

    Model, context length and tokenizer come from `source`. Other fields come from the config file and the overrides.
    Raises UserError if the run exists, a file can't be read, or a setting is not supported.
    """
    described = settings.read(source / CONFIG)
    architecture = architectures.find(described)
    vocab_size = described.whole("vocab_size")
    masked = architecture.objective == "masked"
    start = described.get("decoder_start_token_id") if architecture.has_targets else None
    end, values = described.get("eos_token_id"), described.values
    tokenizer = tokenizer_files.read(source, vocab_size, end, start=start, masked=masked, config=values)
    config = _config(read_fields(source, architecture, described), tokenizer, config_path, overrides)
    with contextlib.ExitStack() as opened:  # check the tensor names before the slow steps
        _match(source, architecture, config.model, _open(source, opened))
    mesh = sharding.make_reading_mesh(config.mesh.fsdp, config.mesh.tensor)
    _, abstract_state = states.abstract(config, vocab_size, mesh)
    arrays = read_weights(source, architecture, config.model, vocab_size)
    if isinstance(tokenizer, SubwordTokenizer):
        arrays |= {name: arrays[name][tokenizer.order] for name in OF_TOKENS if name in arrays}
    places.remember(config.data)  # later commands may read these paths from the run's config.json
    corpus = corpora.open_corpus(config.data)
    parameters = _tree(arrays, abstract_state.parameters, stacked=config.model.scan_layers)
    state = states.first(config, parameters, abstract_state)
    with files.directory_written_whole(workdir) as draft:
        workdirs.claim(draft, config, corpus, tokenizer)
        with contextlib.closing(Checkpoints(draft / workdirs.CHECKPOINTS)) as checkpoints:
            checkpoints.save(0, state, Record())
        workdirs.record_import(draft, source, architecture.title)
    return config


def read_fields(source: Path, architecture: Architecture, described: Settings) -> dict[str, Any]:
    """Return the fields of mini_gpt's config. If config.json does not tell whether the model is tied, the files do."""
    fields = architecture.fields(described)
    if fields["model.tie_embeddings"] is None:
        with contextlib.ExitStack() as opened:
            fields["model.tie_embeddings"] = architecture.head_tensor not in _open(source, opened)
    return fields


def _config(fields: dict[str, Any], tokenizer: Tokenizer, config_path: str, overrides: Mapping[str, str]) -> Config:
    given = fields | {"data.tokenizer": tokenizer.kind}
    if isinstance(tokenizer, SubwordTokenizer):
        given["data.vocab_size"] = len(tokenizer.token_bytes)
    config = configs.load(config_path, given | dict(overrides))
    found = configs.flatten(configs.to_dict(config))
    for name, value in given.items():
        if found[name] != value and name != "context_length":
            raise UserError(f"{name}: found {shown(found[name])}; the imported model has {shown(value)}")
    return config


def read_weights(
    source: Path, architecture: Architecture, model: ModelConfig, vocab_size: int
) -> dict[str, np.ndarray]:
    """Return all parameters of a model by path, float32, layers not stacked.

    Names, shapes and dtypes are checked before any value is read. Raises UserError if one is wrong.
    """
    one_by_one = dataclasses.replace(model, scan_layers=False)
    leaves = gpt.abstract(one_by_one, vocab_size)[1]
    shapes = {name: leaf.shape for name, leaf in model_parameters.by_name(leaves).items()}
    shapes |= architecture.shapes(model)
    arrays: dict[str, np.ndarray] = {}
    with contextlib.ExitStack() as opened:
        wanted, found = _match(source, architecture, model, _open(source, opened))
        for name, tensor in wanted.items():
            _check(f"{source}: {name}", found[name], tensor.shape([shapes[path] for path in tensor.paths]))
        originals = {tensor.paths: tensor.name for tensor in wanted.values() if not tensor.optional}
        copies = {tensor.name: originals[tensor.paths] for tensor in wanted.values() if tensor.optional}
        copies |= dict.fromkeys(_copies(architecture) & found.keys() - wanted.keys(), originals["embedding",])
        for name, original in copies.items():
            if not np.array_equal(found[name][:], found[original][:]):
                reason = "and Transformers uses one of them" if name in wanted else f"but {CONFIG} ties them"
                raise UserError(f"{source}: {name}: it differs from {original}, {reason}")
        for name, tensor in wanted.items():
            values = np.asarray(found[name][:]).astype(np.float32)
            if not np.isfinite(values).all():
                raise UserError(f"{source}: {name}: found non-finite values (NaN or infinity); download it again")
            parts = tensor.unpack(values, [shapes[path] for path in tensor.paths])
            arrays |= dict(zip(tensor.paths, parts, strict=True))
    return architecture.fold(arrays, model)


def _copies(architecture: Architecture) -> set[str]:
    """Return the names of tensors that a file may have, if they repeat the table of embeddings."""
    return {architecture.head_tensor, *architecture.table_copies}


def _open(source: Path, opened: contextlib.ExitStack) -> dict[str, Any]:
    """Return unread slices of all tensors in the files. Raises UserError if a file can't be read."""
    found: dict[str, Any] = {}
    for file in _files(source):
        path = settings.find_file(source, file)
        try:
            files.open_regular(path).close()
            tensors = opened.enter_context(safe_open(path, framework="np"))
        except FileNotFoundError:
            raise UserError(f"{source / file}: not found; {INDEX} names it") from None
        except (SafetensorError, OSError) as error:
            problem = f"not a complete safetensors file ({shown(str(error))}); download it again"
            raise UserError(f"{source / file}: {problem}") from None
        found |= {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  not a mapping
    return found


def _match(
    source: Path, architecture: Architecture, model: ModelConfig, stored: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors that the model needs, and the stored ones with their full names.

    Raises UserError for a missing or an unexpected tensor.
    """
    wanted = {tensor.name: tensor for tensor in architecture.tensors(model)}
    found: dict[str, Any] = {}
    for name, values in stored.items():
        prefixed = architecture.prefix + name  # if the model was saved without its output layer
        found[name if name in wanted or prefixed not in wanted else prefixed] = values
    wanted = {name: tensor for name, tensor in wanted.items() if name in found or not tensor.optional}
    for name in wanted:
        if name not in found:
            raise UserError(f"{source}: {name}: tensor not found; this {architecture.title} config needs it")
    for name in found:
        plain = name.removeprefix(architecture.prefix)
        known = name in wanted or name in _copies(architecture)
        if not known and not re.fullmatch(architecture.buffers, plain):
            raise UserError(f"{source}: {printable(name)}: unexpected tensor for this {architecture.title} config")
    return wanted, found


def _files(source: Path) -> list[str]:
    if (source / WEIGHTS).exists():
        return [WEIGHTS]
    if not (source / INDEX).exists():
        convert = "never from pickle: convert them with save_pretrained(DIR, safe_serialization=True)"
        raise UserError(f"{source / WEIGHTS}: not found; weights are read from safetensors only, {convert}")
    try:
        listed = sorted(set(files.read_json(settings.find_file(source, INDEX))["weight_map"].values()))
        outside = [file for file in listed if Path(file).name != file or file in ("", "..")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{source / INDEX}: not an index of files ({type(error).__name__}: {error})") from None
    if outside:
        raise UserError(f"{source / INDEX}: found {shown(outside[0])}; must be a file in the same directory")
    return listed


def _check(where: str, found: Any, wanted: Shape) -> None:
    shape, dtype = tuple(found.get_shape()), found.get_dtype()
    if shape != wanted:
        raise UserError(f"{where}: found the shape {shape}; {CONFIG} requires {wanted}")
    if dtype not in FLOATS:
        raise UserError(f"{where}: found {dtype}; must be one of {', '.join(FLOATS)}")


def _tree(arrays: dict[str, np.ndarray], shapes: Parameters, *, stacked: bool) -> Parameters:
    one_by_one = jax.eval_shape(lambda tree: model_parameters.with_layers(tree, stacked=False), shapes)
    leaf = lambda path, _: jnp.asarray(arrays[model_parameters.path_name(path)])
    tree = jax.tree_util.tree_map_with_path(leaf, one_by_one)
    return model_parameters.convert_layout(tree, shapes, stacked=stacked)
