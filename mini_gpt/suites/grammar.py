"""How well a model knows the grammar of the English stories: agreement, pronouns, predicates, answers, and the loss."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from mini_gpt.config.schema import Config
from mini_gpt.data import english, tokenizers
from mini_gpt.data.batches import in_full_batches
from mini_gpt.data.english import Story, as_token
from mini_gpt.data.english.grammar import NOUNS, OTHER_NUMBER, PLURAL, PREDICATES, PRONOUNS, VERBS
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.runtime import progress, sharding
from mini_gpt.runtime.errors import require
from mini_gpt.suites.base import Result, Suite, SuiteOptions
from mini_gpt.training.run import Run

EVERY = "every word"
KINDS = (
    EVERY,
    "verb after its subject",
    "verb after another noun of the same number",
    "verb after a noun of the other number",
    "pronoun",
    "predicate of a pronoun",
    "answer",
)
STORIES = 1000  # of a split
ALL_NOUNS = {form for nouns in NOUNS.values() for pair in nouns for form in pair}
PLURALS = {pair[PLURAL] for pair in (*VERBS, *(noun for nouns in NOUNS.values() for noun in nouns))}


def measure(model: LoadedModel, tokenizer: Tokenizer, stories: Sequence[Story]) -> list[dict[str, Any]]:
    """Return a row for each of KINDS. Each story is scored alone, up to the separator at its end.

    words: number of words of the kind.
    accuracy: share of these words that are more probable than each of their `wrong_words`.
    possible: mean probability of all words that the grammar allows at the place.
    nll: mean loss in nats per word.
    grammar_nll: the same of the grammar itself, the lowest loss that can be expected of a model.

    Raises UserError if the tokens are not words.
    """
    require(tokenizer.kind == "words", "data.tokenizer", tokenizer.kind, "must be words, to measure the grammar")
    length = max(len(story.words) for story in stories)
    model.config.model.check_length(length)
    separator = tokenizers.separator(tokenizer)
    found: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in KINDS}
    ids = {text.decode(): token for token, text in enumerate(tokenizer.texts)}  # that of "" is the separator
    for count, part in in_full_batches(stories, model.rows_at_a_time(length, count=len(stories))):
        rows_BL = np.full((len(part), length), separator, np.int32)
        for row_L, story in zip(rows_BL, part, strict=True):
            row_L[1 : len(story.words)] = [ids[token] for token in story.tokens[:-1]]
        logits_BLV = np.asarray(model.logits(*sharding.put_whole((rows_BL,), model.mesh)), np.float64)
        p_BLV = np.exp(logits_BLV - np.logaddexp.reduce(logits_BLV, axis=-1, keepdims=True))
        for p_LV, story in zip(p_BLV[:count], part, strict=False):
            for place, word in enumerate(story.words):
                kind, wrong = wrong_words(story, place)
                p_right, p_wrong, p_options = (
                    [p_LV[place, ids[as_token(text, place)]] for text in texts]
                    for texts in ([word.text], wrong, word.options)
                )
                is_right = p_right[0] > max(p_wrong, default=-1)
                values = (is_right, sum(p_options), -np.log(p_right[0]), word.nats)
                for of_kind in {EVERY, kind}:
                    found[of_kind].append(values)
        progress.advance(count * length)
    return [{"kind": kind, "words": len(rows)} | _means(kind, rows) for kind, rows in found.items()]


def wrong_words(story: Story, place: int) -> tuple[str, list[str]]:
    """Return the kind of a word and wrong words that could be taken for it. Kinds without wrong words are EVERY.

    Of a verb, the form of the other number; of a pronoun, those without exactly one antecedent; of the predicate of a
    pronoun, those of other classes than its antecedent's; of the noun of an answer, all other nouns.
    """
    word, other_of = story.words[place], {link.kind: link.other for link in story.links if link.word == place}
    if "answer" in other_of:
        return KINDS[6], [noun for noun in ALL_NOUNS if noun != word.text]
    if "antecedent" in other_of:
        forms = list(PRONOUNS) if word.role == "subject" else list(PRONOUNS.values())
        forms = [form.capitalize() for form in forms] if word.text[0].isupper() else forms
        return KINDS[4], [form for form in forms if form not in word.options]
    if word.role == "verb" and "subject" in other_of and story.words[other_of["subject"]].role == "subject":
        between = story.words[other_of["subject"] + 1 : place]
        numbers = {noun.text in PLURALS for noun in between if noun.text in ALL_NOUNS}
        is_plural = word.text in PLURALS
        kind = KINDS[1]
        if numbers:
            kind = KINDS[3] if (not is_plural) in numbers else KINDS[2]
        return kind, [OTHER_NUMBER[word.text]]
    if word.role == "predicate" and story.words[place - 2].text.lower() in PRONOUNS:
        return KINDS[5], [other for others in PREDICATES.values() for other in others if other not in word.options]
    return EVERY, []


def _means(kind: str, rows: list[tuple[float, ...]]) -> dict[str, float | None]:
    names = ("accuracy", "possible", "nll", "grammar_nll")
    means = np.mean(np.array(rows, float), axis=0).tolist() if rows else [None] * len(names)
    return dict(zip(names, means, strict=True)) | ({"accuracy": None} if kind == EVERY else {})


class Grammar(Suite):
    name = "grammar"
    needs_attention = False
    needs_text = True
    needs_next_token = True

    def check(self, trained: Config, options: SuiteOptions) -> None:
        super().check(trained, options)
        require(trained.data.corpus == "english", "data.corpus", trained.data.corpus, "must be english for this suite")

    def measure(self, run: Run, options: SuiteOptions) -> Result:
        stories = list(itertools.islice(english.stories(options.split), STORIES))
        total = len(stories) * max(len(story.words) for story in stories)
        with progress.shown("stories", total):
            return {"rows": measure(run.model, run.tokenizer, stories)}
