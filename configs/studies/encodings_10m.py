"""Does the order of the encodings hold at ten million parameters?

    python -m mini_gpt.study run configs/studies/encodings_10m.py

42 runs with the shape of nanoGPT's recipe for a GPU (configs/shakespeare_char.py: six layers of width 384), on the
sources of the Python packages of this environment: BPE with 8,192 tokens, 20M tokens, none seen twice. The runs of
two environments have other texts: do not compare them. `rnope-swa` has RoPE with a window in all layers but the third
and the last, which have no encoding. The study is for a GPU. It was tried at a small size, and was not run.
"""

import sysconfig

ENCODINGS = ("none", "learned", "sinusoidal", "rope", "alibi", "t5")
ENCODINGS += ("hard_alibi", "kerple", "fire", "pope", "fox", "cope")


def get_study() -> dict:
    pattern = ("rope", "rope", "none")
    window = {"model.position": pattern, "model.attention_window": tuple(64 if p == "rope" else None for p in pattern)}
    return dict(
        question="Does the order of the encodings hold at ten million parameters?",
        config="configs/shakespeare_char.py",
        overrides={
            "data.corpus": "text",
            "data.path": f"{sysconfig.get_paths()['purelib']}/**/*.py",
            "data.tokenizer": "bpe",
            "data.vocab_size": 8192,
            "data.split": "documents",
            "data.split_fractions": (0.98, 0.01, 0.01),
            "model.dropout": 0.0,
            "train.steps": 1220,  # of 64 × 256 tokens
            "eval.every": 610,
        },
        conditions={name: {"model.position": name} for name in ENCODINGS}
        | {"rnope-swa": window, "rope,qk-norm": {"model.position": "rope", "model.variants.qk_norm": "weighted"}},
        seeds=range(3),
        suites={"extrapolation": {"lengths": "1x,2x,4x,8x", "strides": "1x"}},
        contrasts=[
            "fox < rope @ nll,1x",
            "fox < alibi @ nll,4x",
            *(f"alibi < {other} @ nll,8x" for other in ("none", "sinusoidal", "rope", "t5")),
            "rnope-swa < alibi @ nll,8x",
        ],
        smallest_effect=0.02,  # nats per token
        expected_deviation=0.01,
    )
