"""Run `python -m mini_gpt.sweep`, the short form of `python -m mini_gpt.study run`; see mini_gpt/study/command.py."""

from mini_gpt.study.command import sweep as main

if __name__ == "__main__":
    main()
