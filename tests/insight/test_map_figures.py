"""Figures of attention maps show the weights of the model, the tokens along both axes, and the true alignment."""

import dataclasses

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from mini_gpt import suites
from mini_gpt.data import tasks
from mini_gpt.data.tokenizers import CharacterTokenizer
from mini_gpt.insight import attention, examples, maps
from mini_gpt.insight.curves import token_label
from mini_gpt.insight.maps import Panel
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites import base
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import loop
from mini_gpt.training.run import Run
from tests.insight.test_maps_by_kind import PAIRS, exact_weights
from tests.random_models import random_model

TOKENIZER = CharacterTokenizer(tasks.ALPHABET)
ALIGNMENT = (((0, 2), (1, 3)), ((2, 3), (0, 1)))


@pytest.fixture
def panel(small):
    config = small(**PAIRS | {"model__encoder_layers": 1})
    pair = examples.of_problem(("abc", "cab"), config, TOKENIZER, ALIGNMENT)
    return Panel("mine", random_model(config, TOKENIZER.token_bytes, noise=0.3), TOKENIZER, pair)


def labels(axes):
    return [[label.get_text() for label in ticks] for ticks in (axes.get_yticklabels(), axes.get_xticklabels())]


def shown(axes):
    return np.asarray(axes.get_images()[0].get_array())


def frames(axes):
    """Return the frames as (x, y, width, height)."""
    patches = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    return [(*patch.get_xy(), patch.get_width(), patch.get_height()) for patch in patches]


def test_a_pair_has_the_tokens_that_are_read_and_written(panel):
    source, inputs, written, alignment = panel.text
    separator = len(TOKENIZER.token_bytes) - 1
    assert source[0] == inputs[0] == written[-1] == separator
    assert [TOKENIZER.decode(part) for part in (source[1:], inputs[1:], written[:-1])] == ["abc", "cab", "cab"]
    cells = examples.cells(alignment, (4, 4)).astype(int).tolist()
    assert cells == [[0, 0, 0, 1], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    longer = examples.of_problem(("abc", "c" * 30), panel.model.config, TOKENIZER)
    assert len(longer.written) == 31 and longer.alignment == ()
    aligned = dataclasses.replace(panel.model.config.data, corpus="task:reverse_words")
    known = examples.of_problem(("ab c", "c ab"), dataclasses.replace(panel.model.config, data=aligned), TOKENIZER)
    assert known.alignment == [((0, 2), (2, 4)), ((3, 4), (0, 1))]


def test_the_figure_has_a_row_for_each_kind_of_attention(panel):
    pair = panel.text
    expected = exact_weights(panel.model, pair.inputs, pair.source)
    *axes, bar = maps.figure([panel, panel]).axes
    axes = np.array(axes).reshape(6, 2)
    assert [label.get_text() for label in bar.get_yticklabels()] == ["0", "0.01", "0.1", "0.25", "0.5", "1"]
    texts = {"encoder": (["∅", *"abc"], ["∅", *"abc"]), "decoder": (["∅", *"cab"], ["∅", *"cab"])}
    texts["cross"] = ([*"cab", "∅"], ["∅", *"abc"])
    for row, line in enumerate(axes):
        kind = attention.KINDS[row % 3]
        assert [a.get_visible() for a in line] == [True, kind != "encoder"]
        assert line[0].get_ylabel().startswith("mine\nposition=sinusoidal\n" + kind)
        for layer, weights_HLS in enumerate(expected[kind]):
            np.testing.assert_allclose(shown(line[layer]), weights_HLS.mean(axis=0), atol=1e-4)
            hidden = np.ma.getmaskarray(line[layer].get_images()[0].get_array())
            later = np.triu(np.ones((4, 4), bool), 1) if kind == "decoder" else np.zeros((4, 4), bool)
            assert (hidden == later).all() and (line[layer].patch.get_hatch() is not None) == later.any()
            rows, columns = labels(line[layer])
            assert (rows, columns) == (texts[kind][0] if layer == 0 else [], texts[kind][1])
            marked = [(0.5, 0.5, 2, 2), (2.5, -0.5, 1, 1)] if kind == "cross" else []
            assert frames(line[layer]) == marked


def test_cross_attention_has_a_map_for_each_head(panel):
    pair = panel.text._replace(alignment=())
    expected = exact_weights(panel.model, pair.inputs, pair.source)["cross"]
    axes = np.array(maps.cross_figure(panel._replace(text=pair)).axes[:-1]).reshape(2, 4)
    for layer, head in np.ndindex(2, 4):
        np.testing.assert_allclose(shown(axes[layer, head]), expected[layer, head], atol=1e-4)
        assert axes[layer, head].get_title() == f"head {layer}.{head}" and frames(axes[layer, head]) == []


FEW = {"train__steps": 1, "eval__tokens": 64}


@pytest.mark.slow
def test_the_suite_draws_a_problem_or_a_pair_of_your_own(small, tmp_path):
    loop.train(small(**PAIRS | FEW | {"model__position": "learned"}), tmp_path / "run", conclude=False)
    run = Run(tmp_path / "run")
    suites.evaluate(run, "figures", SuiteOptions())
    written = {path.stem for path in (run.workdir / "eval" / "figures").iterdir()}
    assert written == {"maps", "cross", "similarity", "sums"}
    question, answer = tasks.problem("task:reverse", "validation", 0, 0, shortest=3, longest=3)
    pair = base.example(run, SuiteOptions())
    assert run.tokenizer.decode(pair.source) == question and run.tokenizer.decode(pair.written) == answer
    own = base.example(run, SuiteOptions(text="ab=c=d"))
    assert run.tokenizer.decode(own.source) == "ab=c" and run.tokenizer.decode(own.written) == "d"
    with pytest.raises(UserError, match=r"^--text: found 'ab'; must be SOURCE=TARGET for a model with an encoder"):
        base.example(run, SuiteOptions(text="ab"))
    with pytest.raises(UserError, match=r"^model\.max_positions: the learned table has 9 positions; found"):
        base.example(run, SuiteOptions(text=f"{'a' * 10}=b"))


@pytest.mark.slow
def test_heads_side_by_side_are_those_of_the_lowest_entropy(small):
    model = random_model(small(model__num_layers=2), TOKENIZER.token_bytes, noise=0.3)
    tokens = np.arange(12, dtype=np.int32) % 5
    drawn = maps.heads_figure(Panel("mine", model, TOKENIZER, tokens))
    weights_NHLS = np.stack([layer.weights_BHLS[0] for layer in attention.attention_maps(model, tokens[None])])
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy_NHL = -np.where(weights_NHLS > 0, weights_NHLS * np.log(weights_NHLS), 0).sum(-1)
    relative_NH = (entropy_NHL / np.log(np.maximum(np.arange(1, 13), 2))).mean(-1)
    places = [divmod(place, 4) for place in sorted(np.argsort(relative_NH, axis=None)[:6].tolist())]
    axes = [axes for axes in drawn.axes if axes.get_title()]
    assert [a.get_title() for a in axes] == [f"head {n}.{h}, entropy {relative_NH[n, h]:.2f}" for n, h in places]
    for a, place in zip(axes, places, strict=True):
        np.testing.assert_allclose(np.ma.filled(shown(a), 0), weights_NHLS[place], atol=1e-5)
    assert labels(axes[0])[1] == [token_label(character) for character in TOKENIZER.decode(tokens)]
