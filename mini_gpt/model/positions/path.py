"""PaTH: between a key and a query, the tokens reflect the key."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.config.model import ModelConfig
from mini_gpt.model.attention.context import Context
from mini_gpt.model.attention.core import scale_of
from mini_gpt.model.attention.parts import InputChange, ScoreMod
from mini_gpt.model.layers import INIT_STD
from mini_gpt.model.positions.base import Encoding

RANK = 32  # of the projection to w, as in the released code


class Path(Encoding):
    """Logits q_iᵀ H_i … H_{j+1} k_j, where token t reflects with H_t = I - β_t w_t w_tᵀ (Yang et al. 2025, section 3).

    Each key-value head and layer has its own. w_t is a projection of x_t, the input of attention, divided by its
    length. β_t = 2 σ(u · x_t + b), so that H_t can reverse a direction. The released code also has a short convolution
    of w.
    """

    name = "path"
    stage = "input"
    own_parameters = True
    causal_only = True
    in_circuits = False
    reads_positions = False
    needs_all_keys = "the products of path"

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        config.check_needs("position", {"heads": None, "variants.soft_cap": None})

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.gates, self.change = Gates(config, rngs=rngs), Change(config)

    def modules(self) -> list[Any]:
        return [self.gates, self.change]


class Reflections(NamedTuple):
    """The w_BLGK, of length 1, and the β_BLG of some tokens, float32."""

    w_BLGK: jax.Array
    beta_BLG: jax.Array

    def changes(self, k_BSGK: jax.Array) -> jax.Array:
        """Return c_BGTS: token t subtracts c_ts w_t from key s, after the tokens between them; 0 for t <= s.

        c_ts = β_t w_t · (k_s - Σ_r c_rs w_r), with r from s + 1 to t - 1: a triangular system.
        """
        w_BGTK, beta_BGT1 = self.w_BLGK.swapaxes(1, 2), self.beta_BLG.swapaxes(1, 2)[..., None]
        products = lambda x_BGSK: jnp.tril(beta_BGT1 * _product("bgtk,bgsk->bgts", w_BGTK, x_BGSK), -1)
        system_BGTT = jnp.eye(w_BGTK.shape[2]) + products(w_BGTK)
        keys_BGSK = k_BSGK.swapaxes(1, 2).astype(jnp.float32)
        return jax.scipy.linalg.solve_triangular(system_BGTT, products(keys_BGSK), lower=True, unit_diagonal=True)

    def after_prompts(self, k_BSGK: jax.Array, lengths_B: jax.Array) -> jax.Array:
        """Return the keys, float32, as the last token of each row sees them. Rows are padded on the right."""
        is_token_BL1 = (jnp.arange(k_BSGK.shape[1]) < lengths_B[:, None])[..., None]
        changes_BGTS = self._replace(beta_BLG=self.beta_BLG * is_token_BL1).changes(k_BSGK)
        return k_BSGK - _product("bgts,btgk->bsgk", changes_BGTS, self.w_BLGK)

    def after_token(self, keys_XSK: jax.Array) -> jax.Array:
        """Return the keys of a cache, float32, after the one new token of each row."""
        w_X1K, beta_X11 = self.w_BLGK.reshape(len(keys_XSK), 1, -1), self.beta_BLG.reshape(-1, 1, 1)
        return keys_XSK - beta_X11 * _product("xsk,xtk->xst", keys_XSK, w_X1K) * w_X1K


class Gates(InputChange):
    """Computes the reflections of the tokens."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.heads, init = config.num_kv_heads, nnx.initializers.normal(INIT_STD)
        options: Any = {"kernel_init": init, "dtype": jnp.float32, "rngs": rngs}
        self.low = nnx.Linear(config.d_model, RANK, use_bias=False, **options)
        self.high = nnx.Linear(RANK, self.heads * config.head_width, use_bias=False, **options)
        self.beta = nnx.Linear(config.d_model, self.heads, **options)

    def __call__(self, x_BLD: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        x32_BLD = x_BLD.astype(jnp.float32)
        w_BLGK = self.high(self.low(x32_BLD)).reshape(*x_BLD.shape[:2], self.heads, -1)
        w_BLGK *= jax.lax.rsqrt(jnp.sum(w_BLGK**2, axis=-1, keepdims=True) + 1e-12)
        reflections = Reflections(w_BLGK, 2 * jax.nn.sigmoid(self.beta(x32_BLD)))
        return x_BLD, context._replace(reflections=reflections)


class Change(ScoreMod):
    """Subtracts from the logits q · k what the reflections change of them."""

    needs_all_keys = Path.needs_all_keys

    def __init__(self, config: ModelConfig):
        self.scale = scale_of(config)

    def __call__(self, logits_BHLS: jax.Array, context: Context) -> jax.Array:
        if context.cache is not None and context.cache.tokens is not None:
            return logits_BHLS  # the keys of a cache are reflected
        assert context.q_BLHK is not None and context.k_BSGK is not None
        w_BLGK, (B, L, G, K) = context.reflections.w_BLGK, context.reflections.w_BLGK.shape
        q_BLGMK = (self.scale * context.q_BLHK.astype(jnp.float32)).reshape(B, L, G, -1, K)
        passed_BGMLT = jnp.tril(_product("blgmk,btgk->bgmlt", q_BLGMK, w_BLGK))
        change_BGMLS = _product("bgmlt,bgts->bgmls", passed_BGMLT, context.reflections.changes(context.k_BSGK))
        return logits_BHLS - change_BGMLS.reshape(logits_BHLS.shape)


def _product(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, x, y, precision="highest")
