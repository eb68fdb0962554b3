"""A model of 0.1M parameters for small studies, trained in half a minute on one core.

python train.py --config=configs/small.py
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.context_length = 64
    config.model.num_layers = 2
    config.model.d_model = 64
    config.model.num_heads = 4
    config.data.split_fractions = (0.98, 0.01, 0.01)  # small, so that evaluation is a small part of the time
    config.train.steps = 500
    config.train.batch_size = 16
    config.optimizer.learning_rate = 4e-3
    config.optimizer.schedule = "wsd"
    config.optimizer.decay_fraction = 0.4
    config.optimizer.warmup_steps = 50
    config.eval.every = 500
    config.eval.tokens = 16_384
    config.eval.sample_tokens = 0
    config.checkpoint.every = 500
    config.checkpoint.keep = 1
    return config
