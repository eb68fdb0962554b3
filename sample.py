"""Run `python sample.py --help` for the flags; see mini_gpt/commands/sample.py."""

from mini_gpt.commands.sample import main

if __name__ == "__main__":
    main()
