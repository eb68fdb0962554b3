"""Settings that cannot take effect in a run, and the passes of a run over its data."""

import fnmatch
import logging
from collections.abc import Mapping
from typing import Any

from mini_gpt.config import loading
from mini_gpt.config.attention import pattern
from mini_gpt.config.fields import specs
from mini_gpt.config.schema import Config
from mini_gpt.data import tasks, text_batches
from mini_gpt.runtime.errors import shown
from mini_gpt.training.optimizer import schedules

log = logging.getLogger(__name__)
POSITIONS = {"model.position": "not none or fox or cope", "model.variants.query_scale": "llama4"}
OWN_SPLITS = "not english or tokens or task:*"  # a corpus of another name is split
RATES = ("model.embedding_dropout", "model.sublayer_dropout", "model.attention_dropout")
# {fields: {another field: its values with which they are read}}. One of the other fields is enough, and one layer of a
# pattern; a name of a field stands for its value. Fields that are not here are always read, or else refused.
READ_WITH: dict[str, Mapping[str, str]] = {
    "source_length": {"model.encoder_layers": "not 0"},
    "model.max_positions": {"model.position": "learned"},
    "model.dropout": dict.fromkeys(RATES, "model.dropout"),
    "model.scale_width": {"model.scale_attention": "True"},
    "model.alibi_exponent": {"model.position": "alibi"},
    "model.random_positions": POSITIONS,
    "model.rope.base": {"model.position": "rope or pope"},
    "model.rope.fraction": {"model.position": "rope"},
    "model.rope.factor": {"model.rope.scaling": "not none"},
    "model.rope.original_context": {"model.rope.scaling": "not none"},
    "model.rope.beta_*": {"model.rope.scaling": "yarn* or llama3"},
    "model.rope.attention_factor": {"model.rope.scaling": "yarn*"},
    "model.sinusoidal.*": {"model.position": "sinusoidal"},
    "model.hard_alibi.*": {"model.position": "hard_alibi"},
    "model.t5.*": {"model.position": "t5"},
    "model.fire.*": {"model.position": "fire"},
    "model.cope.*": {"model.position": "cope"},
    "model.variants.qk_norm_epsilon": {"model.variants.qk_norm": "not none"},
    "model.variants.ssmax_start": {"model.variants.query_scale": "ssmax"},
    "data.text_field": {"data.corpus": "text"},
    "data.document_separator": {"data.corpus": "text or tokens"},
    "data.token_dtype": {"data.corpus": "tokens"},
    "data.split*": {"data.corpus": OWN_SPLITS},
    "data.vocab_size": {"data.tokenizer": "bpe or imported"},
    "data.tokenizer_sample": {"data.tokenizer": "bpe"},
    "data.task_length": {"data.corpus": "task:*"},
    "train.mask_rate": {"train.objective": "masked or span_corruption"},
    "train.mean_span": {"train.objective": "span_corruption"},
    "train.random_offsets": POSITIONS,
    "train.lora_*": {"train.lora_rank": "not 0"},
    "train.nonfinite_limit": {"train.nonfinite": "skip"},
    "optimizer.decay_fraction": {"optimizer.schedule": "wsd"},
    "optimizer.final_fraction": {"optimizer.schedule": "cosine or wsd"},
    "optimizer.muon.*": {"optimizer.name": "muon"},
}


def report(config: Config, rows: int | None, *, new: bool) -> None:
    """Log settings without effect and long intervals; for a new run, also its passes over the data.

    rows: as `Batches.rows_per_epoch`.
    """
    for warning in without_effect(config, rows):
        log.warning(warning)
    for line in long_intervals(config):
        log.info(line)
    if new and rows is not None:
        log.info(passes(config, rows))


def without_effect(config: Config, rows: int | None) -> list[str]:
    """Return a line for each setting that cannot take effect: the field, what was found and reached, what to change.

    rows: as `Batches.rows_per_epoch`; None also if it is not known.
    """
    of_batch = _of_problems(config) if config.data.is_task else _of_rows(config.train.batch_size, rows)
    return [*(_of_positions(config) | unread(config)).values(), *_of_schedule(config), *of_batch]


def unread(config: Config) -> dict[str, str]:
    """Return {field: line} of the fields that are not at their defaults and that nothing reads in this run."""
    values, found = loading.flatten(loading.to_dict(config)), dict[str, str]()
    changed = {name for name, spec in specs(Config).items() if values[name] != spec.default} - loading.computed(values)
    for name in filter(changed.__contains__, values):
        others = next((READ_WITH[key] for key in READ_WITH if fnmatch.fnmatchcase(name, key)), {})
        if not others or any(_is_one_of(values, *other) for other in others.items()):
            continue
        other, wanted = next(iter(others.items()))
        to_change = f"change {other}" if wanted.startswith("not ") or wanted in values else f"set {other}={wanted}"
        with_others = " and ".join(f"{other}={shown(values[other])}" for other in others)
        line = f"{name}: found {shown(values[name])}; nothing reads it with {with_others}; leave it out, or {to_change}"
        found[name] = line
    return found


