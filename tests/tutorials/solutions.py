"""Solutions of the exercises, and wrong answers that must be refused. Solve the exercises before you read this file."""

SOLUTIONS = {
    "1.1": """def attention(q_LK, k_SK, v_SK):
    logits_LS = q_LK @ k_SK.T / np.sqrt(q_LK.shape[-1])
    weights_LS = np.exp(logits_LS)
    return weights_LS / weights_LS.sum(axis=1, keepdims=True) @ v_SK
""",
    "1.2": "def causal_mask(length):\n    return np.tril(np.ones((length, length), bool))\n",
    "1.3": "with_8_heads = with_16_heads = 4 * 512**2\n",
    "1.4": """def multi_head(x_LD, w_query_DD, w_key_DD, w_value_DD, w_out_DD, heads):
    length, d_model = x_LD.shape
    parts = []
    for head in range(heads):
        own = slice(head * d_model // heads, (head + 1) * d_model // heads)
        q, k, v = x_LD @ w_query_DD[:, own], x_LD @ w_key_DD[:, own], x_LD @ w_value_DD[:, own]
        logits = np.einsum("ik,jk->ij", q, k) / np.sqrt(q.shape[1])
        logits[np.triu_indices(length, 1)] = -np.inf
        weights = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        parts.append(weights @ v)
    return np.concatenate(parts, axis=1) @ w_out_DD
""",
    "1.5": """def weights(logits_LS, visible_LS):
    exponentials = np.exp(logits_LS.astype(float)) * visible_LS
    return exponentials / np.maximum(exponentials.sum(axis=1, keepdims=True), 1e-30)
""",
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
TORCH_LIKE = """def multi_head(x, wq, wk, wv, wo, heads):
    length, d_model = x.shape
    q, k, v = (np.reshape(x @ w, (length, heads, -1)).transpose(1, 0, 2) for w in (wq, wk, wv))
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(d_model // heads)
    mask = np.tril(np.ones((length, length)))
    scores = np.where(mask == 0, -1e9, scores)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    attn = scores / scores.sum(-1, keepdims=True)
    return (attn @ v).transpose(1, 0, 2).reshape(length, d_model) @ wo
"""
HALF = """def weights(logits_LS, visible_LS):
    scores = np.where(visible_LS, logits_LS, np.float16(-6e4))
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    scores = scores / scores.sum(-1, keepdims=True)
    return np.where(visible_LS, scores, 0)
"""
SPLIT = "np.reshape(x @ w, (length, heads, -1)).transpose(1, 0, 2)"
ROTATE = """def rotate(x, position):
    a = position * 10000.0 ** (-np.arange(0, 8, 2) / 8)
    return np.array([x[:4] * np.cos(a) - x[4:] * np.sin(a), x[:4] * np.sin(a) + x[4:] * np.cos(a)]).ravel()
"""
ROFORMER = """def rotate(x, position):
    y, a = np.empty(8), position * 10000.0 ** (-np.arange(0, 8, 2) / 8)
    y[0::2] = x[0::2] * np.cos(a) - x[1::2] * np.sin(a)
    y[1::2] = x[0::2] * np.sin(a) + x[1::2] * np.cos(a)
    return y
"""
# {exercise: [(replaced, by, words of the hint)]}: in the solution, or in the answer that stands before the list.
# An empty replaced text: the answer is as in `by`. No words: the general hint.
WRONG = {
    "1.1": [
        (" / np.sqrt(q_LK.shape[-1])", "", "1/√d_k is missing"),
        ("np.sqrt(q_LK.shape[-1])", "16", "not by √d_k"),
        ("/ np.sqrt", "* np.sqrt", "multiplied by √d_k"),
        ("np.sqrt(q_LK.shape[-1])", "np.sqrt(len(k_SK))", "number of keys"),
        ("np.sqrt(q_LK.shape[-1])", "np.sqrt(len(q_LK))", "number of queries"),
        ("k_SK.T / np.sqrt(q_LK.shape[-1])\n", "k_SK.T\n    v_SK = v_SK / 4\n", "after the softmax"),
        ("axis=1", "axis=0", "over the queries"),
        ("axis=1", "axis=None", "all logits at once"),
        ("weights_LS / weights_LS.sum(axis=1, keepdims=True)", "logits_LS", "softmax is missing"),
        ("k_SK.T", "k_SK.reshape(q_LK.shape[1], -1)", "reshaped, not transposed"),
        ("@ v_SK", "@ v_SK + 1", None),
        ("@ k_SK.T", "@ k_SK", "swaps the last two axes"),
    ],
    "1.2": [
        ("np.tril", "np.triu", "transposed"),
        ("np.tril(np.ones((length, length), bool))", "~np.tri(length, dtype=bool)", "attn_mask"),
        ("bool)", "bool), -1", "its own key, too"),
        ("bool)", "bool), 1", "which it must predict"),
        ("np.tril(np.ones((length, length), bool))", "np.log(np.tri(length))", "add to the logits"),
        ("np.tril", "0 * np.tril", None),
    ],
    "1.3": [
        ("with_16_heads = 4 *", "with_16_heads = 4 * 8 *", None),
        (
            "with_8_heads = with_16_heads = 4 * 512**2",
            "with_8_heads = 32 * 512**2; with_16_heads = 64 * 512**2",
            "columns",
        ),
        ("4 *", "3 *", "fourth matrix"),
        ("4 * 512**2", "4 * 513 * 512", "biases"),
        ("with_16_heads = 4 * 512**2", "2**17; with_16_heads = 2**16", "of one head"),
    ],
    "1.4": [
        ("", TORCH_LIKE.replace(SPLIT, "np.reshape(x @ w, (heads, length, -1))"), "mixes tokens"),
        ("", TORCH_LIKE.replace("(attn @ v).transpose(1, 0, 2)", "(attn @ v)"), "not moved back"),
        ("", TORCH_LIKE.replace("k.transpose(0, 2, 1)", "k.reshape(heads, -1, length)"), "reshaped, not transposed"),
        ("", TORCH_LIKE.replace("k.transpose(0, 2, 1)", "k.T"), "swaps the last two axes"),
        ("", TORCH_LIKE.replace("d_model // heads)", "d_model)"), "1/√d_model"),
        ("", TORCH_LIKE.replace(" / np.sqrt(d_model // heads)", ""), "1/√d_k is missing"),
        ("", TORCH_LIKE.replace("np.sqrt(d_model // heads)", "(d_model // heads)"), "not by √d_k"),
        (
            "",
            TORCH_LIKE.replace("np.where(mask == 0, -1e9, scores)", "scores").replace("(attn @", "((attn * mask) @"),
            "after the softmax",
        ),
        ("", TORCH_LIKE.replace("-1e9", "0"), "hidden logits are 0"),
        ("", TORCH_LIKE.replace("mask == 0", "mask == 2"), "mask is missing"),
        ("", TORCH_LIKE.replace("tril", "triu"), "mask is transposed"),
        ("", TORCH_LIKE.replace("scores.sum(-1", "scores.sum(-2").replace("scores.max(-1", "scores.max(-2"), "queries"),
        ("", TORCH_LIKE.replace("x @ w,", "x @ w.T,").replace("@ wo", "@ wo.T"), "nn.Linear"),
        ("", TORCH_LIKE.replace(" @ wo", ""), "output projection"),
        ("@ w_out_DD", "@ w_out_DD * 2", None),
        ("q.shape[1]", "3", None),
    ],
    "1.5": [
        ("", HALF.replace("np.float16(-6e4)", "-np.inf").replace("np.where(visible_LS, scores, 0)", "scores"), "-1e9"),
        (
            "",
            HALF.replace("-6e4", "-1e9").replace("np.where(visible_LS, scores, 0)", "scores"),
            "float16",
        ),
        ("", HALF.replace("np.where(visible_LS, scores, 0)", "scores"), "equal weights on hidden keys"),
        ("", HALF.replace("np.where(visible_LS, logits_LS, np.float16(-6e4))", "logits_LS"), "after the softmax"),
        ("", HALF.replace("-6e4", "0").replace("np.where(visible_LS, scores, 0)", "scores"), "exp(0)"),
        ("* visible_LS", "* visible_LS * 2 + 1", None),
    ],
    "2.1": [
        ("np.sin(angle), np.cos", "np.cos(angle), np.sin", "swapped"),
        ("waves[:, 2 * i], waves[:, 2 * i + 1]", "waves[:, i], waves[:, i + width // 2]", "half-split"),
        ("np.arange(length)", "np.arange(1, length + 1)", "start at 1"),
        ("2 * i / width", "i / width", "it is 2i/width"),
        ("2 * i / width", "4 * i / width", "2 is there twice"),
        ("/ 10000", "* 10000", "multiplied"),
        ("2 * i / width", "i / (width // 2 - 1)", "tensor2tensor"),
        ("10000", "500", None),
    ],
    "2.2": [
        (" ** (510 / 512)", "", "below 1"),
        ("2 * np.pi * ", "", "2π is missing"),
        ("510", "255", "not i/d"),
        (" * 10000 ** (510 / 512)", "", "shortest"),
        ("510", "500", None),
    ],
    "2.3": [
        ("position *", "-position *", "other direction"),
        ("", ROFORMER, "neighbours (interleaved, as in RoFormer)"),
        ("", ROFORMER.replace("position * 1", "-position * 1"), "interleaved), and turn in the other"),
        ("", ROTATE.replace("[x[:4] * np.cos(a) - ", "[x[:4] * np.cos(a) + "), "sign is missing"),
        ("/ half", "/ len(x_K)", "it is 2i/width"),
        ("", ROTATE.replace("-np.arange(0, 8, 2)", "-2 * np.arange(0, 8, 2)"), "2 is there twice"),
        ("position *", "(position + 1) *", "start at 1"),
        ("np.concatenate(turned)", "turned[0]", "the shape is"),
        ("10000", "500000", None),
    ],
    "2.4": [
        ("-slope", "slope", "sign is wrong"),
        ("i[:, None] - i", "i[:, None] - i + 1", "diagonal"),
        ("-slope * ", "-1 * ", "slope is missing"),
        ("-slope", "-2 * slope", None),
    ],
    "3.1": [
        (
            "x + f(norm(x))\ndef post_ln(x, f, norm):\n    return norm(x + f(x))",
            "norm(x + f(x))\npost_ln = pre_ln",
            "swapped",
        ),
        ("norm(x + f(x))", "x + f(norm(x))", "swapped"),
        ("x + f(norm(x))", "f(norm(x))", "residual x is missing"),
        ("x + f(norm(x))", "x + norm(f(x))", "norm is after f"),
        ("x + f(norm(x))", "norm(x) + f(norm(x))", "does not norm the stream"),
        ("norm(x + f(x))", "x + f(x)", "norm is missing"),
        ("norm(x + f(x))", "norm(x + f(norm(x)))", "one norm"),
        ("norm(x + f(x))", "norm(norm(x) + f(x)) * 2", None),
    ],
    "3.2": [
        ("warmup**-1.5", "warmup**-0.5", "exponent -1.5"),
        ("min(", "max(", "not the larger"),
        ("d_model**-0.5 * ", "", "d_model^-0.5 is missing"),
        ("d_model**-0.5", "d_model**0.5", "has the exponent -0.5"),
        ("min(step**-0.5, step * warmup**-1.5)", "step**-0.5", "warm-up is missing"),
        ("d_model**-0.5", "512**-0.5", None),
        ("warmup**-1.5", "4000**-1.5", None),
    ],
    "3.3": [
        ("np.concatenate(windows)", "[np.mean(window) for window in windows]", "windows' means"),
        (
            "np.exp(np.mean(np.concatenate(windows)))",
            "sum(np.exp(w.mean()) for w in windows) / 2",
            "windows' perplexities",
        ),
        (
            "np.exp(np.mean(np.concatenate(windows)))",
            "np.mean(np.exp(np.concatenate(windows)))",
            "tokens' perplexities",
        ),
        ("np.exp(", "(", "exponential is missing"),
        ("np.exp(", "np.exp2(", "not 2"),
        ("np.mean(", "np.sum(", "sum of the losses"),
        ("np.mean(", "np.max(", None),
    ],
    "4.1": [
        (" + 1", "", "one token is missing"),
        ("window - stride + 1", "stride", "number of new targets"),
        ("window - stride + 1", "window", "only the last target"),
        ("+ 1", "+ 2", None),
    ],
    "4.2": [
        ("end - stride + 1", "end - window + 1", "scored twice"),
        ("range(1 if", "range(0 if", "token 0"),
        ("1 if end == window else ", "", "not only the last"),
        ("range(window,", "range(window + 1,", None),
        ("in ends]", "in list(ends)[::-1]]", None),
    ],
    "4.3": [
        ("/ factor", "* factor", "multiplied"),
        (" / factor", "", "factor is missing"),
        ("* frequency", "* (frequency / factor)", "divided, too"),
        ("* frequency", "+ frequency", None),
    ],
    "5.1": [
        (" / (1 - chance)", "", "divide by 1"),
        ("(score - chance)", "score", "subtract chance"),
        ("(score - chance) / (1 - chance)", "score / chance", "ratio"),
        ("1 - chance", "2 - chance", None),
    ],
    "5.2": [
        ("key - query", "query - key", "key − query"),
        (" / len(offsets)", "", "not their number"),
        ("len(offsets)", "offsets.count(best)", "of all pairs"),
        ("return best", "return np.mean(offsets)", "mean offset"),
        ("/ len(offsets)", "/ len(set(offsets)) / 2", None),
    ],
    "5.3": [("box", "queen", None), ("box", "kings", None)],
    "5.4": [
        ("whole_D.std()", "whole_D.std(ddof=1)", "torch.std"),
        ("whole_D.std", "part_D.std", "that of the part"),
        ("part_D.mean()", "whole_D.mean()", "that of the whole"),
        ("(part_D - part_D.mean())", "part_D", "not subtracted"),
        (" / whole_D.std()", "", "is missing"),
        ("whole_D.std()", "whole_D.var()", "variance"),
        ("@ direction_D", "@ direction_D * 2", None),
    ],
}
