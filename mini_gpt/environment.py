"""Run `python -m mini_gpt.environment`; see mini_gpt/commands/environment.py."""

from mini_gpt.commands.environment import main

if __name__ == "__main__":
    main()
