"""The supported Transformers architectures, and the choice of one."""

import itertools
import operator
import types

from mini_gpt.config.model import ModelConfig
from mini_gpt.hugging_face.architecture import Architecture, Ids
from mini_gpt.hugging_face.bert import Bert, Roberta
from mini_gpt.hugging_face.causal import GPT2, MPT, OPT, Bloom, GPTNeo
from mini_gpt.hugging_face.gemma import Gemma, Gemma2, Gemma3
from mini_gpt.hugging_face.gpt_neox import GPTNeoX, Phi, StarCoder2
from mini_gpt.hugging_face.llama import Mistral, Olmo, Olmo2, Qwen2, Qwen3, SmolLM3
from mini_gpt.hugging_face.nanochat import NanoChat
from mini_gpt.hugging_face.rotary import Llama
from mini_gpt.hugging_face.settings import Settings
from mini_gpt.hugging_face.t5 import T5
from mini_gpt.runtime.errors import UserError, shown

NO_IDS: Ids = types.MappingProxyType({})
BY_POSITION: dict[str, tuple[type[Architecture], ...]] = {  # in the order in which an export tries them
    "learned": (GPT2, GPTNeo, OPT),
    "none": (GPT2,),
    "sinusoidal": (GPT2,),
    "rope": (GPTNeoX, Phi, StarCoder2, Olmo),
    "rope, rmsnorm": (Llama, Mistral, Qwen2, Qwen3, Gemma, Gemma2, Gemma3, Olmo2, NanoChat),
    "rope and none": (SmolLM3,),
    "alibi": (MPT, Bloom),
}
ALL: tuple[type[Architecture], ...] = (*itertools.chain(*BY_POSITION.values()), T5, Bert, Roberta)
ARCHITECTURES = {each.model_type: each for each in ALL}


def choose(model: ModelConfig, ids: Ids = NO_IDS, model_type: str | None = None) -> Architecture:
    """Return the architecture that can express a model. Raises UserError, naming the fields, if there is none.

    ids: the token ids in config.json.
    model_type: of the architecture; None: the first that fits.
    """
    candidates = [ARCHITECTURES[model_type]] if model_type else _by_fields(model)
    found = [(each.with_ids(ids), _problems(each.with_ids(ids), model)) for each in candidates]
    architecture, problems = next((pair for pair in found if not pair[1]), found[0])
    if problems:
        chosen = f"{_kind(model)} is exported as {architecture.title}"
        raise UserError("; ".join([*problems, f"--architecture={model_type} needs this" if model_type else chosen]))
    return architecture


def _problems(architecture: Architecture, model: ModelConfig) -> list[str]:
    """Return an error for each field of the model that the architecture can't express."""
    problems = []
    for name, values in architecture.supported(model).items():
        found = operator.attrgetter(name)(model)
        if found not in values:
            problems.append(f"model.{name}: found {shown(found)}; must be {' or '.join(map(str, values))}")
    return problems


def _by_fields(model: ModelConfig) -> tuple[type[Architecture], ...]:
    """Return the architectures that may express a model. Raises UserError if there is none for its positions."""
    if model.has_encoder:
        return (T5,)
    if not model.causal:
        return (Bert,)
    kind = " and ".join(sorted(set(model.position_pattern), reverse=True))
    kind += ", rmsnorm" if kind == "rope" and model.norm == "rmsnorm" else ""
    if kind not in BY_POSITION:
        right = "which can't be exported; must be learned, none, sinusoidal, alibi, rope, or a pattern of rope and none"
        raise UserError(f"model.position: found {shown(model.position)}, {right}")
    return BY_POSITION[kind]


def _kind(model: ModelConfig) -> str:
    """Return the words for the kind of a model by which its architecture is chosen."""
    if model.has_encoder:
        return "an encoder-decoder"
    return f"a model with {model.position} positions and {model.norm}" if model.causal else "a bidirectional model"


def find(settings: Settings) -> Architecture:
    """Return the architecture that a config.json names. Raises UserError if it is not supported."""
    if "optimizer" in settings.values:
        raise UserError(f"{settings.path}: found the config of a run of mini_gpt; it needs no import")
    found = ARCHITECTURES[settings.one_of("model_type", {name: name for name in ARCHITECTURES}, default="")]
    settings.require({"quantization_config": None})
    usual = zip(("hidden_size", "num_hidden_layers", "num_attention_heads"), found.sizes, strict=False)
    settings.rename({alias: name for alias, name in usual if alias != name} | found.aliases)
    return found.of(settings)
