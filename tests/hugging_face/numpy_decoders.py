"""Float64 NumPy forward passes of further decoders of Transformers, written from their definitions.

Each takes a parsed config.json, the tensors, and tokens_BL, and returns logits_BLV. See numpy_forwards.py.
"""

import math

import numpy as np

from tests.hugging_face import numpy_forwards as base

GEMMAS = ("gemma", "gemma2", "gemma3_text")


def _window(L, size):
    """Return visible_LM of a causal mask in which a query sees `size` keys, its own included; None: all before it."""
    places = np.arange(L)
    distance_LM = places[:, None] - places[None, :]
    return (distance_LM >= 0) & (distance_LM < (L if size is None else size))


def _angles(config, L, K, fraction):
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type")
    if kind == "dynamic" and config["max_position_embeddings"] < L:  # another base for longer texts
        stretch = rope["factor"] * L / config["max_position_embeddings"] - (rope["factor"] - 1)
        theta = config["rope_theta"] * stretch ** (K / (K - 2))
        return np.arange(L)[:, None] * theta ** (-np.arange(0, K, 2) / K)
    if kind == "yarn":
        return _yarn_angles(config, rope, L, K)
    if kind != "llama3":
        rope = {"rope_type": "linear", **rope} if kind == "linear" else {}
        config = config | {"rope_scaling": rope}
        return base._rope_angles(config, L, K, config.get("rope_theta", 10000.0), fraction)
    frequencies_R = config["rope_theta"] ** (-np.arange(0, K, 2) / K)
    scaled = []
    for frequency in frequencies_R:  # from the text of Llama 3.1's code: by wavelength, in three ranges
        wavelength, original = 2 * math.pi / frequency, rope["original_max_position_embeddings"]
        if wavelength < original / rope["high_freq_factor"]:
            scaled.append(frequency)
        elif wavelength > original / rope["low_freq_factor"]:
            scaled.append(frequency / rope["factor"])
        else:
            smooth = (original / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            scaled.append((1 - smooth) * frequency / rope["factor"] + smooth * frequency)
    return np.arange(L)[:, None] * np.array(scaled)


def _yarn_angles(config, rope, L, K):
    """The pairs between the bounds are mixed by their index."""
    theta, original = config["rope_theta"], rope["original_max_position_embeddings"]
    index = lambda turns: K / 2 * math.log(original / (turns * 2 * math.pi), theta)
    low, high = index(rope["beta_fast"]), index(rope["beta_slow"])
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(0, low), min(K - 1, high)
    frequencies = []
    for pair in range(K // 2):
        share = min(1.0, max(0.0, (pair - low) / (high - low)))  # of interpolation
        frequency = theta ** (-2 * pair / K)
        frequencies.append(share * frequency / rope["factor"] + (1 - share) * frequency)
    return np.arange(L)[:, None] * np.array(frequencies)


def _plain_norm(x_BLD, eps=1e-5):
    centred_BLD = x_BLD - x_BLD.mean(-1, keepdims=True)
    return centred_BLD / np.sqrt((centred_BLD**2).mean(-1, keepdims=True) + eps)


def _llama_like(config, t, tokens_BL):
    kind, H, L = config["model_type"], config["num_attention_heads"], tokens_BL.shape[1]
    D, G = config["hidden_size"], config.get("num_key_value_heads") or H
    K, act = config.get("head_dim") or D // H, base._activation(config.get("hidden_activation") or config["hidden_act"])
    biased, of_mlp = config.get("attention_bias", False), config.get("mlp_bias", False)
    of_qkv = kind == "qwen2" or biased
    norm = lambda name, x: base._rms_norm(t, name, x, config["rms_norm_eps"])
    if kind in GEMMAS:
        norm = lambda name, x: base._rms_norm(
            {name + ".weight": 1 + t[name + ".weight"]}, name, x, config["rms_norm_eps"]
        )
    if kind == "olmo":
        norm = lambda name, x: _plain_norm(x)
    windows, rotated = [None] * config["num_hidden_layers"], [1] * config["num_hidden_layers"]
    if kind == "mistral":
        windows = [config["sliding_window"]] * len(windows)
    if kind in ("qwen2", "qwen3", "gemma2", "gemma3_text"):
        sliding = [each == "sliding_attention" for each in config["layer_types"]]
        windows = [config["sliding_window"] if each else None for each in sliding]
    if kind == "smollm3":
        rotated = config["no_rope_layers"]
    all_angles = [_angles(config, L, K, 1.0) for _ in windows]
    if kind == "gemma3_text":
        local = config | {"rope_theta": config["rope_local_base_freq"], "rope_scaling": None}
        all_angles = [_angles(config if window is None else local, L, K, 1.0) for window in windows]
    scale = config.get("query_pre_attn_scalar", K) ** -0.5
    if (config.get("rope_scaling") or {}).get("rope_type") == "yarn":
        rope = config["rope_scaling"]
        scale *= (rope.get("attention_factor") or 0.1 * math.log(rope["factor"]) + 1) ** 2
    after = kind in ("gemma2", "gemma3_text", "olmo2")  # norms of the outputs
    of_mlp_input = "pre_feedforward_layernorm" if after else "post_attention_layernorm"
    of_output = lambda name, x: norm(name, x) if after else x
    of_input = lambda name, x: x if kind == "olmo2" else norm(name, x)
    x_BLD = t["model.embed_tokens.weight"][tokens_BL] * (math.sqrt(D) if kind in GEMMAS else 1)
    for i in range(config["num_hidden_layers"]):
        layer, turned = f"model.layers.{i}.", all_angles[i] * rotated[i]
        y_BLD = of_input(layer + "input_layernorm", x_BLD)
        q_BLX, k_BLX, v_BLX = (base._linear(t, f"{layer}self_attn.{each}_proj", y_BLD, of_qkv) for each in "qkv")
        if config.get("clip_qkv"):
            q_BLX, k_BLX, v_BLX = (np.clip(x, -config["clip_qkv"], config["clip_qkv"]) for x in (q_BLX, k_BLX, v_BLX))
        if kind == "olmo2":
            q_BLX, k_BLX = norm(layer + "self_attn.q_norm", q_BLX), norm(layer + "self_attn.k_norm", k_BLX)
        q_BHLK, k_BGLK, v_BGLK = base._heads(q_BLX, H), base._heads(k_BLX, G), base._heads(v_BLX, G)
        if kind in ("qwen3", "gemma3_text"):
            q_BHLK, k_BGLK = norm(layer + "self_attn.q_norm", q_BHLK), norm(layer + "self_attn.k_norm", k_BGLK)
        q_BHLK, k_BGLK = base._rotate(q_BHLK, turned), base._rotate(k_BGLK, turned)
        cap, visible_LM = config.get("attn_logit_softcapping"), _window(L, windows[i])
        a_BLX = base._attention(q_BHLK, k_BGLK, v_BGLK, scale, visible=visible_LM, cap=cap)
        a_BLD = base._linear(t, layer + "self_attn.o_proj", a_BLX, biased)
        x_BLD = x_BLD + of_output(layer + "post_attention_layernorm", a_BLD)
        y_BLD = of_input(layer + of_mlp_input, x_BLD)
        f_BLF = act(base._linear(t, layer + "mlp.gate_proj", y_BLD, of_mlp))
        f_BLF = f_BLF * base._linear(t, layer + "mlp.up_proj", y_BLD, of_mlp)
        f_BLD = base._linear(t, layer + "mlp.down_proj", f_BLF, of_mlp)
        x_BLD = x_BLD + of_output(layer + "post_feedforward_layernorm", f_BLD)
    tied, cap = config["tie_word_embeddings"], config.get("final_logit_softcapping")
    logits_BLV = base._head(t, norm("model.norm", x_BLD), tied, "model.embed_tokens.weight", "lm_head.weight")
    return logits_BLV if cap is None else cap * np.tanh(logits_BLV / cap)


def _phi(config, t, tokens_BL):
    H, L, eps = config["num_attention_heads"], tokens_BL.shape[1], config["layer_norm_eps"]
    K, G = config["hidden_size"] // H, config["num_key_value_heads"]
    act, angles_LR = base._activation(config["hidden_act"]), _angles(config, L, K, config["partial_rotary_factor"])
    x_BLD = t["model.embed_tokens.weight"][tokens_BL]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        y_BLD = base._layer_norm(t, layer + "input_layernorm", x_BLD, eps)
        q_BHLK = base._heads(base._linear(t, layer + "self_attn.q_proj", y_BLD), H)
        k_BGLK = base._heads(base._linear(t, layer + "self_attn.k_proj", y_BLD), G)
        if config["qk_layernorm"]:
            q_BHLK = base._layer_norm(t, layer + "self_attn.q_layernorm", q_BHLK, eps)
            k_BGLK = base._layer_norm(t, layer + "self_attn.k_layernorm", k_BGLK, eps)
        q_BHLK, k_BGLK = base._rotate(q_BHLK, angles_LR), base._rotate(k_BGLK, angles_LR)
        v_BGLK = base._heads(base._linear(t, layer + "self_attn.v_proj", y_BLD), G)
        a_BLD = base._linear(t, layer + "self_attn.dense", base._attention(q_BHLK, k_BGLK, v_BGLK, K**-0.5))
        f_BLD = base._linear(t, layer + "mlp.fc2", act(base._linear(t, layer + "mlp.fc1", y_BLD)))
        x_BLD = x_BLD + a_BLD + f_BLD
    x_BLD = base._layer_norm(t, "model.final_layernorm", x_BLD, eps)
    tied = config["tie_word_embeddings"]
    logits_BLV = base._head(t, x_BLD, tied, "model.embed_tokens.weight", "lm_head.weight")
    return logits_BLV + t["lm_head.bias"]


def _sequential(config, t, tokens_BL, about):
    """Blocks of LayerNorm, attention, LayerNorm and two matrices, with biases. about: names and functions."""
    x_BLD, L = about["embed"], tokens_BL.shape[1]
    for i in range(about["layers"]):
        layer = f"{about['prefix']}.{i}."
        norm = lambda name, x, layer=layer: base._layer_norm(t, layer + about[name], x, about["eps"])
        y_BLD = norm("norm_1", x_BLD)
        q_BHLK, k_BGLK, v_BGLK = about["project"](layer, y_BLD)
        a_BLD = base._attention(
            q_BHLK, k_BGLK, v_BGLK, about["scale"], about.get("bias_HLM", 0.0), visible=_window(L, about["windows"][i])
        )
        x_BLD = x_BLD + base._linear(t, layer + about["out"], a_BLD)
        f_BLF = about["act"](base._linear(t, layer + about["up"], norm("norm_2", x_BLD)))
        x_BLD = x_BLD + base._linear(t, layer + about["down"], f_BLF)
    return base._layer_norm(t, about["norm"], x_BLD, about["eps"])


def _separate(t, names, heads, bias=True, rotate=lambda x: x):
    """Return a function that projects to queries, keys and values by three matrices."""

    def project(layer, y_BLD):
        found = [
            base._heads(base._linear(t, layer + name, y_BLD, bias), count)
            for name, count in zip(names, heads, strict=True)
        ]
        return rotate(found[0]), rotate(found[1]), found[2]

    return project


ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def _starcoder2(config, t, tokens_BL):
    H, G, L = config["num_attention_heads"], config["num_key_value_heads"], tokens_BL.shape[1]
    K, angles_LR = config["hidden_size"] // H, _angles(config, L, config["hidden_size"] // H, 1.0)
    about = {
        "embed": t["model.embed_tokens.weight"][tokens_BL],
        "layers": config["num_hidden_layers"],
        "prefix": "model.layers",
        "norm_1": "input_layernorm",
        "norm_2": "post_attention_layernorm",
        "norm": "model.norm",
        "eps": config["norm_epsilon"],
        "project": _separate(t, ATTENTION, (H, G, G), rotate=lambda x: base._rotate(x, angles_LR)),
        "scale": K**-0.5,
        "windows": [config["sliding_window"]] * config["num_hidden_layers"],
        "out": "self_attn.o_proj",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
        "act": base._activation(config["hidden_act"]),
    }
    x_BLD, tied = _sequential(config, t, tokens_BL, about), config["tie_word_embeddings"]
    return base._head(t, x_BLD, tied, "model.embed_tokens.weight", "lm_head.weight")


def _opt(config, t, tokens_BL):
    H, L, decoder = config["num_attention_heads"], tokens_BL.shape[1], "model.decoder."
    about = {
        "embed": t[decoder + "embed_tokens.weight"][tokens_BL] + t[decoder + "embed_positions.weight"][2 : 2 + L],
        "layers": config["num_hidden_layers"],
        "prefix": decoder + "layers",
        "norm_1": "self_attn_layer_norm",
        "norm_2": "final_layer_norm",
        "norm": decoder + "final_layer_norm",
        "eps": 1e-5,
        "project": _separate(t, ATTENTION, (H, H, H)),
        "scale": (config["hidden_size"] // H) ** -0.5,
        "windows": [None] * config["num_hidden_layers"],
        "out": "self_attn.out_proj",
        "up": "fc1",
        "down": "fc2",
        "act": base._activation(config["activation_function"]),
    }
    x_BLD, tied = _sequential(config, t, tokens_BL, about), config["tie_word_embeddings"]
    return base._head(t, x_BLD, tied, decoder + "embed_tokens.weight", "lm_head.weight")


def _gpt_neo(config, t, tokens_BL):
    H, L = config["num_heads"], tokens_BL.shape[1]
    kinds = [kind for pattern, times in config["attention_types"] for kind in pattern * times]
    about = {
        "embed": t["wte.weight"][tokens_BL] + t["wpe.weight"][:L],
        "layers": config["num_layers"],
        "prefix": "h",
        "norm_1": "ln_1",
        "norm_2": "ln_2",
        "norm": "ln_f",
        "eps": config["layer_norm_epsilon"],
        "project": _separate(t, [f"attn.attention.{x}_proj" for x in "qkv"], (H, H, H), bias=False),
        "scale": 1.0,
        "windows": [config["window_size"] if kind == "local" else None for kind in kinds],
        "out": "attn.attention.out_proj",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
        "act": base._activation(config["activation_function"]),
    }
    x_BLD, tied = _sequential(config, t, tokens_BL, about), config["tie_word_embeddings"]
    return base._head(t, x_BLD, tied, "wte.weight", "lm_head.weight")


def _bloom(config, t, tokens_BL):
    H, L, eps = config["n_head"], tokens_BL.shape[1], config["layer_norm_epsilon"]

    def project(layer, y_BLD):
        qkv_BHLX = base._heads(base._linear(t, layer + "self_attention.query_key_value", y_BLD), H)
        return np.split(qkv_BHLX, 3, axis=-1)

    about = {
        "embed": base._layer_norm(t, "word_embeddings_layernorm", t["word_embeddings.weight"][tokens_BL], eps),
        "layers": config["n_layer"],
        "prefix": "h",
        "norm_1": "input_layernorm",
        "norm_2": "post_attention_layernorm",
        "norm": "ln_f",
        "eps": eps,
        "project": project,
        "scale": (config["hidden_size"] // H) ** -0.5,
        "bias_HLM": base._alibi(H, L, 8),
        "windows": [None] * config["n_layer"],
        "out": "self_attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
        "act": base._activation("gelu_new"),
    }
    x_BLD, tied = _sequential(config, t, tokens_BL, about), config["tie_word_embeddings"]
    return base._head(t, x_BLD, tied, "word_embeddings.weight", "lm_head.weight")


LLAMAS = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo", "olmo2", *GEMMAS)
FORWARDS = dict.fromkeys(LLAMAS, _llama_like)
FORWARDS |= {"phi": _phi, "starcoder2": _starcoder2, "opt": _opt, "gpt_neo": _gpt_neo, "bloom": _bloom}
