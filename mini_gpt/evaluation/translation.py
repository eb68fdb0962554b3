"""The quality of the targets that a model writes, and of its predictions, for pairs of a source and a target."""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import sacrebleu

from mini_gpt.data.pairs import Pair
from mini_gpt.evaluation import items, pair_accuracy
from mini_gpt.evaluation.items import Items
from mini_gpt.evaluation.loaded import LoadedModel

BLEU_ORDER = 4  # BLEU counts runs of up to four words
BINS = 15  # of `calibration_error`
# Scripts without spaces between words, as the first word of a letter's Unicode name. CJK: Chinese characters.
UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")


def written_scores(written: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Return exact_match in 0..1, and chrf and bleu in 0..100, of written targets, by sacrebleu (Post 2018).

    bleu: None if no reference has four words, as BLEU sees them.
    bleu_signature: says how sacrebleu computed it, with the tokenizer (tok) that fits the script of the references.
    """
    exact_P = np.array([text == reference for text, reference in zip(written, references, strict=True)])
    bleu = sacrebleu.metrics.BLEU(tokenize=bleu_tokenizer(references))
    score = bleu.corpus_score(written, [references])
    longest = max(len(bleu.tokenizer(reference).split()) for reference in references)
    return {
        "exact_match": float(exact_P.mean()),
        "chrf": sacrebleu.corpus_chrf(written, [references]).score,
        "bleu": score.score if longest >= BLEU_ORDER else None,
        "bleu_signature": str(bleu.get_signature()),
        "items": items.packed({"exact_match": Items(exact_P, np.ones(len(exact_P)))}),
    }


def bleu_tokenizer(references: Sequence[str]) -> str:
    """Return sacrebleu's tokenizer for the script of most letters: 13a, or zh (Chinese) or char if it has no spaces."""
    letters = (letter for text in references for letter in text if letter.isalpha())
    scripts = Counter(unicodedata.name(letter, "").split(" ")[0] for letter in letters)
    unspaced = sum(scripts[script] for script in UNSPACED)
    if 2 * unspaced <= scripts.total():
        return "13a"
    return "zh" if scripts["CJK"] > 0.9 * unspaced else "char"  # Japanese has Chinese characters among its own


def prediction_scores(model: LoadedModel, pairs: Sequence[Pair], separator: int) -> dict[str, float]:
    """Return scores of the predictions of each target token, given the true ones before it. Its end is a token too.

    {} if a loss is not finite: the predictions mean nothing then.

    nll: mean loss in nats per token.
    token_accuracy: share of tokens that are the most likely ones.
    calibration_error: see the function of this name.
    """
    predicted, confidence, nll = pair_accuracy.predict(model, pairs, separator)
    if not np.isfinite(np.concatenate(nll)).all():
        return {}
    right = np.concatenate([tokens == [*pair.target, separator] for pair, tokens in zip(pairs, predicted, strict=True)])
    return {
        "nll": float(np.concatenate(nll).mean(dtype=np.float64)),
        "token_accuracy": float(right.mean()),
        "calibration_error": calibration_error(np.concatenate(confidence), right),
    }


def calibration_error(confidence: np.ndarray, right: np.ndarray) -> float:
    """Return the expected calibration error of predictions, in 0..1 (Guo et al. 2017, eq. 3).

    confidence: probabilities of the predictions.
    right: whether they are right. Both have shape [tokens].

    The error is the mean over BINS equal intervals of confidence, weighted by their predictions, of |share right - mean
    confidence|.
    """
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    sums = [np.bincount(bins, weights=values, minlength=BINS) for values in (confidence, right)]
    return float(np.abs(sums[0] - sums[1]).sum() / len(confidence))
