"""The result of one check."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One check of a model: its value, the limit, and whether the value is past it (`found`).

    says: the value in a sentence. causes: what may be the reason if `found`, the most likely first.
    """

    check: str
    value: float
    limit: str
    found: bool
    says: str
    causes: tuple[str, ...] = ()
