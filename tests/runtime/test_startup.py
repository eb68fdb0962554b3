"""The log of a command leaves out errors of Orbax's tasks that repeat an error of the command."""

import os
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

TASKS = """
import asyncio, gc
from mini_gpt.runtime import errors, program, startup

OF_TASKS = '''
class Wait:
    def __await__(self):
        yield

async def read():
    try:
        await Wait()
    except BaseException as error:
        raise Exception("a damaged array\\\\n" * 60) from error
    raise ValueError("a damaged array")
'''
found = {}
exec(compile(OF_TASKS, "/packages/PACKAGE/serialization.py", "exec"), found)

def main():
    startup.set_up()
    left = found["read"]()  # its exception is ignored when it is closed
    left.send(None)
    del left

    async def lost():
        asyncio.gather(found["read"]())  # nothing retrieves its exception
        await asyncio.sleep(0.01)

    asyncio.run(lost())
    gc.collect()
    raise errors.UserError("damaged")

program.run(main)
"""


def said(package):
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    script = TASKS.replace("PACKAGE", package)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    return done.stderr


@pytest.mark.slow
def test_errors_of_tasks_of_orbax_are_not_repeated():
    assert said("orbax") == "error: damaged\n"
    assert "Exception ignored in" in said("another")


def test_the_collector_does_not_visit_what_imports_made():
    script = "import gc; from mini_gpt.runtime import startup; startup.set_up(); gc.collect()"
    counts = "print(gc.get_freeze_count(), len(gc.get_objects()))"
    command = [sys.executable, "-c", f"{script}; {counts}"]
    frozen, visited = map(int, subprocess.check_output(command, cwd=REPOSITORY, text=True).split())
    assert frozen > 100 * visited
