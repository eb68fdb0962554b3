"""Count the parameters of a config or a run without allocating them.

    python -m mini_gpt.commands.count_parameters --config=configs/presets.py:gpt2_small

With --workdir, the vocabulary size is that of the run's tokenizer. With --config, it follows from the config: for bpe,
it is data.vocab_size. The masked objective adds a token, and span corruption adds 100.
"""

import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mini_gpt.commands import command_line
from mini_gpt.config import loading
from mini_gpt.config.data import TOKENS, DataConfig
from mini_gpt.config.fields import LARGEST
from mini_gpt.config.schema import Config
from mini_gpt.data import tasks, tokenizers
from mini_gpt.model import build, parameters
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.training import inputs
from mini_gpt.training.initial_weights import SavedRun


@command_line.command
def main() -> None:
    parser = command_line.parser(__doc__, prog="python -m mini_gpt.commands.count_parameters")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", help="config file, with :NAME for a preset in it")
    source.add_argument("--workdir", type=command_line.directory, help="a run directory; counts with its own tokenizer")
    help = "number of tokens, with the document separator; default: that of the run or the config"
    parser.add_argument("--vocab_size", type=int, help=help)
    flags = parser.parse_args()
    tokens = flags.vocab_size
    require(tokens is None or 1 <= tokens <= LARGEST, "--vocab_size", tokens, f"must be in 1..{LARGEST}")
    if flags.workdir:
        run = SavedRun(flags.workdir)
        config = run.trained
        size = tokens + config.objective_class.extra_tokens if tokens else inputs.vocab_size(config, run.tokenizer)
    else:
        config = read(flags.config)
        size = (tokens or vocab_size(config.data)) + config.objective_class.extra_tokens
    print(parameters.report(build.abstract(config.model, size)[1]))


def read(path: str, overrides: Mapping[str, Any] = types.MappingProxyType({})) -> Config:
    """Return the config of a file. The corpus is not read, so its path may be missing."""
    if path.endswith(".json") and not overrides:
        return loading.read(Path(path))  # does not check the corpus
    try:
        return loading.load(path, overrides)
    except UserError as error:
        if not str(error).startswith("data.path: found None"):
            raise
        return loading.load(path, {"data.path": "unread"} | dict(overrides))


def vocab_size(data: DataConfig) -> int:
    """Return the tokenizer's size. Raise UserError if it depends on the corpus, which is not opened."""
    if data.is_task:
        return len(tasks.find(data.corpus).alphabet) + 1
    if data.tokenizer == "bytes" and data.corpus != TOKENS:
        return tokenizers.vocab_size(tokenizers.ByteTokenizer())
    remedy = "the number of tokens depends on the corpus; give it as --vocab_size"
    require(data.corpus != TOKENS, "data.corpus", data.corpus, remedy)
    require(data.tokenizer in ("bpe", "imported"), "data.tokenizer", data.tokenizer, remedy)
    return data.vocab_size


if __name__ == "__main__":
    main()
