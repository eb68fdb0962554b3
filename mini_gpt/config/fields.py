"""Sections of a config: frozen dataclasses whose fields state their type, range, default and meaning in one place."""

import dataclasses
import difflib
import functools
import operator
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, NoReturn

from mini_gpt.runtime.errors import UserError, shown

KINDS = {int: "a whole number below 2**31", float: "a number", bool: "true or false", str: "text", type(None): "None"}
UNIONS = (types.UnionType, typing.Union)
REQUIRED = object()


class Range(NamedTuple):
    words: str  # after "must be"
    holds: Callable[[Any], bool]


def at_least(least: int) -> Range:
    return Range(f"at least {least}", lambda value: value >= least)


def above(bound: int) -> Range:
    return Range(f"above {bound}", lambda value: value > bound)


def up_to(most: int) -> Range:
    return Range(f"in 1..{most}", lambda value: 1 <= value <= most)


class Spec(NamedTuple):
    """All that is stated about a field.

    follows: the field that gives the value of this one at None, or a function from {dotted name: value} of all fields;
      its docstring says what it computes.
    before: the value in runs older than the field; their config.json lacks it.
    """

    default: Any
    description: str
    follows: str | Callable[[Mapping[str, Any]], Any] | None = None
    before: Any = REQUIRED
    hint: Any = None
    section: type["Section"] | None = None


def field(*stated: Any, **more: Any) -> Any:
    """Return a dataclass field with the Spec of these arguments; the annotation states its type and range."""
    return dataclasses.field(metadata={"spec": Spec(*stated, **more)})


@typing.dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Section:
    """Base of all sections. Each becomes a frozen dataclass that checks itself."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    prefix = ""  # of the dotted names of the fields

    def __init_subclass__(cls, prefix: str = ""):
        cls.prefix = prefix
        dataclasses.dataclass(frozen=True)(cls)

    def __post_init__(self):
        for one in dataclasses.fields(self):
            if "spec" in one.metadata:
                value = converted(self.prefix + one.name, getattr(self, one.name), one.type)
                object.__setattr__(self, one.name, value)
        self.check()

    def check(self) -> None:
        """Raise UserError unless the fields agree with each other."""

    def refuse(self, name: str, right: str) -> NoReturn:
        """Raise UserError for a field that does not agree with the others."""
        raise UserError(f"{self.prefix}{name}: found {shown(operator.attrgetter(name)(self))}; {right}")


@functools.cache
def specs(section: Any) -> dict[str, Spec]:
    """Return {dotted name: spec} of the fields of a Section and of the sections in it."""
    found: dict[str, Spec] = {}
    for one in dataclasses.fields(section):
        hint: Any = one.type
        if "spec" in one.metadata:
            found[section.prefix + one.name] = one.metadata["spec"]._replace(hint=hint, section=section)
        else:
            found |= specs(hint)
    return found


def build(section: Any, values: Mapping[str, Any], make: Callable[..., Any] | None = None) -> Any:
    """Return a Section from {dotted name: value}; with make=dict, nested dicts."""
    fields = {
        one.name: values[section.prefix + one.name] if "spec" in one.metadata else build(one.type, values, make)
        for one in dataclasses.fields(section)
    }
    return (make or section)(**fields)


def converted(name: str, value: Any, hint: Any) -> Any:
    """Return a value in the field's type, such as a float for an int. Raises UserError naming the field."""
    try:
        return _converted(value, hint)
    except ValueError as error:
        near = difflib.get_close_matches(value, choices(hint), n=1) if isinstance(value, str) else []
        hint_at = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"{name}: found {shown(value)}; must be {error}{hint_at}") from None


def _converted(value: Any, hint: Any) -> Any:
    """Raises ValueError, which says what the value must be."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        value, limit = _converted(value, arguments[0]), arguments[1]
        if value is not None and not limit.holds(value):
            raise ValueError(limit.words + (", or None" if types.NoneType in typing.get_args(arguments[0]) else ""))
        return value
    if origin in UNIONS:
        for option in arguments:
            try:
                return _converted(value, option)
            except ValueError:
                continue
    elif origin is tuple and isinstance(value, list | tuple):
        inner = arguments[:1] * len(value) if arguments[-1] is ... else arguments
        if len(value) == len(inner):
            return tuple(map(_converted, value, inner))
    elif origin is Literal and value in arguments:
        return value
    elif origin is None and isinstance(value, bool) == (hint is bool):  # to Python, a bool is an int
        if hint is float and isinstance(value, int | float) and abs(value) <= sys.float_info.max:
            return float(value)
        if hint is not float and isinstance(value, hint) and (hint is not int or abs(value) < 2**31):
            return value
    raise ValueError(describe(hint))


def choices(hint: Any) -> list[str]:
    """Return the names that a field may have as its value."""
    return [hint] if isinstance(hint, str) else [text for inner in typing.get_args(hint) for text in choices(inner)]


def describe(hint: Any) -> str:
    """Return a field's type and range in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return f"{describe(arguments[0])}, {arguments[1].words}"
    if origin in UNIONS:
        return " or ".join(map(describe, arguments))
    if origin is Literal:
        return "one of " + ", ".join(arguments)
    if origin is tuple:
        return "a tuple of them" if arguments[-1] is ... else f"a tuple of {len(arguments)} numbers"
    return KINDS[hint]
