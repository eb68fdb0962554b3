"""nanoGPT's character-level Shakespeare recipe for a CPU.

    python train.py --config=configs/shakespeare_char_cpu.py
    python train.py --config=configs/shakespeare_char_cpu.py --config.data.path=FILE    (without a network)

Time: one to two minutes on two CPU cores (AMD EPYC with AVX-512) with Python 3.11. Loss in nats per character, on the
whole validation split (111,538 characters in blocks of 64), three seeds, --config.model.dtype=float32: 1.902 ± 0.001;
with --config.model.position=rope 1.777 ± 0.012. nanoGPT's own checkpoint scores 1.898.
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.context_length = 64
    config.model.position = "learned"
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.d_model = 128
    config.model.use_bias = False
    config.data.corpus = "tiny_shakespeare"
    config.data.split = "contiguous"
    config.data.split_fractions = (0.9, 0.1, 0.0)
    config.data.tokenizer = "characters"
    config.train.steps = 2000
    config.train.batch_size = 12
    config.optimizer.learning_rate = 1e-3
    config.optimizer.schedule = "cosine"
    config.optimizer.final_fraction = 0.1
    config.optimizer.warmup_steps = 100
    config.optimizer.weight_decay = 0.1
    config.optimizer.b2 = 0.99
    config.eval.every = 200
    config.eval.tokens = 16_384
    config.checkpoint.every = 1000
    return config
