"""Reach the loss of nanoGPT's CPU recipe (configs/shakespeare_char_cpu.py) in about a quarter of its time.

    python train.py --config=configs/shakespeare_char_fast.py
    python train.py --config=configs/shakespeare_char_fast.py --config.data.path=FILE    (without a network)

With three seeds and an empty compilation cache, the whole command takes 23.4 to 23.8 s and scores 1.860, 1.860, 1.875
nats per character (whole validation split, blocks of 64). nanoGPT takes 80 to 100 s with imports and scores 1.897. Both
ran on two CPU cores (AMD EPYC with AVX-512 and bfloat16) with Python 3.11. See docs/performance.md.
"""

from ml_collections import ConfigDict

from configs import shakespeare_char_cpu


def get_config() -> ConfigDict:
    config = shakespeare_char_cpu.get_config()
    config.model.position = "rope"
    config.model.norm = "rmsnorm"
    config.train.steps = 300
    config.optimizer.name = "muon"
    config.optimizer.learning_rate = 2e-2
    config.optimizer.schedule = "wsd"
    config.optimizer.decay_fraction = 0.8
    config.optimizer.final_fraction = 0.0
    config.optimizer.warmup_steps = 20
    config.optimizer.b2 = 0.95
    config.optimizer.muon.adam_learning_rate = 5e-3
    config.optimizer.muon.momentum = 0.9
    config.optimizer.muon.newton_schulz_steps = 4
    config.eval.every = 1000  # more than train.steps: evaluate only at the end
    config.eval.sample_tokens = 0
    return config
