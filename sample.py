"""Generate text from a run. `python sample.py --help` lists the flags. The code is in mini_gpt/commands/sample.py."""

from mini_gpt.commands.sample import main

if __name__ == "__main__":
    main()
