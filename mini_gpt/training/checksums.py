"""Checksums of the arrays of a checkpoint."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.model.parameters import by_name


def checksums(tree: Any) -> dict[str, str]:
    """Return {path: 16 hexadecimal digits} of a pytree of arrays, the same for any sharding.

    The digits are two sums modulo 2**32. Each term is an entry's bits times an odd hash of the entry's index.
    One changed entry changes both sums. Several changes can cancel, such as two flipped signs.
    """
    # One array at a time: on several CPU devices, many concurrent programs wait for each other's threads.
    sums = {name: np.asarray(_sums(leaf)) for name, leaf in by_name(tree).items()}
    return {name: "".join(f"{int(part):08x}" for part in both) for name, both in sums.items()}


@jax.jit
def _sums(x: jax.Array) -> jax.Array:
    """Return both sums, uint32. Compiled once for each shape."""
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
    index = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):  # not flattened: a sharded array stays sharded
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.stack([jnp.sum(bits * factor, dtype=jnp.uint32) for factor in _factors(index)])


def _factors(index: Any) -> list[Any]:
    """Return the odd factors of the entries with these indices, uint32, for both sums."""
    return [_hash(index ^ np.uint32(seed)) | np.uint32(1) for seed in (0x9E3779B9, 0x7F4A7C15)]


def _hash(x: Any) -> Any:
    """Return a hash of each uint32 number (the finaliser of MurmurHash3, Appleby 2016)."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
