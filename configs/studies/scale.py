"""Does attention need the factor 1/sqrt(head width)?

    python -m mini_gpt.study run configs/studies/scale.py

48 runs of configs/small.py, with heads of width 4, 16 and 64. Each width is tested; differences between widths are not.
"""

HEADS_BY_WIDTH = {4: 16, 16: 4, 64: 1}


def get_study() -> dict:
    conditions = {
        f"width={width},{name}": {"model.num_heads": heads, "model.scale_attention": scaled}
        for width, heads in HEADS_BY_WIDTH.items()
        for name, scaled in (("scaled", True), ("unscaled", False))
    }
    return dict(
        question="Does attention need the factor 1/sqrt(head width)?",
        config="configs/small.py",
        conditions=conditions,
        seeds=range(8),
        suites={"perplexity": {}},
        contrasts=[f"width={width},scaled < width={width},unscaled @ nll" for width in HEADS_BY_WIDTH],
        smallest_effect=0.01,  # nats per token
        fit="nll <= 2.6",
        expected_deviation=0.005,
    )
