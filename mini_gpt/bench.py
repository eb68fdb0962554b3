"""Run `python -m mini_gpt.bench`; see mini_gpt/commands/bench.py."""

from mini_gpt.commands.bench import main
from mini_gpt.runtime import errors

if __name__ == "__main__":
    errors.run(main)
