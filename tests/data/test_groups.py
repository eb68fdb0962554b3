"""The groups of the word problems are groups, and their answers are the targets of the questions."""

import argparse
import itertools

import numpy as np
import pytest

from mini_gpt.commands.generate import request
from mini_gpt.data import task_batches, tasks, tokenizers
from mini_gpt.data.tasks import groups
from mini_gpt.evaluation import task_accuracy
from mini_gpt.objectives.tasks import TaskObjective
from mini_gpt.runtime.errors import UserError
from tests.random_models import random_model

ORDERS = {"z60": 60, "s3": 6, "a5": 60, "s5": 120}


def table(name):
    """Return the products as numbers of elements, [a, b]; a product outside the group raises KeyError."""
    elements = groups.GROUPS[name]
    numbers = {element: number for number, element in enumerate(elements)}
    return np.array([[numbers[groups.product(a, b)] for b in elements] for a in elements])


@pytest.mark.parametrize("name", ORDERS)
def test_the_elements_are_a_group_of_this_order(name):
    products = table(name)
    every = np.arange(ORDERS[name])
    assert products.shape == (ORDERS[name],) * 2 and groups.GROUPS[name] == sorted(set(groups.GROUPS[name]))
    np.testing.assert_array_equal(products[0], every)  # the first element is the identity
    np.testing.assert_array_equal(products[:, 0], every)
    assert ((products == 0).sum(axis=0) == 1).all() and ((products == 0) == (products == 0).T).all(), "inverses"
    for a in every:  # (a·b)·c = a·(b·c)
        np.testing.assert_array_equal(products[products[a]], products[a][products])
    assert (np.sort(products) == every).all(), "after any prefix, a uniform element gives a uniform product"


def test_only_a5_and_s5_are_not_solvable():
    """The orders of the derived subgroups end with 1 in a solvable group."""
    for name, expected in {"z60": [60, 1], "s3": [6, 3, 1], "a5": [60, 60], "s5": [120, 60, 60]}.items():
        products, orders = table(name), [ORDERS[name]]
        inverse = np.argmax(products == 0, axis=1)
        members = set(range(ORDERS[name]))
        while orders[-1] > 1 and (len(orders) < 2 or orders[-1] != orders[-2]):
            pairs = itertools.product(members, repeat=2)
            found = {int(products[products[a, b], products[inverse[a], inverse[b]]]) for a, b in pairs}
            while (larger := found | {int(products[a, b]) for a in found for b in found}) != found:
                found = larger
            members = found
            orders.append(len(members))
        assert orders == expected


@pytest.fixture
def config(small):
    fields = {"data__corpus": "task:group_s3", "data__tokenizer": "characters", "data__task_length": 6}
    return small(**fields, model__num_layers=2, context_length=8)


TOKENIZER = tokenizers.CharacterTokenizer(tasks.known()["group_s3"].alphabet)


def test_each_target_is_the_product_up_to_its_place(config):
    batch = task_batches.TaskBatches(config, TOKENIZER)[3]
    elements, separator = groups.GROUPS["s3"], tokenizers.separator(TOKENIZER)
    letters = {chr(0x100 + number): element for number, element in enumerate(elements)}
    for inputs, targets, weights in zip(*(batch[name] for name in ("inputs", "targets", "weights")), strict=True):
        length = int(weights.sum())
        assert (weights[:length] == 1).all() and (inputs[length:] == separator).all()
        question, answer = TOKENIZER.decode(inputs[:length]), TOKENIZER.decode(targets[:length])
        assert question[-1] == "=" and answer[-1] == "\n" and 2 <= length - 1 <= 6
        places = range(3)
        for end, letter in enumerate(answer[:-1], start=1):
            moved = places
            for factor in reversed(question[:end]):  # the last factor acts first
                moved = [letters[factor][x] for x in moved]
            assert tuple(moved) == letters[letter]


def test_accuracy_compares_likeliest_tags_with_answers(config):
    """Answers are the likeliest letters of a random model at most places, and other letters at each third place."""
    model = random_model(config, TOKENIZER.token_bytes, noise=0.4)
    words = [tasks.problem("task:group_s3", "test", 0, index, shortest=5, longest=5)[0] for index in range(6)]
    logits_BLV = np.stack([model(TOKENIZER.encode(f"{word}=")[None])[0] for word in words])
    answers_BL = np.argmax(logits_BLV[..., : tokenizers.separator(TOKENIZER)], axis=-1)
    answers_BL.flat[::3] = (answers_BL.flat[::3] + 1) % 6
    answers_BL[:, -1] = TOKENIZER.encode(tasks.END)
    is_right_BL = np.argmax(logits_BLV, axis=-1) == answers_BL
    problems = [(word, TOKENIZER.decode(row[:-1])) for word, row in zip(words, answers_BL, strict=True)]
    score = task_accuracy.accuracy(model, TOKENIZER, problems, config.context_length)
    assert score.token_accuracy == is_right_BL[:, :-1].mean() and 0.4 < score.token_accuracy < 0.7
    assert score.exact_match == is_right_BL.all(axis=1).mean()


def test_a_model_that_tags_writes_no_text(config):
    assert TaskObjective(config, TOKENIZER, lambda split: np.zeros(0, np.int32)).prompt is None
    run = argparse.Namespace(config=config)
    with pytest.raises(UserError, match=r"^data\.corpus: found task:group_s3; the model tags .* --suite=tasks"):
        request.make(run, ["ĀĀ="], argparse.Namespace(), 0)
