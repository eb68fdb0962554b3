"""Layers that attention and the blocks use, and `observe`, which names activations for tools."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from mini_gpt.config.model import ModelConfig
from mini_gpt.model.xla_workarounds import CpuLayerNorm, CpuRMSNorm, matmul, recompute_in_backward
from mini_gpt.runtime import devices

INIT_STD = 0.02  # Radford et al. 2019
Keys = Sequence[Any]  # of dropout: random keys, or as many None
PRODUCT = "product"  # name of a Linear's output for checkpoint policies
ACTIVATIONS: dict[str, Callable[..., jax.Array]] = {
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "swiglu": lambda gate, up: jax.nn.silu(gate) * up,
    "geglu": lambda gate, up: jax.nn.gelu(gate) * up,
}


class Linear(nnx.Linear):
    """A linear layer with float32 parameters and matrix products in `model.dtype`. use_bias: None: `model.use_bias`."""

    def __init__(
        self,
        config: ModelConfig,
        d_in: int,
        d_out: int,
        *,
        std: float = INIT_STD,
        use_bias: bool | None = None,
        rngs: nnx.Rngs,
    ):
        biased, dtype = config.use_bias if use_bias is None else use_bias, devices.compute_dtype(config.dtype)
        kernel_init = nnx.initializers.normal(std)
        super().__init__(d_in, d_out, use_bias=biased, dtype=dtype, kernel_init=kernel_init, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]  # no out_sharding
        x_TD = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        y_TF = matmul(x_TD, self.kernel[...])
        if self.bias is not None:
            y_TF = y_TF + self.bias[...]  # added in float32, so that the bias's gradient is summed in float32
        y_TF = checkpoint_name(y_TF.astype(self.dtype), PRODUCT)
        return y_TF.reshape(*x.shape[:-1], self.out_features)


class Mlp(nnx.Module):
    """The feed-forward sublayer: two linear layers with an activation between, or three with a gate (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.activate = ACTIVATIONS[config.activation]
        if config.scan_layers or jax.default_backend() == "gpu":  # saves one array for gelu, where a scan saves five
            self.activate = recompute_in_backward(self.activate)
        self.up = Linear(config, config.d_model, config.d_ff, rngs=rngs)
        self.gate = Linear(config, config.d_model, config.d_ff, rngs=rngs) if config.gated else None
        self.down = Linear(config, config.d_ff, config.d_model, std=residual_std(config), rngs=rngs)
        self.output_norm = make_norm(config, rngs=rngs) if config.output_norm else None

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        observe(self, "feed_forward_in", x_BLD)
        up_BLF = self.up(x_BLD)
        units_BLF = self.activate(up_BLF) if self.gate is None else self.activate(self.gate(x_BLD), up_BLF)
        observe(self, "units", units_BLF)
        out_BLD = self.down(units_BLF)
        out_BLD = out_BLD if self.output_norm is None else self.output_norm(out_BLD)
        observe(self, "feed_forward", out_BLD)
        return out_BLD


def make_norm(config: ModelConfig, *, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
    """Return LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019), computed in float32."""
    options: dict[str, Any] = {"epsilon": config.norm_epsilon, "use_scale": config.norm_weights, "dtype": jnp.float32}
    kinds = (CpuLayerNorm, CpuRMSNorm) if jax.default_backend() == "cpu" else (nnx.LayerNorm, nnx.RMSNorm)
    if config.norm == "rmsnorm":
        return kinds[1](config.d_model, **options, rngs=rngs)
    biased = config.use_bias and config.norm_weights
    return kinds[0](config.d_model, **options, use_bias=biased, use_fast_variance=False, rngs=rngs)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero entries with probability `rate`, else scale by 1/(1 - rate) (Srivastava et al. 2014); no-op for key None."""
    if key is None or rate == 0.0:
        return x
    kept = x.astype(jnp.float32) / (1 - rate)  # in bfloat16, 1 - rate would be rounded
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), kept, 0).astype(x.dtype)


def residual_std(config: ModelConfig) -> float:
    """Return the initial std of the layers that add to the residual stream (Radford et al. 2019, 2.3)."""
    sublayers = (3 if config.has_encoder else 2) * config.num_layers
    return INIT_STD / math.sqrt(sublayers) if config.residual else INIT_STD


def dropout_keys(key: jax.Array | None, count: int) -> Any:
    """Return `count` random keys from one, or as many None from None."""
    return [None] * count if key is None else jax.random.split(key, count)


def observe(module: nnx.Module, name: str, value: jax.Array) -> None:
    """Keep an activation under this name, if the module runs inside `nnx.capture`; else do nothing."""
    if hasattr(module, "__captures__"):
        module.sow(nnx.Intermediate, name, value)


def make_table(vocab_size: int, config: ModelConfig, *, rngs: nnx.Rngs) -> nnx.Param:
    """Return a table_VD of embeddings, float32, normally distributed."""
    std = config.d_model**-0.5 if config.scale_embeddings else INIT_STD
    return nnx.Param(nnx.initializers.normal(std)(rngs.params(), (vocab_size, config.d_model), jnp.float32))


def scaled(factor: float | jax.Array, x: jax.Array) -> jax.Array:
    """Return factor · x in x's dtype, computed in float32: a factor rounded to bfloat16 is off by up to 0.4%."""
    return (factor * x.astype(jnp.float32)).astype(x.dtype)


def gather(table_VD: jax.Array) -> jax.Array:
    """Replicate an embedding table over its mesh, if it is sharded.

    Otherwise XLA would shard the activations like the table, along their width. It would then communicate activations,
    which are larger than parameters.
    """
    mesh = jax.typeof(table_VD).sharding.mesh
    if mesh.shape.get("fsdp", 1) == 1:
        return table_VD
    replicate = jax.jit(jax.lax.with_sharding_constraint, static_argnums=1)  # jit: for gradients outside of jit
    return replicate(table_VD, NamedSharding(mesh, PartitionSpec()))
