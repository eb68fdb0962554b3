"""Remove heads of a run for good: write a smaller run, whose layers may keep different heads.

python -m mini_gpt.prune --workdir=RUN --keep=12 --output=DIR [--steps=200] [--config.optimizer.learning_rate=3e-4]
python -m mini_gpt.prune --workdir=RUN --heads=2.1,3.0 --output=DIR

--keep removes the least important heads, by the gradient of the loss, and writes the loss for each number of kept heads
to DIR/eval/prune.csv, .png and .json. Each layer keeps at least one head. DIR is a run: train.py --workdir=DIR trains
it, also if this command was killed, and all tools open it. Heads keep their numbers.
"""

import argparse
import collections
import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mini_gpt.commands import command_line, staging
from mini_gpt.config import loading
from mini_gpt.config.model import ModelConfig
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.hugging_face import origin
from mini_gpt.insight import pruning, removed, training_curves
from mini_gpt.insight.removed import Heads
from mini_gpt.model import editing
from mini_gpt.model import parameters as model_parameters
from mini_gpt.runtime import files, progress
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.study.worker import forward_seconds
from mini_gpt.suites import base, results
from mini_gpt.suites.pruning import scorer
from mini_gpt.training import assembly, loop, run_directory
from mini_gpt.training.checkpoint import Checkpoints, Record
from mini_gpt.training.run import Run
from mini_gpt.training.train_state import TrainState

TIMES = 5  # a forward pass of each model is measured, in turns; the shortest time counts
MOST_ROWS = 64  # of the table of kept heads, at equal distances
KEPT = ("model.", "data.", "context_length")  # fields that the smaller run has from its source
Loss = Callable[[LoadedModel], float]


@command_line.command
def main() -> None:
    flags, rest = _parser().parse_known_args()
    overrides = command_line.config_overrides(rest)
    command_line.set_up()
    of_run = [name for name in overrides if name.startswith(KEPT)]
    if of_run:
        raise UserError(f"{of_run[0]}: the smaller run has that of {flags.workdir}; only fields of its training change")
    require(flags.steps is None or flags.steps > 0, "--steps", flags.steps, "must be at least 1")
    if flags.steps and "train.steps" in overrides:
        raise UserError(f"train.steps: found {overrides['train.steps']}, and --steps={flags.steps}; give --steps alone")
    unused = [name for name in overrides if not name.startswith(("data.", "eval.", "mesh."))]
    if unused and flags.steps is None:
        raise UserError(f"{unused[0]}: nothing is trained without --steps; give --steps=N too, or leave it out")
    with (
        staging.reading(flags.workdir, flags.checkpoint) as workdir,
        staging.training(flags.output, flags, new=True) as output,
    ):
        _prune(Run(workdir, checkpoint=flags.checkpoint), output, flags, overrides)


def _parser() -> argparse.ArgumentParser:
    parser = command_line.parser(__doc__, prog="python -m mini_gpt.prune")
    command_line.add_run_flags(parser)
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--keep", type=int, metavar="N", help="the number of heads to keep, in all layers together")
    which.add_argument(
        "--heads", metavar="LAYER.HEAD,…", help="the heads to remove, such as 2.1,3.0; both count from 0"
    )
    add("--output", type=command_line.place, required=True, help="a new directory for the smaller run")
    add("--steps", type=int, help="fine-tune for this number of steps; default: none")
    add("--tokens", type=int, default=pruning.SCORED_TOKENS, help="the most tokens of a loss or of the gradients")
    return parser


