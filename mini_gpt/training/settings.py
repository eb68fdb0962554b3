"""Settings that cannot take effect in a run, and the passes of a run over its data."""

from mini_gpt.config import loading
from mini_gpt.config.attention import ENCODINGS
from mini_gpt.config.fields import specs
from mini_gpt.config.schema import Config
from mini_gpt.runtime.errors import shown


def without_effect(config: Config, rows: int | None) -> list[str]:
    """Return a line for each setting that cannot take effect.

    rows: as `Batches.rows_per_epoch`; None also if it is not known.
    """
    lines = list(unread(config).values())
    o, steps, size = config.optimizer, config.train.steps, config.train.batch_size
    left, decay = steps - o.warmup_steps, round(steps * o.decay_fraction)
    if left < 0 or (left == 0 and o.schedule != "constant"):
        reached = f"the learning rate of a run of {steps} steps only rises"
        lines.append(f"optimizer.warmup_steps: found {o.warmup_steps}; {reached}; lower it, or raise train.steps")
    elif o.schedule == "wsd" and o.decay_fraction < 1 and decay > left:
        reached = f"of {decay} steps of decay, the warm-up leaves {left}"
        lines.append(f"optimizer.decay_fraction: found {o.decay_fraction:g}; {reached}; lower it, or the warm-up")
    if rows is not None and rows < size:
        reached = f"the training data have {rows} rows, so each is about {size / rows:.3g} times in a step"
        lines.append(f"train.batch_size: found {size}; {reached}; lower it, or use more data")
    return lines


def unread(config: Config) -> dict[str, str]:
    """Return {field: line} of the changed fields of an encoding, model.NAME.*, that no layer has."""
    values, found = loading.flatten(loading.to_dict(config)), dict[str, str]()
    used = {*config.model.position_pattern} | ({"rope"} if config.model.uses_rope else set())
    sections, computed = tuple(f"model.{name}." for name in ENCODINGS.keys() - used), loading.computed(values)
    for field, spec in specs(Config).items():
        if field.startswith(sections) and field not in computed and values[field] != spec.default:
            reason = f"no layer has model.position={field.split('.')[1]}"
            found[field] = f"{field}: found {shown(values[field])}, but {reason}; leave it out"
    return found


def passes(config: Config, rows: int) -> str:
    """Return how often a run uses each of its training rows, as a line of the log. rows: of an epoch."""
    steps, size = config.train.steps, config.train.batch_size
    unit = "rows of pairs" if config.data.has_pairs else f"× {config.text_length} tokens"
    count = steps * size / rows
    times = f"{count:.3g} pass" if count < 100 else f"{count:,.0f} pass"
    times += "" if count == 1 else "es"
    return f"{steps:,} steps of {size} {unit}: {times} over the training data"
