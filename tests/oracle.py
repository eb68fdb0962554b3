"""The forward pass in float64 NumPy, written from the papers and independent of the package."""

import math

import numpy as np

from tests.oracle_positions import (
    accumulated,
    alibi_slopes,
    cope,
    fire,
    path,
    pope,
    relative_logits,
    rope,
    sigmoid,
    sinusoid,
    softplus,
    t5_bucket,
)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def activate(name, x):
    if name == "relu":
        return np.maximum(x, 0)
    if name == "relu2":
        return np.where(x > 0, x * x, 0)
    if name == "swiglu":
        return x / (1 + np.exp(-x))
    if name == "gelu_exact":
        return x * np.vectorize(lambda value: 0.5 * (1 + math.erf(value / math.sqrt(2))))(x)
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def norm(config, p, x):
    centred = x if config.norm == "rmsnorm" else x - x.mean(-1, keepdims=True)
    size = np.sqrt((centred**2).mean(-1, keepdims=True) + config.norm_epsilon)
    return centred / size * p.get("scale", 1.0) + p.get("bias", 0.0)


def linear(p, x):
    return x @ p["kernel"] + p.get("bias", 0.0)


def recurrence(p, x, segments):
    """Return the states of a GRU after a linear layer (Cho et al. 2014, 2.3; the reset gate after the product)."""
    states = []
    for i, token in enumerate(x):
        h = np.zeros(len(p["cell"]["dense_h"]["kernel"])) if i == 0 or segments[i] != segments[i - 1] else states[-1]
        of_token, of_state = linear(p["cell"]["dense_i"], token), linear(p["cell"]["dense_h"], h)
        r, z, n = np.split(of_token, 3)
        hr, hz, hn = np.split(of_state, 3)
        reset, keep = sigmoid(r + hr), sigmoid(z + hz)
        states.append(keep * h + (1 - keep) * np.tanh(n + reset * hn))
    return linear(p["out"], np.stack(states))


def selected(logits, visible, segments):
    """Return what selective attention subtracts from the logits, by the logits of the first head."""
    length = len(logits)
    result = np.zeros((length, length))
    for i in range(length):
        for j in range(length):
            is_first = j == 0 or segments[j] != segments[j - 1]
            earlier = [t for t in range(j + 1, i) if visible[t, j]]
            result[i, j] = 0 if is_first else sum(max(logits[t, j], 0) for t in earlier)
    return result


def sticks(logits, visible):
    """Return the weights of one query, the last visible key: sticks are broken from the newest other key on."""
    weights, rest = np.zeros(len(logits)), 1.0
    own = max(t for t in range(len(logits)) if visible[t])
    for j in range(own - 1, -1, -1):
        if visible[j]:
            weights[j] = rest * sigmoid(logits[j])
            rest -= weights[j]
    weights[own] = rest
    return weights


def convolved(taps, x, segments):
    """Return x plus a causal convolution within each segment."""
    out = x.copy()
    for i in range(len(x)):
        for age in range(len(taps)):
            if i >= age and segments[i - age] == segments[i]:
                out[i] += taps[age] * x[i - age]
    return out


def bias(config, position, own, tables, i, j):
    """Return the biases of all heads for a query at position i and a key at position j. own: the layer's parameters."""
    heads = range(config.num_heads)
    if position == "alibi":
        return [-(slope ** (config.alibi_exponent / 8)) * abs(i - j) for slope in alibi_slopes(config.num_heads)]
    if position == "hard_alibi":
        return [-np.inf if h < config.hard_alibi.heads and abs(i - j) > h else 0.0 for h in heads]
    if position == "t5":
        return tables["t5"]["bias_table"][
            t5_bucket(j - i, config.causal, config.t5.num_buckets, config.t5.max_distance)
        ]
    if position == "kerple":
        return [-softplus(own["p"][h]) * math.log(1 + softplus(own["a"][h]) * abs(i - j)) for h in heads]
    if position == "fire":
        return fire(own, config.fire.threshold, i, j)
    return [0.0 for _ in heads]


OF_LAYER = {"kerple": "p", "fire": "up", "cope": "table"}  # {biases with parameters in each layer: one of them}


def module_with(p, name):
    """Return the parameters of the first module of attention that has a parameter of this name."""
    lists = [p.get("on_input", {}), p.get("on_heads", {}), p.get("core", {}).get("score_mods", {})]
    return next(module for modules in lists for module in modules.values() if name in module)


