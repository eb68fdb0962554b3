"""Run `python -m mini_gpt.hugging_face`; see mini_gpt/commands/hugging_face.py."""

from mini_gpt.commands.hugging_face import main

if __name__ == "__main__":
    main()
