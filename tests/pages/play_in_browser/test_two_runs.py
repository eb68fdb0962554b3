"""Two runs on one page in Chromium read the same text, and the page says when their steps differ."""

import numpy as np
import pytest

from tests.conftest import make_text
from tests.pages.play_in_browser.play_page import LIMIT, TEXT, losses_of, without_head

pytestmark = pytest.mark.slow
MOVE = "document.querySelector('#order .chip button:last-child').click()"


def test_two_runs_read_the_same_text(page, runs):
    text = make_text(0, 40)[:128]
    page.open("two")
    wanted = [losses_of(run.model, text).mean() for run in runs]
    assert page.losses() == [[pytest.approx(loss, abs=LIMIT)] for loss in wanted]
    assert page.find("tab-loss").get_attribute("aria-selected") == "true"
    assert "trained context ends: 32" in page.find("loss-chart").get_attribute("textContent")
    beyond = page.js("return [...document.querySelectorAll('.paint .beyond')].map((span) => +span.dataset.last)")
    assert min(beyond) == 32
    page.click("run-1").click("head-1.2")
    edited = losses_of(without_head(runs[1].model, 1, 2), text).mean()
    assert page.losses()[0] == [pytest.approx(wanted[0], abs=LIMIT)]
    assert page.losses()[1] == [pytest.approx(wanted[1], abs=LIMIT), pytest.approx(edited, abs=LIMIT)]


def test_measured_heads_are_those_of_one_run(page):
    page.open("two", text=TEXT).click("measure")
    page.wait(lambda: page.find("measure").is_enabled())
    label = lambda: page.find("head-1.3").get_attribute("aria-label")
    assert "off changes the loss by" in label()
    page.click("run-1")
    assert "off changes the loss by" not in label()
    # A measurement ends when another run is chosen.
    page.js(
        "window.sent = []; const send = engines.send;"
        "engines.send = (request, reply) => { sent.push(request.slot); return send(request, reply); };"
        "for (const id of ['measure', 'run-0']) document.getElementById(id).click();"
    )
    page.wait(lambda: page.find("measure").is_enabled())
    assert 0 < page.js("return sent.filter((slot) => slot === 'probe').length") < 8


def test_a_moved_word_moves_the_predictions_as_the_models_say(page, runs):
    page.open("two", text="one two three")
    page.js(MOVE)
    one, two = (run.model for run in runs)
    for models in ([one, two], [one, without_head(two, 1, 2)]):  # a head is removed after the move
        page.wait(lambda: page.js("return document.querySelectorAll('#duel tr[data-moved]').length") == 2)
        assert page.js("return document.getElementById('text').value") == "two one three"
        for number, model in enumerate(models):
            probabilities = [next_of(model, text) for text in ("one two three", "two one three")]
            moved = page.js(f"return +document.querySelectorAll('#duel tr[data-moved]')[{number}].dataset.moved")
            assert moved == pytest.approx(known_movement(*probabilities), abs=1e-3)
            assert 0.5 < moved / np.maximum(probabilities[0] - probabilities[1], 0).sum() <= 1.001
        page.click("run-1").click("head-1.2")
    page.click("order-first")
    assert page.js("return document.getElementById('text').value") == "one two three"
    page.wait(lambda: page.js("return document.getElementById('duel')") is None)


def known_movement(p_V, q_V):
    """Return the larger of both sums of differences, if only the 48 most likely tokens of each side are known."""
    each = [np.where(x_V >= np.sort(x_V)[-48], x_V, 0) for x_V in (p_V, q_V)]
    at_most = [np.where(x_V > 0, x_V, np.sort(x_V)[-48]) for x_V in each]
    return max(np.maximum(each[0] - at_most[1], 0).sum(), np.maximum(each[1] - at_most[0], 0).sum())


def next_of(model, text):
    tokens_BL = np.tile(np.frombuffer(text.encode(), np.uint8).astype(np.int32), (8, 1))
    logits_V = np.asarray(model(tokens_BL), np.float64)[0, -1]
    exp_V = np.exp(logits_V - logits_V.max())
    return exp_V / exp_V.sum()
