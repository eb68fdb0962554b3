"""What a model computes of a text, by mini_gpt or by Transformers, so that two models can be compared."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.hugging_face import settings, tokenizer_files
from mini_gpt.hugging_face.architectures import ARCHITECTURES
from mini_gpt.hugging_face.settings import CONFIG
from mini_gpt.insight import observing
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError, first_line
from mini_gpt.training.run import Run

MOST = 512  # tokens that are compared
OVERRIDES = {"model.dtype": "float32", "model.attention": "reference"}


class Reading(NamedTuple):
    """What a model computes of L tokens, float32.

    logits_LV: of all tokens, in the order of the reader's `names`; no columns if the model has no prediction head.
    streams_PLD: the residual stream before the first layer and after each. The last one is after the last norm.
    """

    logits_LV: np.ndarray
    streams_PLD: np.ndarray


class Reader(NamedTuple):
    """A model and its tokenizer.

    title: for a report.
    names: of all tokens, by id.
    context: the most tokens of a text.
    masked: whether it predicts masked tokens, not next ones.
    encode: returns the ids of a text, with the tokens that the tokenizer adds around it.
    show: returns the text of a token.
    read: returns what the model computes of ids_L.
    has_head: whether it has logits.
    """

    title: str
    names: list[str]
    context: int
    masked: bool
    encode: Callable[[str], np.ndarray]
    show: Callable[[int], str]
    read: Callable[[np.ndarray], Reading]
    has_head: bool = True


def _refuse_encoder(directory: Path, has_encoder: bool) -> None:
    if has_encoder:
        raise UserError(f"{directory}: found a model with an encoder; compare needs models without one")


def of_run(workdir: Path) -> Reader:
    """Open the last checkpoint of a run. Raises the errors of `Run`, and UserError for a model with an encoder."""
    run = Run(workdir, overrides=OVERRIDES)
    _refuse_encoder(workdir, run.config.model.has_encoder)
    by_id = tokenizer_files.names(run.tokenizer, masked=run.model.masked)
    names = [by_id.get(token, f"id {token}") for token in range(len(run.model.parameters["embedding"]))]

    def read(ids_L: np.ndarray) -> Reading:
        tokens_BL = sharding.put_whole(sharding.pad_rows(ids_L[None].astype(np.int32), run.mesh), run.mesh)
        logits_BLV, streams_PBLD = jax.device_get(_read(run.model, tokens_BL))
        return Reading(logits_BLV[0], np.stack(streams_PBLD)[:, 0])

    return Reader(
        title=f"{workdir}: mini_gpt, step {run.step:,}",
        names=names,
        context=run.config.context_length,
        masked=run.model.masked,
        encode=run.tokenizer.encode_prompt,
        show=lambda token: run.tokenizer.decode([token]) or names[token],
        read=read,
        has_head=run.config.model.prediction_head is not None,
    )


@jax.jit
def _read(model: LoadedModel, tokens_BL: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """Return logits_BLV and the streams x_BLD of a `Reading`."""
    module, inputs = model.merge(), model.with_layout(tokens_BL)
    x_BLD, layers, _ = observing.observed(model.merge(), lambda observed: observed.hidden(*inputs))
    streams = [layers[0].before_BLD, *(layer.after_BLD for layer in layers)]
    if module.final_norm is not None:
        streams[-1] = module.final_norm(streams[-1])
    has_head = model.config.model.prediction_head is not None
    logits_BLV = module.logits(x_BLD) if has_head else x_BLD[..., :0]
    return sharding.replicate((logits_BLV, streams), model.mesh)


def of_transformers(directory: Path, *, has_head: bool = True) -> Reader:
    """Open a directory by Transformers, to compute in float32. No code and no pickle in it is run.

    has_head: whether the prediction head is opened too.

    Raises UserError if PyTorch or Transformers is missing, Transformers can't open the model, or it has an encoder.
    """
    model_type = settings.read(directory / CONFIG).get("model_type")
    known = ARCHITECTURES.get(model_type)
    try:
        import torch
        import transformers
    except ImportError as error:
        remedy = "pip install -r requirements-hugging-face.txt"
        raise UserError(f"--right: {directory}: {error.name} is not installed; {remedy}") from None
    _refuse_encoder(directory, known is not None and known.has_targets)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind = known.auto_class if known else "AutoModelForCausalLM"
    load = getattr(transformers, kind if has_head else "AutoModel").from_pretrained
    safe: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    # Other implementations of attention in some versions leave the soft cap of Gemma 2 out.
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager", "use_safetensors": True}
    try:
        model, about = load(str(directory), output_loading_info=True, **options, **safe)
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory), **safe)
    except Exception as error:  # Transformers raises errors of several libraries
        raise UserError(f"--right: {directory}: Transformers can't open it ({first_line(error)})") from None
    if missing := sorted(name for name in about["missing_keys"] if has_head or not name.startswith("pooler.")):
        raise UserError(f"--right: {directory}: no tensor {missing[0]}; Transformers would use random numbers")
    encode = lambda text: np.array(tokenizer(text)["input_ids"], np.int32)

    def read(ids_L: np.ndarray) -> Reading:
        with torch.inference_mode():
            found = model.eval()(torch.from_numpy(ids_L.astype(np.int64))[None], output_hidden_states=True)
        logits_LV = found.logits[0].numpy() if has_head else np.empty((len(ids_L), 0), np.float32)
        return Reading(logits_LV, torch.cat(found.hidden_states).numpy())

    by_id = {token: name for name, token in tokenizer.get_vocab().items()}
    return Reader(
        title=f"{directory}: Transformers {transformers.__version__}, {model_type}",
        names=[by_id.get(token, f"id {token}") for token in range(len(model.get_input_embeddings().weight))],
        context=getattr(model.config, known.context[0] if known else "max_position_embeddings", None) or MOST,
        masked=known is not None and known.objective == "masked",
        encode=encode,
        show=lambda token: tokenizer.decode([token]),
        read=read,
        has_head=has_head,
    )
