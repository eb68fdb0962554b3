"""Shapes of known models, by name: --config=configs/presets.py:gpt2_small

To count the parameters without allocating them:
    python -m mini_gpt.commands.count_parameters --config=configs/presets.py:gpt3_175b --vocab_size=50257
Heads × head width: gpt2_small 12 × 64 (Radford et al. 2019); gpt3_xl 16 × 128, gpt3_175b 96 × 128 (Brown et al. 2020);
llama2_7b 32 × 128, llama2_70b 64 × 128 (Touvron et al. 2023); transformer_base 8 × 64 (Vaswani et al. 2017, decoder).
Table 2.1 of Brown et al. gives gpt3_xl 24 heads of width 128, which contradicts its model width of 2,048. No preset was
trained in this project.
"""

from ml_collections import ConfigDict

from configs import default

LLAMA2 = dict(activation="swiglu", norm="rmsnorm", use_bias=False, tie_embeddings=False, position="rope")
SHAPES = {
    "gpt2_small": dict(num_layers=12, d_model=768, num_heads=12, position="learned"),
    "gpt3_xl": dict(num_layers=24, d_model=2_048, num_heads=16, position="learned"),
    "gpt3_175b": dict(num_layers=96, d_model=12_288, num_heads=96, position="learned"),
    "llama2_7b": LLAMA2 | dict(num_layers=32, d_model=4_096, num_heads=32, d_ff=11_008),
    "llama2_70b": LLAMA2 | dict(num_layers=80, d_model=8_192, num_heads=64, num_kv_heads=8, d_ff=28_672),
    "transformer_base": dict(
        num_layers=6,
        d_model=512,
        num_heads=8,
        activation="relu",
        norm_placement="post",
        scale_embeddings=True,
        position="sinusoidal",
    ),
}
CONTEXT_LENGTHS = {
    "gpt2_small": 1024,
    "gpt3_xl": 2048,
    "gpt3_175b": 2048,
    "llama2_7b": 4096,
    "llama2_70b": 4096,
    "transformer_base": 512,
}


def get_config(name: str = "gpt2_small") -> ConfigDict:
    if name not in SHAPES:
        raise ValueError(f"found preset {name!r}; must be one of {', '.join(SHAPES)}")
    config = default.get_config()
    config.context_length = CONTEXT_LENGTHS[name]
    config.model.update(SHAPES[name])
    config.data.tokenizer = "bpe"
    config.data.vocab_size = 32_000 if name.startswith("llama2") else 50_257
    return config
