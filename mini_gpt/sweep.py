"""Run `python -m mini_gpt.sweep`, the short form of `python -m mini_gpt.study run`; see mini_gpt/commands/study.py."""

from mini_gpt.commands.study import sweep as main

if __name__ == "__main__":
    main()