def at_layer(value, layer):
    """Return the value of a field that may be a pattern over the layers."""
    return value[layer % len(value)] if isinstance(value, tuple) else value


def latent(p, x, heads, rotated):
    """Return the keys [L, H * (R + K)] and the values [L, H * K] of latent attention."""
    down = linear(p["down"], x)
    c = down[:, rotated:]
    c = c / np.sqrt((c**2).mean(1, keepdims=True) + 1e-6) * p["norm"]["scale"]
    keys = np.split(linear(p["key"], c), heads, axis=1)
    return np.concatenate([np.concatenate([down[:, :rotated], key], axis=1) for key in keys], axis=1), linear(
        p["value"], c
    )


def differences(p, of_heads, layer):
    """Return the outputs of differential attention [L, H * K], from those of each head's softmax [L, 2K]."""
    start = 0.8 - 0.6 * math.exp(-0.3 * layer)
    share = math.exp(sum(p["q1"] * p["k1"])) - math.exp(sum(p["q2"] * p["k2"])) + start
    found = []
    for first, second in zip(of_heads[::2], of_heads[1::2], strict=True):
        rows = first - share * second
        normed = rows / np.sqrt((rows**2).mean(1, keepdims=True) + 1e-5) * p["norm"]["scale"]
        found.append((1 - start) * normed)
    return np.concatenate(found, axis=1)


