"""Run `python -m mini_gpt.sweep`; see mini_gpt/commands/sweep.py."""

from mini_gpt.commands.sweep import main

if __name__ == "__main__":
    main()
