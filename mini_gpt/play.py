"""Run `python -m mini_gpt.play`; see mini_gpt/commands/play.py."""

from mini_gpt.commands.play import main

if __name__ == "__main__":
    main()
