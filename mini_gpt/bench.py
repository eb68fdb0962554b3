"""Run `python -m mini_gpt.bench`; see mini_gpt/commands/bench.py."""

from mini_gpt.commands.bench import main

if __name__ == "__main__":
    main()
