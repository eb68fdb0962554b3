"""Measure what the heads of an imported English model do, and how its loss depends on the context.

    python -m benchmarks.open_model PART --workdir=RUN --output=DIR [--text=FILE]

PART: one of sinks, induction, circuits, facts, pruning, windows, beyond. --text: an English text, for sinks, induction
and pruning; the first half is for choosing heads, and the second half for measuring. Writes DIR/PART.json. Heads that a
part chooses on some texts are measured on others, beside as many random heads.

windows and beyond read long documents of the run's corpus, by default of Python's standard library. windows: the loss
in windows of several lengths and strides. beyond: the loss up to twice the trained context, with RoPE as it is and
scaled by 2.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import english_pairs, open_model_context
from benchmarks.english_pairs import Pair
from mini_gpt.commands import command_line
from mini_gpt.data import batches
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import pruning
from mini_gpt.insight.attention import each_layer
from mini_gpt.insight.heads import templates
from mini_gpt.insight.mechanisms import lens, patching
from mini_gpt.insight.observing import Layer
from mini_gpt.model import editing
from mini_gpt.model.editing import Edit, Edits
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError
from mini_gpt.training.run import Run

LENGTH, ROWS = 256, 16  # of the texts that heads are measured on
DRAWS = 5  # random choices of heads
SHARES = (0.1, 0.2, 0.4)  # of the heads that are pruned
CHOSEN = 10  # heads of a kind that are ablated together
Heads = list[tuple[int, int]]  # (layer, head)


class Texts(NamedTuple):
    """Rows of LENGTH + 1 tokens: from the first half of a text, to choose heads, and from the second, to measure."""

    first_BL: np.ndarray
    second_BL: np.ndarray


def sinks(run: Run, texts: Texts) -> dict[str, Any]:
    """Return the mean weight on the first token, over all heads and over the strongest one, of each layer."""
    found = each_layer(run.model, texts.second_BL[:, :-1], _weight_on_first)
    means_NH = np.stack(found).mean(axis=1)
    return {
        "mean_of_layer": means_NH.mean(axis=1).tolist(),
        "largest_of_layer": means_NH.max(axis=1).tolist(),
        "uniform": float(np.mean(1 / np.arange(LENGTH // 4 + 1, LENGTH + 1))),
        "rows": len(texts.second_BL),
    }


def _weight_on_first(layer: Layer) -> jax.Array:
    """Return the mean weight_BH on token 0 of the queries after the first quarter."""
    return layer.attention.weights_BHLS[:, :, LENGTH // 4 :, 0].mean(axis=-1)


def induction(run: Run, texts: Texts) -> dict[str, Any]:
    """Find heads that attend to the previous token, and induction heads, and remove them."""
    tokens = np.unique(texts.first_BL)
    repeated_BL = [templates.repeated_tokens(tokens, LENGTH + 1, ROWS, seed) for seed in (0, 1)]
    is_key_BLS = templates.induction(LENGTH, repeated_BL[0][1])["induction"]
    scores = {"induction": _mean_weight(run.model, repeated_BL[0][0][:, :-1], is_key_BLS)}
    previous_BLS = np.broadcast_to(np.eye(LENGTH, k=-1, dtype=bool), (len(texts.first_BL), LENGTH, LENGTH))
    scores["previous token"] = _mean_weight(run.model, texts.first_BL[:, :-1], previous_BLS)
    held_out_BL, period_B = repeated_BL[1]
    again_BL = np.arange(LENGTH) >= period_B[:, None]
    cases = {"repeated random tokens": (held_out_BL, again_BL), "text": (texts.second_BL, np.ones((1, LENGTH), bool))}
    removed: dict[str, list[Heads]] = {"none": [[]]}
    for kind, scores_NH in scores.items():
        removed[kind] = [_strongest(scores_NH, CHOSEN)]
    removed["random"] = _random_choices(np.random.default_rng(0), _others(scores_NH, removed["induction"][0]), CHOSEN)
    losses = {
        name: {case: [_loss(run.model, heads, *arrays) for heads in choices] for case, arrays in cases.items()}
        for name, choices in removed.items()
    }
    strongest = {kind: _listed(scores_NH, CHOSEN) for kind, scores_NH in scores.items()}
    return {"strongest": strongest, "nll_without": losses, "rows": ROWS, "removed": CHOSEN}


def _mean_weight(model: LoadedModel, tokens_BL: np.ndarray, is_key_BLS: np.ndarray) -> np.ndarray:
    """Return each head's mean weight_NH on the keys that the template marks, over queries with such a key."""
    sums = np.stack(each_layer(model, tokens_BL, _weight_on, (is_key_BLS,)), dtype=np.float64)
    return sums.sum(axis=1) / is_key_BLS.any(axis=-1).sum()


def _weight_on(layer: Layer, is_key_BLS: jax.Array) -> jax.Array:
    return jnp.einsum("bhls,bls->bh", layer.attention.weights_BHLS, is_key_BLS.astype(jnp.float32))


