"""RoPE settings of Llama and GPT-NeoX; both store queries and keys half-split, as ours."""

from typing import Any

from mini_gpt.config.model_schema import ModelConfig
from mini_gpt.hugging_face.architectures.settings import Settings

# No YaRN: its ramp is linear in the index of a pair in Transformers, and in its rotations in the paper and here.
SCALINGS = ("none", "linear", "ntk")


def base(model: ModelConfig) -> float:
    """Return RoPE's base; NTK-aware scaling is a change of the base."""
    rope, width = model.rope, model.rotated_width
    return rope.base * rope.factor ** (width / (width - 2)) if rope.scaling == "ntk" else rope.base


def scaling(model: ModelConfig) -> dict[str, Any] | None:
    """Return rope_scaling; Transformers before 4.45 reads "type"."""
    if model.rope.scaling != "linear":
        return None
    return {"rope_type": "linear", "type": "linear", "factor": model.rope.factor}


def fields(settings: Settings, *, base_name: str, fraction_name: str, fraction: float) -> dict[str, Any]:
    """Return our config fields, from rope_scaling and its neighbours, or from rope_parameters (Transformers 5)."""
    old = settings.section("rope_scaling")
    found = old if old.values else settings.section("rope_parameters")  # as Transformers 5 chooses
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in ("default", "linear"):
        name = "rope_type" if "rope_type" in found.values else "type"
        raise found.error(name, "must be default or linear to be imported")
    factor = found.number("factor", 0.0) if kind == "linear" else 1.0
    if factor < 1:
        raise found.error("factor", "must be at least 1")
    return {
        "model.position": "rope",
        "model.rope.base": found.number("rope_theta", settings.number(base_name, 10_000.0)),
        "model.rope.fraction": found.number("partial_rotary_factor", settings.number(fraction_name, fraction)),
        "model.rope.scaling": "linear" if factor > 1 else "none",
        "model.rope.factor": factor,
    }
