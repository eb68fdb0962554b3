"""The floating-point operations of a training step."""

import statistics

from mini_gpt.config.schema import Config
from mini_gpt.model.parameters import Parameters, by_name

LOOKED_UP = ("positions/learned/embedding", "encoder/positions/learned/embedding", "source_embedding")


def flops_per_token(config: Config, parameters: Parameters) -> float:
    """Return 6N + 12·layers·heads·head width·keys: forward and backward without recomputation (PaLM, appendix B).

    N excludes lookup tables: learned positions, and an embedding that is not tied to the logits.

    keys: the largest number that a query sees, by the context or `model.attention_window`, averaged over the layers. As
      in the paper, all queries use this number. With an encoder, a token is one of the target: each has source_length /
      context_length tokens of the source, and cross-attention has source_length keys.
    """
    model, length, source = config.model, config.context_length, config.source_length

    def attention(model, length: int) -> float:
        """Return the operations per token of self-attention in all layers of a stack."""

        def reach(window: int | None) -> int:
            if window is None:
                return length
            return min(length, window if model.causal else 2 * window - 1)

        keys = statistics.mean(reach(kind.window) for kind in model.layer_kinds)
        return 12 * model.num_layers * model.attention_width * keys

    looked_up = LOOKED_UP if model.tie_embeddings else (*LOOKED_UP, "embedding")
    sizes = {name: x.size for name, x in by_name(parameters).items() if name not in looked_up}
    flops = 6 * sum(sizes.values()) + attention(model, length)
    if not model.has_encoder:
        return flops
    of_encoder = sum(size for name, size in sizes.items() if name.startswith("encoder/"))
    of_source = sum(  # keys and values of cross-attention are those of the source
        size for name, size in sizes.items() if "cross_attention/key" in name or "cross_attention/value" in name
    )
    cross = 12 * model.num_layers * model.attention_width * source
    moved = 6 * (of_encoder + of_source)
    return flops - moved + cross + source / length * (moved + attention(model.encoder, source))
