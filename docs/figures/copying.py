"""Show how models that were trained to copy a word do it: what each head and each place carries, and attention.

    for seed in 0 1 2; do
        python train.py --config=configs/tasks.py:copy --config.data.task_length=10 --config.context_length=22 \\
            --config.model.num_layers=2 --config.model.dtype=float32 --config.model.position=rope \\
            --config.train.steps=3000 --config.train.batch_size=64 --config.optimizer.learning_rate=5e-3 \\
            --config.seed=$seed --workdir=runs/copy_$seed
    done
    python -m docs.figures.copying runs/copy_0 runs/copy_1 runs/copy_2

It writes docs/results/how_copying_works.csv, how_copying_works_places.csv and how_copying_works.png.
"""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from mini_gpt.commands import command_line
from mini_gpt.data import tasks
from mini_gpt.insight import colours, curves
from mini_gpt.insight.attention import attention_maps
from mini_gpt.insight.curves import Curve
from mini_gpt.insight.mechanisms import patching
from mini_gpt.runtime import files
from mini_gpt.suites import results
from mini_gpt.training.run import Run

WORDS = 40  # of each length, of the validation split
SHORTEST = 5  # letters
PLACES = ("the letter", "the next letter", "other letters", "=", "copied letters", "query")


def measured(run: Run) -> tuple[list[dict], list[dict]]:
    """Return a row for each word length and head, and one for each word length.

    Of a head: the patching effect, and the mean weight at each distance. Of a length: the effects of the residual
    stream before the last layer, by PLACES.
    """
    longest, of_heads, of_places = run.config.data.task_length, [], []
    for length in range(SHORTEST, longest + 1):
        random = np.random.default_rng(length)
        found = tasks.different(run.config.data.corpus, "validation", WORDS, shortest=length, longest=length)
        words = [question for question, _ in found]
        effects = [_effects(run, word, random) for word in words]
        effects_NH = np.mean([found.heads_NH for _, found in effects], axis=0)
        weights_NHX = np.mean([_by_distance(run, word) for word in words], axis=0, dtype=np.float64)
        common = {"seed": run.config.seed, "letters": length, "words": len(words)}
        for layer, head in np.ndindex(effects_NH.shape):
            row = common | {"head": f"{layer}.{head}", "effect": round(float(effects_NH[layer, head]), 5)}
            by_distance = enumerate(weights_NHX[layer, head].round(5).tolist())
            of_heads.append(row | {f"distance {n}": weight for n, weight in by_distance})
        shares = np.mean([by_place(found.by_place["stream"][-1], place, length) for place, found in effects], axis=0)
        of_places.append(common | dict(zip(PLACES, shares.round(5).tolist(), strict=True)))
    return of_heads, of_places


def by_place(effects_L: np.ndarray, changed: int, length: int) -> np.ndarray:
    """Return the sums of effects over PLACES. changed: the index of the letter that differs, of a word of `length`.

    The text is the word, =, and the copied letters before the changed one. For the first letter, = is the query.
    """
    names = np.array(["other letters"] * length + ["="] + ["copied letters"] * changed, object)
    names[changed] = "the letter"
    if changed + 1 < length:
        names[changed + 1] = "the next letter"
    names[-1] = "query"
    return np.array([effects_L[names == name].sum() for name in PLACES])


def _effects(run: Run, word: str, random: np.random.Generator) -> tuple[int, patching.Effects]:
    """Change one letter of the word. Return its index, and the shares of the difference that patches restore."""
    place = int(random.integers(len(word)))
    letter = str(random.choice([other for other in "abcdefghijklmnopqrstuvwxyz" if other != word[place]]))
    other = word[:place] + letter + word[place + 1 :]
    text = lambda source, copied: run.tokenizer.encode(f"{source}{tasks.ANSWER}{copied}").astype(np.int32)
    clean, corrupted = text(word, word[: place + 1]), text(other, word[:place] + letter)
    pair = patching.TextPair(clean[:-1], corrupted[:-1], int(clean[-1]), int(corrupted[-1]))
    return place, patching.patch(run.model, pair)


