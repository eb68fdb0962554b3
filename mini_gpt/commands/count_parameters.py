"""Count the parameters of a config without allocating them.

python -m mini_gpt.commands.count_parameters --config=configs/presets.py:gpt2_small
"""

from mini_gpt.commands import command_line
from mini_gpt.config import loading as configs
from mini_gpt.model import gpt, parameters


@command_line.command
def main() -> None:
    parser = command_line.parser(__doc__, prog="python -m mini_gpt.commands.count_parameters")
    parser.add_argument("--config", required=True, help="config file, with :NAME for a preset in it")
    parser.add_argument("--vocab_size", type=int, help="default: data.vocab_size for bpe, else 257")
    flags = parser.parse_args()
    config = configs.load(flags.config, {"data.corpus": "python_stdlib"})  # unused; a built-in corpus needs no path
    vocab_size = flags.vocab_size or (config.data.vocab_size if config.data.tokenizer == "bpe" else 257)
    print(parameters.report(gpt.abstract(config.model, vocab_size)[1]))


if __name__ == "__main__":
    main()
