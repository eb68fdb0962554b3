"""A command ends without a traceback, with any standard streams. Real processes, without JAX."""

import os
import shlex
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

SCRIPT = """
import pathlib, sys
from mini_gpt.runtime import errors, program

def main():
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        print("größer × " * int(sys.argv[2]))
        if sys.argv[3] == "read":
            file.write(ascii(sys.stdin.read()))
        if sys.argv[3] == "fail":
            raise errors.UserError("wrong")

program.run(main)
"""
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0"}
# How the process is started, the locale, the exit statuses, and all of stderr.
STREAMS = {
    "ASCII": ("{}", ASCII, (0,), ""),
    "a reader that ends": ("{} | true", {}, (1,), ""),
    "a reader of the start": ("{} | head -c 1", {}, (0, 1), ""),
    "a full disk": ("{} > /dev/full", {}, (1,), "error: No space left on device\n"),
}


def start(tmp_path, around, locale, *arguments):
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    call = shlex.join([sys.executable, str(tmp_path / "script.py"), str(tmp_path / "file"), *arguments])
    line = f"set -o pipefail; {around.format(call)}"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)} | locale
    return subprocess.run(["bash", "-c", line], env=environment, capture_output=True, timeout=30)


@pytest.mark.parametrize("count", ["1", "30000"])
@pytest.mark.parametrize("name", STREAMS)
def test_any_standard_streams_end_without_a_traceback(tmp_path, name, count):
    around, locale, statuses, said = STREAMS[name]
    done = start(tmp_path, around, locale, count, "print")
    assert (done.stderr.decode(), done.returncode in statuses) == (said, True), done
    assert (tmp_path / "file").read_text() == "", "nothing printed is in a file of the command"


def test_an_error_is_printed_though_the_reader_has_ended(tmp_path):
    done = start(tmp_path, "{} | true", {}, "1", "fail")
    assert done.returncode == 1 and done.stderr in (b"", b"error: wrong\n")


@pytest.mark.parametrize("locale", [{}, ASCII], ids=["UTF-8", "ASCII"])
def test_input_that_is_not_utf8_becomes_surrogates(tmp_path, locale):
    assert start(tmp_path, "printf 'a\\xff' | {}", locale, "1", "read").returncode == 0
    assert (tmp_path / "file").read_text() == r"'a\udcff'"


@pytest.mark.parametrize("error", ["MemoryError()", 'RuntimeError("can\'t start new thread")'])
def test_a_full_memory_is_one_line(error):
    script = f"from mini_gpt.runtime import program\ndef main():\n    raise {error}\nprogram.run(main)"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: out of memory (") and "ulimit -v" in done.stderr


LOGS = """
import pathlib, sys, threading
from mini_gpt.runtime import program

def main():
    for _ in range(3):
        thread = threading.Thread(target=lambda: sys.stderr.write("größer × " * 30000))
        thread.start()
        thread.join()
        print("logged", file=sys.stderr)
    pathlib.Path(sys.argv[1]).write_text("end")

program.run(main)
"""


@pytest.mark.parametrize("around", ["{} 2>&1 >/dev/null | head -c 1", "{} 2>&1 >/dev/null | true", "{} 2>/dev/full"])
def test_a_lost_log_ends_no_command(tmp_path, around):
    call = shlex.join([sys.executable, "-c", LOGS, str(tmp_path / "file")])
    line = f"set -o pipefail; {around.format(call)}"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, timeout=30)
    assert done.returncode == 0 and (tmp_path / "file").read_text() == "end"
