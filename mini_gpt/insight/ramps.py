"""Ramps of colours for maps, on light paper: the same as in the pages (pages/common/colours.js).

Weights go from paper to ink in equal steps of lightness, so 0 has the colour of the paper. Signed values go from blue
over paper to red.
"""

from collections.abc import Sequence

import numpy as np

WEIGHTS = ("#fcfcfa", "#cfdcf4", "#a2bdec", "#779ee1", "#4f7fd5", "#3760b7", "#254492", "#1b2c60", "#16181d")
SIGNED = ("#1b3f8f", "#5b86d6", "#b9cdf0", "#fcfcfa", "#f3c4b3", "#d97452", "#962d12")


def rgb(ramp: Sequence[str]) -> np.ndarray:
    """Return the 256 colours of a ramp, uint8 [256, 3]: those of the Matplotlib colormap, whose import takes longer."""
    stops_N3 = np.array([list(bytes.fromhex(stop[1:])) for stop in ramp]) / 255
    places_N = np.linspace(0, 1, len(ramp)) * 255
    channels = [np.interp(np.arange(256), places_N, channel_N) for channel_N in stops_N3.T]
    return (np.stack(channels, axis=-1) * 255).astype(np.uint8)
