"""GPT-2 small (Radford et al. 2019): 124M parameters, context 1,024, BPE of the corpus, half a million tokens a step.

    python train.py --config=configs/gpt2_124m.py --config.data.path='openwebtext/**/*.txt'

Meant for one machine of eight 80 GB GPUs; on fewer, raise train.accumulation_steps. Not run here: no GPU was at hand.
The shape and its parameter count are tested; the recipe is GPT-3's for this size (Brown et al. 2020, table 2.1).
"""

from ml_collections import ConfigDict

from configs import presets


def get_config() -> ConfigDict:
    config = presets.get_config("gpt2_small")
    config.data.corpus = "text"
    config.data.path = "openwebtext/**/*.txt"
    config.data.split_fractions = (0.998, 0.001, 0.001)
    config.train.steps = 100_000
    config.train.batch_size = 512
    config.train.accumulation_steps = 4
    config.optimizer.learning_rate = 6e-4
    config.optimizer.schedule = "cosine"
    config.optimizer.warmup_steps = 2000
    config.eval.every = 1000
    config.eval.tokens = 2**20
    config.checkpoint.every = 1000
    return config
