"""Count a config's parameters: python -m mini_gpt.commands.count_parameters --config=configs/presets.py:gpt2_small"""

import argparse

from mini_gpt.config import loading as configs
from mini_gpt.model import parameters
from mini_gpt.runtime import errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", required=True, help="a config file, with :NAME for one of its presets")
    parser.add_argument("--vocab_size", type=int, help="tokens; default: data.vocab_size for bpe, else 257")
    arguments = parser.parse_args()
    config = configs.load(arguments.config, {"data.corpus": "python_stdlib"})  # no corpus is opened
    vocab_size = arguments.vocab_size or (config.data.vocab_size if config.data.tokenizer == "bpe" else 257)
    print(parameters.report(parameters.abstract(config.model, vocab_size)[1]))


if __name__ == "__main__":
    errors.run(main)
