"""What the model would predict if it ended after each block: the logit lens and the Jacobian lens."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from mini_gpt.config.schema import Config
from mini_gpt.data import batches, spans
from mini_gpt.insight.mechanisms import lens
from mini_gpt.runtime import progress
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.suites import base
from mini_gpt.suites.base import Result, Suite, SuiteOptions
from mini_gpt.training.run import Run

TOKENS = 32_768  # of the split
FITTED = 4096  # tokens of the training split, for the Jacobian lens
COMPARED = ("nll", "agreement", "divergence", "divergence_error")  # also of the Jacobian lens
SHOWN = 16  # tokens in the figure
LIKELY = 5  # tokens of each depth and place in the result


class Lens(Suite):
    name = "lens"
    flags = ("text", "tokens", "jacobian")
    needs_next_token = True

    def check(self, trained: Config, options: SuiteOptions) -> None:
        super().check(trained, options)
        if options.jacobian and trained.model.norm_placement == "post":
            reason = "the sum of the derivatives needs a norm after the last block"
            raise UserError(f"--jacobian: model.norm_placement is post, and {reason}; leave out --jacobian")

    def measure(self, run: Run, options: SuiteOptions) -> Result:
        length = run.config.context_length
        if options.text is None:
            texts = base.batches(run, options.split, min(TOKENS, options.tokens or TOKENS), "depths")
            shown = base.opening(run, options, min(SHOWN, length))
        else:
            text = base.opening(run, options, length + 1)
            require(len(text) > 1, "--text", options.text, "must have at least two tokens")
            texts, shown = [(1, batches.next_token_batch(text[None]))], text[:SHOWN]
        size = lambda found: sum(batch["inputs"].size for _, batch in found)
        with progress.shown("logit lens", size(texts)):
            rows = lens.by_depth(run.model, texts)
        if options.jacobian:
            fitted = base.batches(run, "train", min(FITTED, options.tokens or FITTED), "gradients")
            with progress.shown("Jacobian lens", size(fitted) * run.config.model.d_model + size(texts)):
                moved = lens.by_depth(run.model, texts, lens.mean_jacobians(run.model, fitted))
            rows = [
                row | {f"jacobian_{name}": other[name] for name in COMPARED}
                for row, other in zip(rows, moved, strict=True)
            ]
        base.check_finite(run, (row["nll"] for row in rows))
        return {"context_length": length, "rows": rows, "shown": _shown(run, shown)}

    def figure(self, result: Result) -> Figure:
        text = result["request"]["text"]
        title = "logit lens on " + (f"the {result['split']} split" if text is None else base.quoted(text))
        return lens.lens_figure(result["rows"], result["shown"], title=title)


def _shown(run: Run, tokens: np.ndarray) -> dict[str, Any]:
    """Return the tokens of a text, and the likeliest next tokens at each depth and place."""
    found = lens.read(run.model, {"inputs": tokens[None], "targets": tokens[None]}, min(LIKELY, run.model.vocab_size))
    return {
        "inputs": spans.decode_each(tokens, run.tokenizer),
        "tokens": [[spans.decode_each(top, run.tokenizer) for top in depth] for depth in found.tokens_PBLT[:, 0]],
        "probabilities": found.probabilities_PBLT[:, 0].tolist(),
    }
