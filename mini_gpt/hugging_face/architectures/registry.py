"""Choose the Transformers architecture that has the blocks of a config."""

from types import ModuleType

from mini_gpt.config.model_schema import ModelConfig
from mini_gpt.hugging_face.architectures import gpt2, gpt_neox, llama, mpt
from mini_gpt.hugging_face.architectures.settings import Settings
from mini_gpt.runtime.errors import UserError, shown

# By model_type in config.json. Each module has TITLE, CLASS, ALWAYS_BIASED (linear layers and norms have biases),
# PREFIX (of tensor names), BUFFERS (a pattern of tensors to skip), and functions can, describe, fields, tensors.
ARCHITECTURES = {"gpt2": gpt2, "llama": llama, "gpt_neox": gpt_neox, "mpt": mpt}

# Values that all of them need. Fields that only training reads, such as dropout, are not checked.
ALL_CAN = {
    "causal": (True,),
    "norm_placement": ("pre",),
    "residual": (True,),
    "scale_attention": (True,),  # GPT-2's config can express False, but some versions of Transformers ignore it
    "attention_window": (None,),
    "random_positions": (None,),
}
IMPLIED = {f"model.{name}": values[0] for name, values in ALL_CAN.items()} | {"model.scale_embeddings": False}


def choose(model: ModelConfig) -> str:
    """Return the model_type as which a model can be exported. Raises UserError, naming the fields, if there is none."""
    by_position = {
        "learned": "gpt2",
        "alibi": "mpt",
        "rope": "llama" if model.norm == "rmsnorm" else "gpt_neox",
    }
    if model.position not in by_position:
        raise UserError(
            f"model.position: found {shown(model.position)}, which can't be exported; must be one of "
            f"{', '.join(by_position)}"
        )
    model_type = by_position[model.position]
    architecture, problems = ARCHITECTURES[model_type], []
    for name, values in (ALL_CAN | architecture.can(model)).items():
        section, _, leaf = name.rpartition(".")
        found = getattr(getattr(model, section) if section else model, leaf)
        if found not in values:
            problems.append(f"model.{name}: found {shown(found)}; must be {' or '.join(map(str, values))}")
    if problems:
        written = f"a model with {model.position} positions and {model.norm} is exported as {architecture.TITLE}"
        raise UserError("; ".join([*problems, written]))
    return model_type


def find(settings: Settings) -> ModuleType:
    """Return the architecture that a config.json names. Raises UserError if it is not supported."""
    if "optimizer" in settings.values:
        raise UserError(f"{settings.path}: found the config of a run of mini_gpt; it needs no import")
    architecture = ARCHITECTURES[settings.one_of("model_type", {name: name for name in ARCHITECTURES}, default="")]
    settings.must_be("quantization_config", None, default=None)
    return architecture
