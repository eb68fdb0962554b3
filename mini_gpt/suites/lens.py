"""What the model would predict if it ended after each block: the logit lens."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from mini_gpt.data import batches, spans
from mini_gpt.insight.mechanisms import lens
from mini_gpt.runtime import progress
from mini_gpt.runtime.errors import require
from mini_gpt.suites import base
from mini_gpt.suites.base import Result, Suite, SuiteOptions
from mini_gpt.training.run import Run

TOKENS = 32_768  # of the split
SHOWN = 16  # tokens in the figure
LIKELY = 5  # tokens of each depth and place in the result


class Lens(Suite):
    name = "lens"
    flags = ("text", "tokens")
    needs_next_token = True

    def measure(self, run: Run, options: SuiteOptions) -> Result:
        length = run.config.context_length
        if options.text is None:
            texts = base.batches(run, options.split, min(TOKENS, options.tokens or TOKENS), "depths")
            shown = base.opening(run, options, min(SHOWN, length))
        else:
            text = base.opening(run, options, length + 1)
            require(len(text) > 1, "--text", options.text, "must have at least two tokens")
            texts, shown = [(1, batches.next_token_batch(text[None]))], text[:SHOWN]
        with progress.shown("logit lens", sum(batch["inputs"].size for _, batch in texts)):
            rows = lens.by_depth(run.model, texts)
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
