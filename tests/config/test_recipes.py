"""The recipes for web text: their hours in the guide follow from the configs, and they train on files of their form."""

import re

import jax
import numpy as np
import pytest

from mini_gpt.config import loading
from mini_gpt.data import subwords
from mini_gpt.model import build
from mini_gpt.training import loop
from mini_gpt.training.run import Run
from tests.conftest import REPOSITORY, make_text
from tests.data.test_token_files import shard
from tests.places import hub_server
from tests.places.test_hub import parquet

PEAK = 989e12  # FLOP/s of an H100, bfloat16, dense
SMALL = {
    "context_length": 16, "model.num_layers": 1, "model.d_model": 16, "model.num_heads": 2, "model.dtype": "float32",
    "train.steps": 1, "train.batch_size": 4, "train.accumulation_steps": 1, "optimizer.warmup_steps": 0, "mesh.data": 1,
}  # fmt: skip


@pytest.mark.parametrize(("name", "vocab_size"), [("fineweb_edu", 50_257), ("tinystories", 8192)])
def test_the_hours_of_a_recipe_follow_from_its_config(name, vocab_size):
    guide = (REPOSITORY / "docs" / "guides" / "data.md").read_text(encoding="utf-8")
    row = next(line for line in guide.splitlines() if line.startswith(f"| `{name}.py`"))
    millions, steps, per_step, billions, flops, mfu, hours = re.findall(r"\d[\d,]*(?:\.\d+)?(?:e\d+)?", row)
    config = loading.load(f"configs/{name}.py")
    sizes = [np.prod(leaf.shape) for leaf in jax.tree.leaves(build.abstract(config.model, vocab_size)[1])]
    parameters, tokens = float(sum(sizes)), config.train.steps * config.train.batch_size * config.context_length
    assert int(steps.replace(",", "")) * int(per_step.replace(",", "")) == tokens
    assert f"{parameters / 1e6:.1f} {tokens / 1e9:.2f}" == f"{millions} {billions}"
    assert f"{6 * parameters * tokens:.2e}".replace("+", "") == flops
    assert float(hours) == pytest.approx(6 * parameters * tokens / (float(mfu) / 100 * PEAK) / 3600, rel=0.02)


@pytest.mark.slow
def test_the_recipe_of_fineweb_edu_trains_on_such_shards(tmp_path):
    texts = [make_text(number, 60) for number in range(6)]
    model = subwords.BpeTokenizer.train(texts, 300).model
    model.add_special_tokens(["<|endoftext|>"])
    model.save(str(tmp_path / "tokenizer.json"))
    separator = model.token_to_id("<|endoftext|>")
    ids = np.array([token for text in texts for token in (separator, *model.encode(text).ids)], np.uint16)
    for name, part in zip(("val_000000", "train_000001", "train_000002"), np.split(ids, [100, 300]), strict=True):
        (tmp_path / f"finewebedu_{name}.bin").write_bytes(shard(part))
    overrides = {**SMALL, "data.path": str(tmp_path)}
    loop.train(loading.load("configs/fineweb_edu.py", overrides), tmp_path / "run", conclude=False)
    run = Run(tmp_path / "run")
    assert run.step == 1 and run.store.tokens("train").tolist() == ids[100:].tolist()
    assert run.store.tokens("validation").tolist() == ids[:100].tolist()


@pytest.mark.slow
def test_the_recipe_of_tinystories_trains_on_such_files(tmp_path, monkeypatch):
    stories = [make_text(number, 60) for number in range(120)]
    names = ("train-00000-of-00002-2d5a", "train-00001-of-00002-5852", "validation-00000-of-00001-869c")
    parts = stories[:60], stories[60:110], stories[110:]
    with hub_server.running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        content = {f"data/{name}.parquet": parquet(part) for name, part in zip(names, parts, strict=True)}
        hub.add("datasets/roneneldan/TinyStories", content)
        config = loading.load("configs/tinystories.py", {**SMALL, "data.vocab_size": 300})
        loop.train(config, tmp_path / "run", conclude=False)
    counts = Run(tmp_path / "run").store.meta["splits"]
    assert [counts[name]["documents"] for name in ("train", "validation", "test")] == [110, 10, 0]