def circuits(run: Run) -> dict[str, Any]:
    """Patch each head's output from the clean into the corrupted text, and remove the strongest heads."""
    return {name: _circuit(run, pairs) for name, pairs in english_pairs.tasks(run.tokenizer).items()}


def _circuit(run: Run, pairs: list[Pair]) -> dict[str, Any]:
    half = len(pairs) // 2
    effects_XNH = np.stack([_effects(run.model, pair) for pair in pairs[:half]])
    means_NH, errors_NH = effects_XNH.mean(axis=0), effects_XNH.std(axis=0, ddof=1) / np.sqrt(half)
    strongest = _strongest(means_NH, CHOSEN)
    choices = {"none": [[]], "strongest": [strongest]}
    choices["random"] = _random_choices(np.random.default_rng(0), _others(means_NH, strongest), CHOSEN)
    held_out = pairs[half:]
    scores = {name: [_summary(_scores(run.model, heads, held_out)) for heads in each] for name, each in choices.items()}
    example = {name: run.tokenizer.decode(getattr(pairs[0], name).tolist()) for name in ("clean_L", "corrupted_L")}
    return {
        "pairs": len(pairs),
        "example": example | {"answer": run.tokenizer.decode([pairs[0].clean_answer])},
        "strongest": [_row(head, means_NH, errors_NH) for head in strongest],
        "effect_of_all_strongest": float(np.mean([_patched(run.model, pair, [strongest])[0] for pair in held_out])),
        "held_out": scores,
    }


def _row(head: tuple[int, int], means_NH: np.ndarray, errors_NH: np.ndarray) -> dict[str, Any]:
    return {"head": f"{head[0]}.{head[1]}", "effect": float(means_NH[head]), "standard_error": float(errors_NH[head])}


def _summary(scores_X: np.ndarray) -> dict[str, float]:
    error = float(scores_X.std(ddof=1) / np.sqrt(len(scores_X)))
    return {"right": float((scores_X > 0).mean()), "score": float(scores_X.mean()), "standard_error": error}


def _effects(model: LoadedModel, pair: Pair) -> np.ndarray:
    """Return the effect_NH of each head, patched at all places."""
    layers, heads = model.config.model.num_layers, model.config.model.num_heads
    return _patched(model, pair, [[head] for head in np.ndindex(layers, heads)]).reshape(layers, heads)


def _patched(model: LoadedModel, pair: Pair, choices: list[Heads]) -> np.ndarray:
    """Return (score with the patch - corrupted) / (clean - corrupted) for each choice of heads."""
    values_NBLHK = patching.activations(model, pair.clean_L[None]).heads
    answers = np.array([pair.clean_answer, pair.corrupted_answer])
    clean, corrupted = (float(patching.answer_scores(model, tokens_L[None], answers)[0]) for tokens_L in pair[:2])
    found: list[float] = []
    for count, part in batches.in_full_batches(choices, min(len(choices), 54)):
        chosen_NBH = np.stack([_mask(model, heads) for heads in part], axis=1)
        edits = Edits(heads=Edit.replace(chosen_NBH[:, :, None], values_NBLHK))
        patched, corrupted_BL = dataclasses.replace(model, edits=edits), np.repeat(pair.corrupted_L[None], len(part), 0)
        found += np.asarray(patching.answer_scores(patched, corrupted_BL, answers))[:count].tolist()
    return (np.array(found) - corrupted) / (clean - corrupted)


def _scores(model: LoadedModel, removed: Heads, pairs: Iterable[Pair]) -> np.ndarray:
    """Return the score of each clean text without these heads."""
    model = _without(model, removed)
    answers = lambda pair: np.array([pair.clean_answer, pair.corrupted_answer])
    return np.array([float(patching.answer_scores(model, pair.clean_L[None], answers(pair))[0]) for pair in pairs])


def facts(run: Run) -> dict[str, Any]:
    """Return, for each depth, how the logit lens ranks the last word of known facts."""
    prompts = english_pairs.facts(run.tokenizer)
    rows = []
    for text, tokens_L, answer in prompts:
        found = lens.read(run.model, {"inputs": tokens_L[None], "targets": np.full((1, len(tokens_L)), answer)})
        is_first_P = found.tokens_PBLT[:, 0, -1, 0] == answer
        rows.append({"text": text, "nll": found.nll_PBL[:, 0, -1].tolist(), "first": is_first_P.tolist()})
    nll_XP, first_XP = (np.array([row[name] for row in rows], float) for name in ("nll", "first"))
    return {
        "facts": len(rows),
        "right_by_depth": first_XP.mean(axis=0).tolist(),
        "nll_by_depth": nll_XP.mean(axis=0).tolist(),
        "standard_error_by_depth": (nll_XP.std(axis=0, ddof=1) / np.sqrt(len(rows))).tolist(),
        "wrong": [row["text"] for row in rows if not row["first"][-1]],
    }


