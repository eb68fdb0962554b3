"""The options of a suite, as they are typed after eval.py or a sweep."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SuiteOptions:
    """Options of a suite; None means the default of the suite.

    split: train, validation or test. lengths, strides: comma-separated, such as "64,2x". text: a text whose attention
    is shown, in place of the start of the split.
    """

    split: str = "validation"
    lengths: str | None = None
    strides: str | None = None
    text: str | None = None


Request = SuiteOptions  # the old name
