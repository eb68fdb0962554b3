"""Checksums of arrays agree with their definition on any mesh, and notice any flipped bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mini_gpt.training.checkpoint import checksums


def independent_sums(array: np.ndarray) -> str:
    """Return the checksum by its definition, one entry at a time."""
    words = array.reshape(-1).view(f"uint{8 * array.dtype.itemsize}").tolist()
    sums = []
    for seed in (0x9E3779B9, 0x7F4A7C15):
        total = 0
        for place, word in enumerate(words):
            x = place ^ seed
            x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
            x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
            total += word * ((x ^ (x >> 16)) | 1)
        sums.append(f"{total % 2**32:08x}")
    return "".join(sums)


@pytest.mark.parametrize(
    "shape, dtype", [((), "int32"), ((5,), "float32"), ((8, 16), "float32"), ((4, 3, 8), "bfloat16")]
)
def test_checksums_on_any_mesh_equal_an_independent_sum(shape, dtype):
    array = jnp.asarray(np.random.default_rng(0).normal(size=shape) * 100).astype(dtype)
    expected = {"x": independent_sums(np.asarray(array))}
    assert checksums({"x": array}) == checksums({"x": np.asarray(array)}) == expected
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    if shape and shape[-1] % 8 == 0:
        divided = jax.device_put(array, NamedSharding(mesh, PartitionSpec(*[None] * (len(shape) - 1), "d")))
        assert checksums({"x": divided}) == expected


def test_any_flipped_bit_changes_both_sums():
    array = np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32)
    before = checksums({"x": array})["x"]
    for bit in range(32 * array.size):
        words = array.copy().view(np.uint32).reshape(-1)
        words[bit // 32] ^= np.uint32(1 << bit % 32)
        after = checksums({"x": words.view(np.float32).reshape(array.shape)})["x"]
        assert before[:8] != after[:8] and before[8:] != after[8:]
