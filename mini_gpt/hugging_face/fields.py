"""Fields of config.json that an import reads and an export writes, each by one record."""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mini_gpt.config.model import ModelConfig
from mini_gpt.hugging_face.settings import Settings

FULL, SLIDING = "full_attention", "sliding_attention"  # entries of layer_types
Read = Mapping[str, Any]  # {field of mini_gpt's config: value}, as far as they are read


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of config.json, and the fields of `ModelConfig` with its value.

    theirs: its name in Transformers.
    ours: one or more names; all must have the value of the first.
    default: Transformers' value of a missing field, or a function of the fields that are read before.
    kind: the method of `Settings` that reads it, or our names of true and false.
    nullable: null is None; for other fields, null is the default.
    written: an export writes it; if not, only the default can be exported, a function of width and heads.
    """

    theirs: str
    ours: str
    default: Any = None
    kind: str | Mapping[bool, str] = "whole"
    nullable: bool = False
    written: bool = True

    def read(self, settings: Settings, fields: Read) -> dict[str, Any]:
        """Return fields of mini_gpt's config. Raises UserError for an unsupported setting."""
        default = self.default(fields) if callable(self.default) else self.default
        if self.nullable and settings.values.get(self.theirs, default) is None:
            value = None
        elif isinstance(self.kind, str):
            value = getattr(settings, self.kind)(self.theirs, default)
        else:
            value = self.kind[settings.boolean(self.theirs, default)]
        return {f"model.{name}": value for name in self.ours.split()}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return fields of config.json."""
        value = operator.attrgetter(self.ours.split()[0])(model)
        if not isinstance(self.kind, str):
            value = next(theirs for theirs, ours in self.kind.items() if ours == value)
        return {self.theirs: value} if self.written else {}

    def supported(self, model: ModelConfig) -> dict[str, tuple]:
        """Return the values of fields of `ModelConfig` that can be exported."""
        first, *_ = names = self.ours.split()
        value = operator.attrgetter(first)(model)
        if not self.written:
            return {first: (self.default({"model.d_model": model.d_model, "model.num_heads": model.num_heads}),)}
        if not isinstance(self.kind, str):
            return {first: tuple(self.kind.values())}
        return dict.fromkeys(names, ("one number for all layers" if isinstance(value, tuple) else value,))


@dataclasses.dataclass(frozen=True)
class Windows(Field):
    """One window of the layers that layer_types names.

    by_default: returns the kinds of the layers, if layer_types is missing.
    flag: a field without which no layer has a window.
    """

    theirs: str = "sliding_window"
    ours: str = "attention_window"
    default: Any = 4096
    by_default: Callable[[Settings, int], list[str]] = lambda settings, layers: [FULL] * layers
    flag: str | None = None

    def kinds(self, settings: Settings, layers: int) -> Sequence[str]:
        """Return the kind of each layer, FULL or SLIDING."""
        return settings.of_layers("layer_types", self.by_default(settings, layers), layers, (FULL, SLIDING))

    def read(self, settings: Settings, fields: Read) -> dict[str, Any]:
        window = None
        if self.flag is None or (
            settings.boolean(self.flag, False) and settings.values.get(self.theirs, 1) is not None
        ):
            window = settings.whole(self.theirs, self.default)
        kinds = self.kinds(settings, fields["model.num_layers"])
        if window is None and SLIDING in kinds and "layer_types" in settings.values:
            raise settings.error("layer_types", f"must be {FULL} without {self.flag}")
        return {f"model.{self.ours}": shortest([window if kind == SLIDING else None for kind in kinds])}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        windows = [kind.window for kind in model.layer_kinds]
        used = {} if self.flag is None else {self.flag: any(windows)}
        window = first_window(model, None if self.flag else self.default)
        return used | {self.theirs: window, "layer_types": [SLIDING if each else FULL for each in windows]}

    def supported(self, model: ModelConfig) -> dict[str, tuple]:
        return window_in_some_layers(model)


def first_window(model: ModelConfig, without: int | None) -> int | None:
    """Return the window of the first layer that has one; `without` if none has."""
    return next((kind.window for kind in model.layer_kinds if kind.window is not None), without)


def window_in_some_layers(model: ModelConfig) -> dict[str, tuple]:
    """Return the supported values of the window of an architecture in which a layer has one window or none."""
    sizes = {kind.window for kind in model.layer_kinds} - {None}
    return {"attention_window": ("None and one number",) if len(sizes) > 1 else (model.attention_window,)}


def shortest(values: Sequence[Any]) -> Any:
    """Return the shortest tuple that repeats to `values`, or its value if there is only one."""
    for size in range(1, len(values) + 1):
        if all(value == values[index % size] for index, value in enumerate(values)):
            break
    return values[0] if size == 1 else tuple(values[:size])
