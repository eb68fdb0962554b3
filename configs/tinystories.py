"""A model of 29M parameters on TinyStories (Eldan and Li 2023): two million short stories for small children.

    python -m mini_gpt.data look --config=configs/tinystories.py
    python train.py --config=configs/tinystories.py

The text, 1 GB, comes from the Hugging Face Hub; its own validation split is kept. The first command downloads it and
makes the tokens. The shape is near that of the paper's 28M model, with RoPE and a BPE of this text. This config is for
one GPU. It was never trained, for lack of network access; docs/guides/data.md has the expected hours.
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.context_length = 512
    config.model.num_layers = 8
    config.model.d_model = 512
    config.model.num_heads = 8
    config.data.corpus = "text"
    config.data.path = "hf://datasets/roneneldan/TinyStories/data/*.parquet"
    config.data.split_fractions = (1.0, 0.0, 0.0)  # of what is not in its validation split
    config.data.tokenizer = "bpe"
    config.train.steps = 10_000
    config.train.batch_size = 128
    config.optimizer.learning_rate = 1e-3
    config.optimizer.schedule = "cosine"
    config.optimizer.warmup_steps = 500
    config.eval.every = 500
    config.eval.tokens = 2**20
    config.checkpoint.every = 500
    return config
