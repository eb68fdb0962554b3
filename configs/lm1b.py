"""The One Billion Word benchmark (Chelba et al. 2013) from TFDS: 30 million shuffled sentences.

    python train.py --config=configs/lm1b.py

TFDS downloads 1.8 GB. Only the preparation needs TensorFlow: install it, or prepare the data elsewhere as array_record
and set data.path. TFDS's test split is kept, and validation is taken from train. Attention stays inside a sentence, in
evaluation too. This config is for one host with a GPU or TPU. It was never trained, for lack of network access.
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.context_length = 256
    config.model.num_layers = 12
    config.model.d_model = 768
    config.model.num_heads = 12
    config.data.corpus = "tfds:lm1b"
    config.data.split_fractions = (0.998, 0.001, 0.001)
    config.data.tokenizer = "bpe"
    config.data.vocab_size = 32_768
    config.data.isolate_documents = True
    config.train.steps = 50_000
    config.train.batch_size = 512
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 2000
    config.eval.every = 1000
    config.eval.tokens = 2**20
    config.checkpoint.every = 1000
    return config
