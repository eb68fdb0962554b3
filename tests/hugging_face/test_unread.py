"""An export reads the checkpoint one array at a time: the same files as from a loaded run, or none if it is damaged."""

import json

import pytest

from mini_gpt.hugging_face import exporting
from mini_gpt.hugging_face.unread import UnreadRun
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError
from mini_gpt.training.run import Run

pytestmark = pytest.mark.slow
FIELDS = {
    "llama, stacked": {
        "position": "rope",
        "num_layers": 2,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "use_bias": False,
        "scan_layers": True,
        "scale_embeddings": True,
    },
    "gpt2, bfloat16": {"position": "learned", "num_layers": 2},
}


@pytest.mark.parametrize("name", FIELDS)
def test_an_unread_run_is_exported_as_a_loaded_one(trained, tmp_path, name):
    workdir = trained(**{f"model__{field}": value for field, value in FIELDS[name].items()})
    options = exporting.Options(dtype="bfloat16" if "bfloat16" in name else "float32")
    run = UnreadRun(workdir)
    for at, each in (("loaded", Run(workdir)), ("unread", run), ("again", run)):
        exporting.export(each, tmp_path / at, options)
    written = {path.name: path.read_bytes() for path in (tmp_path / "loaded").iterdir()}
    for at in ("unread", "again"):
        assert {path.name: path.read_bytes() for path in (tmp_path / at).iterdir()} == written, at


def test_a_damaged_checkpoint_is_not_exported(trained, tmp_path):
    checkpoint = trained(model__position="learned") / "checkpoints" / "8"
    record = checkpoint / "format" / "metadata"
    body = files.read_with_checksum(record)

    def refused(sums):
        record.write_text(json.dumps(files.with_checksum(body | {"checksums": sums})))
        with pytest.raises(UserError) as raised:
            exporting.export(UnreadRun(tmp_path / "run"), tmp_path / "out")
        assert not (tmp_path / "out").exists() and "give another --checkpoint" in str(raised.value)
        return str(raised.value)

    name = "parameters/final_norm/scale"
    assert f"8: damaged, or deleted by training ({name} has another" in refused(body["checksums"] | {name: "0" * 16})
    others = {each: digits for each, digits in body["checksums"].items() if each != name}
    assert "it has other arrays than config.json implies" in refused(others)
    (largest,) = sorted(checkpoint.glob("parameters/**/d/*"), key=lambda path: path.stat().st_size)[-1:]
    content = largest.read_bytes()
    largest.write_bytes(bytes(byte ^ 1 for byte in content))
    refused(body["checksums"])
