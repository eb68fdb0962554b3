"""Run `python train.py --help` for the flags; see mini_gpt/commands/train.py."""

from mini_gpt.commands.train import main

if __name__ == "__main__":
    main()
