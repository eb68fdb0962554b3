"""What eval.py can be asked for: each suite measures a run, writes eval/<suite>.json in it, and prints a table."""

import json
from pathlib import Path

from mini_gpt import files
from mini_gpt.errors import UserError
from mini_gpt.evaluation import perplexity
from mini_gpt.run import Run


def evaluate_perplexity(run: Run, split: str) -> dict:
    """Scores a whole split in blocks of the context length; the result is written as eval/perplexity.json."""
    tokens = run.store.split(split).tokens
    score = perplexity.score_split(
        run.definition, run.parameters, run.config, tokens, run.tokenizer.token_bytes, run.mesh
    )
    masked = run.config.train.objective == "masked"
    return {
        "checkpoint_step": run.step,
        "split": split,
        "protocol": "masked blocks" if masked else "blocks",
        "context_length": run.config.context_length,
        "nll": score.nll,
        "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte if score.bytes else None,
        "tokens_scored": score.tokens,
        "bytes_scored": score.bytes,
        "overrides": run.overrides,
    }


SUITES = {"perplexity": evaluate_perplexity}


def check_names(names: list[str]) -> None:
    """Raises UserError for a suite that there is not."""
    for name in names:
        if name not in SUITES:
            raise UserError(f"--suite: found {name!r}; must be of {', '.join(SUITES)}")


def evaluate(run: Run, suite: str, split: str) -> Path:
    """Runs a suite and writes its result whole; what differs from the plain evaluation is in the file's name."""
    result = SUITES[suite](run, split)
    extra = [] if split == "validation" else [f"split={split}"]
    extra += [] if run.checkpoint == "last" else [f"checkpoint={run.checkpoint}"]
    extra += [f"{name}={value}".replace("/", "_") for name, value in run.overrides.items()]
    path = run.workdir / "eval" / (",".join([suite, *extra]) + ".json")
    path.parent.mkdir(exist_ok=True)
    files.write_text(path, json.dumps(result, indent=2) + "\n")
    width = max(map(len, result))
    for name, value in result.items():
        shown = f"{value:,.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        print(f"{name:<{width}}  {shown}")
    print(f"\nWritten to {path}")
    return path
