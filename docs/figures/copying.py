"""Show how a model that was trained to copy a word does it: its attention by distance, and what each head carries.

    python train.py --config=configs/tasks.py:copy --config.data.task_length=10 --config.context_length=22 \\
        --config.model.num_layers=2 --config.model.dtype=float32 --config.model.position=rope \\
        --config.train.steps=3000 --config.train.batch_size=64 --config.optimizer.learning_rate=5e-3 --workdir=runs/copy
    python -m docs.figures.copying --workdir=runs/copy

It writes docs/results/how_copying_works.csv and how_copying_works.png.
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from mini_gpt.commands import command_line, results
from mini_gpt.data import tasks
from mini_gpt.insight import colours, curves
from mini_gpt.insight.attention import attention_maps
from mini_gpt.insight.curves import Curve
from mini_gpt.insight.mechanisms import patching
from mini_gpt.runtime import files
from mini_gpt.training.run import Run

WORDS = 40  # of each length, of the validation split
SHORTEST = 5  # letters


def measured(run: Run) -> list[dict]:
    """Return a row for each word length and head: the patching effect, and the mean weight at each distance."""
    longest, rows = run.config.data.task_length, []
    for length in range(SHORTEST, longest + 1):
        random = np.random.default_rng(length)
        found = tasks.different(run.config.data.corpus, "validation", WORDS, shortest=length, longest=length)
        words = [question for question, _ in found]
        effects_NH = np.mean([_effects(run, word, random) for word in words], axis=0)
        weights_NHX = np.mean([_by_distance(run, word) for word in words], axis=0)
        for layer, head in np.ndindex(effects_NH.shape):
            row = {"letters": length, "words": len(words), "head": f"{layer}.{head}", "effect": effects_NH[layer, head]}
            distances = {f"distance {n}": weight for n, weight in enumerate(weights_NHX[layer, head])}
            rows.append(
                {
                    name: cell if isinstance(cell, int | str) else round(float(cell), 5)
                    for name, cell in (row | distances).items()
                }
            )
    return rows


def _effects(run: Run, word: str, random: np.random.Generator) -> np.ndarray:
    """Return the share of the difference that each head restores, if one letter of the word is another."""
    place = int(random.integers(len(word)))
    letter = str(random.choice([other for other in "abcdefghijklmnopqrstuvwxyz" if other != word[place]]))
    other = word[:place] + letter + word[place + 1 :]
    text = lambda source, copied: run.tokenizer.encode(f"{source}{tasks.ANSWER}{copied}").astype(np.int32)
    clean, corrupted = text(word, word[: place + 1]), text(other, word[:place] + letter)
    pair = patching.TextPair(clean[:-1], corrupted[:-1], int(clean[-1]), int(corrupted[-1]))
    return patching.patch(run.model, pair).heads_NH


def _by_distance(run: Run, word: str) -> np.ndarray:
    """Return the mean weight_NHX on the key X tokens before the query, over the queries that predict a letter."""
    tokens = run.tokenizer.encode(f"{word}{tasks.ANSWER}{word[:-1]}").astype(np.int32)
    longest = 2 * run.config.data.task_length
    weights_NHLS = np.stack([maps.weights_BHLS[0] for maps in attention_maps(run.model, tokens[None])])
    queries = range(len(word), len(tokens))
    by_distance = [np.pad(weights_NHLS[:, :, i, i::-1], ((0, 0), (0, 0), (0, longest - i - 1))) for i in queries]
    return np.mean(by_distance, axis=0)


def figure(rows: list[dict]) -> Figure:
    """Plot the effects by word length and head, and the weights of the first layer by distance."""
    lengths, heads = ([*dict.fromkeys(row[name] for row in rows)] for name in ("letters", "head"))
    first = [head for head in heads if head.startswith("0.")]
    chosen = [lengths[0], lengths[len(lengths) // 2], lengths[-1]]
    size, options = (4.2 + 3.4 * len(chosen), 4.0), {"width_ratios": (4.2, *[3.4] * len(chosen))}
    drawn, (left, *others) = curves.new_figure(size, 1, 1 + len(chosen), **options)
    effects = np.array([[row["effect"] for row in rows if row["letters"] == length] for length in lengths])
    image = left.imshow(effects, cmap=colours.SIGNED, vmin=-1, vmax=1, aspect="auto")
    left.set(xlabel="head (layer.head)", ylabel="letters of the word", title="Share restored by a head's output")
    left.set_xticks(range(len(heads)), heads)
    left.set_yticks(range(len(lengths)), lengths)
    drawn.colorbar(image, ax=left, shrink=0.8)
    for axes, length in zip(others, chosen, strict=True):
        for number, head in enumerate(first):
            (row,) = (row for row in rows if (row["letters"], row["head"]) == (length, head))
            weights = [row[name] for name in row if name.startswith("distance")]
            curves.plot_curve(axes, Curve(f"head {head}", [*range(len(weights))], weights), f"C{number}")
        axes.axvline(length, color="grey", linestyle=":", label="letter to copy")
        axes.set(ylim=(0, 0.6), xticks=range(0, 20, 4))
        curves.finish(axes, xlabel="tokens before the query", title=f"{length} letters: mean weight")
    return drawn


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--workdir", type=command_line.directory, required=True, help="a run of task:copy")
    parser.add_argument("--out", type=command_line.directory, default=Path("docs/results"), help="directory to write")
    flags = parser.parse_args()
    command_line.set_up()
    rows = measured(Run(flags.workdir))
    files.write_text(flags.out / "how_copying_works.csv", results.csv_text(rows))
    curves.save(figure(rows), flags.out / "how_copying_works.png")


if __name__ == "__main__":
    main()
