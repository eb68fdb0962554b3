"""A model of 0.3M parameters, trained on short English stories whose grammar is known.

python train.py --config=configs/english.py --workdir=runs/english
python eval.py --workdir=runs/english --suite=heads
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.context_length = 64
    config.data.corpus = "english"
    config.data.tokenizer = "words"
    config.data.isolate_documents = True
    config.model.num_layers = 3
    config.model.num_heads = 4
    config.model.d_model = 96
    config.train.steps = 1500
    config.train.batch_size = 16
    config.optimizer.learning_rate = 3e-3
    config.optimizer.schedule = "wsd"
    config.optimizer.decay_fraction = 0.4
    config.optimizer.warmup_steps = 100
    config.eval.every = 500
    config.eval.tokens = 16_384
    config.checkpoint.every = 500
    return config
