"""GPT-2 small on 9.9 billion tokens of FineWeb-Edu (Penedo et al. 2024), with llm.c's hyperparameters.

    hf download kjj0/finewebedu10B-gpt2 --repo-type=dataset --local-dir=finewebedu10B
    hf download openai-community/gpt2 tokenizer.json --local-dir=finewebedu10B
    python -m mini_gpt.data look --config=configs/fineweb_edu.py
    python train.py --config=configs/fineweb_edu.py

The hyperparameters are those of llm.c's scripts/run_gpt2_124M.sh (commit f1e2ace). This config is for one GPU; with
eight, set train.accumulation_steps=4. It was never trained, for lack of network access. docs/guides/data.md has the
expected hours, and the loss to compare with.
"""

from ml_collections import ConfigDict

from configs import gpt2_124m


def get_config() -> ConfigDict:
    config = gpt2_124m.get_config()
    config.model.use_bias = True
    config.data.corpus = "tokens"
    config.data.path = "finewebedu10B"
    config.train.steps = 18_865  # of 524,288 tokens
    config.train.accumulation_steps = 32
    config.optimizer.warmup_steps = 700
    config.optimizer.final_fraction = 0.0
    return config
