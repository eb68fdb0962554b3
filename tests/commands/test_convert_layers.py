"""A converted run has the same parameters in the other layout of layers, and resumes in it."""

import json
import re

import jax
import numpy as np
import pytest

from mini_gpt.model import parameters
from mini_gpt.runtime import sharding
from mini_gpt.training import loop
from mini_gpt.training import state as states
from mini_gpt.training.checkpoint import Checkpoints
from mini_gpt.training.run import InitialWeights, Run
from tests.commands.test_command_line import overtake, type_in
from tests.training.interruption import Interrupted, interrupt_after

COMMAND = "mini_gpt.commands.convert_layers"
FIELDS = {"model__num_layers": 2, "optimizer__name": "muon", "eval__every": 2, "checkpoint__every": 2}


@pytest.mark.slow
def test_training_resumes_in_the_other_layout(small, tmp_path, monkeypatch):
    plain, scanned = tmp_path / "plain", tmp_path / "scanned"
    loop.train(small(train__steps=4, **FIELDS), plain, conclude=False)
    assert type_in(monkeypatch, COMMAND, f"--workdir={plain}", f"--to={scanned}") is None
    assert "exists already" in type_in(monkeypatch, COMMAND, f"--workdir={plain}", f"--to={scanned}")

    unstacked, stacked = Run(plain).model.parameters, Run(scanned).model.parameters
    assert stacked["blocks"]["mlp"]["up"]["kernel"].shape == (2, 32, 128)
    equal = lambda a, b: jax.tree.map(np.testing.assert_array_equal, a, b)
    equal(stacked, jax.jit(lambda tree: parameters.with_layers(tree, stacked=True))(unstacked))
    equal(stacked, Run(plain, overrides={"model.scan_layers": "True"}).model.parameters)
    equal(unstacked, Run(scanned, overrides={"model.scan_layers": "False"}).model.parameters)
    for directory, scan in ((plain, True), (scanned, False)):
        config = small(model__scan_layers=scan, mesh__data=1, mesh__fsdp=4, **FIELDS)
        abstract = states.abstract(config, 257, sharding.make_mesh(*config.mesh.sizes))[1].parameters
        taken = InitialWeights(directory, config, "last").parameters(abstract)
        equal(taken, stacked if scan else unstacked)
        assert jax.tree.map(lambda leaf: leaf.sharding, taken) == jax.tree.map(lambda leaf: leaf.sharding, abstract)

    resumed = [
        loop.train(small(train__steps=6, model__scan_layers=scan, **FIELDS), directory, conclude=False)
        for directory, scan in ((plain, False), (scanned, True))
    ]
    for left, right in zip(*(jax.tree.leaves(parameters.with_layers(x, stacked=False)) for x in resumed), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-5)
    steps = [[json.loads(row)["step"] for row in (d / "metrics.jsonl").open()] for d in (plain, scanned)]
    assert steps[0] == steps[1] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_copy_goes_to_a_new_directory_outside_the_run(trained, tmp_path, monkeypatch):
    run = trained(train__steps=4)
    before = sorted(run.rglob("*"))
    convert = lambda to: type_in(monkeypatch, COMMAND, f"--workdir={run}", f"--to={to}")
    for inside in (run / "copy", tmp_path / "new" / ".." / "run" / "eval" / "copy"):
        assert re.match(rf"error: --to: found {run}/\S+, which is in --workdir; name", convert(inside))
    for there in (run, run / "..", tmp_path / "new" / ".."):
        assert convert(there) == f"error: {there.resolve()}: exists already; name a new directory"
    overtake(monkeypatch)
    assert convert(tmp_path / "copy") == f"error: {tmp_path / 'copy'}: exists already; name a new directory"
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["of another process"]
    assert sorted(run.rglob("*")) == before and not (tmp_path / "new").exists() and not list(tmp_path.glob("*.draft"))


@pytest.mark.slow
def test_non_finite_weights_are_copied_with_a_warning(trained, tmp_path, monkeypatch, caplog):
    restore = Checkpoints.restore

    def spoiled(self, step, abstract):
        state = restore(self, step, abstract)
        return state._replace(parameters=state.parameters | {"embedding": state.parameters["embedding"] * np.nan})

    run = trained(train__steps=4)
    monkeypatch.setattr(Checkpoints, "restore", spoiled)
    assert type_in(monkeypatch, COMMAND, f"--workdir={run}", f"--to={tmp_path / 'copy'}") is None
    assert "step 4: found non-finite values (NaN or infinity) in embedding; copied unchanged" in caplog.text


@pytest.mark.slow
def test_a_run_without_a_checkpoint_is_refused(small, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        interrupt_after(patch, 1)
        loop.train(small(**FIELDS), tmp_path / "begun", conclude=False)
    error = type_in(monkeypatch, COMMAND, f"--workdir={tmp_path / 'begun'}", f"--to={tmp_path / 'to'}")
    assert "has no checkpoint" in error and not (tmp_path / "to").exists()
