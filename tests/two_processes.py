"""Run several commands, one after another, in each of the two processes of tests/runtime/test_processes.py.

python -m tests.two_processes COMMANDS.json   [["train.py", "--config=...", ...], ["eval.py", ...]]
"""

import importlib
import json
import sys
from pathlib import Path

from mini_gpt.runtime import program
from mini_gpt.training import conclusion

if __name__ == "__main__":
    conclusion.SUMMARY_TOKENS = 4  # each sampled token needs a forward pass, with a barrier in each layer
    for command, *arguments in json.loads(Path(sys.argv[1]).read_text()):
        sys.argv = [command, *arguments]
        program.run(importlib.import_module(command.removesuffix(".py")).main)
