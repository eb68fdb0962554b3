"""python train.py --config=configs/tiny.py"""

from configs import default


def get_config():
    config = default.get_config()
    config.train.steps = 1000
    return config
