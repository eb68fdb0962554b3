"""Run `python -m mini_gpt.exercises`; see mini_gpt/commands/exercises.py."""

from mini_gpt.commands.exercises import main

if __name__ == "__main__":
    main()
