"""The drawn mask of a KV cache is the one that attention uses, and shows each new token the keys that it should see."""

import jax
import numpy as np
import pytest

from mini_gpt.insight import cache_masks
from mini_gpt.model.attention import reference


@pytest.mark.slow
def test_the_drawn_masks_are_those_of_attention(monkeypatch):
    used = []
    plain = reference.observe
    keep = lambda module, name, value: used.append(np.asarray(value)) if name == "visible" else None
    monkeypatch.setattr(reference, "observe", lambda *given: (keep(*given), plain(*given)))
    with jax.disable_jit():
        layers = cache_masks.masks.__wrapped__()
    prompts, steps = used[:2], used[2:]
    assert len(steps) == 2 * cache_masks.STEPS
    for number, layer in enumerate(layers):
        np.testing.assert_array_equal(layer.prompt_BLL, np.broadcast_to(prompts[number], layer.prompt_BLL.shape))
        np.testing.assert_array_equal(layer.visible_BTS, np.concatenate(steps[number::2], axis=1))


def test_a_new_token_sees_itself_and_the_keys_before_it_within_the_window():
    full, window = cache_masks.masks()
    assert (full.window, window.window) == (None, 4) and window.visible_BTS.shape[-1] == 4
    for layer in (full, window):
        reach = layer.window or 99
        distance_LL = np.subtract.outer(np.arange(5), np.arange(5))
        np.testing.assert_array_equal(layer.prompt_BLL, [(distance_LL >= 0) & (distance_LL < reach)] * 2)
        for row, length in enumerate(cache_masks.LENGTHS):
            for step, (visible_S, indices_S) in enumerate(
                zip(layer.visible_BTS[row], layer.indices_BTS[row], strict=True)
            ):
                new = length + step
                assert sorted(indices_S[visible_S]) == list(range(max(0, new - reach + 1), new + 1))
    figure = cache_masks.figure()
    shown = [axes.get_title() for axes in figure.axes]
    new = "new tokens, window 4\n1 × 4 each, a ring"
    assert shown[:4] == ["prompt, all keys\n5 × 5", "new tokens, all keys\n1 × 9 each", "prompt, window 4\n5 × 5", new]
    texts = [text.get_text() for text in figure.axes[3].texts]
    assert texts[:8] == ["2", "3", "0", "1", "2", "3", "4", "1"]