def _prune(run: Run, output: Path, flags: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    """Choose the heads, write the smaller run, fine-tune it if asked, and print and write what was measured."""
    config = run.config.model
    files.check_new(output)
    if config.block != "attention":
        raise UserError(f"{run.workdir}: found model.block={config.block}; a recurrent run has no heads to remove")
    steps = {} if flags.steps is None else {"train.steps": flags.steps}
    fixed = {"model.heads": config.head_numbers, "model.scan_layers": False, "train.lora_rank": 0}
    new_config = loading.override(run.config, {**steps, **overrides, **fixed})
    if flags.steps:
        assembly.make_mesh(new_config)  # raises its errors before a file is written
    require(config.prediction_head is not None, "model.prediction_head", None, "the model has no logits, and no loss")
    require(flags.tokens > 0, "--tokens", flags.tokens, "must be at least 1")
    files.make_directory(output)  # raises its errors
    output.rmdir()
    model, table, loss = removed.whole(run.model), list[dict[str, Any]](), scorer(run, "validation", flags.tokens)
    if flags.heads is not None:
        kept: Heads = removed.without(config.head_numbers, parse(flags.heads, config))
    else:
        kept, table = _most_important(run, model, loss, flags)
    smaller = removed.smaller(model, kept)
    new_config = loading.override(new_config, {"model.heads": smaller.config.model.heads})
    models = {"before": run.model, "after": smaller}
    _write(run, dataclasses.replace(smaller, config=new_config), output, _source(run, smaller))
    if flags.steps:
        loop.train(new_config, output, conclude=False, probe=training_curves.attention_metrics)
        models[f"after {flags.steps} steps"] = Run(output).model
    rows = _measured(models, loss)
    scored = {"split": "validation", "tokens": flags.tokens, "dtype": model.dtype}
    result = {"heads": kept, **scored, "comparison": rows, **({"rows": table} if table else {})}
    contents: results.Contents = {}
    if table:
        contents = {".csv": results.csv_text(table), ".png": removed.figure(table, base.name_of(run))}
        print(results.table(table), end="\n\n")
    print(results.table(rows))
    print(f"\nnll: of the validation split, on up to {flags.tokens:,} tokens")
    count = sum(map(len, config.head_numbers)) - sum(map(len, kept))
    print(f"removed {count} heads; each layer keeps: {'; '.join(' '.join(map(str, heads)) for heads in kept)}")
    written = results.write(output / "eval", "prune", contents | {".json": results.json_text(result)})
    print("\nWritten to", output, *written, sep="\n")


def parse(text: str, config: ModelConfig) -> list[tuple[int, int]]:
    """Return (layer, head) of --heads. Raise UserError for heads that can't be removed."""
    found = [removed.parse("--heads", part, config.head_numbers) for part in text.split(",")]
    for layer, kept in enumerate(removed.without(config.head_numbers, found)):
        require(len(kept) > 0, "--heads", text, f"layer {layer} must keep at least one head")
        groups = collections.Counter(head * config.num_kv_heads // config.num_heads for head in kept)
        remedy = f"layer {layer} must keep equally many heads of each group that shares keys: remove whole groups"
        require(len({*groups.values()}) == 1, "--heads", text, remedy)
    return found


def _most_important(
    run: Run, model: LoadedModel, loss: Loss, flags: argparse.Namespace
) -> tuple[Heads, list[dict[str, Any]]]:
    """Return the --keep most important heads of each layer, and the losses of all numbers of kept heads.

    Raises UserError for a number that is not possible.
    """
    config = model.config.model
    units, total = removed.units(run.config.model), sum(map(len, run.config.model.head_numbers))
    least, step = sum(map(len, dict(units).values())), math.gcd(*(len(unit) for _, unit in units))
    if least == total:
        raise UserError("--keep: each layer has one head, or one group of heads that share keys; none can be removed")
    if flags.keep not in range(least, total, step):
        whole_groups = f", in steps of {step}, because heads that share keys go together" if step > 1 else ""
        raise UserError(f"--keep: found {flags.keep}; must be in {least}..{total - step}{whole_groups}")
    texts = base.batches(run, "train", min(flags.tokens, pruning.IMPORTANCE_TOKENS), "gradients")
    with progress.shown("importance of the heads", 4 * flags.tokens):
        order = removed.removal_order(run.config.model, pruning.importance(model, texts))
    heads: Heads = run.config.model.head_numbers
    possible = {total: heads}  # {number of heads: the heads}
    for layer, unit in order:
        heads = removed.without(heads, [(layer, head) for head in unit])
        possible[sum(map(len, heads))] = heads
    require(flags.keep in possible, "--keep", flags.keep, f"must be one of {[*possible][1:]}")  # layers differ
    every = -(-len(possible) // MOST_ROWS)
    chosen = {*sorted(possible, reverse=True)[::every], flags.keep, least}
    table = []
    with progress.shown("the loss of each number of heads", len(chosen) * flags.tokens):
        for count in sorted(chosen, reverse=True):
            mask_NH = removed.mask(config, possible[count])
            edited = dataclasses.replace(model, edits=editing.head_mask(jnp.asarray(mask_NH[:, None])))
            table.append({"heads": count, "nll": loss(edited)})
    return possible[flags.keep], table


def _measured(models: Mapping[str, LoadedModel], loss: Loss) -> list[dict[str, Any]]:
    """Return the rows of the comparison. Speeds are those of forward passes over whole contexts, measured in turns."""
    seconds = [[forward_seconds(model) for model in models.values()] for _ in range(TIMES)]
    return [
        {
            "model": name,
            "heads": sum(map(len, model.config.model.head_numbers)),
            "parameters": model_parameters.count(model.parameters),
            "tokens per second": round(1 / min(of_model)),
            "nll": loss(model),
        }
        for (name, model), of_model in zip(models.items(), zip(*seconds, strict=True), strict=True)
    ]


def _source(run: Run, smaller: LoadedModel) -> dict[str, Any]:
    """Return the record of a smaller model's origin, see `origin.imported_from`."""
    count = sum(map(len, smaller.config.model.head_numbers))
    source = {"directory": str(run.workdir.resolve()), "checkpoint_step": run.step}
    source |= {"context_length": origin.trained_context(run)}
    source |= {"architecture": f"run of mini_gpt, of which {count} heads are kept"}
    return (origin.imported_from(run.workdir) or {}) | source


def _write(run: Run, model: LoadedModel, output: Path, source: Mapping[str, Any]) -> None:
    """Write the model as a run at step 0 with its config. A failure leaves no files."""
    with files.directory_written_whole(output) as draft:
        run_directory.claim(draft, model.config, run.corpus, run.tokenizer)
        with contextlib.closing(Checkpoints(draft / run_directory.CHECKPOINTS)) as checkpoints:
            state = TrainState(jnp.int32(0), model.parameters, None, jnp.bool(False))
            checkpoints.save(0, jax.block_until_ready(state), Record())
        origin.record_import(draft, run.workdir, source)


if __name__ == "__main__":
    main()
