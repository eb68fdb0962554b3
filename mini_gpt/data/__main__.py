"""Run `python -m mini_gpt.data look`; see mini_gpt/commands/data.py."""

from mini_gpt.commands.data import main

if __name__ == "__main__":
    main()
