"""Float64 NumPy forward passes of Hugging Face architectures, to be used as test oracles.

`logits` takes a parsed config.json and the tensors of model.safetensors. The model types gpt2, gpt_neox, mpt, bert,
roberta and t5 are here, and the others in numpy_decoders.py. Both files are written from the architectures' definitions
and share no code with the code under test. All arithmetic is in float64. (Transformers computes some angles, norms and
softmaxes in float32 for every dtype.)
Unsupported settings raise ValueError, so that the oracle is never silently wrong.

Shape suffixes: B batch, L and M query and key position, D model, H heads, G key/value heads, K head width,
F hidden width of the MLP, R half the rotated width, V vocabulary, X any width.
"""

import math

import numpy as np

_erf = np.vectorize(math.erf, otypes=[np.float64])  # NumPy has no erf
_ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: 0.5 * x * (1 + np.tanh(0.5 * x)),  # x * sigmoid(x), written with tanh: exp(-x) may overflow
    "gelu": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    "gelu_new": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}
_ACTIVATIONS["gelu_pytorch_tanh"] = _ACTIVATIONS["gelu_new"]


def logits(config: dict, tensors: dict[str, np.ndarray], tokens_BL: np.ndarray, source_BS=None) -> np.ndarray:
    """Return logits_BLV, in float64. Raise ValueError if a setting is not supported.

    source_BS: the encoder's tokens for t5; -1 is padding.
    """
    from tests.hugging_face import numpy_decoders

    forwards = {"gpt2": _gpt2, "gpt_neox": _gpt_neox, "mpt": _mpt, "bert": _bert, "roberta": _bert}
    forwards |= numpy_decoders.FORWARDS
    if source_BS is not None:
        forwards = {"t5": lambda *inputs: _t5(*inputs, np.asarray(source_BS))}
    _require(config.get("model_type") in forwards, f"model_type {config.get('model_type')!r}")
    _require(config.get("quantization_config") is None, "quantization_config")
    # NumPy would read a negative id as an index from the end.
    _require(np.min(tokens_BL) >= 0 and np.max(tokens_BL) < config["vocab_size"], "a token outside the vocabulary")
    # GPT-2 and MPT files have this prefix, except those that were saved without the LM head.
    tensors = {name.removeprefix("transformer."): np.asarray(x, np.float64) for name, x in tensors.items()}
    return forwards[config["model_type"]](config, tensors, np.asarray(tokens_BL))


def _require(supported, what):
    if not supported:
        raise ValueError(f"not supported: {what}")


def _activation(name):
    _require(name in _ACTIVATIONS, f"activation {name!r}")
    return _ACTIVATIONS[name]


def _linear(t, name, x_BLX, bias=True):
    y_BLX = x_BLX @ t[name + ".weight"].T  # nn.Linear keeps its weight as [out, in]
    return y_BLX + t[name + ".bias"] if bias else y_BLX


def _rms_norm(t, name, x_BLD, eps):
    return x_BLD / np.sqrt((x_BLD**2).mean(-1, keepdims=True) + eps) * t[name + ".weight"]


def _layer_norm(t, name, x_BLD, eps, bias=True):
    y_BLD = _rms_norm(t, name, x_BLD - x_BLD.mean(-1, keepdims=True), eps)
    return y_BLD + t[name + ".bias"] if bias else y_BLD


def _head(t, x_BLD, tied, embedding, head):
    # If the file's head differs from the embedding, Transformers does not tie them, even if the config does.
    _require(not tied or np.array_equal(t.get(head, t[embedding]), t[embedding]), "a tied head that differs")
    return x_BLD @ t[embedding if tied else head].T


def _heads(x_BLX, H):
    return x_BLX.reshape(*x_BLX.shape[:2], H, -1).swapaxes(1, 2)  # BHLK


