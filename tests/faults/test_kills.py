"""Real training processes, killed at random and told to stop, against a twin that was left alone."""

import random
import signal

import pytest

from tests.faults import kills
from tests.faults.kills import Marks, Trainer


@pytest.mark.slow
def test_twenty_kills_change_nothing(tmp_path):
    tally = kills.check(tmp_path, kills=20, seed=random.SystemRandom().randrange(2**31))
    assert tally.kills >= 20


@pytest.mark.slow
def test_a_signal_to_a_real_process(tmp_path):
    twin, told = Trainer(tmp_path, "twin"), Trainer(tmp_path, "told")
    kills.run_to_the_end(twin)
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        process, pipe = told.start()
        marks = Marks(pipe)
        while marks.entered["step"] < 7:
            assert marks.read(None)
        process.send_signal(number)
        said = process.communicate(timeout=60)[0]
        assert process.returncode == status, said
        assert "the same command resumes the run" in said and "Traceback" not in said
    kills.run_to_the_end(told)
    kills.compare(twin.workdir, told.workdir)
