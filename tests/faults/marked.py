"""Run train.py and write marks to a pipe (its file descriptor is in the environment variable MARKS): "enter PHASE" and
"leave PHASE" for the phases data, step, save and evaluation, and "from STEP" for the restored step."""

import functools
import os
import sys
from types import SimpleNamespace

import jax
from orbax.checkpoint import CheckpointManager

import train
from mini_gpt.commands import command_line
from mini_gpt.data import token_store
from mini_gpt.objectives.pairs import PairObjective
from mini_gpt.objectives.text import TextObjective
from mini_gpt.runtime import processes
from mini_gpt.training import assembly, checkpoint, loop

PIPE = int(os.environ["MARKS"])


def mark(line: str) -> None:
    if processes.is_main_process():
        os.write(PIPE, f"{line}\n".encode())


def mark_calls(phase: str, owner, name: str, *, enters: bool = True, leaves: bool = True) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def marked(*args, **kwargs):
        if enters:
            mark(f"enter {phase}")
        try:
            return original(*args, **kwargs)
        finally:
            if leaves:
                mark(f"leave {phase}")

    setattr(owner, name, marked)


def mark_restored() -> None:
    restore_last = checkpoint.Checkpoints.restore_last

    def marked_restore(*args, **kwargs):
        found = restore_last(*args, **kwargs)
        mark(f"from {found[0] if found else 0}")
        return found

    checkpoint.Checkpoints.restore_last = marked_restore


def mark_steps() -> None:
    lowered_step = assembly.Assembly.lowered_step

    def compiled(lowered):
        step = lowered.compile()

        def marked(state, batch):
            mark("enter step")
            result = jax.block_until_ready(step(state, batch))
            mark("leave step")
            return result

        return marked

    assembly.Assembly.lowered_step = lambda self: SimpleNamespace(compile=lambda: compiled(lowered_step(self)))


def cache_all_programs() -> None:
    set_up = command_line.set_up

    def setting_up(*args, **kwargs):
        set_up(*args, **kwargs)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_compilation_cache_dir", os.environ["PROGRAMS"])

    command_line.set_up = setting_up


if __name__ == "__main__":
    mark_calls("data", token_store, "_build")
    mark_calls("save", loop.Checkpoints, "save", leaves=False)  # Orbax writes the rest in the background
    mark_calls("save", CheckpointManager, "_finalize", enters=False)
    for objective in (TextObjective, PairObjective):
        mark_calls("evaluation", objective, "scalars")
    mark_restored()
    mark_steps()
    cache_all_programs()
    sys.argv[0] = "train.py"
    train.main()
