"""What a suite is asked, as it was typed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """What is asked of a suite, as it was typed; None is the suite's own default."""

    split: str = "validation"
    lengths: str | None = None
    strides: str | None = None
    text: str | None = None  # whose attention is shown, in place of the split's start
