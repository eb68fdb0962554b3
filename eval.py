"""Run `python eval.py --help` for the flags; see mini_gpt/commands/eval.py."""

from mini_gpt.commands.eval import main

if __name__ == "__main__":
    main()
