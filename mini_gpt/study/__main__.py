"""Run `python -m mini_gpt.study`; see mini_gpt/commands/study.py."""

from mini_gpt.commands.study import main

if __name__ == "__main__":
    main()
