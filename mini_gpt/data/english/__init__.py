"""Short English stories of a small grammar. The links between their words and the grammar's probabilities are known.

"The cats near the girl see a box. It is heavy. Who sees the box? The cats." Verbs agree with their subjects, a pronoun
has one possible antecedent in the sentence before it, and what is said of an antecedent fits its class.
"""

import functools
import random
import re
from collections.abc import Iterator

from mini_gpt.config.data import DataConfig
from mini_gpt.data import splits
from mini_gpt.data.corpora import Corpus, digest
from mini_gpt.data.english.grammar import END, Link, Options, Story, Teller, TextEnds, Word, as_token
from mini_gpt.runtime.errors import UserError, shown

__all__ = ["END", "Link", "Story", "Word", "as_token", "open_corpus", "read", "split_of", "stories", "texts", "write"]

VERSION = 1  # part of the corpus's fingerprint; increase it if stories change
STORIES = 32_000  # in all splits
WORD = re.compile(r"\w+|[^\w\s]")


def open_corpus(data: DataConfig) -> Corpus:
    parts = {split: functools.partial(texts, split) for split in splits.SPLITS}
    return Corpus("english", digest("english", VERSION), STORIES, parts)


def write(seed: int) -> Story:
    """Draw a story. The same seed gives the same story on any machine."""
    generator = random.Random(seed)

    def choose(options: Options) -> str:
        cut, word = generator.random(), END
        for word, probability in options.items():
            cut -= probability
            if cut < 0:
                return word
        return word  # the sum of the probabilities was rounded down

    return Teller(choose).tell()


def read(text: str) -> Story:
    """Return the story of a text, with its links. The text may end before its story ends.

    Raises UserError that names the first word that the grammar does not allow.
    """
    found = iter(WORD.findall(text))
    past: list[str] = []

    def choose(options: Options) -> str:
        word = next(found, None)
        if word is None:
            raise TextEnds(options)
        if word not in options:
            place, expected = shown(" ".join(past[-6:])), ", ".join(filter(None, list(options)[:6]))
            raise UserError(f"text: found {shown(word)} after {place}; the grammar expects words such as {expected}")
        past.append(word)
        return word

    return Teller(choose).tell()


def split_of(story: Story) -> str:
    """Return the split of a story, by its first sentence."""
    return splits.by_eighths(story.text[: story.text.index(".")])


def stories(split: str) -> Iterator[Story]:
    """Yield the stories of a split, in a fixed order. No first sentence is in two splits."""
    return (story for story in map(write, range(STORIES)) if split_of(story) == split)


def texts(split: str) -> Iterator[str]:
    """Yield the texts of the stories of a split."""
    return iter(_texts()[split])


@functools.cache
def _texts() -> dict[str, list[str]]:
    """Return {split: texts of its stories}. All splits are drawn at once, because each needs all stories."""
    found: dict[str, list[str]] = {split: [] for split in splits.SPLITS}
    for story in map(write, range(STORIES)):
        found[split_of(story)].append(story.text)
    return found