def _attention(q_BHLK, k_BGMK, v_BGMK, scale, bias_HLM=0.0, visible=None, cap=None):
    B, H, L, _ = q_BHLK.shape
    # Query head h reads key/value head h // (H / G).
    k_BHMK, v_BHMK = (np.repeat(x_BGMK, H // x_BGMK.shape[1], axis=1) for x_BGMK in (k_BGMK, v_BGMK))
    scores_BHLM = scale * q_BHLK @ k_BHMK.swapaxes(-1, -2)
    scores_BHLM = (scores_BHLM if cap is None else cap * np.tanh(scores_BHLM / cap)) + bias_HLM
    visible = np.tril(np.ones((L, L), bool)) if visible is None else visible
    scores_BHLM = np.where(visible, scores_BHLM, -np.inf)
    weights_BHLM = np.exp(scores_BHLM - scores_BHLM.max(-1, keepdims=True))
    y_BHLK = weights_BHLM / weights_BHLM.sum(-1, keepdims=True) @ v_BHMK
    return y_BHLK.swapaxes(1, 2).reshape(B, L, -1)


def _rope_angles(config, L, K, theta, fraction):
    # Transformers 5 has rope_parameters. 4.x has rope_scaling (or null) and flat keys, here `theta` and `fraction`.
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    _require(kind in ("default", "linear"), f"rope type {kind!r}")
    rotated = int(K * rope.get("partial_rotary_factor", fraction))
    _require(rotated % 2 == 0, f"odd rotary width {rotated}")
    frequencies_R = rope.get("rope_theta", theta) ** (-np.arange(0, rotated, 2) / rotated)
    return np.arange(L)[:, None] * frequencies_R / (rope["factor"] if kind == "linear" else 1)


def _rotate(x_BHLK, angles_LR):
    cos_LR, sin_LR, R = np.cos(angles_LR), np.sin(angles_LR), angles_LR.shape[1]
    # Pairs are (i, i + R), not (2i, 2i + 1). Columns from 2R on are not rotated.
    a_BHLR, b_BHLR, rest_BHLX = x_BHLK[..., :R], x_BHLK[..., R : 2 * R], x_BHLK[..., 2 * R :]
    return np.concatenate([a_BHLR * cos_LR - b_BHLR * sin_LR, b_BHLR * cos_LR + a_BHLR * sin_LR, rest_BHLX], axis=-1)


def _alibi(H, L, bias_max):
    P = 2 ** math.ceil(math.log2(H))
    slopes = [2.0 ** (-bias_max * i / P) for i in range(1, P + 1)]
    slopes_H = np.array(slopes if P == H else (slopes[1::2] + slopes[::2])[:H])
    return slopes_H[:, None, None] * (np.arange(L)[None, :] - np.arange(L)[:, None])  # slope * (key - query)


def _gpt2(config, t, tokens_BL):
    _require(not config.get("add_cross_attention"), "add_cross_attention")
    D, H, L, eps = config["n_embd"], config["n_head"], tokens_BL.shape[1], config["layer_norm_epsilon"]
    t = {name: x.T if ".c_" in name else x for name, x in t.items()}  # GPT-2's Conv1D keeps its weight as [in, out]
    _require(config["n_positions"] >= L, "more tokens than n_positions")
    _require(len(t["h.0.mlp.c_fc.bias"]) == (config.get("n_inner") or 4 * D), "an MLP not n_inner wide")
    x_BLD = t["wte.weight"][tokens_BL] + t["wpe.weight"][:L]
    for i in range(config["n_layer"]):
        scale = (D // H) ** -0.5 if config.get("scale_attn_weights", True) else 1.0
        scale /= i + 1 if config.get("scale_attn_by_inverse_layer_idx", False) else 1
        qkv_BLX = _linear(t, f"h.{i}.attn.c_attn", _layer_norm(t, f"h.{i}.ln_1", x_BLD, eps))
        q_BHLK, k_BHLK, v_BHLK = (_heads(y_BLD, H) for y_BLD in np.split(qkv_BLX, 3, axis=-1))
        x_BLD = x_BLD + _linear(t, f"h.{i}.attn.c_proj", _attention(q_BHLK, k_BHLK, v_BHLK, scale))
        f_BLF = _linear(t, f"h.{i}.mlp.c_fc", _layer_norm(t, f"h.{i}.ln_2", x_BLD, eps))
        x_BLD = x_BLD + _linear(t, f"h.{i}.mlp.c_proj", _activation(config["activation_function"])(f_BLF))
    x_BLD = _layer_norm(t, "ln_f", x_BLD, eps)
    return _head(t, x_BLD, config.get("tie_word_embeddings", True), "wte.weight", "lm_head.weight")


def _gpt_neox(config, t, tokens_BL):
    H, eps, bias = config["num_attention_heads"], config["layer_norm_eps"], config.get("attention_bias", True)
    K, L, act = config["hidden_size"] // H, tokens_BL.shape[1], _activation(config["hidden_act"])
    angles_LR = _rope_angles(config, L, K, config.get("rotary_emb_base", 10000.0), config.get("rotary_pct", 0.25))
    x_BLD = t["gpt_neox.embed_in.weight"][tokens_BL]
    for i in range(config["num_hidden_layers"]):
        layer = f"gpt_neox.layers.{i}."
        y_BLD = _layer_norm(t, layer + "input_layernorm", x_BLD, eps)
        qkv_BHLX = _heads(_linear(t, layer + "attention.query_key_value", y_BLD, bias), H)
        q_BHLK, k_BHLK, v_BHLK = np.split(qkv_BHLX, 3, axis=-1)  # q, k and v are adjacent for each head
        a_BLD = _attention(_rotate(q_BHLK, angles_LR), _rotate(k_BHLK, angles_LR), v_BHLK, K**-0.5)
        a_BLD = x_BLD + _linear(t, layer + "attention.dense", a_BLD, bias)
        # The MLP reads the residual stream before the attention (parallel residual) or after it.
        f_BLD = x_BLD if config.get("use_parallel_residual", True) else a_BLD
        f_BLD = _layer_norm(t, layer + "post_attention_layernorm", f_BLD, eps)
        x_BLD = a_BLD + _linear(t, layer + "mlp.dense_4h_to_h", act(_linear(t, layer + "mlp.dense_h_to_4h", f_BLD)))
    x_BLD = _layer_norm(t, "gpt_neox.final_layer_norm", x_BLD, eps)
    head = "embed_out.weight" if "embed_out.weight" in t else "lm_head.weight"  # Transformers 5 renamed the module
    return _head(t, x_BLD, config.get("tie_word_embeddings", False), "gpt_neox.embed_in.weight", head)


def _mpt(config, t, tokens_BL):
    attn = config.get("attn_config") or {}
    known = {
        "expansion_ratio": 4,
        "no_bias": True,
        "logit_scale": None,
        "attn_type": "multihead_attention",
        "alibi": True,
        "softmax_scale": None,
        "qk_ln": False,
        "prefix_lm": False,
        "attn_uses_sequence_id": False,
    }  # learned_pos_emb is ignored: ALiBi replaces it
    for key, value in known.items():
        _require({**config, **attn}.get(key, value) == value, f"{key} other than {value}")
    H, L, eps = config["n_heads"], tokens_BL.shape[1], config["layer_norm_epsilon"]
    _require(config["max_seq_len"] >= L, "more tokens than max_seq_len")
    bias_HLM = _alibi(H, L, attn.get("alibi_bias_max", 8))  # Transformers always uses 8
    x_BLD = t["wte.weight"][tokens_BL]
    for i in range(config["n_layers"]):
        y_BLD = _layer_norm(t, f"blocks.{i}.norm_1", x_BLD, eps, bias=False)
        qkv_BLX = _linear(t, f"blocks.{i}.attn.Wqkv", y_BLD, bias=False)
        if attn.get("clip_qkv"):
            qkv_BLX = np.clip(qkv_BLX, -attn["clip_qkv"], attn["clip_qkv"])
        q_BHLK, k_BHLK, v_BHLK = (_heads(z_BLD, H) for z_BLD in np.split(qkv_BLX, 3, axis=-1))
        a_BLD = _attention(q_BHLK, k_BHLK, v_BHLK, (config["d_model"] // H) ** -0.5, bias_HLM)
        x_BLD = x_BLD + _linear(t, f"blocks.{i}.attn.out_proj", a_BLD, bias=False)
        y_BLD = _layer_norm(t, f"blocks.{i}.norm_2", x_BLD, eps, bias=False)
        f_BLF = _ACTIVATIONS["gelu"](_linear(t, f"blocks.{i}.ffn.up_proj", y_BLD, bias=False))
        x_BLD = x_BLD + _linear(t, f"blocks.{i}.ffn.down_proj", f_BLF, bias=False)
    x_BLD = _layer_norm(t, "norm_f", x_BLD, eps, bias=False)
    return _head(t, x_BLD, config.get("tie_word_embeddings", True), "wte.weight", "lm_head.weight")


def _bert(config, t, tokens_BL):
    prefix = config["model_type"]
    known = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
    for key, value in known.items():
        _require(config.get(key, value) == value, f"{key} other than {value}")
    H, eps, act = config["num_attention_heads"], config["layer_norm_eps"], _activation(config["hidden_act"])
    first = 0
    if prefix == "roberta":  # position p of RoBERTa is in row p + 1 + padding_idx
        first = config["pad_token_id"] + 1
        _require(not np.any(tokens_BL == config["pad_token_id"]), "padding")
    L = tokens_BL.shape[1]
    _require(first + L <= config["max_position_embeddings"], "more tokens than max_position_embeddings")
    embeddings = f"{prefix}.embeddings."
    x_BLD = t[embeddings + "word_embeddings.weight"][tokens_BL] + t[embeddings + "token_type_embeddings.weight"][0]
    x_BLD = x_BLD + t[embeddings + "position_embeddings.weight"][first : first + L]
    x_BLD = _layer_norm(t, embeddings + "LayerNorm", x_BLD, eps)
    for i in range(config["num_hidden_layers"]):
        layer = f"{prefix}.encoder.layer.{i}."
        q_BHLK, k_BHLK, v_BHLK = (
            _heads(_linear(t, f"{layer}attention.self.{name}", x_BLD), H) for name in ("query", "key", "value")
        )
        a_BLD = _attention(q_BHLK, k_BHLK, v_BHLK, q_BHLK.shape[-1] ** -0.5, visible=True)
        a_BLD = x_BLD + _linear(t, layer + "attention.output.dense", a_BLD)
        x_BLD = _layer_norm(t, layer + "attention.output.LayerNorm", a_BLD, eps)
        f_BLD = _linear(t, layer + "output.dense", act(_linear(t, layer + "intermediate.dense", x_BLD)))
        x_BLD = _layer_norm(t, layer + "output.LayerNorm", x_BLD + f_BLD, eps)
    if prefix == "roberta":
        dense, norm, head, act = "lm_head.dense", "lm_head.layer_norm", "lm_head.", _ACTIVATIONS["gelu"]
    else:
        dense, norm = "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"
        head = "cls.predictions."
    x_BLD = _layer_norm(t, norm, act(_linear(t, dense, x_BLD)), eps)
    bias_V = t.get(head + "decoder.bias", t[head + "bias"])
    _require(np.array_equal(bias_V, t[head + "bias"]), "two biases of the logits")
    tied = config.get("tie_word_embeddings", True)
    return _head(t, x_BLD, tied, embeddings + "word_embeddings.weight", head + "decoder.weight") + bias_V


def _t5_bucket(distance, bidirectional, buckets, longest):
    """Return the bucket of query position - key position; written for one number, as in the paper's appendix."""
    start = 0
    if bidirectional:
        buckets //= 2
        start = buckets if distance < 0 else 0
        distance = abs(distance)
    distance, exact = max(distance, 0), buckets // 2
    if distance < exact:
        return start + distance
    wide = math.log(distance / exact) / math.log(longest / exact) * (buckets - exact)
    return start + min(exact + int(wide + 1e-9), buckets - 1)


def _t5(config, t, tokens_BL, source_BS):
    H, eps = config["num_heads"], config["layer_norm_epsilon"]
    gated, _, name = config["feed_forward_proj"].rpartition("-")
    _require(gated in ("", "gated"), f"feed_forward_proj {config['feed_forward_proj']!r}")
    act = _activation("gelu_new" if gated and name == "gelu" else name)

    def attend(name, x_BLD, from_BMD, bias_HLM, visible):
        q_BHLK, k_BHMK, v_BHMK = (
            _heads(_linear(t, f"{name}.{part}", each, False), H)
            for part, each in (("q", x_BLD), ("k", from_BMD), ("v", from_BMD))
        )
        return _linear(t, f"{name}.o", _attention(q_BHLK, k_BHMK, v_BHMK, 1.0, bias_HLM, visible), False)

    def stack(name, tokens_BL, layers, visible, memory_BSD=None, memory_visible=None):
        L, bidirectional = tokens_BL.shape[1], memory_BSD is None
        sizes = config["relative_attention_num_buckets"], config["relative_attention_max_distance"]
        table = t[f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        bias_LMH = [[table[_t5_bucket(i - j, bidirectional, *sizes)] for j in range(L)] for i in range(L)]
        bias_HLM = np.moveaxis(np.array(bias_LMH), -1, 0)
        x_BLD = t["shared.weight"][np.maximum(tokens_BL, 0)]
        for i in range(layers):
            layer = f"{name}.block.{i}.layer."
            y_BLD = _rms_norm(t, layer + "0.layer_norm", x_BLD, eps)
            x_BLD = x_BLD + attend(layer + "0.SelfAttention", y_BLD, y_BLD, bias_HLM, visible)
            if memory_BSD is not None:
                y_BLD = _rms_norm(t, layer + "1.layer_norm", x_BLD, eps)
                x_BLD = x_BLD + attend(layer + "1.EncDecAttention", y_BLD, memory_BSD, 0.0, memory_visible)
            last = layer + ("1" if memory_BSD is None else "2")
            y_BLD = _rms_norm(t, last + ".layer_norm", x_BLD, eps)
            up = last + ".DenseReluDense.wi"
            f_BLF = act(_linear(t, up + "_0" if gated else up, y_BLD, False))
            f_BLF = f_BLF * _linear(t, up + "_1", y_BLD, False) if gated else f_BLF
            x_BLD = x_BLD + _linear(t, last + ".DenseReluDense.wo", f_BLF, False)
        return _rms_norm(t, name + ".final_layer_norm", x_BLD, eps)

    seen_B11S = (source_BS >= 0)[:, None, None, :]
    memory_BSD = stack("encoder", source_BS, config["num_layers"], seen_B11S)
    x_BLD = stack("decoder", tokens_BL, config["num_decoder_layers"], None, memory_BSD, seen_B11S)
    tied = config.get("tie_word_embeddings", True)
    if config.get("scale_decoder_outputs", tied):  # the field is of Transformers 5
        x_BLD = x_BLD / math.sqrt(config["d_model"])
    return _head(t, x_BLD, tied, "shared.weight", "lm_head.weight")
