"""The supported Transformers architectures, and the choice of one."""

import operator
import types

from mini_gpt.config.model import ModelConfig
from mini_gpt.hugging_face.architecture import Architecture, Ids
from mini_gpt.hugging_face.bert import Bert, Roberta
from mini_gpt.hugging_face.causal import GPT2, MPT, GPTNeoX, Llama
from mini_gpt.hugging_face.settings import Settings
from mini_gpt.hugging_face.t5 import T5
from mini_gpt.runtime.errors import UserError, shown

NO_IDS: Ids = types.MappingProxyType({})
ARCHITECTURES: dict[str, type[Architecture]] = {
    each.model_type: each for each in (GPT2, Llama, GPTNeoX, MPT, T5, Bert, Roberta)
}


def choose(model: ModelConfig, ids: Ids = NO_IDS, model_type: str | None = None) -> Architecture:
    """Return the architecture that can express a model. Raises UserError, naming the fields, if there is none.

    ids: the token ids in config.json. model_type: of the architecture; None: the first that fits.
    """
    chosen = ARCHITECTURES[model_type] if model_type else _by_fields(model)
    architecture, problems = chosen.with_ids(ids), []
    if isinstance(model.rope.base, tuple):
        problems.append(f"model.rope.base: found {shown(model.rope.base)}; must be one number for all layers")
    for name, values in architecture.supported(model).items():
        found = operator.attrgetter(name)(model)
        if found not in values:
            problems.append(f"model.{name}: found {shown(found)}; must be {' or '.join(map(str, values))}")
    if problems:
        raise UserError("; ".join([*problems, f"{_kind(model)} is exported as {architecture.title}"]))
    return architecture


def _by_fields(model: ModelConfig) -> type[Architecture]:
    if model.encoder_layers:
        return T5
    if not model.causal:
        return Bert
    rotary = Llama if model.norm == "rmsnorm" else GPTNeoX
    by_position: dict[str, type[Architecture]] = {"learned": GPT2, "alibi": MPT, "rope": rotary}
    if not isinstance(model.position, str) or model.position not in by_position:
        right = f"which can't be exported; must be one of {', '.join(by_position)}"
        raise UserError(f"model.position: found {shown(model.position)}, {right}")
    return by_position[model.position]


def _kind(model: ModelConfig) -> str:
    """Return the words for the kind of a model by which its architecture is chosen."""
    if model.encoder_layers:
        return "an encoder-decoder"
    return f"a model with {model.position} positions and {model.norm}" if model.causal else "a bidirectional model"


def find(settings: Settings) -> Architecture:
    """Return the architecture that a config.json names. Raises UserError if it is not supported."""
    if "optimizer" in settings.values:
        raise UserError(f"{settings.path}: found the config of a run of mini_gpt; it needs no import")
    found = ARCHITECTURES[settings.one_of("model_type", {name: name for name in ARCHITECTURES}, default="")]
    settings.require({"quantization_config": None})
    return found.of(settings)
