"""Fixtures of tests of diagnosis."""

import jax
import pytest

from tests.insight import broken


@pytest.fixture
def with_wrong_mask(monkeypatch):
    """Return a function that breaks the code of models by name, for all functions that are traced during the test."""

    def change(name):
        broken.MASKS[name][0](monkeypatch)
        jax.clear_caches()

    yield change
    monkeypatch.undo()
    jax.clear_caches()
