"""Fine-tune a run with RoPE for twice its context, and measure its loss in windows of several lengths before and after.

    python -m benchmarks.fine_tuning --workdir=RUN --runs=DIR --output=FILE.json --length=256 --windows=64,128,256,512

Each plan, such as linear:adapters, is a scaling of RoPE by 2 (`none`: no scaling) and what 200 steps train: `attention`
(`train.trainable`) or `adapters` (`train.lora_rank`). The tuned runs are written to DIR. All losses are of the same
targets: pieces of the validation split, each of one document, or with --across of one or more.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from mini_gpt.commands import command_line
from mini_gpt.config import loading
from mini_gpt.config.schema import Config
from mini_gpt.data import batches, tokenizers
from mini_gpt.evaluation import perplexity
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.model import parameters
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.training import loop, trainable
from mini_gpt.training.run import Run

STEPS, FACTOR = 200, 2.0
PLANS = "linear:attention,linear:adapters,none:attention,none:adapters,ntk:attention,yarn:attention"
TRAINED: dict[str, dict[str, Any]] = {
    "attention": {"train.trainable": "attention/"},
    "adapters": {"train.lora_rank": 8},
}


def scaled(scaling: str) -> dict[str, Any]:
    """Return the fields of a scaling."""
    return {} if scaling == "none" else {"model.rope.scaling": scaling, "model.rope.factor": FACTOR}


def tuned_config(run: Run, scaling: str, trained: str, flags: argparse.Namespace) -> Config:
    """Return the config of a fine-tuning."""
    fields = {
        "context_length": flags.length,
        "model.rope.original_context": run.trained.model.rope.original_context,
        "train.steps": STEPS,
        "train.batch_size": flags.rows,
        "optimizer.learning_rate": flags.rates[trained],
        "optimizer.schedule": "wsd",
        "optimizer.decay_fraction": 0.5,
        "optimizer.warmup_steps": 10,
        "eval.every": STEPS,
        "eval.tokens": 4096,
        "eval.sample_tokens": 0,
        "checkpoint.every": STEPS,
    }
    return loading.load(run.workdir / "config.json", fields | scaled(scaling) | TRAINED[trained])


def pieces(run: Run, length: int, count: int, *, across: bool = False) -> np.ndarray:
    """Return texts_DM, pieces of `length` + 1 tokens of documents of the validation split, from all of it.

    across: a piece may have the end of a document and the next ones.

    Raises UserError if there are fewer than `count`.
    """
    tokens = run.store.tokens("validation")
    starts = [] if across else np.flatnonzero(tokens == tokenizers.separator(run.tokenizer))
    parts = np.split(tokens, starts)
    found = [part[at : at + length + 1] for part in parts for at in range(0, len(part) - length, length)]
    require(len(found) >= count, "--pieces", count, f"the documents have {len(found)} pieces of {length} tokens")
    chosen = batches.evenly_spaced(len(found), 1, count)
    return np.stack([found[index] for index in chosen]).astype(np.int32)


def losses(model: LoadedModel, texts_DM: np.ndarray, windows: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Return {window: the mean loss of each part of a text}, nats per token. A part has the shortest window's length.

    Each text is cut into windows, in which the first tokens have no context. All windows divide the texts' length.
    """
    nll_fn, found = perplexity.make_nll_fn(model), {}
    for length in windows:
        blocks = [array.reshape(-1, length) for array in (texts_DM[:, :-1], texts_DM[:, 1:])]
        rows = model.rows_at_a_time(length, count=len(blocks[0]))
        parts = [nll_fn(*(array[at : at + rows] for array in blocks)) for at in range(0, len(blocks[0]), rows)]
        found[str(length)] = np.concatenate(parts).reshape(-1, windows[0]).mean(axis=1, dtype=np.float64)
    return found


def summary(found: dict[str, np.ndarray], before: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return means, and the differences to `before` with their standard errors over the parts."""
    rows = {}
    for length, losses_P in found.items():
        change_P = losses_P - before[length]
        error = float(change_P.std(ddof=1) / np.sqrt(len(change_P)))
        rows[length] = {"nll": float(losses_P.mean()), "change": float(change_P.mean()), "standard_error": error}
    return rows


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """Return the losses before and after each plan, and their changes from the run as it is."""
    base, after = Run(flags.workdir), []
    texts_DM = pieces(base, flags.windows[-1], flags.pieces, across=flags.across)
    before = {"none": losses(base.model, texts_DM, flags.windows)}
    for plan in flags.plans.split(","):
        scaling, _, trained = plan.partition(":")
        if scaling not in before:
            overrides = {name: str(value) for name, value in scaled(scaling).items()}
            before[scaling] = losses(Run(flags.workdir, overrides=overrides).model, texts_DM, flags.windows)
        workdir = flags.runs / plan.replace(":", "_")
        config = tuned_config(base, scaling, trained, flags)
        state = loop.train(config, workdir, init_from=flags.workdir, conclude=False)
        count = parameters.count(trainable.checked(config, state.parameters))
        tuned = summary(losses(Run(workdir).model, texts_DM, flags.windows), before["none"])
        after.append({"scaling": scaling, "trained": trained, "parameters": count, "losses": tuned})
        print(json.dumps(after[-1], indent=1))
    described = {
        "steps": STEPS,
        "factor": FACTOR,
        "length": flags.length,
        "rows": flags.rows,
        "fields": TRAINED,
        "rates": flags.rates,
        "across": flags.across,
    }
    described |= {"pieces": len(texts_DM), "targets": texts_DM[:, 1:].size, "part": flags.windows[0]}
    summaries = {scaling: summary(found, before["none"]) for scaling, found in before.items()}
    return {**described, "before": summaries, "after": after}


@command_line.command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=command_line.directory, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--plans", default=PLANS)
    parser.add_argument("--length", type=int, required=True, help="tokens of a training row")
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch")
    parser.add_argument("--pieces", type=int, default=128, help="texts for the losses")
    parser.add_argument("--across", action="store_true", help="a text may have several documents")
    rates = lambda text: dict(zip(TRAINED, map(float, text.split(",")), strict=True))
    parser.add_argument("--rates", type=rates, default="1e-3,1e-2", help="peaks for attention and adapters")
    sizes = lambda text: tuple(sorted(map(int, text.split(","))))
    parser.add_argument("--windows", type=sizes, required=True, help="their lengths; each must divide the longest")
    flags = parser.parse_args()
    command_line.set_up()
    if any(flags.windows[-1] % length or length % flags.windows[0] for length in flags.windows):
        raise UserError(f"--windows: found {flags.windows}; each must be a multiple of the first, and divide the last")
    files.write_text(flags.output, json.dumps(measure(flags), indent=1) + "\n")


if __name__ == "__main__":
    main()
