"""Evaluate a run. `python eval.py --help` lists the flags. The code is in mini_gpt/commands/eval.py."""

from mini_gpt.commands.eval import main

if __name__ == "__main__":
    main()
