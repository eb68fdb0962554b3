"""An encoder-decoder that learns by span corruption on Python source, after T5 (Raffel et al. 2020).

    python train.py --config=configs/t5.py
    python sample.py --workdir=runs/t5 --source='def <0>(self):' --temperature=0

As in T5, attention has relative biases and no scale, norms are RMSNorm, and layers have no biases. A row of the encoder
has 256 tokens, from about 285 tokens of text.
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.model.encoder_layers = 2
    config.model.num_layers = 2
    config.model.position = "t5"
    config.model.scale_attention = False
    config.model.norm = "rmsnorm"
    config.model.use_bias = False
    config.model.activation = "relu"
    config.source_length = 256
    config.context_length = 58  # 43 tokens in 14 spans, 14 sentinels, and the end
    config.train.objective = "span_corruption"
    config.train.steps = 2000
    config.train.batch_size = 16
    config.optimizer.learning_rate = 2e-3
    return config
