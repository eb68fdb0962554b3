"""A model of 0.8M parameters over the source of the running Python's standard library; for a CPU.

    python train.py --config=configs/tiny.py

Two CPU cores (AMD EPYC with AVX-512 and its bfloat16), Python 3.11: two to three minutes with the installation, 0.9 GB
of memory; 2.043 bits a byte on the whole validation split (312,915 tokens in blocks of 128), 2.037 with
--config.model.dtype=float32. One seed.
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.context_length = 128
    config.train.steps = 900
    config.train.batch_size = 16
    config.optimizer.learning_rate = 4e-3
    config.optimizer.schedule = "wsd"  # in so few steps a decay is worth a tenth of a bit: docs/experiments.md
    config.optimizer.decay_fraction = 0.4
    config.optimizer.warmup_steps = 100
    config.eval.every = 300
    config.checkpoint.every = 300
    return config
