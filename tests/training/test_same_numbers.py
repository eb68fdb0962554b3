"""A small run still has the recorded losses."""

import pytest

from mini_gpt.training import loop
from tests.training.interruption import rows

TRAIN = [5.549993515, 5.526333332, 5.471690655, 5.421407223, 5.333127975, 5.274291039, 5.225000858, 5.189845085]
VALIDATION = {4: 5.323483134, 8: 5.133705709}


def test_a_small_run_has_the_recorded_losses(small, tmp_path):
    loop.train(small(), tmp_path, conclude=False)
    logged = rows(tmp_path)
    message = "the losses changed: record the new ones only if that is intended"
    assert [row["train/loss"] for row in logged] == pytest.approx(TRAIN, rel=1e-5), message
    found = {row["step"]: row["validation/loss"] for row in logged if "validation/loss" in row}
    assert found == pytest.approx(VALIDATION, rel=1e-5), message
