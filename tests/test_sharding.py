"""Where batches lie; what else is divided, tests/training/test_step.py holds against one device."""

import numpy as np

from mini_gpt import sharding
from mini_gpt.schema import MeshConfig


def test_a_batch_is_put_before_the_one_ahead_of_it_is_used():
    mesh = sharding.make_mesh(MeshConfig(4, 2, 1))
    asked = []
    batches = ({"inputs": np.full((8, 3), asked.append(step) or step)} for step in range(3))
    seen = []
    for batch in sharding.put_ahead(batches, mesh):
        assert batch["inputs"].sharding == sharding.batch_sharding(mesh)
        seen.append((int(batch["inputs"][0, 0]), list(asked)))
    assert seen == [(0, [0, 1]), (1, [0, 1, 2]), (2, [0, 1, 2])]
    assert list(sharding.put_ahead([], mesh)) == []
