"""Which of Transformers' architectures has the blocks of a config, and what it can't say of them."""

from types import ModuleType

from mini_gpt.config.model_schema import ModelConfig
from mini_gpt.hugging_face.architectures import gpt2, gpt_neox, llama, mpt
from mini_gpt.hugging_face.architectures.settings import Settings
from mini_gpt.runtime.errors import UserError, shown

# By model_type in their config.json. Each has a TITLE, a CLASS, whether its products and norms are ALWAYS_BIASED, the
# PREFIX of its tensors, the BUFFERS that old files hold, and can, describe, fields and tensors.
ARCHITECTURES = {"gpt2": gpt2, "llama": llama, "gpt_neox": gpt_neox, "mpt": mpt}

# What all of them are. Of the fields that only training reads, dropout among them, none is looked at.
ALL_CAN = {
    "causal": (True,),
    "norm_placement": ("pre",),
    "residual": (True,),
    "scale_attention": (True,),  # GPT-2 may say no, which some versions of Transformers do not hear
    "attention_window": (None,),
    "random_positions": (None,),
}
IMPLIED = {f"model.{name}": values[0] for name, values in ALL_CAN.items()} | {"model.scale_embeddings": False}


def choose(model: ModelConfig) -> str:
    """Gives the model_type that a model can be written as.

    Raises UserError, with the name of the field, where there is none.
    """
    by_position = {
        "learned": "gpt2",
        "alibi": "mpt",
        "rope": "llama" if model.norm == "rmsnorm" else "gpt_neox",
    }
    if model.position not in by_position:
        raise UserError(
            f"model.position: found {shown(model.position)}; no architecture that can be written here has it: "
            f"must be {', '.join(by_position)}"
        )
    model_type = by_position[model.position]
    architecture, problems = ARCHITECTURES[model_type], []
    for name, values in (ALL_CAN | architecture.can(model)).items():
        section, _, leaf = name.rpartition(".")
        found = getattr(getattr(model, section) if section else model, leaf)
        if found not in values:
            problems.append(f"model.{name}: found {shown(found)}; must be {' or '.join(map(str, values))}")
    if problems:
        written = f"a model with {model.position} positions and {model.norm} is written as {architecture.TITLE}"
        raise UserError("; ".join([*problems, written]))
    return model_type


def find(settings: Settings) -> ModuleType:
    """Gives the architecture that a config.json names. Raises UserError for one that is not read here."""
    if "optimizer" in settings.values:
        raise UserError(f"{settings.path}: found a run's config; its directory is a run already")
    architecture = ARCHITECTURES[settings.one_of("model_type", {name: name for name in ARCHITECTURES}, default="")]
    settings.must_be("quantization_config", None, default=None)
    return architecture
