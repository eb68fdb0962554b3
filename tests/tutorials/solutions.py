"""Solutions of the exercises, and wrong answers that must be refused. Solve the exercises before you read this file."""

SOLUTIONS = {
    "1.1": """def attention(q_LK, k_SK, v_SK):
    logits_LS = q_LK @ k_SK.T / np.sqrt(q_LK.shape[-1])
    weights_LS = np.exp(logits_LS)
    return weights_LS / weights_LS.sum(axis=1, keepdims=True) @ v_SK
""",
    "1.2": "def causal_mask(length):\n    return np.tril(np.ones((length, length), bool))\n",
    "1.3": "with_8_heads = with_16_heads = 4 * 512**2\n",
    "2.1": """def sinusoids(length, width):
    waves = np.empty((length, width))
    for i in range(width // 2):
        angle = np.arange(length) / 10000 ** (2 * i / width)
        waves[:, 2 * i], waves[:, 2 * i + 1] = np.sin(angle), np.cos(angle)
    return waves
""",
    "2.2": "longest = 2 * np.pi * 10000 ** (510 / 512)\n",
    "2.3": """def rotate(x_K, position):
    half = len(x_K) // 2
    angle = position * 10000 ** (-np.arange(half) / half)
    first, second = x_K[:half], x_K[half:]
    turned = first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)
    return np.concatenate(turned)
""",
    "2.4": "def alibi_bias(length, slope):\n    i = np.arange(length)\n    return -slope * (i[:, None] - i)\n",
    "3.1": """def pre_ln(x, f, norm):
    return x + f(norm(x))
def post_ln(x, f, norm):
    return norm(x + f(x))
""",
    "3.2": """def learning_rate(step, d_model, warmup):
    return d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
""",
    "3.3": "def perplexity(windows):\n    return np.exp(np.mean(np.concatenate(windows)))\n",
    "4.1": "def least_context(window, stride):\n    return window - stride + 1\n",
    "4.2": """def targets(last, window, stride):
    ends = range(window, last + 1, stride)
    return [range(1 if end == window else end - stride + 1, end + 1) for end in ends]
""",
    "4.3": "def angle(position, factor, frequency):\n    return position / factor * frequency\n",
    "5.1": "def strength(score, chance):\n    return (score - chance) / (1 - chance)\n",
    "5.2": """def best_offset(pairs):
    offsets = [key - query for query, key in pairs]
    best = max(set(offsets), key=offsets.count)
    return best, offsets.count(best) / len(offsets)
""",
    "5.3": 'antecedent = "box"\n',
    "5.4": """def share(part_D, whole_D, direction_D):
    return (part_D - part_D.mean()) / whole_D.std() @ direction_D
""",
}
WRONG = {  # {exercise: [(replaced, by) in the solution]}
    "1.1": [(" / np.sqrt(q_LK.shape[-1])", ""), ("axis=1", "axis=0"), ("return", "return q_LK, ")],
    "1.2": [("np.tril", "np.triu"), ("(length, length), bool)", "(length, length), bool), -1")],
    "1.3": [("4 *", "4 * 8 *"), ("4 *", "3 *")],
    "2.1": [("2 * i / width", "i / width"), ("np.sin(angle), np.cos", "np.cos(angle), np.sin")],
    "2.2": [(" ** (510 / 512)", ""), ("510", "512")],
    "2.3": [("position *", "-position *"), ("/ half", "/ len(x_K)"), ("np.concatenate(turned)", "turned[0]")],
    "2.4": [("-slope", "slope"), ("-slope", "-2 * slope")],
    "3.1": [("x + f(norm(x))", "x + norm(f(x))"), ("norm(x + f(x))", "x + f(norm(x))")],
    "3.2": [
        ("warmup**-1.5", "warmup**-0.5"),
        ("min(", "max("),
        ("d_model**-0.5", "512**-0.5"),
        ("warmup**-1.5", "4000**-1.5"),
    ],
    "3.3": [("np.concatenate(windows)", "[np.mean(window) for window in windows]"), ("np.exp(", "(")],
    "4.1": [(" + 1", ""), ("window - stride + 1", "stride")],
    "4.2": [
        ("end - stride + 1", "end - window + 1"),
        ("range(window,", "range(window + 1,"),
        ("in ends]", "in list(ends)[::-1]]"),
    ],
    "4.3": [("/ factor", "* factor"), (" / factor", "")],
    "5.1": [(" / (1 - chance)", ""), ("(score - chance)", "score")],
    "5.2": [("key - query", "query - key"), ("/ len(offsets)", "/ len(set(offsets))")],
    "5.3": [("box", "queen"), ("box", "kings")],
    "5.4": [("whole_D.std", "part_D.std"), ("part_D.mean()", "whole_D.mean()")],
}
