"""The page of `python -m benchmarks.gpu`: its numbers, goals and look."""

from benchmarks.gpu import page

SPREAD = {"median": 28.5, "quartiles": [28.0, 29.25]}
PROGRAM = {
    "milliseconds_per_step": SPREAD,
    "tokens_per_second": 574877.2,
    "model_flops_utilisation": 0.498,
    "flops_per_token": 857e6,
    "peak_memory_bytes": 20 * 2**30,
    "compile_seconds": 31.24,
    "parameters": 124_000_000,
}
SHAPE = {"layers": 12, "width": 768, "heads": 12, "context": 1024, "batch": 16, "dropout": 0.0, "vocabulary": 50304}
RECIPE = {"shape": SHAPE, "peak_flops": 989e12, "peak_source": "data sheet of H100", "mini_gpt": PROGRAM}
ROW = {"encoding": "rope", "mask": "window", "dtype": "bfloat16", "auto": "cudnn", "tolerance": 0.06}
KERNEL = {
    "kernel": "void cutlass::Kernel2<a_b|c>" + 3 * "_long_name",
    "kind": "matrix products",
    "where": "model/x.py:1",
}
DECODED = {"tokens_per_second": SPREAD, "seconds_to_first_token": SPREAD}
NUMBERS = {
    "training": {
        "recipes": {
            "gpt2_124m": RECIPE | {"nanogpt": PROGRAM | {"compile_seconds": 45.5}, "ratio": SPREAD | {"median": 1.25}},
            "tiny": RECIPE | {"problem": "nanoGPT: found no <PyTorch>"},
            "shakespeare_char": {"problem": "out of memory"},
        }
    },
    "kernels": {
        "recipe": "gpt2_124m",
        "steps": 5,
        "milliseconds_per_step": 28.4,
        "classes": {
            "matrix products": {"milliseconds": 20.0, "share": 0.7},
            "idle": {"milliseconds": 8.4, "share": 0.3},
        },
        "rows": [KERNEL | {"milliseconds": 20.0 - n, "share": 0.7, "count": 48.0} for n in range(30)],
    },
    "decoding": {
        "mini_gpt": DECODED,
        "transformers": DECODED,
        "ratio": SPREAD,
        "prompt_tokens": 16,
        "tokens": 64,
        "dtype": "bfloat16",
        "parameters": 124_000_000,
    },
    "resume": {
        "steps": 20,
        "plain": {"arrays": 60, "different": 3, "first_different": ["parameters/embedding"]},
        "deterministic": {"arrays": 60, "different": 0, "first_different": []},
    },
    "attention": {
        "progress": "2 rows of 1 of 20 cases",
        "rows": [
            ROW | {"implementation": "cudnn + reference", "error": 0.0123, "ok": True, "compared": "output"},
            ROW | {"implementation": "blockwise", "error": 0.5, "ok": False, "compared": "output and gradients"},
            ROW | {"implementation": "reference", "error": None, "ok": False, "compared": "output and gradients"},
        ],
    },
}


def made(*, small=False, failed=None):
    parts = {
        name: {
            "title": f"Part {name}",
            "command": "python -m x",
            "seconds": 12.3,
            "limit_seconds": 50,
            "failed": failed if name == "attention" else None,
            "numbers": numbers,
        }
        for name, numbers in NUMBERS.items()
    }
    machine = {"device": "NVIDIA H100 <80GB>", "mini_gpt": "0123456789abcdef", "torch": "2.14"}
    goals = {"model_flops_utilisation": 0.5, "ratio": 1.0}
    return {"date": "2026-01-02", "small": small, "goals": goals, "machine": machine, "parts": parts}


def test_the_page_has_the_numbers_of_all_parts():
    text = page.html_of(made(failed="too slow"))
    for said in (
        "NVIDIA H100 &lt;80GB&gt;</h1>",
        "<td class=number>574,877</td><td class=number>49.8%</td><td class=number>20.00</td><td class=number>31.2</td>",
        "1.25 (28.00 to 29.25)",
        "found no &lt;PyTorch&gt;",
        "void cutlass::Kernel2&lt;a_b|c&gt;",
        "<td class=number>3 of 60</td><td>parameters/embedding</td>",
        "<td class=number>1.2e-02 (output)</td><td class=number><strong>5.0e-01</strong></td>",
        "too slow",
    ):
        assert said in text, said
    goals = text[text.index("<h2>Goals") : text.index("<h2>Part training")]
    assert "0.498</td><td><strong>not reached</strong>" in goals and "1.250</td><td>reached" in goals


def test_a_goal_that_was_not_measured_is_not_reached():
    report = made()
    report["parts"]["training"]["numbers"] = {"recipes": {"gpt2_124m": {"problem": "out of memory"}}}
    assert page.html_of(report).count("<td class=number>–</td><td>not measured</td>") == 2
