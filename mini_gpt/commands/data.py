"""Look at the data that a run would see, before anything is trained.

python -m mini_gpt.data look --config=configs/tiny.py [--documents=3] [--config.data.path='books/*.jsonl' ...]

It prints documents, bytes and tokens of each split, the passes over the data, and the first documents. The text is
tokenized into the cache, where training finds it.
"""

import itertools
import shutil
import textwrap
from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table

from mini_gpt.commands import command_line
from mini_gpt.config import loading
from mini_gpt.config.schema import Config
from mini_gpt.data import corpora, text_batches, token_store, tokenizers
from mini_gpt.data.corpora import Corpus
from mini_gpt.data.sources.text import LONGEST_PIECE
from mini_gpt.data.token_store import TokenStore
from mini_gpt.runtime.errors import UserError, printable
from mini_gpt.training import settings

CHARACTERS = 240  # of a document that is shown


@command_line.command
def main() -> None:
    parser = command_line.parser(__doc__, "python -m mini_gpt.data")
    parser.add_argument("action", choices=["look"])
    parser.add_argument("--config", required=True, help="config file, such as configs/tiny.py")
    parser.add_argument("--documents", type=int, default=3, help="number of first documents that are shown")
    command_line.add_cache_flag(parser)
    flags, rest = parser.parse_known_args()
    config = loading.load(flags.config, command_line.config_overrides(rest))
    if config.data.is_task:
        raise UserError("data.corpus: a task makes its problems itself; see --suite=tasks")
    command_line.set_up()
    corpus = corpora.open_corpus(config.data)
    tokenizer = token_store.fit_tokenizer(corpus, config.data)
    store = token_store.open_store(corpus, config.data, tokenizer)
    console = Console(width=min(shutil.get_terminal_size().columns, 100), highlight=False)
    console.print(f"{corpus.name}: tokenizer {tokenizer.kind} with {tokenizers.vocab_size(tokenizer):,} tokens")
    console.print(_splits(store))
    for line in _of_training(config, store, tokenizer):
        console.print(line, markup=False, soft_wrap=True)
    for line in () if corpus.token_files else _first(corpus, flags.documents):
        console.print(line, markup=False, soft_wrap=True)


def _splits(store: TokenStore) -> Table:
    table = Table("split", box=box.SIMPLE_HEAD)
    for name in ("documents", "bytes", "tokens", "bytes per token"):
        table.add_column(name, justify="right")
    for split, counts in store.meta["splits"].items():
        numbers = [f"{counts[name]:,}" for name in ("documents", "bytes", "tokens")]
        table.add_row(split, *numbers, f"{counts['bytes'] / counts['tokens']:.2f}" if counts["tokens"] else "")
    return table


def _of_training(config: Config, store: TokenStore, tokenizer: tokenizers.Tokenizer) -> Iterator[str]:
    """Yield the passes over the data, or why training would fail."""
    yield f"data.split={store.meta['split']}; cached in {store.directory}"
    if config.data.has_pairs:
        return
    try:
        vocab = text_batches.vocab_of(tokenizer)
        rows = text_batches.TextBatches(store.tokens("train"), config, vocab=vocab).rows_per_epoch
        yield settings.passes(config, rows)
    except UserError as error:
        yield f"training would end with: {error}"


def _first(corpus: Corpus, count: int) -> Iterator[str]:
    starts = (piece.text for _, piece in corpus.pieces() if piece.is_new)
    for number, text in enumerate(itertools.islice(starts, max(0, count)), start=1):
        shown = printable(" ".join(text[: 2 * CHARACTERS].split()))
        size = f"{len(text):,} characters" if len(text) < LONGEST_PIECE else f"at least {LONGEST_PIECE:,} characters"
        yield f"\ndocument {number}, {size}:"
        yield textwrap.indent("\n".join(textwrap.wrap(textwrap.shorten(shown, CHARACTERS), 96)), "  ")
