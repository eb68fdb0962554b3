"""Fixtures of tests of benchmarks."""

from tests.pages.conftest import browser  # noqa: F401