def _by_distance(run: Run, word: str) -> np.ndarray:
    """Return the mean weight_NHX on the key X tokens before the query, over the queries that predict a letter."""
    tokens = run.tokenizer.encode(f"{word}{tasks.ANSWER}{word[:-1]}").astype(np.int32)
    longest = 2 * run.config.data.task_length
    weights_NHLS = np.stack([maps.weights_BHLS[0] for maps in attention_maps(run.model, tokens[None])])
    queries = range(len(word), len(tokens))
    by_distance = [np.pad(weights_NHLS[:, :, i, i::-1], ((0, 0), (0, 0), (0, longest - i - 1))) for i in queries]
    return np.mean(by_distance, axis=0)


def figure(of_heads: list[dict], of_places: list[dict]) -> Figure:
    """Plot a row for each seed: effects of heads, effects of places, and weights of the first layer by distance."""
    seeds, lengths = ([*dict.fromkeys(row[name] for row in of_heads)] for name in ("seed", "letters"))
    chosen = [lengths[len(lengths) // 2], lengths[-1]]
    size, ratios = (9.4 + 3.4 * len(chosen), 4.0 * len(seeds)), (4.2, 5.2, *[3.4] * len(chosen))
    drawn, panels = curves.new_figure(size, len(seeds), 2 + len(chosen), width_ratios=ratios, squeeze=False)
    for seed, (left, middle, *others) in zip(seeds, panels, strict=True):
        by_length = {
            length: [row for row in of_heads if (row["seed"], row["letters"]) == (seed, length)] for length in lengths
        }
        heads = [row["head"] for row in by_length[lengths[0]]]
        _plot_effects(left, [[row["effect"] for row in found] for found in by_length.values()], lengths)
        left.set_xticks(range(len(heads)), heads)
        left.set(xlabel="head (layer.head)", title=f"Seed {seed}: share restored by a head")
        image = _plot_effects(
            middle, [[row[name] for name in PLACES] for row in of_places if row["seed"] == seed], lengths
        )
        middle.set_xticks(range(len(PLACES)), [name.replace(" ", "\n") for name in PLACES], fontsize=8)
        middle.set_title("Share restored by places, before layer 1")
        drawn.colorbar(image, ax=middle, shrink=0.8)
        for axes, length in zip(others, chosen, strict=True):
            _plot_weights(axes, length, [row for row in by_length[length] if row["head"].startswith("0.")])
    return drawn


def _plot_effects(axes: Axes, effects: list[list[float]], lengths: list[int]) -> AxesImage:
    """Plot shares with a row for each word length, and their numbers."""
    axes.set_ylabel("letters of the word")
    axes.set_yticks(range(len(lengths)), lengths)
    image = colours.heat_map(axes, np.array(effects))
    colours.write_cells(image, lambda _, share: f"{share:.2f}" if abs(share) >= 0.05 else "", fontsize=7)
    return image


def _plot_weights(axes: Axes, length: int, heads: list[dict]) -> None:
    for number, row in enumerate(heads):
        weights = [row[name] for name in row if name.startswith("distance")]
        curves.plot_curve(axes, Curve(f"head {row['head']}", [*range(len(weights))], weights), f"C{number}")
    axes.axvline(length, color="grey", linestyle=":", label="letter to copy")
    axes.set(ylim=(0, 1), xticks=range(0, 20, 4))
    curves.finish(axes, xlabel="tokens before the query", title=f"{length} letters: mean weight")


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("workdirs", nargs="+", type=command_line.directory, help="runs of task:copy with several seeds")
    parser.add_argument("--out", type=command_line.directory, default=Path("docs/results"), help="directory to write")
    flags = parser.parse_args()
    command_line.set_up()
    found = [measured(Run(workdir)) for workdir in flags.workdirs]
    of_heads, of_places = ([row for rows in each for row in rows] for each in zip(*found, strict=True))
    files.write_text(flags.out / "how_copying_works.csv", results.csv_text(of_heads))
    files.write_text(flags.out / "how_copying_works_places.csv", results.csv_text(of_places))
    curves.save(figure(of_heads, of_places), flags.out / "how_copying_works.png")


if __name__ == "__main__":
    main()
