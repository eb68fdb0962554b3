"""Run `python -m mini_gpt.lab`; see mini_gpt/commands/lab.py."""

from mini_gpt.commands.lab import main

if __name__ == "__main__":
    main()
