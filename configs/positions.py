"""Sweeps over positional encodings: nanoGPT's CPU recipe on Shakespeare, with a context of 64 characters.

    python -m mini_gpt.sweep --config=configs/positions.py --suite=extrapolation --seeds=3 \\
        --vary model.position=none,learned,sinusoidal,rope,alibi,t5

Without a network, add --config.data.path=FILE. For a first look, configs/positions.py:quick is a short run on Python's
standard library. Times and results: docs/results/extrapolation.md.
"""

from ml_collections import ConfigDict

from configs import shakespeare_char_cpu


def get_config(version: str = "full") -> ConfigDict:
    if version not in ("full", "quick"):
        raise ValueError(f"found version {version!r}; must be full or quick")
    config = shakespeare_char_cpu.get_config()
    config.eval.every = 1000
    config.eval.sample_tokens = 0
    if version == "quick":
        config.data.corpus = "python_stdlib"
        config.data.tokenizer = "bytes"
        config.data.split = "documents"
        config.data.split_fractions = (0.985, 0.0075, 0.0075)  # small, because evaluation takes half of the time
        config.train.steps = 250
        config.optimizer.learning_rate = 3e-3
        config.optimizer.warmup_steps = 50
    return config
