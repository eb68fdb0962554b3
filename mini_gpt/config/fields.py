"""Sections of a config: frozen dataclasses. Each field gives its type, range, default and meaning in one place."""

import dataclasses
import functools
import operator
import sys
import types
import typing
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, NoReturn

from mini_gpt.runtime.errors import UserError, shown, suggestion

KINDS = {int: "a whole number below 2**31", float: "a number", bool: "true or false", str: "text", type(None): "None"}
NUMBERS: dict[Any, Any] = {int: (Integral, 2**31 - 1), float: ((Integral, float), sys.float_info.max)}
UNIONS = (types.UnionType, typing.Union)
Values = Mapping[str, Any]  # values of fields, by dotted name
Follows = str | Callable[[Values], Any] | None


class Range(NamedTuple):
    words: str  # completes the message "must be ..."
    holds: Callable[[Any], bool]


def at_least(least: int) -> Range:
    return Range(f"at least {least}", lambda value: value >= least)


def above(bound: int) -> Range:
    return Range(f"above {bound}", lambda value: value > bound)


def up_to(most: int, least: int = 1) -> Range:
    return Range(f"in {least}..{most}", lambda value: least <= value <= most)


LARGEST = 2**24  # above any real model
Count = Annotated[int, at_least(1)]
Positive = Annotated[float, above(0)]
Share = Annotated[float, Range("in [0, 1]", lambda value: 0 <= value <= 1)]
ShareAbove0 = Annotated[float, Range("in (0, 1]", lambda value: 0 < value <= 1)]
Epsilon = Annotated[float, Range("in 1e-15..0.01", lambda value: 1e-15 <= value <= 0.01)]
ShareInside = Annotated[float, Range("in (0, 1)", lambda value: 0 < value < 1)]
Rate = Annotated[float, Range("in [0, 1)", lambda value: 0 <= value < 1)]
Size = Annotated[int, up_to(LARGEST)]
OptionalSize = Annotated[int | None, up_to(LARGEST)]


class Spec(NamedTuple):
    """The definition of a field, except its name.

    follows: another field's name, or a function of {dotted name: value} with its formula as docstring. It gives the
      value if the field is None.
    """

    default: Any
    description: str
    follows: Follows = None
    hint: Any = None
    section: type["Section"] | None = None


def field(default: Any, description: str, *, follows: Follows = None) -> Any:
    """Return a dataclass field with a Spec as metadata. The annotation gives type and range."""
    return dataclasses.field(metadata={"spec": Spec(default, description, follows)})


@typing.dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Section:
    """The base class of all sections. Subclasses become frozen dataclasses and are checked when created.

    `loading` converts values to the types of their fields; a section takes values of these types.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    prefix = ""  # start of the dotted names of its fields

    def __init_subclass__(cls, prefix: str = ""):
        cls.prefix = prefix
        dataclasses.dataclass(frozen=True)(cls)

    def __post_init__(self):
        self.check()

    def check(self) -> None:
        """Raise UserError if the values of the fields contradict each other."""

    def refuse(self, name: str, remedy: str) -> NoReturn:
        """Raise UserError for this field, with its value and the remedy."""
        raise UserError(f"{self.prefix}{name}: found {shown(operator.attrgetter(name)(self))}; {remedy}")


@functools.cache
def specs(section: Any) -> dict[str, Spec]:
    """Return {dotted name: spec} of all fields of a section, including nested sections."""
    found: dict[str, Spec] = {}
    for attr in dataclasses.fields(section):
        hint: Any = attr.type
        if "spec" in attr.metadata:
            found[section.prefix + attr.name] = attr.metadata["spec"]._replace(hint=hint, section=section)
        else:
            found |= specs(hint)
    return found


def build(section: Any, values: Values, make: Callable[..., Any] | None = None) -> Any:
    """Build a section from {dotted name: value}. With make=dict, build nested dicts instead."""
    fields = {
        attr.name: values[section.prefix + attr.name] if "spec" in attr.metadata else build(attr.type, values, make)
        for attr in dataclasses.fields(section)
    }
    return (make or section)(**fields)


def convert(name: str, value: object, hint: object) -> Any:
    """Convert a value to the type of its field, such as an int to a float. Raises UserError that names the field."""
    try:
        return _convert(value, hint)
    except ValueError as error:
        near = suggestion(value, choices(hint)) if isinstance(value, str) else ""
        raise UserError(f"{name}: found {shown(value)}; must be {error}{near}") from None


def _convert(value: Any, hint: Any) -> Any:
    """Convert a value to a type. Raises ValueError; its text completes "must be ..."."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        value, limit = _convert(value, arguments[0]), arguments[1]
        if value is not None and not limit.holds(value):
            raise ValueError(limit.words + (", or None" if types.NoneType in typing.get_args(arguments[0]) else ""))
        return value
    if origin in UNIONS:
        listed = isinstance(value, list | tuple)
        options = [option for option in arguments if (typing.get_origin(option) is tuple) == listed]
        if len(options) == 1:
            return _convert(value, options[0])
        for option in options:
            try:
                return _convert(value, option)
            except ValueError:
                continue
    elif origin is tuple and isinstance(value, list | tuple):
        inner = arguments[:1] * len(value) if arguments[-1] is ... else arguments
        if len(value) == len(inner):
            return tuple(map(_convert, value, inner))
    elif origin is Literal and value in arguments:
        return value
    elif origin is None and isinstance(value, bool) == (hint is bool):  # in Python, a bool is an int
        kind, most = NUMBERS.get(hint, (hint, None))
        if isinstance(value, kind) and (most is None or -most <= value <= most):
            return value if most is None else hint(value)
    raise ValueError(describe(hint))


def choices(hint: object) -> list[str]:
    """Return the strings that the Literal types in a type hint allow."""
    return [hint] if isinstance(hint, str) else [text for inner in typing.get_args(hint) for text in choices(inner)]


def describe(hint: Any) -> str:
    """Return the type and range of a type hint, in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return f"{describe(arguments[0])}, {arguments[1].words}"
    if origin in UNIONS:
        return " or ".join(map(describe, arguments))
    if origin is Literal:
        return "one of " + ", ".join(arguments)
    if origin is tuple:
        several = f"a tuple of {len(arguments)} values, each {describe(arguments[0])}"
        return "a tuple of them" if arguments[-1] is ... else several
    return KINDS[hint]
