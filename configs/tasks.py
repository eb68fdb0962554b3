"""Problems with one right answer: configs/tasks.py:NAME, with a NAME from mini_gpt/data/tasks/, such as copy.

    python train.py --config=configs/tasks.py:copy --workdir=runs/copy
    python eval.py --workdir=runs/copy --suite=tasks

Training uses lengths up to data.task_length, evaluation up to twice that. Times and results:
docs/results/extrapolation.md.
"""

from ml_collections import ConfigDict

from configs import default
from mini_gpt.data import tasks


def get_config(name: str = "copy") -> ConfigDict:
    config = default.get_config()
    config.data.corpus = f"task:{name}"
    config.data.tokenizer = "characters"
    config.data.task_length = 20
    config.context_length = tasks.find(config.data.corpus).size(config.data.task_length)
    config.model.num_layers = 4
    config.model.d_model = 64
    config.model.num_heads = 4
    config.train.steps = 15_000
    config.train.batch_size = 16
    config.optimizer.learning_rate = 1e-3
    config.optimizer.b2 = 0.99
    config.optimizer.schedule = "wsd"
    config.optimizer.decay_fraction = 0.3
    config.optimizer.final_fraction = 0.0
    config.optimizer.warmup_steps = 100
    config.eval.every = 1000
    config.eval.tokens = 16_384
    config.checkpoint.every = 1000
    return config
