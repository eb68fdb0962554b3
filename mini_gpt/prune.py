"""Run `python -m mini_gpt.prune`; see mini_gpt/commands/prune.py."""

from mini_gpt.commands.prune import main

if __name__ == "__main__":
    main()
