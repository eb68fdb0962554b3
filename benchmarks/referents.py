"""Which noun "it" or "he" stands for: log-probabilities of both, and heads that attend to them, by whole words.

python -m benchmarks.referents --workdir=runs/smollm2

The score of a noun is the log-probability of the end of the sentence with the noun in the place of the pronoun (Trinh
and Le 2018, partial score). A causal model reads the pronoun before the end. So the attention of the pronoun is the
same for both ends, and only that of the last word can differ.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mini_gpt.commands import command_line
from mini_gpt.data import spans
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import attention, words
from mini_gpt.training.run import Run


class Sentence(NamedTuple):
    """A text with a place for the pronoun. ends: for the first and for the second noun."""

    text: str
    pronoun: str
    nouns: tuple[str, str]
    ends: tuple[str, str]


TROPHY = "The trophy did not fit in the suitcase because {}"
LAWYER = "The lawyer cross-examined the witness because {}"
SENTENCES = (
    Sentence(TROPHY, "it", ("trophy", "suitcase"), ("was too big", "was too small")),
    Sentence(LAWYER, "he", ("lawyer", "witness"), ("wanted answers", "had lied")),
)


def score(run: Run, beginning: str, end: str) -> float:
    """Return the log-probability of the end, in nats."""
    tokens = run.tokenizer.encode(f"{beginning} {end}").astype(np.int32)
    first = len(run.tokenizer.encode(beginning))
    return -float(run.model.nll(tokens[None, :-1], tokens[None, 1:])[0, first - 1 :].sum())


def scores(run: Run, sentence: Sentence) -> np.ndarray:
    """Return the score of each noun (rows) with each end (columns)."""
    return np.array(
        [[score(run, sentence.text.format(f"the {noun}"), end) for end in sentence.ends] for noun in sentence.nouns]
    )


def weights(model: LoadedModel, tokens: np.ndarray, texts: list[str], names: tuple[str, ...]) -> np.ndarray:
    """Return [N, H, len(names) - 1]: the weights of the last of the named words on the others."""
    word_L, with_spaces = words.of_tokens(texts)
    found = [word.strip() for word in with_spaces]
    layers = words.grouped(attention.attention_maps(model, tokens[None]), word_L)
    *keys, query = (len(found) - 1 - found[::-1].index(name) for name in names)
    return np.stack([layer.weights_BHLS[0][:, query][:, keys] for layer in layers])


def attended(run: Run, sentence: Sentence, end: str, query: str) -> np.ndarray:
    """Return weights_NHK of a word on both nouns."""
    tokens = run.tokenizer.encode(f"{sentence.text.format(sentence.pronoun)} {end}").astype(np.int32)
    return weights(run.model, tokens, spans.decode_each(tokens, run.tokenizer), (*sentence.nouns, query))


def report(run: Run, sentence: Sentence) -> str:
    """Return the scores, and the heads whose last word attends most to the right noun rather than to the other one."""
    one, two = sentence.nouns
    lines = [sentence.text.format(sentence.pronoun)]
    for end, (of_one, of_two) in zip(sentence.ends, scores(run, sentence).T, strict=True):
        lines.append(f"  {end}: {one} {of_one:.2f}, {two} {of_two:.2f}")
    first, second = (attended(run, sentence, end, end.split()[-1]) for end in sentence.ends)
    shift_NH = (
        np.diff(second - first)[..., 0] / 2
    )  # how much more the last word favours the right noun, mean of both ends
    mean = attended(run, sentence, sentence.ends[0], sentence.pronoun).mean((0, 1))
    lines.append(f"  {sentence.pronoun}, mean over heads: {one} {mean[0]:.3f}, {two} {mean[1]:.3f}")
    for index in np.argsort(-shift_NH.ravel())[:3]:
        layer, head = divmod(int(index), shift_NH.shape[1])
        of_ends = zip(sentence.ends, (first[layer, head], second[layer, head]), strict=True)
        found = (f"{end.split()[-1]}: {one} {of_one:.2f}, {two} {of_two:.2f}" for end, (of_one, of_two) in of_ends)
        lines.append(f"  head {layer}.{head}: {'; '.join(found)}")
    return "\n".join(lines)


@command_line.command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=Path, required=True)
    run = Run(parser.parse_args().workdir)
    for sentence in SENTENCES:
        print(report(run, sentence))


if __name__ == "__main__":
    main()