def attention(config, p, x, layer, tables, positions, visible, segments, memory=None):
    """memory: the keys' and values' sequence in cross-attention, at positions 0, 1, … tables: of the encodings."""
    position = at_layer(config.position, layer) if memory is None or config.cross_positions else "none"
    of_keys = positions if memory is None else range(len(memory))
    length = len(x)
    if config.variants.canon:
        x = convolved(module_with(p, "taps")["taps"], x, segments)
    K, H, G = config.head_width, config.num_heads, config.num_kv_heads
    keys_from = x if memory is None else memory
    q = linear(p["query"], x)
    if config.variants.latent is None:
        k, v = linear(p["key"], keys_from), linear(p["value"], keys_from)
    else:
        k, v = latent(p["latent"], x, H, K // 2)
    if config.variants.clip_qkv:
        q, k, v = (
            np.minimum(np.maximum(rows, -config.variants.clip_qkv), config.variants.clip_qkv) for rows in (q, k, v)
        )
    epsilon = config.variants.qk_norm_epsilon
    if config.variants.qk_norm == "all_heads":
        q, k = (
            rows / np.sqrt((rows**2).mean(1, keepdims=True) + epsilon) * module_with(p, name)[name]["scale"]
            for rows, name in ((q, "query_norm"), (k, "key_norm"))
        )
    subtracted = None
    if config.variants.differential:
        v = np.concatenate([np.tile(v[:, g : g + 2 * K], 2) for g in range(0, G * K, 2 * K)], axis=1)
    Q, V, of_heads = q.shape[1] // H, v.shape[1] // G, []  # the width of a head's values
    for h in range(H):
        g = h // (H // G)
        qh, kh, vh = q[:, h * Q : (h + 1) * Q], k[:, g * Q : (g + 1) * Q], v[:, g * V : (g + 1) * V]
        if config.variants.qk_norm == "layernorm":
            qh, kh = (rows - rows.mean(1, keepdims=True) for rows in (qh, kh))
        if config.variants.qk_norm in ("plain", "weighted", "layernorm"):
            of = module_with(p, "query_norm") if config.variants.qk_norm != "plain" else {}
            qh, kh = (
                rows / np.sqrt((rows**2).mean(1, keepdims=True) + epsilon) * of.get(name, {"scale": 1.0})["scale"]
                + of.get(name, {}).get("bias", 0.0)
                for rows, name in ((qh, "query_norm"), (kh, "key_norm"))
            )
        if position == "rope":
            base = at_layer(config.rope.base, layer)
            rotated, r = int(K * config.rope.fraction) if config.variants.latent is None else K // 2, config.rope
            factor = at_layer(r.factor, layer)
            scaling = {
                "scaling": "none" if factor == 1 and r.scaling != "dynamic" else r.scaling,
                "factor": factor,
                "original_context": r.original_context,
            }
            scaling |= {"betas": (r.beta_slow, r.beta_fast), "turning": r.turning}
            scaling |= {"length": max(positions) + 1}
            qh = np.stack([rope(row, at, rotated, base, **scaling) for row, at in zip(qh, positions, strict=True)])
            kh = np.stack([rope(row, at, rotated, base, **scaling) for row, at in zip(kh, of_keys, strict=True)])
        if position == "accumulated":
            places = accumulated(module_with(p, "log_step"), x, segments)[:, g]
            options = {"width": int(K * config.rope.fraction), "turning": config.rope.turning}
            options["base"] = at_layer(config.rope.base, layer)
            qh, kh = (np.stack([rope(rows[i], places[i], **options) for i in range(length)]) for rows in (qh, kh))
        if position == "pope":
            phases = tables["pope"]["phases"][g]
            qh = np.stack([pope(row, at, config.rope.base) for row, at in zip(qh, positions, strict=True)])
            kh = np.stack([pope(row, at, config.rope.base, phases) for row, at in zip(kh, positions, strict=True)])
        variants = config.variants
        if variants.query_scale == "ssmax":
            qh = qh * (module_with(p, "factor")["factor"][h] * np.log(visible.sum(1)))[:, None]
        if variants.query_scale == "llama4":
            qh = qh * np.array([1 + 0.1 * math.log(math.floor((at + 1) / 8192) + 1) for at in positions])[:, None]
        logits = np.real(qh @ kh.conj().T) / (math.sqrt(config.scale_width) if config.scale_attention else 1.0)
        if position == "path":
            scale = 1 / math.sqrt(config.scale_width) if config.scale_attention else 1.0
            logits = path(module_with(p, "beta"), qh, kh, x, g, scale)
        factor = at_layer(config.rope.factor, layer)
        if position == "rope" and config.rope.scaling.startswith("yarn") and factor > 1:
            logits *= (config.rope.attention_factor or 0.1 * math.log(factor) + 1) ** 2
        if variants.soft_cap:
            logits = variants.soft_cap * np.tanh(logits / variants.soft_cap)
        stack = config if memory is None else config.encoder  # cross-attention sees both directions
        own = module_with(p, OF_LAYER[position]) if position in OF_LAYER else None
        for i, j in np.ndindex(*logits.shape if position != "none" else (0, 0)):
            logits[i, j] += bias(stack, position, own, tables, positions[i], of_keys[j])[h]
        if position == "fox":
            gates = np.log(sigmoid(linear(module_with(p, "gate")["gate"], x)))[:, h]
            logits += np.array([[gates[j + 1 : i + 1].sum() for j in range(length)] for i in range(length)])
        if position == "relative_logits":
            of_head = linear(module_with(p, "project")["project"], x).reshape(length, H, -1)[:, h]
            table, at = module_with(p, "table")["table"], np.subtract.outer(positions, positions)
            logits += [[relative_logits(of_head[i], table, at[i, j]) for j in range(length)] for i in range(length)]
        if position == "cope":
            logits += np.stack([cope(own["table"], *row) for row in zip(qh, logits, visible, strict=True)])
        if variants.selective:
            subtracted = selected(logits, visible, segments) if h == 0 else subtracted
            logits = logits - subtracted
        logits = np.where(visible, logits, -np.inf)
        if variants.normaliser == "stick_breaking":
            of_heads.append(np.stack([sticks(*row) for row in zip(logits, visible, strict=True)]) @ vh)
        else:
            if variants.sink != "none":  # a key with a logit of its own and a value of zero
                sink = p["core"]["sink"][h] if variants.sink == "trained" else 0.0
                logits, vh = np.pad(logits, ((0, 0), (0, 1)), constant_values=sink), np.pad(vh, ((0, 1), (0, 0)))
            of_heads.append(softmax(logits) @ vh)
    out = differences(p["difference"], of_heads, layer) if variants.differential else np.concatenate(of_heads, axis=1)
    for h in range(H):
        if variants.gate != "none":
            of_head = slice(h, h + 1) if variants.gate == "head" else slice(h * K, (h + 1) * K)
            out[:, h * K : (h + 1) * K] /= 1 + np.exp(-linear(p["gate"], x)[:, of_head])
    out = linear(p["out"], out)
    return norm(config, p.get("output_norm", {}), out) if config.output_norm else out


def forward(config, parameters, tokens, positions=None, segments=None, source=None):
    """Return the logits [L, V] of one sequence, in float64. source: the encoder's tokens, -1 for padding."""
    memory, is_padding = None, None
    if source is not None:
        is_padding = np.asarray(source) < 0
        table = parameters["embedding" if config.share_embeddings else "source_embedding"]
        p, segments_of_source = parameters["encoder"] | {"embedding": table}, is_padding.astype(int)
        memory = hidden(config.encoder, p, np.maximum(source, 0), list(range(len(source))), segments_of_source)
    positions = list(range(len(tokens))) if positions is None else list(positions)
    segments = [0] * len(tokens) if segments is None else list(segments)
    x = hidden(config, parameters, tokens, positions, segments, memory, is_padding)
    table = parameters["embedding" if config.tie_embeddings else "unembedding"]
    if config.prediction_head:
        head = parameters["output"]
        x = norm(config, head["norm"], activate(config.activation, linear(head["dense"], x)))
        return x @ table.T + head["bias"]
    logits = x @ table.T + (parameters["output"]["bias"] if config.output_bias else 0)
    return (
        logits if config.output_soft_cap is None else config.output_soft_cap * np.tanh(logits / config.output_soft_cap)
    )


def hidden(config, parameters, tokens, positions, segments, memory=None, is_padding=None):
    """Return the last hidden states [L, D] of a stack of blocks."""
    length = len(tokens)

    def visible(window):
        return np.array(
            [
                [
                    (j <= i or not config.causal) and segments[i] == segments[j] and abs(i - j) < (window or length)
                    for j in range(length)
                ]
                for i in range(length)
            ]
        )

    tables = parameters.get("positions", {})
    x = parameters["embedding"][tokens]
    std = 0.02
    if config.scale_embeddings:
        x, std = x * math.sqrt(config.d_model), 1.0
    if config.position == "learned":
        x = x + tables["learned"]["embedding"][positions]
    if config.position == "sinusoidal":
        width = config.sinusoidal.columns or config.d_model
        waves = (
            std
            * config.sinusoidal.amplitude
            * np.stack([sinusoid(p, width, config.sinusoidal.base) for p in positions])
        )
        x = x + waves if config.sinusoidal.columns is None else np.concatenate([x[:, :-width], waves], axis=1)
    if config.embedding_norm:
        x = norm(config, parameters.get("embedding_norm", {}), x)
    for layer in range(config.num_layers):
        p = parameters["blocks"][layer]

        def attend(x, p=p, layer=layer):
            if config.block == "gru":
                return recurrence(p["recurrence"], x, segments)
            seen = visible(at_layer(config.attention_window, layer))
            return attention(config, p["attention"], x, layer, tables, positions, seen, segments)

        def mlp(x, p=p["mlp"]):
            units = activate(config.activation, linear(p["gate" if "gate" in p else "up"], x))
            out = linear(p["down"], units * linear(p["up"], x) if "gate" in p else units)
            return norm(config, p.get("output_norm", {}), out) if config.output_norm else out

        def cross(x, p=p, layer=layer):
            seen = np.array([[not padded for padded in is_padding] for _ in range(length)])
            of_cross = parameters.get("cross_positions", {})
            return attention(config, p["cross_attention"], x, layer, of_cross, positions, seen, segments, memory)

        first = "attention_norm" if config.block == "attention" else "recurrence_norm"
        sublayers = [(attend, first), (mlp, "mlp_norm")]
        sublayers[1:1] = [] if memory is None else [(cross, "cross_norm")]
        if config.parallel_residual != "none":
            of_mlp = "attention_norm" if config.parallel_residual == "one_norm" else "mlp_norm"
            x = x + attend(norm(config, p.get("attention_norm", {}), x)) + mlp(norm(config, p.get(of_mlp, {}), x))
            continue
        for sublayer, name in sublayers:
            if config.norm_placement != "post":
                added = sublayer(norm(config, p.get(name, {}), x) if config.norm_placement == "pre" else x)
                x = x + added if config.residual else added
            else:
                added = sublayer(x)
                x = norm(config, p[name], x + added if config.residual else added)
    if config.norm_placement != "post":
        x = norm(config, parameters.get("final_norm", {}), x)
    return x
