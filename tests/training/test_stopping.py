"""SIGTERM and SIGINT save the current step; the resumed run ends with the bits of an uninterrupted run."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import jax
import orbax.checkpoint as ocp
import pytest

from mini_gpt.runtime.errors import UserError
from mini_gpt.training import assembly, loop, run_directory, stopping
from mini_gpt.training.checkpoint import Checkpoints
from tests.faults.kills import Trainer
from tests.training.interruption import assert_same_bits, rows, without_rates, wrap_step
from tests.training.test_loop import HARD


def signal_in_step(monkeypatch, number, step_number):
    """Send this process the signal `number` just before training step `step_number` of the run starts."""

    def signalling(step):
        taken = []

        def signalled(state, batch):
            taken.append(None)
            if len(taken) == step_number:
                os.kill(os.getpid(), number)
            return step(state, batch)

        return signalled

    wrap_step(monkeypatch, signalling)


@pytest.mark.slow
@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_the_step_and_sets_the_exit_status(small, tmp_path, monkeypatch, number, status, capfd, caplog):
    config = small(train__steps=9, train__log_every=4, checkpoint__every=4, eval__every=9, **HARD)
    uninterrupted = loop.train(config, tmp_path / "uninterrupted", conclude=False)
    caplog.set_level("INFO", "mini_gpt")
    handler = signal.getsignal(number)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as left:
        signal_in_step(patch, number, 6)
        loop.train(config, tmp_path / "run", conclude=False)
    assert left.value.code == status and signal.getsignal(number) is handler
    assert "stopping: saving after this step; send the signal again to exit at once" in capfd.readouterr().err
    assert "stopped and saved at step 6; the same command resumes the run" in caplog.text
    assert Checkpoints(tmp_path / "run" / "checkpoints", read_only=True).steps() == [4, 6]
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 4]  # step 6 is saved, but not logged
    assert_same_bits(loop.train(config, tmp_path / "run", conclude=False), uninterrupted)
    one, other = ([without_rates(row) for row in rows(tmp_path / name)] for name in ("uninterrupted", "run"))
    assert one == other


def test_a_run_trains_outside_the_main_thread(small, tmp_path):
    config = small(train__steps=2, eval__every=2, checkpoint__every=2)
    with ThreadPoolExecutor(1) as pool:
        state = pool.submit(loop.train, config, tmp_path, conclude=False).result()
    assert int(state.step) == 2 and Checkpoints(tmp_path / "checkpoints", read_only=True).steps() == [2]


@pytest.mark.slow
def test_a_hang_up_during_the_last_save_does_not_lose_it(small, tmp_path, monkeypatch):
    """A scheduler sends SIGTERM, and the process that watches the runs of a study then sends SIGHUP."""
    config, sent, unprotected = small(train__steps=9, checkpoint__every=9, **HARD), [], []
    wait, previous = Checkpoints.wait, signal.signal(signal.SIGHUP, lambda *_: unprotected.append("hung up"))

    def hang_up(checkpoints):
        sent.append(signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        wait(checkpoints)

    monkeypatch.setattr(Checkpoints, "wait", hang_up)
    signal_in_step(monkeypatch, signal.SIGTERM, 3)
    try:
        with pytest.raises(SystemExit):
            loop.train(config, tmp_path, conclude=False)
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert Checkpoints(tmp_path / "checkpoints", read_only=True).steps() == [3]
    assert sent and not unprotected


@pytest.mark.slow
def test_a_signal_in_the_last_evaluation_stops_the_process(small, tmp_path, monkeypatch):
    config, evaluate = small(train__steps=3, eval__every=3, checkpoint__every=3, **HARD), loop.Loop._evaluated

    def signalled(self, row, state):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, row, state)

    monkeypatch.setattr(loop.Loop, "_evaluated", signalled)
    with pytest.raises(SystemExit) as left:
        loop.train(config, tmp_path)
    assert left.value.code == 143
    assert Checkpoints(tmp_path / "checkpoints", read_only=True).steps() == [3]


def exit_with_the_signal(never, ready):
    with stopping.listening() as request:
        ready.set()
        never.wait(30)
        os._exit(request.received or 0)


@pytest.mark.slow
def test_a_second_signal_exits_at_once():
    context = multiprocessing.get_context("spawn")
    never, ready = context.Event(), context.Event()
    process = context.Process(target=exit_with_the_signal, args=(never, ready))
    process.start()
    assert ready.wait(60)
    os.kill(process.pid, signal.SIGTERM)
    process.join(1)
    assert process.exitcode is None
    os.kill(process.pid, signal.SIGTERM)
    process.join(10)
    assert process.exitcode == 143


def hold_the_lock(workdir, held, release):
    with run_directory.locked(workdir, new=True):
        held.set()
        release.wait(60)


@pytest.mark.slow
def test_a_second_run_is_refused_until_the_first_has_ended(small, tmp_path):
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    process = context.Process(target=hold_the_lock, args=(tmp_path, held, release))
    process.start()
    assert held.wait(60)
    with pytest.raises(UserError, match=r"--workdir: another run trains in \S+; wait, or name a new directory"):
        loop.train(small(), tmp_path)
    assert not (tmp_path / "config.json").exists() and not (tmp_path / "checkpoints").exists()
    process.kill()
    process.join()
    loop.train(small(train__steps=1), tmp_path, conclude=False)
    with pytest.raises(UserError, match="another run has started in"), run_directory.locked(tmp_path, new=True):
        pass


def test_a_file_system_without_locks_gives_a_warning(small, tmp_path, monkeypatch, caplog):
    def unsupported(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", unsupported)
    state = loop.train(small(train__steps=1), tmp_path / "run", conclude=False)
    assert state.step == 1 and "lock: this file system has no locks (No locks available)" in caplog.text


FULL_MEMORY = [
    MemoryError(),
    MemoryError("std::bad_alloc"),
    jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.\nmore"),
    RuntimeError("can't start new thread"),
    OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
]


@pytest.mark.parametrize("where, error", [("lowered_step", FULL_MEMORY[2]), ("first_state", FULL_MEMORY[4])])
def test_full_memory_names_the_fields_that_need_less(small, tmp_path, monkeypatch, error, where):
    def fail(*_):
        raise error

    monkeypatch.setattr(assembly.Assembly, where, fail)
    with pytest.raises(
        UserError, match=r"^out of memory \(.+\); raise train\.accumulation_steps or mesh\.fsdp, or lower"
    ):
        loop.train(small(), tmp_path / "run", conclude=False)


@pytest.mark.slow
def test_full_memory_in_a_resume_damages_no_checkpoint(small, tmp_path, monkeypatch):
    loop.train(small(train__steps=2), tmp_path / "run", conclude=False)
    for error in FULL_MEMORY:
        monkeypatch.setattr(ocp.StandardCheckpointHandler, "restore", mock.Mock(side_effect=error))
        with pytest.raises(UserError, match=r"^out of memory \(.+\); raise train\.accumulation_steps"):
            loop.train(small(train__steps=4), tmp_path / "run", conclude=False)
        assert (tmp_path / "run" / "checkpoints" / "2").exists()
    assert not (tmp_path / "run" / "damaged").exists()


COMPILING = """
import ctypes
import signal
from types import SimpleNamespace
from mini_gpt.training import assembly

# A shell starts commands in the background with SIGINT ignored, and processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

def compile():
    print("compiling", flush=True)
    ctypes.CDLL(None).sleep(60)  # no Python code runs meanwhile, as in the compiler

assembly.Assembly.lowered_step = lambda run: SimpleNamespace(compile=compile)
from mini_gpt.commands import train
train.main()
"""


@pytest.mark.slow
def test_an_interrupt_while_compiling_ends_the_process_at_once(tmp_path):
    arguments = Trainer(tmp_path, "run").command
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    process = subprocess.Popen(
        [sys.executable, "-c", COMPILING, *arguments], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout.readline() == "compiling\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == -signal.SIGINT
