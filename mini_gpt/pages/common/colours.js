// Colours of maps and of shaded text. The ramp goes from paper to ink in equal steps of lightness; signed values go
// from blue over paper to red. So 0 has the colour of the paper in light and in dark.

import { clamped } from "./numbers.js";
import { theme } from "./theme.js";

const RAMPS = {
  light: ["#fcfcfa", "#cfdcf4", "#a2bdec", "#779ee1", "#4f7fd5", "#3760b7", "#254492", "#1b2c60", "#16181d"],
  dark: ["#15171b", "#1e2d50", "#284386", "#355db4", "#477bd8", "#6b9ae8", "#94b9f4", "#c1d8fb", "#f2f6ff"],
};
const SIGNED = {
  light: ["#1b3f8f", "#5b86d6", "#b9cdf0", "#fcfcfa", "#f3c4b3", "#d97452", "#962d12"],
  dark: ["#a9c8ff", "#5f92ea", "#2a4580", "#15171b", "#6e3421", "#d8704a", "#ffc0a6"],
};
// Of lines and heads.
const SERIES = {
  light: ["#2f5fd0", "#b8431b", "#1f7a4d", "#9c2f92", "#806000", "#08768a", "#6c4cc9", "#b3304f"],
  dark: ["#7fa6ff", "#f0875f", "#5cc48e", "#e08ad8", "#d8b23c", "#4cc3da", "#b19cf5", "#f0849c"],
};

const rgbOf = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const mixed = (from, to, share) => from.map((value, k) => Math.round(value + (to[k] - value) * share));

export function table256(stops) {
  const colours = stops.map(rgbOf);
  return Array.from({ length: 256 }, (_, n) => {
    const at = (n / 255) * (stops.length - 1);
    const low = Math.min(stops.length - 2, Math.floor(at));
    return mixed(colours[low], colours[low + 1], at - low);
  });
}
export const TABLES = Object.fromEntries(
  ["light", "dark"].map((name) => [name, { ramp: table256(RAMPS[name]), signed: table256(SIGNED[name]) }]),
);
export const themeName = () => (theme.isDark ? "dark" : "light");
export const seriesColour = (n) => SERIES[themeName()][n % 8];

// A scale: what a value's colour and a colour bar's ticks are. `share` is from 0 to 1.
export const scales = {
  // Square roots, so that small weights can be seen; the ticks are weights.
  weights: { table: "ramp", share: (weight) => Math.sqrt(weight), ticks: [0, 0.01, 0.1, 0.25, 0.5, 1] },
  linear: (low, high, ticks) => ({
    table: "ramp",
    share: (v) => (v - low) / (high - low),
    ticks: ticks ?? [low, (low + high) / 2, high],
  }),
  signed: (reach, ticks) => ({
    table: "signed",
    share: (v) => 0.5 + v / (2 * reach),
    ticks: ticks ?? [-reach, 0, reach],
  }),
};

// The place of a value in a table of colours; null for a value that is masked (null), or not a number.
export function colourIndex(scale, value) {
  const share = value === null ? NaN : scale.share(value);
  return Number.isNaN(share) ? null : clamped(Math.round(255 * share), 0, 255);
}

// [r, g, b] of a value, in the colours of now; null if it has no colour.
export function colourOf(scale, value) {
  const index = colourIndex(scale, value);
  return index === null ? null : TABLES[themeName()][scale.table][index];
}

function luminance(rgb) {
  const [r, g, b] = rgb.map((v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

// The style of text on a colour: black or white, so that the contrast is at least 4.5; nothing without a colour.
export const textOn = (rgb) => rgb && `background:rgb(${rgb});color:${luminance(rgb) > 0.179 ? "#000" : "#fff"}`;

// The style of text that is shaded by a value on a scale; nothing for 0, which has the paper's colour.
export const shadeStyle = (scale, value) => (value === 0 ? "" : textOn(colourOf(scale, value)));
