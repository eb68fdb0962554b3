"""Run `python -m mini_gpt.study`; see mini_gpt/study/command.py."""

from mini_gpt.study.command import main

if __name__ == "__main__":
    main()