def long_intervals(config: Config) -> list[str]:
    """Return a line for each interval above `train.steps`.

    These are no warnings: nothing is lost, and many short runs are meant to be evaluated and saved only at the end.
    """
    steps = config.train.steps
    best = ", and after an evaluation with the best loss" if config.eval.every < steps else ""
    intervals = {
        "eval.every": (config.eval.every, "the only evaluation is at the end"),
        "checkpoint.every": (config.checkpoint.every, f"the run is saved only at the end, or when it is stopped{best}"),
        "train.log_every": (config.train.log_every, "only step 1, evaluations and checkpoints are logged"),
    }
    return [
        f"{name}={every} is above train.steps={steps}: {effect}"
        for name, (every, effect) in intervals.items()
        if every > steps
    ]


def passes(config: Config, rows: int) -> str:
    """Return how often a run uses each of its training rows, as a line of the log. rows: of an epoch."""
    steps, size = config.train.steps, config.train.batch_size
    unit = "rows of pairs" if config.data.has_pairs else f"× {text_batches.text_length(config)} tokens"
    count = steps * size / rows
    times = f"{count:.3g} pass" if count < 100 else f"{count:,.0f} pass"
    times += "" if count == 1 else "es"
    return f"{steps:,} steps of {size} {unit}: {times} over the training data"


def _is_one_of(values: Mapping[str, Any], name: str, wanted: str) -> bool:
    """Return whether the value of a field is wanted in `READ_WITH`; for a pattern, whether one of its values is."""
    listed = wanted.removeprefix("not ")
    names = [str(values.get(text, text)) for text in listed.split(" or ")]
    is_listed = lambda value: any(fnmatch.fnmatchcase(str(value), text) for text in names)
    return any(is_listed(value) != (wanted != listed) for value in pattern(values[name]))


def _of_schedule(config: Config) -> list[str]:
    """Return a line if the learning rate does not reach its peak, or does not decay as long as the fields say."""
    o, steps = config.optimizer, config.train.steps
    schedule = schedules(config)["learning_rate"]

    def rate(step: int) -> str:
        return f"{float(schedule(step - 1)):.4g}"

    left = steps - o.warmup_steps
    if left < 0:
        reached = f"the learning rate reaches {rate(steps)} of {o.learning_rate:.4g}, at step {steps}"
        found = f"optimizer.warmup_steps: found {o.warmup_steps}, above train.steps={steps}"
        return [f"{found}; {reached}; lower it, or raise train.steps"]
    decays = o.schedule == "inverse_sqrt" or (o.schedule in ("cosine", "wsd") and o.final_fraction < 1)
    if left == 0 and decays:
        reached = f"the learning rate is {rate(steps)} at the last step, and its decay ({o.schedule}) never begins"
        found = f"optimizer.warmup_steps: found {o.warmup_steps}, as many as train.steps"
        return [f"{found}; {reached}; lower it, raise train.steps, or set optimizer.schedule=constant"]
    # With a decay_fraction of 1, all steps after the warm-up decay, as meant.
    if o.schedule != "wsd" or not decays or o.decay_fraction == 1:
        return []
    found, asked = f"optimizer.decay_fraction: found {o.decay_fraction:g}", round(steps * o.decay_fraction)
    if asked == 0 and steps > 1:
        reached = f"the learning rate is {rate(steps - 1)} up to step {steps - 1}, and {rate(steps)} at the last step"
        return [f"{found}, less than one of {steps} steps; {reached}; raise it, or set optimizer.schedule=constant"]
    if asked > left:
        reached = f"the decay takes only {left}, from {rate(o.warmup_steps)} to {rate(steps)}"
        remedy = f"lower it or optimizer.warmup_steps={o.warmup_steps}, or raise train.steps"
        return [f"{found}, {asked} of {steps} steps; {reached}; {remedy}"]
    return []


def _of_rows(size: int, rows: int | None) -> list[str]:
    """Return a line if a batch of `size` rows is larger than the data."""
    if rows is None or rows >= size:
        return []
    reached = f"the training data have {rows} rows, so each is about {size / rows:.3g} times in a step"
    remedy = "lower it, shorten the rows (context_length), or use more data"
    return [f"train.batch_size: found {size}; {reached}; {remedy}"]


def _of_problems(config: Config) -> list[str]:
    """Return a line if a task has fewer training problems than a batch."""
    size, data = config.train.batch_size, config.data
    different = len(tasks.different(data.corpus, "train", size, **tasks.trained_lengths(data)))
    if different == size:
        return []
    reached = f"{4 * size} training problems had only {different} different ones, so a step has some several times"
    return [f"train.batch_size: found {size}; {reached}; lower it, or raise data.task_length={data.task_length}"]


def _of_positions(config: Config) -> dict[str, str]:
    """Return {field: line} for random positions of which there is only one choice."""
    length, found = config.context_length, {"model.random_positions": config.model.random_positions}
    if not config.data.isolate_documents and config.data.position_ids == "sequence":  # else positions are lower
        found["train.random_offsets"] = config.train.random_offsets
    only = f"as much as context_length; all rows have the positions 0 to {length - 1}; raise it"
    return {name: f"{name}: found {most}, {only}" for name, most in found.items() if most == length}
