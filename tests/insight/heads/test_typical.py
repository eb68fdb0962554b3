"""The query that is typical of a head: of its label, or of its mean pattern."""

import numpy as np
import pytest

from mini_gpt.insight.heads import templates, typical

LENGTH = 12
SEEN_LS = np.tri(LENGTH, dtype=bool)
PREVIOUS_LS = np.eye(LENGTH, k=-1, dtype=bool)


def uniform() -> np.ndarray:
    return SEEN_LS / SEEN_LS.sum(-1, keepdims=True)


def of_one_head(weights_LS, *kinds_LS, seen_LS=SEEN_LS) -> list[int]:
    kinds_TLS = np.array(kinds_LS, bool).reshape(-1, *weights_LS.shape)
    return typical.queries(weights_LS[None].astype(np.float32), seen_LS[None], kinds_TLS)[0].tolist()


def test_the_typical_query_of_a_kind_reads_such_keys_the_most():
    weights_LS = uniform()
    weights_LS[5] = 0.02 * SEEN_LS[5] + 0.88 * PREVIOUS_LS[5]
    weights_LS[9] = 0.05 * SEEN_LS[9] + 0.5 * PREVIOUS_LS[9]
    assert of_one_head(weights_LS, PREVIOUS_LS)[0] == 5


def test_a_query_that_can_only_read_such_keys_is_not_typical():
    """The second token has a weight of 0.9 on the previous one, of two keys; the eighth has 0.8, of eight."""
    weights_LS = uniform()
    weights_LS[1, :2] = 0.9, 0.1
    weights_LS[7] = 0.2 / 7 * SEEN_LS[7]
    weights_LS[7, 6] = 0.8
    assert of_one_head(weights_LS, PREVIOUS_LS)[0] == 7
    assert of_one_head(uniform(), SEEN_LS)[0] == -1, "a query that sees keys of this kind only"


def test_a_kind_that_no_query_reads_has_no_typical_query():
    weights_LS = uniform()
    avoided_LS = np.zeros_like(SEEN_LS)
    assert of_one_head(weights_LS, avoided_LS, PREVIOUS_LS)[:2] == [-1, -1]


@pytest.mark.parametrize("shape", [(12, 12), (12, 9), (9, 12)])
def test_without_a_kind_the_query_nearest_to_the_mean_is_typical(shape):
    """Each query reads the keys at its own two distances in turn, but one reads both as the mean does."""
    weights_LS = np.zeros(shape)
    for query in range(2, min(shape)):
        weights_LS[query, [query, query - 2]] = (0.9, 0.1) if query % 2 else (0.1, 0.9)
    weights_LS[6, [6, 4]] = 0.5, 0.5
    seen_LS = weights_LS > 0
    assert of_one_head(weights_LS, seen_LS=seen_LS) == [6]


def test_a_head_opens_on_the_query_of_its_label():
    query_NHK = np.array([[[3, -1, 8], [4, 5, 9], [6, 7, 2]]])
    of_labels = lambda *names: typical.of_labels(query_NHK, ["self", "induction"], [names] if names else None)
    assert of_labels("self", "induction", "mixed") == [[3, 5, 2]]
    assert of_labels("induction", "", "self") == [[8, 9, 6]], "no query reads the keys of induction"
    assert of_labels() == [[8, 9, 2]]


def test_in_a_text_induction_reads_what_followed_a_copy():
    tokens_BL = np.array([[4, 7, 4, 4, 9, 7]])
    assert np.argwhere(templates.after_copies(tokens_BL)[0]).tolist() == [[2, 1], [3, 1], [5, 2]]
