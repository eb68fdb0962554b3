"""The config fields of the data."""

from typing import Annotated, Literal

from mini_gpt.config.fields import Count, Section, at_least, field

PAIRS, TOKENS, TASK = "pairs", "tokens", "task:"  # the last starts the names of corpora of task problems
SOURCES = {  # {data.corpus, or its start: function that opens it}, whose module is imported when it is used
    "python_stdlib": "mini_gpt.data.sources.python_stdlib:open_corpus",
    "tiny_shakespeare": "mini_gpt.data.sources.tiny_shakespeare:open_corpus",
    "english": "mini_gpt.data.english:open_corpus",
    "text": "mini_gpt.data.sources.text:open_corpus",
    "pairs": "mini_gpt.data.sources.pairs:open_corpus",
    "tokens": "mini_gpt.data.sources.tokens:open_corpus",
    "tfds:": "mini_gpt.data.sources.tfds:open_corpus",
    "task:": "mini_gpt.data.tasks:open_corpus",
}
NO_FILES = ("python_stdlib", "english", TASK)  # starts of the names of corpora that do not read data.path


def known_sources() -> str:
    """Return the values of `data.corpus`, for messages."""
    return ", ".join(f"{name}NAME" if name.endswith(":") else name for name in SOURCES)


class DataConfig(Section, prefix="data."):
    """The text: source, split and tokenization."""

    corpus: str = field("python_stdlib", known_sources())
    path: str | None = field(None, "text: glob; pairs: TSV or sources; tokens, tfds: directory; tiny_shakespeare: file")
    text_field: str = field("text", "text: the field or column of records, in JSON, CSV, Parquet and Arrow")
    document_separator: str | None = field(
        None, "between documents, such as '\\n\\n'; None: a file is a document; for tokens, <|endoftext|>"
    )
    token_dtype: Literal["uint16", "uint32", "int32", "int64"] | None = field(
        None, "tokens: the type of the ids; None: that of a shard's header, else uint16 unless they look wider"
    )
    target_path: str | None = field(None, "pairs: the file of the targets; None: data.path is a TSV file")
    pair: tuple[str, str] | None = field(None, "tfds: features of source and target, as ('en', 'de'); None: one text")
    split: Literal["documents", "contiguous"] = field("documents", "by a hash of each document, or by text position")
    split_fractions: tuple[float, float, float] = field((0.9, 0.05, 0.05), "for train, validation and test; sum to 1")
    tokenizer: Literal["bytes", "characters", "words", "bpe", "imported"] = field(
        "bytes", "unit of a token; imported: the Unigram, WordPiece or words of an imported model"
    )
    vocab_size: Count = field(8192, "for bpe, above 257: 256 bytes, a document separator, and merges")
    tokenizer_sample: Count = field(100_000_000, "for bpe: bytes of files to train on, from all of a larger corpus")
    task_length: Count = field(20, "task:NAME: length of the longest training problems, in the task's own unit")
    seed: Annotated[int, at_least(0)] = field(
        None, "for the order of the training data, and their masks", follows="seed"
    )
    position_ids: Literal["sequence", "coupled", "abacus"] = field(
        "sequence", "coupled, abacus: positions restart at each character that is no letter or digit"
    )
    isolate_documents: bool = field(False, "attention stays inside a document, and positions restart in each")

    def check(self) -> None:
        for name in ("path", "target_path"):
            if "\0" in (getattr(self, name) or ""):
                self.refuse(name, "must be a path without NUL characters")
        if min(self.split_fractions) < 0 or abs(sum(self.split_fractions) - 1) >= 1e-6:
            self.refuse("split_fractions", "must be non-negative and sum to 1")
        if self.is_task and self.tokenizer != "characters":
            self.refuse("tokenizer", "the tasks have a fixed vocabulary: must be characters")
        if self.tokenizer == "bpe" and self.vocab_size < 258:
            self.refuse("vocab_size", "must be above 257, for bytes and a separator, because data.tokenizer is bpe")
        if self.position_ids != "sequence" and not self.is_task:
            self.refuse("position_ids", "must be sequence, because data.corpus is not a task")
        needed = {"text": "a glob, such as 'books/**/*.txt'", PAIRS: "a file", TOKENS: "a directory"}
        if self.corpus in needed and self.path is None:
            self.refuse("path", f"data.corpus={self.corpus} needs {needed[self.corpus]}")
        if self.document_separator == "":
            self.refuse("document_separator", "must be a text such as '<|endoftext|>', or None")
        readers = {"path": ("text", not self.corpus.startswith(NO_FILES)), "target_path": (PAIRS, self.corpus == PAIRS)}
        for name, (other, is_read) in (readers | {"pair": ("tfds:NAME", self.corpus.startswith("tfds:"))}).items():
            if not is_read and getattr(self, name) is not None:
                self.refuse(name, f"must be None: data.corpus={self.corpus} does not read it; data.corpus={other} does")

    @property
    def has_pairs(self) -> bool:
        """Whether the corpus consists of sources and targets; the problems of a task can be used as such."""
        return self.corpus == PAIRS or self.pair is not None

    @property
    def is_task(self) -> bool:
        return self.corpus.startswith(TASK)
