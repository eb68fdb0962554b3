"""Train a model. `python train.py --help` lists the flags. The code is in mini_gpt/commands/train.py."""

from mini_gpt.commands.train import main

if __name__ == "__main__":
    main()
