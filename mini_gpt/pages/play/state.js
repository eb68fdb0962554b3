"use strict";
// What the page shows, and its form in the fragment of the URL.

const VIEWS = [["attention", "Attention"], ["map", "Attention map"], ["loss", "Loss along the text"], ["lens", "Logit lens"], ["stream", "Residual stream"]];
const UNITS = { nats: 1, bits: 1 / Math.LN2 };
const DEFAULTS = { run: 0, view: "attention", layer: 0, head: 0, pin: null, range: null, colours: "0", unit: "nats", logits: false, temperature: 0.8, topK: 40, seed: 0, count: 100, other: "" };

// Facts about a model of the page's data.
function factsOf({ name, step, parameters, context_length, packed }) {
  const { config } = packed, positions = config.layers.map((layer) => layer.position);
  const table = packed.parameters.find((held) => held.name === "positions/learned/embedding");
  return {
    name, step, parameters, context: context_length, layers: config.num_layers, heads: config.num_heads, config,
    positions: [...new Set(positions)].join(", "), has: (position) => positions.includes(position),
    rope: positions.some((position) => ["rope", "pope"].includes(position)) ? { base: config.layers[0].rope_base, scaling: config.rope.scaling, factor: config.layers[0].rope_factor } : null,
    windows: [...new Set(config.layers.map((layer) => layer.attention_window))], table: table ? table.shape[0] : null,
    masks: !["fox", "cope"].some((position) => positions.includes(position)) && !config.variants.selective && config.variants.normaliser !== "stick_breaking",
  };
}

// The edits of an object from outside that have the right types; the engine checks the values.
const whole = (values) => [...new Set(values)].filter((value) => Number.isInteger(value) && value >= 0).sort((a, b) => a - b);
const isRecord = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const READERS = {
  heads: (value) => isRecord(value) && Object.fromEntries(Object.entries(value).filter(([name, how]) => /^\d+\.\d+$/.test(name) && ["off", "mean", "patch"].includes(how))),
  layers: (value) => Array.isArray(value) && whole(value),
  attentions: (value) => Array.isArray(value) && whole(value),
  feedForwards: (value) => Array.isArray(value) && whole(value),
  scale: (value) => value === "off" && value,
  mask: (value) => ["none", "shifted"].includes(value) && value,
  temperature: (value) => value > 0 && +value,
  window: (value) => (value === null || (Number.isInteger(value) && value > 0) ? value : undefined),
  start: (value) => Number.isInteger(value) && value > 0 && value,
  rope: (value) => isRecord(value) && Object.fromEntries(Object.entries(value).filter(([name]) => ["base", "scaling", "factor"].includes(name))),
  slopes: (value) => Number.isFinite(value) && value,
  places: (value) => Array.isArray(value) && whole(value),
};
function cleanEdits(found) {
  const edits = {};
  for (const [name, read] of Object.entries(READERS)) {
    const value = isRecord(found) && Object.hasOwn(found, name) ? read(found[name]) : undefined;
    const isEmpty = value === undefined || value === false || (value !== null && typeof value === "object" && !Object.keys(value).length);
    if (!isEmpty) edits[name] = value;
  }
  return edits;
}

function readJson(text) {
  try { return JSON.parse(text ?? "{}"); } catch { return {}; }
}

// The state of a fragment. runs: facts of the models. text, other: those to start with.
function readState(runs, { text, other }) {
  const held = fragment.read(), number = (name, low, high) => {
    const value = Number(held[name]);
    return held[name] !== undefined && value >= low && value <= high ? value : DEFAULTS[name];
  };
  const run = fragment.index(held.run, runs.length), { layers, heads } = runs[run];
  if (held.theme) theme.choose(held.theme);
  return {
    ...DEFAULTS, run, text: held.text ?? text, other: held.other ?? other, edits: runs.map((_, n) => cleanEdits(readJson(held[`edits${n}`]))),
    view: VIEWS.some(([id]) => id === held.view) ? held.view : runs.length > 1 ? "loss" : DEFAULTS.view,
    layer: fragment.index(held.layer, layers), head: fragment.index(held.head, heads), pin: /^\d{1,5}$/.test(held.pin) ? +held.pin : null,
    range: readRange(held.range),
    unit: Object.hasOwn(UNITS, held.unit) ? held.unit : DEFAULTS.unit, logits: held.logits === "yes",
    colours: runs.length > 1 && ["0", "1", "difference"].includes(held.colours) ? held.colours : DEFAULTS.colours,
    temperature: number("temperature", 0, 2), topK: number("topK", 0, 1e5), seed: number("seed", 0, 2 ** 31), count: number("count", 1, 2000),
  };
}

// Tokens from first to last, as `3-7`.
function readRange(text) {
  const [, first, last] = /^(\d{1,5})-(\d{1,5})$/.exec(text ?? "") ?? [];
  return first !== undefined && +first <= +last ? { first: +first, last: +last } : null;
}

function writeState(state, first) {
  const entries = { theme: theme.chosen };
  for (const name of ["text", "other"]) if (state[name] !== first[name]) entries[name] = state[name] || " ";
  state.edits.forEach((edits, n) => { entries[`edits${n}`] = Object.keys(edits).length ? JSON.stringify(edits) : null; });
  for (const name of ["run", "layer", "head", "pin", "colours", "unit", "temperature", "topK", "seed", "count"])
    entries[name] = state[name] === DEFAULTS[name] ? null : state[name];
  if (state.range) entries.range = `${state.range.first}-${state.range.last}`;
  fragment.write({ ...entries, view: state.view, logits: state.logits ? "yes" : null });
}

// The engine's edits: heads with "patch" become a patch from the other text.
function engineEdits({ heads = {}, places, ...others }, otherIds) {
  const entries = Object.entries(heads), patched = entries.filter(([, how]) => how === "patch").map(([name]) => name);
  const edited = entries.filter(([, how]) => how !== "patch"), edits = { ...others };
  if (edited.length) edits.heads = Object.fromEntries(edited);
  if (patched.length) edits.patch = { tokens: otherIds, heads: patched, places: places ?? "all" };
  return edits;
}

// What edits do, as phrases.
function phrases({ heads = {}, layers = [], attentions = [], feedForwards = [], scale, mask, temperature, window, start, rope = {}, slopes, places }) {
  const said = Object.entries(heads).map(([name, how]) => `head ${name} ${{ off: "off", mean: "at its mean", patch: "from the other text" }[how]}`);
  if (places && Object.values(heads).includes("patch")) said.push(`only at place ${places.join(", ")}`);
  for (const n of layers) said.push(`layer ${n} off`);
  for (const n of attentions) said.push(`attention of layer ${n} off`);
  for (const n of feedForwards) said.push(`feed-forward of layer ${n} off`);
  if (scale) said.push("no division by √K");
  if (mask) said.push(mask === "none" ? "no causal mask" : "mask one token too late");
  if (temperature) said.push(`attention temperature ${temperature}`);
  if (window !== undefined) said.push(window === null ? "no window" : `window of ${window}`);
  if (start) said.push(`positions from ${start.toLocaleString("en")}`);
  if (rope.base) said.push(`RoPE base ${rope.base.toLocaleString("en")}`);
  if (rope.scaling || rope.factor) said.push(`RoPE scaling ${rope.scaling ?? ""}${rope.factor ? ` × ${rope.factor}` : ""}`);
  if (slopes !== undefined) said.push(`ALiBi's slopes × ${slopes}`);
  return said;
}
