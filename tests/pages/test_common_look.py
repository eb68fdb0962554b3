"""The colours that all pages share: text is legible in light and in dark, and ramps have equal steps of lightness."""

import itertools
import re

import numpy as np
import pytest

from tests.conftest import REPOSITORY

COMMON = REPOSITORY / "mini_gpt/pages/common"
TEXTS = [*itertools.product(("ink", "soft", "accent"), ("paper", "card")), ("on-accent", "accent"), ("paper", "mark")]
THEMES = ("light", "dark")


def luminance(colour):
    """Return the relative luminance (WCAG 2.2)."""
    rgb = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4) @ (0.2126, 0.7152, 0.0722)


def contrast(one, other):
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def style(theme):
    """Return {name: colour} of the style sheet."""
    text = (COMMON / "base.css").read_text(encoding="utf-8")
    found = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", text)
    return {name: colours[THEMES.index(theme)] for name, *colours in found}


def stops(name, theme):
    script = (COMMON / "colours.js").read_text(encoding="utf-8")
    part = re.search(rf"const {name} = \{{(.*?)\}};", script, re.DOTALL)[1]
    return re.findall(r"#[0-9a-f]{6}", re.search(rf"{theme}: \[(.*?)\]", part, re.DOTALL)[1])


@pytest.mark.parametrize("theme", THEMES)
def test_text_has_enough_contrast(theme):
    colours = style(theme)
    assert len(colours) >= 9
    assert {pair: round(ratio, 2) for pair in TEXTS if (ratio := contrast(*map(colours.get, pair))) < 4.5} == {}
    assert contrast(colours["edge"], colours["paper"]) >= 3, "borders of controls (WCAG 2.2, 1.4.11)"
    lines = stops("SERIES", theme)
    assert len(lines) == 8 and min(contrast(line, colours["card"]) for line in lines) >= 4.5


@pytest.mark.parametrize("theme", THEMES)
def test_the_ramp_goes_evenly_from_paper_to_ink(theme):
    ramp, paper = stops("RAMPS", theme), style(theme)["paper"]
    lightness = np.array([116 * np.cbrt(y) - 16 if y > 0.008856 else 903.3 * y for y in map(luminance, ramp)])  # CIE L*
    np.testing.assert_allclose(
        np.diff(lightness), np.ptp(lightness) / 8 * np.sign(lightness[-1] - lightness[0]), atol=1
    )
    signed = stops("SIGNED", theme)
    assert ramp[0] == signed[len(signed) // 2] == paper and contrast(ramp[-1], paper) > 14
