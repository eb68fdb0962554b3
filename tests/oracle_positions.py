"""The formulas of the position encodings in float64 NumPy, written from the papers, for the oracle."""

import math

import numpy as np


def softplus(x):
    return np.log(1 + np.exp(x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def sinusoid(position, width, base=10_000.0):
    row = np.zeros(width)
    for i in range(width):
        wavelength = 2 * math.pi * base ** (2 * (i // 2) / width)
        row[i] = (math.cos if i % 2 else math.sin)(2 * math.pi * position / wavelength)
    return row


def wavelength(pair, width, base=10_000.0, scaling="none", factor=1.0, original_context=None, betas=(1, 32), length=0):
    """Return the tokens per rotation of one pair of dimensions. The package uses frequencies instead."""
    plain = 2 * math.pi * base ** (2 * pair / width)
    if scaling == "linear":
        return factor * plain
    if scaling == "ntk":
        return plain * factor ** (2 * pair / (width - 2))
    if scaling == "dynamic":
        return plain * max(1, factor * length / original_context - (factor - 1)) ** (2 * pair / (width - 2))
    if scaling in ("yarn_by_index", "yarn_unrounded"):
        slow, fast = betas
        place = lambda turns: math.log(original_context / (2 * math.pi * turns), base) * width / 2
        whole = (math.floor, math.ceil) if scaling == "yarn_by_index" else (float, float)
        low, high = max(whole[0](place(fast)), 0), min(whole[1](place(slow)), width - 1)
        share = 1 - min(1.0, max(0.0, (pair - low) / ((high - low) or 1e-3)))  # also for high < low, as there
        return 1 / ((1 - share) / (factor * plain) + share / plain)
    if scaling in ("yarn", "llama3"):
        rotations = original_context / plain
        slow, fast = betas
        if rotations > fast:
            return plain
        if rotations < slow:
            return factor * plain
        share = (rotations - slow) / (fast - slow)
        return 1 / ((1 - share) / (factor * plain) + share / plain)
    return plain


def rope(x, position, width, base=10_000.0, turning=1.0, **scaling):
    """Rotate one vector. Dimensions i and i + width/2 form one complex number."""
    half = width // 2
    z = x[:half] + 1j * x[half:width]
    for i in range(int(turning * width // 2)):
        z[i] *= np.exp(2j * math.pi * position / wavelength(i, width, base, **scaling))
    return np.concatenate([z.real, z.imag, x[width:]])


def pope(x, position, base, phases=0.0):
    """Return complex numbers, one for each dimension; the logit is the real part of Σ q · conj(k)."""
    turns = position * base ** (-np.arange(len(x)) / len(x))
    return softplus(x) * np.exp(1j * (turns + phases))


def alibi_slopes(heads):
    """Return the slopes by the recursion in Press et al.'s released code."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    closest = 2 ** math.floor(math.log2(heads))
    return alibi_slopes(closest) + alibi_slopes(2 * closest)[0::2][: heads - closest]


def t5_bucket(offset, causal, buckets=32, max_distance=128):
    """Return the bucket of one offset (key - query), as in Raffel et al.'s released code."""
    result, n = 0, -offset
    if not causal:
        buckets //= 2
        result += buckets if n < 0 else 0
        n = abs(n)
    else:
        n = max(n, 0)
    exact = buckets // 2
    if n < exact:
        return result + n
    large = exact + int(math.log(n / exact) / math.log(max_distance / exact) * (buckets - exact) + 1e-9)
    return result + min(large, buckets - 1)


def fire(p, threshold, i, j):
    """Return the biases of all heads for query i and key j, as in Li et al.'s released code."""
    psi = lambda x: math.log(abs(p["c"] * x) + 1)
    share = psi(i - j) / psi(max(threshold * p["factor"], i))
    return np.maximum(share * p["up"] + p["up_bias"], 0) @ p["down"] + p["down_bias"]


def accumulated(p, x, segments):
    """Return positions [L, G]; they begin anew in each segment. p: parameters. x: the inputs of attention."""
    places = np.zeros((len(x), len(p["log_step"])))
    for i, row in enumerate(x):
        before = places[i - 1] if i and segments[i] == segments[i - 1] else 0.0
        places[i] = before + np.exp(p["log_step"]) + row @ p["project"]["kernel"] / math.sqrt(row @ row)
    return places


def path(p, q, k, x, group, scale):
    """Return the logits of a head [L, L], from whole products of reflections. p: parameters. x: inputs of attention."""
    width, length = q.shape[1], len(q)
    w = (x @ p["low"]["kernel"] @ p["high"]["kernel"])[:, group * width : (group + 1) * width]
    beta = 2 * sigmoid(x @ p["beta"]["kernel"] + p["beta"]["bias"])[:, group]
    logits = np.zeros((length, length))
    for j in range(length):
        key = k[j]
        for i in range(j, length):
            if i > j:
                unit = w[i] / np.linalg.norm(w[i])
                key = (np.eye(width) - beta[i] * np.outer(unit, unit)) @ key
            logits[i, j] = scale * q[i] @ key
    return logits


def relative_logits(weights, table, distance):
    """Return the bias of a head for a key at this distance. weights: of the table's rows, for the query."""
    return weights @ table[:, distance] if 0 <= distance < table.shape[1] else 0.0


def cope(table, q, logits, visible):
    """Return the biases of one query for all keys, by its logits and the keys that it sees."""
    biases = np.zeros(len(logits))
    for j in range(len(logits)):
        at = min(sum(sigmoid(logits[t]) for t in range(j, len(logits)) if visible[t]), len(table) - 1)
        low, high = math.floor(at), math.ceil(at)
        biases[j] = q @ table[low] if low == high else (high - at) * (q @ table[low]) + (at - low) * (q @ table[high])
    return biases
