"""An untrusted Transformers model must have regular files and finite weights; its names are escaped in errors."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mini_gpt.config import loading
from mini_gpt.data.subwords import BpeTokenizer
from mini_gpt.hugging_face import architectures, importing, model_card, settings, tokenizer_files
from mini_gpt.runtime.errors import UserError
from tests.hugging_face.models import written


@pytest.fixture
def model(tmp_path):
    """Write a GPT-2 model as Transformers does; return its directory."""
    written("learned", tmp_path / "model")
    return tmp_path / "model"


MODEL_FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]


@pytest.mark.parametrize("name", [*MODEL_FILES, "model.safetensors.index.json"])
def test_links_out_of_a_model_are_not_followed(model, name, tmp_path):
    (tmp_path / "outside").write_text("{}")
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(tmp_path / "outside")
    if "index" in name:
        (model / "model.safetensors").unlink()
    with pytest.raises(UserError, match=f"{name}: found a link"):
        if name == "config.json":
            settings.read(model / name)
        elif "tokenizer" in name:
            (model / "tokenizer.json").exists() or (model / "tokenizer.json").write_text(
                BpeTokenizer.train(["the cat"], 300).model.to_str()
            )
            tokenizer_files.read(model, 300, 5)
        else:
            weights(model)


def weights(model):
    fields = settings.read(model / "config.json")
    architecture = architectures.find(fields)
    config = loading.load("configs/default.py", architecture.fields(fields))
    arrays = importing.read_weights(model, architecture, config.model, fields.whole("vocab_size"))
    return {path: np.asarray(array) for path, array in arrays.items()}


def test_links_of_the_hubs_cache_are_followed(model, tmp_path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1f", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in model.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert weights(snapshot)
    (blobs / "model.safetensors").rename(tmp_path / "secret")
    (blobs / "model.safetensors").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=r"model\.safetensors: found a link to \S+/secret"):
        weights(snapshot)


def test_names_of_tensors_are_escaped(model):
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {"a\x1b[2J": np.zeros(1, np.float32)}, model / "model.safetensors")
    with pytest.raises(UserError) as raised:
        weights(model)
    assert r"a\x1b[2J" in str(raised.value) and "\x1b" not in str(raised.value)


def test_importing_non_finite_weights_is_refused(model):
    tensors = load_file(model / "model.safetensors")
    tensors["transformer.wte.weight"][0, 0] = np.inf
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(UserError, match=r"transformer\.wte\.weight: found non-finite values \(NaN or infinity\)"):
        weights(model)


def test_a_model_card_has_no_markup_of_a_run():
    assert model_card._table_cell("tiny |\n# <b>x</b> `rm` [a](b)\x1b") == "tiny ? ? ?b?x?/b? ?rm? ?a??b??x1b"
