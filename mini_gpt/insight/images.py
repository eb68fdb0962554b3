"""Images for TensorBoard as arrays, because plotting with Matplotlib is slower than a training step."""

from collections.abc import Sequence

import numpy as np

# Ramps of colours on light paper, as in pages/common/colours.js: from paper to ink in equal steps of lightness, and for
# signed values from blue over paper to red. So 0 has the colour of the paper.
WEIGHTS = ("#fcfcfa", "#cfdcf4", "#a2bdec", "#779ee1", "#4f7fd5", "#3760b7", "#254492", "#1b2c60", "#16181d")
SIGNED = ("#1b3f8f", "#5b86d6", "#b9cdf0", "#fcfcfa", "#f3c4b3", "#d97452", "#962d12")
GAP = 3  # pixels between maps
PAPER, INK, LINE = 255, 60, 205  # grey levels
SMALLEST, LARGEST = 96, 256  # pixels of one map
HATCH = 6  # pixels between the lines that mark masked pairs
BAR, TICK, TEXT = 10, 4, 11  # pixels: heights of the colour bar, of its ticks and of letters
TICKS = (0, 0.1, 0.5, 1)  # weights


def rgb(ramp: Sequence[str]) -> np.ndarray:
    """Return the 256 colours of a ramp, uint8 [256, 3]: those of the Matplotlib colormap, whose import takes longer."""
    stops_N3 = np.array([list(bytes.fromhex(stop[1:])) for stop in ramp]) / 255
    places_N = np.linspace(0, 1, len(ramp)) * 255
    channels = [np.interp(np.arange(256), places_N, channel_N) for channel_N in stops_N3.T]
    return (np.stack(channels, axis=-1) * 255).astype(np.uint8)


WEIGHTS_X3, SIGNED_X3 = rgb(WEIGHTS), rgb(SIGNED)


def map_grid(weights_NHLS: np.ndarray) -> np.ndarray:
    """Return RGB pixels, uint8: layers downwards, heads across, and a colour bar; NaN is a masked pair, hatched.

    Square roots make small weights visible.
    """
    is_masked_NHLS = _enlarged(np.isnan(weights_NHLS)[..., None])[..., 0]
    pixels_NHLS3 = _enlarged(WEIGHTS_X3[_levels(np.sqrt(np.clip(weights_NHLS, 0, 1)))])
    layers, heads, height, width, _ = pixels_NHLS3.shape
    is_line_LS = np.add(*np.ogrid[:height, :width]) % HATCH == 0
    pixels_NHLS3[is_masked_NHLS] = PAPER
    pixels_NHLS3[is_masked_NHLS & is_line_LS] = LINE
    with_gaps = np.pad(pixels_NHLS3, ((0, 0), (0, 0), (0, GAP), (0, GAP), (0, 0)), constant_values=PAPER)
    grid = with_gaps.transpose(0, 2, 1, 3, 4).reshape(layers * (height + GAP), heads * (width + GAP), 3)[:-GAP, :-GAP]
    rows = {layer * (height + GAP) + height // 2: f"layer {layer}" for layer in range(layers)}  # at their middles
    columns = {head * (width + GAP) + width // 2: f"head {head}" for head in range(heads)}
    return _framed(grid, rows, columns, (WEIGHTS_X3, {tick**0.5: f"{tick:g}" for tick in TICKS}))


def similarity(table_PD: np.ndarray) -> np.ndarray:
    """Return RGB pixels, uint8, of the cosines between the rows of a table, with positions and a colour bar."""
    step = max(1, -(-len(table_PD) // LARGEST))
    pixels = _enlarged(SIGNED_X3[_levels((cosines(table_PD[::step]) + 1) / 2)])
    cell = len(pixels) / len(table_PD)
    places = {int((place + 0.5) * cell): str(place) for place in (0, len(table_PD) // 2, len(table_PD) - 1)}
    return _framed(pixels, places, places, (SIGNED_X3, {0: "-1", 0.5: "0", 1: "1"}))


def cosines(table_PD: np.ndarray) -> np.ndarray:
    """Return the cosines between the rows of a table, float64; 0 where a row is zero."""
    rows_PD = table_PD.astype(np.float64)
    rows_PD = rows_PD / np.maximum(np.linalg.norm(rows_PD, axis=1, keepdims=True), 1e-12)
    return rows_PD @ rows_PD.T


def _levels(shares: np.ndarray) -> np.ndarray:
    return np.clip(np.round(np.nan_to_num(shares) * 255), 0, 255).astype(int)  # NaN gets the first colour


def _enlarged(pixels: np.ndarray) -> np.ndarray:
    times = max(1, SMALLEST // pixels.shape[-3])
    return pixels.repeat(times, axis=-3).repeat(times, axis=-2)


def _framed(
    pixels: np.ndarray, rows: dict[int, str], columns: dict[int, str], bar: tuple[np.ndarray, dict[float, str]]
) -> np.ndarray:
    """Put labels at the left and at the top, and a colour bar below.

    rows, columns: {middle in pixels: label}.
    bar: its colours, and {place from 0 to 1: tick}.
    """
    from PIL import Image, ImageDraw, ImageFont  # slow to import

    font, (colours_X3, ticks), (height, width) = ImageFont.load_default(size=TEXT), bar, pixels.shape[:2]
    widest = lambda labels: round(max(map(font.getlength, labels)))
    left, top = widest(rows.values()) + 3 * GAP, TEXT + 3 * GAP
    size, below = min(width, LARGEST), 4 * GAP + BAR + TICK + TEXT
    right = (widest(ticks.values()) + widest(columns.values())) // 2
    canvas = Image.new("RGB", (left + width + right, top + height + below), (PAPER,) * 3)
    draw = ImageDraw.Draw(canvas)
    canvas.paste(Image.fromarray(pixels), (left, top))
    for middle, label in rows.items():
        draw.text((left - 2 * GAP, top + middle), label, (INK,) * 3, font, anchor="rm")
    for middle, label in columns.items():
        draw.text((left + middle, top - GAP), label, (INK,) * 3, font, anchor="mb")
    begin = top + height + 2 * GAP
    bar_pixels = colours_X3[np.linspace(0, 255, size).astype(int)][None].repeat(BAR, axis=0)
    canvas.paste(Image.fromarray(bar_pixels), (left, begin))
    for share, label in ticks.items():
        at = left + round(share * (size - 1))
        draw.line((at, begin + BAR, at, begin + BAR + TICK), (INK,) * 3)
        draw.text((at, begin + BAR + TICK + GAP), label, (INK,) * 3, font, anchor="mt")
    return np.asarray(canvas)
