"""Checksums of a state's arrays that are the same on any number of devices and hosts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.model.parameters import path_name


def checksums(tree: Any) -> dict[str, str]:
    """Gives {path: 16 hexadecimal digits} of a pytree of arrays, wherever they lie.

    Two sums modulo 2**32, over each array, of its entries' bits times odd numbers that are drawn by the entry's place.
    They are exact, in whatever order and on whatever device the parts are added; one changed entry changes both, and
    exchanged entries do, but for one case in 2**32 and less.
    """
    # One after the other: many small programs at once on several devices of a CPU wait for each other's threads.
    sums = {path_name(path): np.asarray(_sums(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    return {name: "".join(f"{int(part):08x}" for part in both) for name, both in sums.items()}


@jax.jit
def _sums(x: jax.Array) -> jax.Array:
    """Gives both sums, uint32; compiled once a shape."""
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
    place = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):  # not flattened, so that an array that is divided stays so
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    first, second = (_mixed(place ^ jnp.uint32(seed)) | 1 for seed in (0x9E3779B9, 0x7F4A7C15))
    return jnp.stack([jnp.sum(bits * odd, dtype=jnp.uint32) for odd in (first, second)])


def _mixed(x: jax.Array) -> jax.Array:
    """Gives well mixed bits of uint32 numbers (the finaliser of MurmurHash3, Appleby 2016)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
