"""Other values of a model's fields and other arrangements of its weights, compared by their losses.

After an override, an edited config or a wrong import, the model that fits the weights has a much lower loss.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from mini_gpt.config import loading
from mini_gpt.config.attention import ROPE_FREQUENCIES
from mini_gpt.config.fields import specs
from mini_gpt.config.model import ModelConfig
from mini_gpt.config.schema import Config
from mini_gpt.insight.diagnosis import arrangements
from mini_gpt.insight.diagnosis.result import REGAINED, SAME, CheckResult
from mini_gpt.model import gpt
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.model.parameters import Parameters, by_name, with_layers
from mini_gpt.runtime import progress
from mini_gpt.runtime.errors import UserError

EXPLAINED = 0.9  # share of the difference from the recorded loss, after which single layers are not tried
CLEAR = 0.3  # nats that it must gain if no loss was recorded
LEAST = 0.05  # nats that it must gain in any case
BASES = (1e4, 5e5, 1e6)  # of RoPE
UNSCALED = {f"model.rope.{name}": specs(Config)[f"model.rope.{name}"].default for name in ROPE_FREQUENCIES}


def check(model: LoadedModel, loss_of: Callable[[LoadedModel], float], excess: float | None) -> list[CheckResult]:
    """Name the alternative with the lowest loss. loss_of: returns a model's loss on some windows, in nats.

    Single layers are changed only if no change of all layers explains the loss. excess: the loss minus the recorded
    loss, in nats; None if no loss was recorded.
    """
    loss = loss_of(model)
    needed = CLEAR if excess is None else max(LEAST, REGAINED * excess)
    best, name = _best(others(model), loss_of, "other definitions")
    if not loss - best > max(needed, EXPLAINED * (excess or 0)):
        single = _best(arranged(model, arrangements.of_one_layer), loss_of, "changes of a single layer")
        best, name = min((best, name), single)
    says = f"The loss of some windows is {loss:.2f} nats per token, and {best:.2f} with this change: {name}."
    return [CheckResult("definition", loss - best, f"below {needed:.2f} nats", loss - best > needed, says, name)]


def others(model: LoadedModel) -> Iterator[tuple[str, LoadedModel]]:
    """Yield (what is wrong, model) with another value of a field, or with the weights in another arrangement."""
    config = model.config.model
    flat = loading.flatten(loading.to_dict(model.config))
    for field, value in fields(config):
        with contextlib.suppress(UserError):
            unscaled = UNSCALED if field == "model.position" and value != "rope" else {}
            changed = loading.override(model.config, unscaled | {field: value})
            definition, abstract = gpt.abstract(changed.model, len(model.parameters["embedding"]))
            if changed.model != config and by_name(abstract).keys() == by_name(model.parameters).keys():
                other = dataclasses.replace(model, config=changed, definition=definition)
                yield f"{field} is {flat[field]}, but {value} fits better", other
    yield from arranged(model, arrangements.of_all_layers)


def fields(config: ModelConfig) -> Iterator[tuple[str, Any]]:
    """Yield (field, other value). `others` skips values that need other parameters."""
    yield from (("model.position", name) for name in ("none", "sinusoidal", "rope", "alibi", "hard_alibi"))
    yield from (("model.activation", name) for name in ("gelu", "relu") if not config.gated)
    yield from ((f"model.{name}", not getattr(config, name)) for name in ("scale_attention", "scale_embeddings"))
    yield from (("model.parallel_residual", value) for value in ("none", "two_norms"))
    yield "model.attention_window", None
    yield "model.output_soft_cap", None
    if config.encoder_layers:
        yield "model.cross_positions", not config.cross_positions
    if "rope" in config.position_pattern:
        yield from (("model.rope.base", base) for base in BASES)


def arranged(
    model: LoadedModel, arrange: Callable[[Parameters, ModelConfig], arrangements.Named]
) -> Iterator[tuple[str, LoadedModel]]:
    """Yield (what is wrong, model) with the weights in each of some arrangements."""
    config = model.config.model
    for name, parameters in arrange(with_layers(model.parameters, stacked=False), config):
        yield name, dataclasses.replace(model, parameters=with_layers(parameters, stacked=config.scan_layers))


def _best(
    models: Iterator[tuple[str, LoadedModel]], loss_of: Callable[[LoadedModel], float], title: str
) -> tuple[float, str]:
    """Return the lowest loss that is finite, and the name of its model; (infinity, "") if there is none.

    Of losses that are about the same, the first is taken: a change of one kind of layers comes before that of all.
    """
    scored = [(loss_of(model), name) for name, model in progress.counted(models, title)]
    lowest = min((loss for loss, _ in scored if math.isfinite(loss)), default=math.inf)
    return next((pair for pair in scored if pair[0] <= lowest + SAME), (math.inf, ""))
