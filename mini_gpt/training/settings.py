"""Settings that cannot take effect in a run, and the passes of a run over its data."""

import logging

from mini_gpt.config import loading
from mini_gpt.config.attention import ENCODINGS
from mini_gpt.config.fields import specs
from mini_gpt.config.schema import Config
from mini_gpt.runtime.errors import shown
from mini_gpt.training.optimizer import schedules

log = logging.getLogger(__name__)


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
    return [*unread(config).values(), *_of_schedule(config), *_of_rows(config.train.batch_size, rows)]


def unread(config: Config) -> dict[str, str]:
    """Return {field: line} of the changed fields of an encoding, model.NAME.*, that no layer has."""
    values, found = loading.flatten(loading.to_dict(config)), dict[str, str]()
    used = {"rope" if name == "pope" else name for name in config.model.position_pattern}
    for field in specs(Config).keys() - loading.computed(values):
        _, name, *rest = field.split(".") if field.startswith("model.") else ("", "")
        if rest and name in ENCODINGS and name not in used and values[field] != specs(Config)[field].default:
            found[field] = (
                f"{field}: found {shown(values[field])}, but no layer has model.position={name}; leave it out"
            )
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
    unit = "rows of pairs" if config.data.has_pairs else f"× {config.text_length} tokens"
    count = steps * size / rows
    times = f"{count:.3g} pass" if count < 100 else f"{count:,.0f} pass"
    times += "" if count == 1 else "es"
    return f"{steps:,} steps of {size} {unit}: {times} over the training data"


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
