"""Real training processes end like an uninterrupted run after random kills and after signals."""

import os
import pty
import random
import signal
import termios
import time

import pytest

from tests.faults import kills
from tests.faults.kills import Marks, Trainer
from tests.faults.limits import seconds


def test_much_output_does_not_block_a_process(tmp_path):
    trainer, much = Trainer(tmp_path, "run"), "head -c 300000 /dev/zero | tr '\\0' x"
    with seconds(20):
        trainer.before = ["sh", "-c", f"{much}; exit 3"]
        assert kills.run_to_the_end(trainer, status=3) == "x" * 300_000
        trainer.before = ["bash", "-c", f"{much}; echo enter data >&$MARKS; {much}; sleep 60"]
        tally = kills.Tally()
        assert kills.kill_at_random(trainer, random.Random(0), tally, "data") and tally.phases == {"data": 1}


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, kills.PAIRS], ids=["text", "pairs"])
def test_twenty_kills_change_nothing(tmp_path, fields):
    tally = kills.check(tmp_path, kills=20, seed=random.SystemRandom().randrange(2**31), fields=fields)
    assert tally.kills >= 20


@pytest.mark.slow
def test_a_process_saves_and_resumes_after_a_signal(tmp_path):
    reference, signalled = Trainer(tmp_path, "reference"), Trainer(tmp_path, "signalled")
    signalled.before = ["env", "--default-signal=HUP"]  # also if the tests run under nohup
    kills.run_to_the_end(reference)
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)):
        process, pipe = signalled.start()
        marks = Marks(pipe)
        while marks.entered["step"] < 7:
            assert marks.read(None)
        process.send_signal(number)
        if number == signal.SIGHUP:  # a terminal that closes can send two
            while process.poll() is None and b"stopping: " not in signalled.log.read_bytes():
                time.sleep(0.001)
            process.send_signal(number)
        output = signalled.output(process, 60)
        assert process.returncode == status, output
        assert "the same command resumes the run" in output and "Traceback" not in output
    kills.run_to_the_end(signalled)
    kills.compare(reference.workdir, signalled.workdir)


@pytest.mark.slow
def test_a_run_goes_on_without_its_log(tmp_path):
    """The reader of a pipe ends, or a terminal is closed while SIGHUP is ignored: the run ends as with a log."""
    reference = Trainer(tmp_path, "reference")
    kills.run_to_the_end(reference)
    for name, (reading, writing) in {"pipe": os.pipe(), "terminal": pty.openpty()}.items():
        if name == "terminal":
            termios.tcsetwinsize(writing, (24, 80))  # without a size, there is no progress bar
        alone = Trainer(tmp_path, name)
        alone.before = ["env", "--ignore-signal=HUP"]
        process, pipe = alone.start(output=writing)
        os.close(writing)
        marks = Marks(pipe)
        while marks.entered["step"] < 7:
            assert marks.read(None)
        os.read(reading, 1)
        os.close(reading)
        while marks.read(None):
            pass
        process.wait(60)
        kills.compare(reference.workdir, alone.workdir)
