"""Multi-head attention in five steps: project, split, attend, concatenate, project."""

import jax
from flax import nnx

from mini_gpt.config.attention import LayerKind
from mini_gpt.config.model import ModelConfig
from mini_gpt.model import positions
from mini_gpt.model.attention import variants
from mini_gpt.model.attention.context import Context, Mask
from mini_gpt.model.attention.core import Core
from mini_gpt.model.layers import Linear, make_norm, observe, residual_std


class MultiHeadAttention(nnx.Module):
    """Attention of H query heads over G key-value heads (Vaswani et al. 2017, 3.2.2; Ainslie et al. 2023).

    Self-attention, or cross-attention if the context has hidden states of an encoder. The positional encoding and the
    variants of attention are modules, each in the list of its `stage` (`parts.Shared` stands in for a shared one):

    on_input: modules that change the input, or add to the context.
    on_heads: modules that change queries and keys.
    core.score_mods: modules that change the logits, also called scores, before the mask.
    """

    def __init__(self, config: ModelConfig, kind: LayerKind, *, cross: bool = False, rngs: nnx.Rngs):
        layer = config.of_layer(kind)  # with the heads that the layer keeps
        self.num_heads, self.num_kv_heads = layer.num_heads, layer.num_kv_heads
        self.mask = Mask(causal=False) if cross else Mask(layer.causal, kind.window)
        self.add_projections(layer, rngs)
        std, biased = residual_std(layer), layer.attention_out_bias
        self.out = Linear(layer, layer.attention_width, layer.d_model, std=std, use_bias=biased, rngs=rngs)
        before_position, after_position = variants.modules(layer, rngs=rngs)
        self.gate = variants.gate(layer, rngs=rngs)
        self.output_norm = make_norm(layer, rngs=rngs) if layer.output_norm else None
        from_encoding = positions.modules(config, kind, cross=cross, rngs=rngs)
        modules = [*before_position, *from_encoding, *after_position]
        self.on_input = nnx.List([module for module in modules if module.stage == "input"])
        self.on_heads = nnx.List([module for module in modules if module.stage == "heads"])
        self.core = Core(layer, [module for module in modules if module.stage == "scores"])

    def __call__(self, x_BLD: jax.Array, context: Context, dropout_key: jax.Array | None = None) -> jax.Array:
        """Return out_BLD. dropout_key: for dropout of the attention weights; None: no dropout."""
        observe(self, "attention_in", x_BLD)
        context = context._replace(mask=self.mask)
        for module in self.on_input:
            x_BLD, context = module(x_BLD, context)
        kv_input_BSD = x_BLD if context.encoder_BSD is None else context.encoder_BSD
        # 1. Project. 2. Split into heads.
        q_BLHK, k_BSGK, v_BSGK = self.project(x_BLD, kv_input_BSD)
        for module in self.on_heads:
            q_BLHK, k_BSGK = module(q_BLHK, k_BSGK, context)
        for name, array in (("queries", q_BLHK), ("keys", k_BSGK), ("values", v_BSGK)):
            observe(self, name, array)
        # 3. Attend.
        if context.cache is None:
            attend = self.core.choose(q_BLHK, k_BSGK, v_BSGK, context, dropout_key)
            out_BLHK = attend(q_BLHK, k_BSGK, v_BSGK, context)
        else:  # while text is generated
            out_BLHK = context.cache.attend(self.core, q_BLHK, k_BSGK, v_BSGK, context)
        out_BLHK = self.outputs(out_BLHK)
        if self.gate is not None:
            out_BLHK = self.gate(out_BLHK, x_BLD)
        observe(self, "heads", out_BLHK)
        # 4. Concatenate the heads. 5. Project.
        out_BLD = self.out(out_BLHK.reshape(*x_BLD.shape[:-1], -1))
        out_BLD = out_BLD if self.output_norm is None else self.output_norm(out_BLD)
        observe(self, "attention", out_BLD)
        return out_BLD

    def add_projections(self, layer: ModelConfig, rngs: nnx.Rngs) -> None:
        """Make the layers of `project`."""
        kv_width = layer.num_kv_heads * layer.head_width
        self.query = variants.projection(layer, layer.d_model, layer.attention_width, rngs=rngs)
        self.key = variants.projection(layer, layer.d_model, kv_width, rngs=rngs)
        self.value = variants.projection(layer, layer.d_model, kv_width, rngs=rngs)

    def project(self, x_BLD: jax.Array, kv_input_BSD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return q_BLHK, k_BSGK and v_BSGK."""
        k_BSGK, v_BSGK = (split_heads(made(kv_input_BSD), self.num_kv_heads) for made in (self.key, self.value))
        return split_heads(self.query(x_BLD), self.num_heads), k_BSGK, v_BSGK

    def outputs(self, out_BLHK: jax.Array) -> jax.Array:
        """Return the outputs of the heads from the weighted sums of the values."""
        return out_BLHK


def split_heads(x_BLD: jax.Array, heads: int) -> jax.Array:
    """Return x_BLHK; each head gets K consecutive entries of axis D."""
    return x_BLD.reshape(*x_BLD.shape[:-1], heads, -1)
