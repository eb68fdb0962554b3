"""GPT-2 small (Radford et al. 2019): 124M parameters, context 1,024, BPE, 0.5M tokens per step.

    python train.py --config=configs/gpt2_124m.py --config.data.path='openwebtext/**/*.txt'

This config is for eight 80 GB GPUs. With fewer, increase train.accumulation_steps. It was never trained, for lack of
GPUs. Batch size and learning rate are those of GPT-3 Small (Brown et al. 2020, table 2.1). There are no biases, as in
nanoGPT's recipe.
"""

from ml_collections import ConfigDict

from configs import presets


def get_config() -> ConfigDict:
    config = presets.get_config("gpt2_small")
    config.model.use_bias = False
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
