"""Measure the loss of words by the distance of the word that they need, in the runs of a study on the English stories.

    python -m benchmarks.distances --study=runs/studies/recurrent [--stories=1000] [--csv=FILE]

A verb needs its subject (its number), a pronoun its antecedent, and the noun of an answer the same noun in an earlier
sentence. The grammar of the stories knows both places. Loss: nats above those of the grammar itself, 0 at best. Prints
a row for each kind and distance: the number of words, the mean of each condition over its seeds, and for two conditions
the paired difference, first minus second, with its 95% interval over the seeds.
"""

import argparse
import collections
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mini_gpt.commands import command_line
from mini_gpt.data import english, tokenizers
from mini_gpt.data.batches import in_full_batches
from mini_gpt.data.english import Story
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import require
from mini_gpt.study import statistics
from mini_gpt.suites import results
from mini_gpt.training.run import Run

KINDS = ("subject", "antecedent", "answer")
FEWEST = 20  # words at a place that is shown
Place = tuple[str, int]  # kind, and the smallest distance of its group: a power of 2


def needed(story: Story) -> list[tuple[Place, int]]:
    """Return the place in the table and the index of each word with a link of KINDS to an earlier word."""
    earlier = [link for link in story.links if link.kind in KINDS and link.other < link.word]
    return [((link.kind, 1 << ((link.word - link.other).bit_length() - 1)), link.word) for link in earlier]


def losses(model: LoadedModel, tokenizer: Any, stories: Sequence[Story]) -> dict[Place, list[float]]:
    """Return the losses of the words at each place, in nats above the grammar's. Each story is scored alone."""
    length, separator = max(len(story.words) for story in stories), tokenizers.separator(tokenizer)
    ids = {text.decode(): token for token, text in enumerate(tokenizer.texts)}
    found = collections.defaultdict(list)
    for count, part in in_full_batches(stories, model.rows_at_a_time(length, count=len(stories))):
        tokens_BM = np.full((len(part), length + 1), separator, np.int32)
        for row_M, story in zip(tokens_BM, part, strict=True):
            row_M[1 : len(story.words)] = [ids[token] for token in story.tokens[:-1]]
        inputs_BL, targets_BL = sharding.put_whole((tokens_BM[:, :-1], tokens_BM[:, 1:]), model.mesh)
        nll_BL = np.asarray(model.nll(inputs_BL, targets_BL))
        for nll_L, story in zip(nll_BL[:count], part, strict=False):
            for place, word in needed(story):
                found[place].append(float(nll_L[word]) - story.words[word].nats)
    return dict(found)


def rows(means: dict[str, dict[int, dict[Place, float]]], words: dict[Place, int]) -> list[dict[str, Any]]:
    """Return the rows of the table. means: {condition: {seed: {place: mean loss}}}; words: the number at each place."""
    table = []
    for kind, distance in sorted(words, key=lambda place: (KINDS.index(place[0]), place[1])):
        place, last = (kind, distance), 2 * distance - 1
        if words[place] < FEWEST:
            continue
        shown = f"{distance}–{last}" if last > distance else str(distance)
        row: dict[str, Any] = {"kind": kind, "distance": shown, "words": words[place]}
        row |= {name: float(np.mean([of_seed[place] for of_seed in seeds.values()])) for name, seeds in means.items()}
        if len(means) == 2:
            first, second = means.values()
            differences = [first[seed][place] - second[seed][place] for seed in sorted(first.keys() & second.keys())]
            low, high = statistics.interval(statistics.draw_means(differences), 0.05)
            row |= {"difference": float(np.mean(differences)), "low": low, "high": high}
        table.append(row)
    return table


@command_line.command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, required=True)
    parser.add_argument("--stories", type=int, default=1000, help="of the validation split")
    parser.add_argument("--csv", type=Path)
    flags = parser.parse_args()
    command_line.set_up()
    workdirs = sorted(path.parent for path in flags.study.rglob("config.json") if ",seed=" in path.parent.name)
    require(bool(workdirs), "--study", str(flags.study), "has no run of a study")
    stories = list(itertools.islice(english.stories("validation"), flags.stories))
    means: dict[str, dict[int, dict[Place, float]]] = {}
    words: dict[Place, int] = {}
    for workdir in workdirs:
        run, (condition, seed) = Run(workdir), workdir.name.split(",seed=")
        corpus = run.config.data.corpus
        require(corpus == "english", f"{workdir}: data.corpus", corpus, "must be english")
        found = losses(run.model, run.tokenizer, stories)
        words = {place: len(each) for place, each in found.items()}
        means.setdefault(condition, {})[int(seed)] = {place: float(np.mean(each)) for place, each in found.items()}
    table = rows(means, words)
    print(results.table(table))
    if flags.csv:
        flags.csv.write_text(results.csv_text(table), encoding="utf-8")


if __name__ == "__main__":
    main()
