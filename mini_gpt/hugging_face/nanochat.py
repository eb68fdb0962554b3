"""NanoChat, the port of nanochat's model of October 2025 to Transformers."""

import re
from typing import Any, ClassVar

import numpy as np

from mini_gpt.config.model import ModelConfig
from mini_gpt.hugging_face.architecture import GELUS, Arrays
from mini_gpt.hugging_face.fields import Field
from mini_gpt.hugging_face.rotary import BIAS, Llama, head_width, kv_heads
from mini_gpt.hugging_face.settings import Settings


class NanoChat(Llama):
    """NanoChat (Karpathy 2025): RoPE, relu², norms without weights, of the embeddings and of queries and keys too.

    It turns queries and keys by -θ, so the halves of each head are swapped. It normalises them after the rotation,
    which does not change their size.
    """

    model_type, title, class_name = "nanochat", "NanoChat", "NanoChatForCausalLM"
    needs: ClassVar = {"norm_weights": False, "embedding_norm": True, "variants.qk_norm": "plain", "use_bias": False}
    activation_by_default = "relu2"
    activations: ClassVar = {"relu2": "relu2", **GELUS}
    sizes_by_default = (768, 12, 6, 8192)
    table: ClassVar = (
        *(kv_heads(), head_width(written=False), BIAS),
        Field("final_logit_softcapping", "output_soft_cap", 15.0, "number", nullable=True),
    )
    layer = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.fc1 mlp.fc2"
    parameters = "attention/query attention/key attention/value attention/out mlp/up mlp/down"

    def supported(self, model: ModelConfig) -> dict[str, tuple]:
        allowed = super().supported(model)
        scalings = tuple(name for name in allowed["rope.scaling"] if not name.startswith("yarn"))
        return allowed | {"rope.scaling": scalings}  # the norm removes yarn's factor of queries and keys

    def fields(self, settings: Settings) -> dict[str, Any]:
        fields = super().fields(settings)
        if fields["model.rope.scaling"].startswith("yarn"):
            raise settings.error("rope_parameters", "must not be yarn, whose factor the norm of q and k removes")
        return fields

    def fold(self, arrays: Arrays, model: ModelConfig) -> Arrays:
        def swapped(array: np.ndarray) -> np.ndarray:
            halves = array.reshape(*array.shape[:-1], -1, 2, model.head_width // 2)
            return np.flip(halves, axis=-2).reshape(array.shape)

        turned = re.compile(r"blocks/\d+/attention/(query|key)/")
        return {name: swapped(array) if turned.match(name) else array for name, array in arrays.items()}

    unfold = fold  # swapped twice, they are as before
