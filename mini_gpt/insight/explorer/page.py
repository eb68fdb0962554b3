"""The explorer: one HTML file that shows a run's attention without a network; put together from the files beside."""

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from mini_gpt.commands.suite_options import Request
from mini_gpt.insight import images, toy
from mini_gpt.insight import positions as position_figures
from mini_gpt.insight.attention import attention_maps
from mini_gpt.model import positions
from mini_gpt.runtime import sharding
from mini_gpt.training.run import Run

FOLDER = Path(__file__).parent
LIBRARY = "vendor/htm-preact-3.1.1.js"
MOST_PAIRS = 36 * 512 * 513 // 2  # that fit in the page: 6 layers of 6 heads, 512 tokens
LONGEST = 512  # tokens
MOST_POSITIONS = 256  # of a learned table, whose cosines are shown
MOST_BYTES = 4_800_000  # of packed logits in base64; the page is to stay under 5 MB
STEPS = (254, 127, 63)  # of quantisation; the finest that fits is taken
FLOOR = 16.0  # nats below a row's largest logit: there weights are below 1.2e-7 of the largest
HIDDEN = 255  # what stands for a pair that is not visible


def explorer(run: Run, request: Request, labels: list[list[str]] | None = None) -> str:
    """Gives the page of a run, for the start of a split or a text; labels[layer][head] says what heads attend to."""
    config = run.config.model
    length = min(
        LONGEST, run.config.context_length, int((2 * MOST_PAIRS / (config.num_layers * config.num_heads)) ** 0.5)
    )
    tokens = run.opening(request, length)
    rows_BL = tokens[None].repeat(sharding.shards(run.mesh), axis=0)
    maps = attention_maps(run.model, rows_BL)
    logits_NHLS = np.stack([layer.logits_BHLS[0] for layer in maps])
    weights_NHLS = np.stack([layer.weights_BHLS[0] for layer in maps])
    source = f"the {request.split} split" if request.text is None else "a text of one's own"
    data = {
        "title": f"{run.workdir.resolve().name}: what {config.num_layers} × {config.num_heads} heads attend to",
        "subtitle": f"step {run.step:,}, {len(tokens)} tokens of {source}, position={config.position}",
        "attention": {
            "tokens": [run.tokenizer.decode([token]) for token in tokens],
            "layers": config.num_layers,
            "heads": config.num_heads,
            "labels": labels,
            **packed(logits_NHLS, weights_NHLS, maps[0].visible_BLS[0], causal=config.causal),
        },
        "positions": _positions(run),
        "toy": {
            "words": toy.WORDS,
            "heads": toy.HEADS,
            "x": toy.X_LD.tolist(),
            "presets": {name: [matrix.tolist() for matrix in pair] for name, pair in toy.PRESETS.items()},
        },
    }
    return put_together(data)


def _positions(run: Run) -> dict[str, Any]:
    """Gives what the formulas of the page take, and what the run has learnt: a table's cosines, biases by distance."""
    config, learned, t5 = run.config.model, None, None
    if "learned" in config.position_pattern:
        table_PD = sharding.whole(run.parameters["positions"]["learned"]["embedding"], run.mesh)
        every = -(-len(table_PD) // MOST_POSITIONS)
        levels = np.round(127 * images.cosines(table_PD[::every])).astype(np.int8)
        learned = {"every": every, "size": len(levels), "cosines": base64.b64encode(levels.tobytes()).decode()}
    if "t5" in config.position_pattern:
        table = sharding.whole(run.parameters["positions"]["t5"]["bias_table"], run.mesh)
        t5 = table[position_figures.t5_buckets(config, 2 * config.t5.max_distance)].T.round(4).tolist()
    return {
        "width": config.d_model,
        "turned": config.rotated_width,
        "base": config.rope.base if "rope" in config.position_pattern else config.sinusoidal.base,
        "slopes": positions.alibi_slopes(config.num_heads),
        "learned": learned,
        "t5": t5,
    }


def packed(
    logits_NHLS: np.ndarray, weights_NHLS: np.ndarray, visible_LS: np.ndarray, *, causal: bool
) -> dict[str, Any]:
    """Gives each row's largest logit, and how far the others are below it, quantised by the root, packed by zlib.

    error: the largest distance of a weight that is made of them again from the model's.
    """
    top_NHL1 = np.where(visible_LS, logits_NHLS, -np.inf).max(axis=-1, keepdims=True)
    top_NHL1 = np.where(np.isfinite(top_NHL1), top_NHL1, 0)
    below = np.sqrt(np.clip(top_NHL1 - logits_NHLS, 0, FLOOR) / FLOOR)
    rows, columns = np.tril_indices(len(visible_LS)) if causal else np.indices(visible_LS.shape).reshape(2, -1)
    for steps in STEPS:
        levels = np.where(visible_LS, np.round(below * steps), HIDDEN).astype(np.uint8)
        text = base64.b64encode(zlib.compress(levels[:, :, rows, columns].tobytes(), 9)).decode()
        if len(text) <= MOST_BYTES:
            break
    again = np.where(visible_LS, np.exp(-FLOOR * (levels / steps) ** 2), 0)
    again = again / np.maximum(again.sum(axis=-1, keepdims=True), 1e-30)
    return {
        "causal": causal,
        "steps": steps,
        "floor": FLOOR,
        "hidden": HIDDEN,
        "row_max": base64.b64encode(top_NHL1.astype("<f4").tobytes()).decode(),
        "logits": text,
        "error": float(np.abs(again - weights_NHLS).max()),
    }


def put_together(data: dict[str, Any]) -> str:
    """Gives page.html with what it links to in it, and the data as JSON, in which no text can end the element."""
    page = (FOLDER / "page.html").read_text(encoding="utf-8")
    encoded = json.dumps(data, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")
    parts = {
        '<link rel="stylesheet" href="page.css">': f"<style>\n{_text('page.css')}</style>",
        '<script id="data" type="application/json">null</script>': (
            f'<script id="data" type="application/json">{encoded}</script>'
        ),
        f'<script src="{LIBRARY}"></script>': f"<script>\n{_text(LIBRARY)}\n</script>",
        '<script src="page.js"></script>': f"<script>\n{_text('page.js')}</script>",
    }
    for link, content in parts.items():
        before, _, after = page.partition(link)
        page = before + content + after
    return page


def _text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