def pruned(run: Run, texts: Texts) -> dict[str, Any]:
    """Return the loss without shares of the heads: the least important ones by gradient, and random ones."""
    importance_NH = pruning.importance(run.model, [(1, batches.next_token_batch(row[None])) for row in texts.first_BL])
    order = pruning.removal_orders(importance_NH, importance_NH)["importance"]
    all_heads, random = _others(importance_NH, []), np.random.default_rng(0)
    everything = (texts.second_BL, np.ones((1, LENGTH), bool))
    rows = [{"share": 0.0, "least important": _loss(run.model, [], *everything)}]
    for share in SHARES:
        count = round(share * len(all_heads))
        least = _loss(run.model, [tuple(head) for head in order[:count]], *everything)
        losses = [_loss(run.model, heads, *everything) for heads in _random_choices(random, all_heads, count)]
        rows.append({"share": share, "removed": count, "least important": least, "random": losses})
    return {"heads": len(all_heads), "rows": rows, "texts": len(texts.second_BL)}


def _loss(model: LoadedModel, removed: Heads, tokens_BL: np.ndarray, counted_BL: np.ndarray) -> dict[str, float]:
    """Return the loss of the counted targets without these heads, in nats per token, with its error over rows."""
    model = _without(model, removed)
    nll_BL = np.concatenate([np.asarray(model.nll(row[None, :-1], row[None, 1:])) for row in tokens_BL])
    counted_BL = np.broadcast_to(counted_BL, nll_BL.shape)
    means_B = (nll_BL * counted_BL).sum(axis=1) / counted_BL.sum(axis=1)
    error = float(means_B.std(ddof=1) / np.sqrt(len(means_B)))
    return {"nll": float(nll_BL[counted_BL].mean()), "standard_error": error}


def _without(model: LoadedModel, removed: Heads) -> LoadedModel:
    mask_NBH = jnp.asarray(1.0 - _mask(model, removed)[:, None])
    return dataclasses.replace(model, edits=editing.head_mask(mask_NBH))


def _mask(model: LoadedModel, heads: Heads) -> np.ndarray:
    """Return a bool mask_NH of these heads."""
    mask_NH = np.zeros((model.config.model.num_layers, model.config.model.num_heads), bool)
    for head in heads:
        mask_NH[head] = True
    return mask_NH


def _others(scores_NH: np.ndarray, chosen: Heads) -> Heads:
    return [head for head in np.ndindex(scores_NH.shape) if head not in chosen]


def _random_choices(random: np.random.Generator, heads: Heads, count: int) -> list[Heads]:
    return [[heads[i] for i in random.choice(len(heads), count, False)] for _ in range(DRAWS)]


def _strongest(scores_NH: np.ndarray, count: int) -> Heads:
    order = np.argsort(-scores_NH, axis=None, kind="stable")[:count]
    return [(int(layer), int(head)) for layer, head in zip(*np.unravel_index(order, scores_NH.shape), strict=True)]


def _listed(scores_NH: np.ndarray, count: int) -> dict[str, float]:
    return {f"{layer}.{head}": float(scores_NH[layer, head]) for layer, head in _strongest(scores_NH, count)}


def texts_of(run: Run, path: Path) -> Texts:
    """Return evenly spaced rows of both halves of a text. Raises UserError if it is too short."""
    tokens = run.tokenizer.encode(path.read_text(encoding="utf-8")).astype(np.int32)
    if len(tokens) < 2 * ROWS * (LENGTH + 1):
        raise UserError(f"--text: found {len(tokens)} tokens; must have at least {2 * ROWS * (LENGTH + 1)}")
    halves = np.split(tokens[: len(tokens) // 2 * 2], 2)
    starts = np.linspace(0, len(halves[0]) - LENGTH - 1, ROWS).astype(int)
    return Texts(*(np.stack([half[start : start + LENGTH + 1] for start in starts]) for half in halves))


OF_TEXT: dict[str, Callable[[Run, Texts], dict[str, Any]]] = {"sinks": sinks, "induction": induction, "pruning": pruned}
OF_RUN: dict[str, Callable[[Run], dict[str, Any]]] = {
    "circuits": circuits,
    "facts": facts,
    "windows": open_model_context.windows,
    "beyond": open_model_context.beyond,
}


@command_line.command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*OF_TEXT, *OF_RUN])
    parser.add_argument("--workdir", type=command_line.directory, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--text", type=Path)
    flags = parser.parse_args()
    command_line.set_up()
    if flags.part in OF_TEXT and flags.text is None:
        raise UserError(f"--text: not given; {flags.part} needs an English text")
    run = Run(flags.workdir)
    found = OF_TEXT[flags.part](run, texts_of(run, flags.text)) if flags.part in OF_TEXT else OF_RUN[flags.part](run)
    flags.output.mkdir(parents=True, exist_ok=True)
    files.write_text(flags.output / f"{flags.part}.json", json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
