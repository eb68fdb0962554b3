"""Shapes of known models, by name: --config=configs/presets.py:gpt2_small

To count the parameters without allocating them:
    python -m mini_gpt.commands.count_parameters --config=configs/presets.py:gpt3_175b --vocab_size=50257
Heads × head width: bert_base 12 × 64 (Devlin et al. 2019, without token types), gpt2_small 12 × 64 (Radford et al.
2019), gpt3_175b 96 × 128 (Brown et al. 2020), llama2_70b 64 × 128 (Touvron et al. 2023), nanochat_d20 10 × 128
(NanoChat of Transformers, in the size of nanochat's --depth=20). No preset was trained here.
"""

from ml_collections import ConfigDict

from configs import default

SHAPES = {
    "bert_base": dict(
        num_layers=12,
        d_model=768,
        num_heads=12,
        position="learned",
        causal=False,
        norm_placement="post",
        embedding_norm=True,
        norm_epsilon=1e-12,
        activation="gelu_exact",
        prediction_head=True,
    ),
    "gpt2_small": dict(num_layers=12, d_model=768, num_heads=12, position="learned"),
    "gpt3_175b": dict(num_layers=96, d_model=12_288, num_heads=96, position="learned"),
    "llama2_70b": dict(
        num_layers=80,
        d_model=8_192,
        num_heads=64,
        num_kv_heads=8,
        d_ff=28_672,
        activation="swiglu",
        norm="rmsnorm",
        use_bias=False,
        tie_embeddings=False,
        position="rope",
    ),
    "nanochat_d20": dict(
        num_layers=20,
        d_model=1280,
        num_heads=10,
        activation="relu2",
        norm="rmsnorm",
        norm_weights=False,
        norm_epsilon=1e-6,
        embedding_norm=True,
        use_bias=False,
        tie_embeddings=False,
        output_soft_cap=15.0,
        position="rope",
    ),
}
CONTEXT_LENGTHS = {"bert_base": 512, "gpt2_small": 1024, "gpt3_175b": 2048, "llama2_70b": 4096, "nanochat_d20": 2048}
# That of BERT is without [MASK], which the objective adds.
VOCAB_SIZES = {"bert_base": 30_521, "llama2_70b": 32_000, "nanochat_d20": 32_768}


def get_config(name: str = "gpt2_small") -> ConfigDict:
    if name not in SHAPES:
        raise ValueError(f"found preset {name!r}; must be one of {', '.join(SHAPES)}")
    config = default.get_config()
    config.context_length = CONTEXT_LENGTHS[name]
    config.model.update(SHAPES[name])
    config.data.tokenizer = "bpe"
    config.data.vocab_size = VOCAB_SIZES.get(name, 50_257)
    if name == "nanochat_d20":
        config.model.variants.qk_norm = "plain"
    if name == "bert_base":
        config.train.objective = "masked"
    return config
