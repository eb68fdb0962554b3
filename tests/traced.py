"""Record calls of mini_gpt while it runs, for tests/structure.py. Prints JSON.

    python -m tests.traced step DIRECTORY      the functions that are entered while the step of tiny is traced
    python -m tests.traced softmax DIRECTORY   the calls from train.py to the softmax of attention

It needs a process of its own, because JAX traces some functions only once in a process.
"""

import inspect
import json
import os
import runpy
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jax

from mini_gpt.config import loading
from mini_gpt.data import corpora, token_store
from mini_gpt.training import assembly
from tests.structure import REPOSITORY

OWN = (f"{REPOSITORY}/mini_gpt/", f"{REPOSITORY}/train.py")
# They print the errors of all commands. A reader of training can skip them.
ERROR_HANDLERS = (f"{REPOSITORY}/mini_gpt/commands/command_line.py", f"{REPOSITORY}/mini_gpt/runtime/program.py")
INLINE = ("<lambda>", "<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")


def stack(frame: FrameType | None) -> list[CodeType]:
    """Return the code of mini_gpt and train.py that a frame was called from, outermost first."""
    codes = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(OWN):
            codes.append(frame.f_code)
        frame = frame.f_back
    return codes[::-1]


def described(code: CodeType) -> tuple[str, str, int]:
    """Return file, name and number of lines. Code inside a line, such as a lambda, has no lines of its own."""
    lines = 0 if code.co_name in INLINE else len(inspect.getsourcelines(code)[0])
    return str(Path(code.co_filename).relative_to(REPOSITORY)), code.co_qualname, lines


def overrides(directory: Path) -> dict[str, str]:
    """Return overrides of tiny that do not change which functions run, and write a small corpus.

    One layer, since all layers run the same functions.
    """
    corpus = directory / "text.txt"
    corpus.write_text("the cat sat on the mat\n" * 100, encoding="utf-8")
    return {"data.corpus": "text", "data.path": str(corpus), "model.dtype": "float32", "model.num_layers": "1"}


def make_trace_step(directory: Path) -> Callable[[], Any]:
    """Return a function that traces the training step of tiny."""
    config = loading.load("configs/tiny.py", overrides(directory))
    corpus = corpora.open_corpus(config.data)
    tokenizer = token_store.fit_tokenizer(corpus, config.data)
    run = assembly.assemble(config, assembly.make_mesh(config), corpus, tokenizer)
    jax.stages.Lowered.compile = lambda *_, **__: None  # XLA calls no function of mini_gpt
    return run.compiled_step


def record_step(directory: Path) -> dict[str, Any]:
    """Return {functions: described code that is entered while the step is traced, deepest: size of the largest stack}.

    The frames of other packages are not counted.
    """
    trace_step, deepest = make_trace_step(directory), 0
    codes: set[CodeType] = set()

    def record(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal deepest
        if frame.f_code.co_filename.startswith(OWN):
            codes.add(frame.f_code)
            deepest = max(deepest, len(stack(frame)))

    sys.settrace(record)
    trace_step()
    sys.settrace(None)
    return {"functions": sorted(map(described, codes)), "deepest": deepest}


def record_softmax(directory: Path) -> list[tuple[str, str, int]]:
    """Run train.py with reference attention up to the first call of jax.nn.softmax. Return the stack of that call."""

    class Found(BaseException):
        pass

    def softmax(*_: Any, **__: Any) -> jax.Array:
        raise Found(stack(sys._getframe(1)))

    def submit(_: ThreadPoolExecutor, function: Callable, *arguments: Any, **keywords: Any) -> Future:
        """Run the function in this thread: the stack of another thread does not begin in train.py."""
        future: Future = Future()
        future.set_result(function(*arguments, **keywords))
        return future

    jax.nn.softmax, ThreadPoolExecutor.submit = softmax, submit
    given = overrides(directory) | {"model.attention": "reference"}
    flags = [f"--config.{name}={value}" for name, value in given.items()]
    sys.argv = ["train.py", "--config=configs/tiny.py", f"--workdir={directory / 'run'}", *flags]
    try:
        runpy.run_path(str(REPOSITORY / "train.py"), run_name="__main__")
    except Found as found:
        (codes,) = found.args
        named = [code for code in codes if code.co_name not in INLINE]
        return [described(code) for code in named if code.co_filename not in ERROR_HANDLERS]
    raise AssertionError("train.py ended without a call of jax.nn.softmax")


if __name__ == "__main__":
    records = {"step": record_step, "softmax": record_softmax}
    print(json.dumps(records[sys.argv[1]](Path(sys.argv[2]))), flush=True)
    os._exit(0)  # without waiting for threads of the stopped run
