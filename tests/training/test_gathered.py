"""Checkpoints that one process gathers have the bits of the sharded states, also after a rewind."""

import contextlib

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mini_gpt.runtime import processes, sharding
from mini_gpt.training.checkpoint import Checkpoints
from mini_gpt.training.gathered import GatheredCheckpoints
from mini_gpt.training.record import Record
from mini_gpt.training.step import TrainState


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_state_is_gathered_and_sharded_again(tmp_path, monkeypatch, is_trained):
    monkeypatch.setattr(processes, "apart", True)
    mesh = sharding.make_mesh(1, 8, 1)
    by_rows, replicated = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("fsdp",), ()))

    def state_of(step):
        values = {"a": np.random.default_rng(step).integers(2**32, size=16, dtype=np.uint32).view(np.float32)}
        values["a"][:2] = -0.0, np.nan
        arrays = jax.device_put(values, by_rows)
        scalars = jax.device_put((np.int32(step), np.bool_(False)), replicated)
        return TrainState(scalars[0], arrays, arrays if is_trained else None, scalars[1])

    states = {step: state_of(step if is_trained else 0) for step in (0, 1, 2, 3)}
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), states[0])
    if not is_trained:
        abstract = abstract._replace(optimizer_state=abstract.parameters)
    with contextlib.closing(GatheredCheckpoints(tmp_path / "checkpoints", keep=3)) as checkpoints:
        assert checkpoints.restore_last(abstract) is None
        for step in (1, 2, 3):
            checkpoints.save(step, states[step], Record(scheduled=step < 3))
        checkpoints.wait()
        for scheduled, expected in ((False, 3), (True, 2)):
            step, restored, record = checkpoints.restore_last(abstract, scheduled=scheduled)
            assert step == expected and record.scheduled == scheduled
            assert bits(restored) == bits(states[step])
            assert restored.parameters["a"].sharding == by_rows
        checkpoints.delete_after(2)
        assert checkpoints.steps() == [1, 2]
    with contextlib.closing(Checkpoints(tmp_path / "checkpoints", read_only=True)) as checkpoints:  # as any other
        assert bits(checkpoints.restore(2, abstract)) == bits(states[2])
