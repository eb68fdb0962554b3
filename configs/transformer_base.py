"""The base model of Vaswani et al. 2017 on WMT 2014, English to German, from TFDS.

    python train.py --config=configs/transformer_base.py
    python eval.py --workdir=runs/transformer_base --suite=translation --split=test

The parameters: python -m mini_gpt.commands.count_parameters --config=configs/transformer_base.py --vocab_size=37000
TFDS downloads 1.6 GB. Only the preparation needs TensorFlow: install it, or prepare the data elsewhere as array_record
and set data.path. Rows hold several sentences, about 25,000 tokens of each language in a step, as in the paper (5.1).
Unlike in the paper, the last checkpoints are not averaged. This config was never trained, for lack of network access.
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.source_length = 256
    config.context_length = 256
    config.model.encoder_layers = 6
    config.model.num_layers = 6
    config.model.d_model = 512
    config.model.num_heads = 8
    config.model.d_ff = 2048
    config.model.position = "sinusoidal"
    config.model.activation = "relu"
    config.model.norm_placement = "post"
    config.model.scale_embeddings = True
    config.model.embedding_dropout = 0.1
    config.model.sublayer_dropout = 0.1
    config.data.corpus = "tfds:wmt14_translate/de-en"
    config.data.pair = ("en", "de")
    config.data.tokenizer = "bpe"
    config.data.vocab_size = 37_000
    config.train.steps = 100_000
    config.train.batch_size = 96
    config.train.label_smoothing = 0.1
    config.optimizer.learning_rate = (512 * 4000) ** -0.5
    config.optimizer.warmup_steps = 4000
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.98
    config.optimizer.weight_decay = 0.0
    config.optimizer.clip_norm = 1e9
    config.eval.every = 2000
    config.checkpoint.every = 2000
    return config
