"""What a sweep over positional encodings trains: nanoGPT's CPU recipe on Shakespeare, 64 characters of context.

    python -m mini_gpt.sweep --config=configs/positions.py --suite=extrapolation --seeds=3 \\
        --vary model.position=none,learned,sinusoidal,rope,alibi,t5

Add --config.data.path=FILE where there is no network. Times and results: docs/extrapolation.md.
"""

from ml_collections import ConfigDict

from configs import shakespeare_char_cpu


def get_config() -> ConfigDict:
    config = shakespeare_char_cpu.get_config()
    config.eval.every = 1000
    config.eval.sample_tokens = 0
    return config
