// What the page shows, and its form in the fragment of the URL.

import { fragment } from "../../common/fragment.js";
import { clamped } from "../../common/numbers.js";
import { MASKS, readEdits } from "./edits.js";

export const VIEWS = [
  ["attention", "Attention"],
  ["map", "Attention map"],
  ["loss", "Loss along the text"],
  ["lens", "Logit lens"],
  ["stream", "Residual stream"],
];
export const UNITS = { nats: 1, bits: 1 / Math.LN2 };
// The numbers that the writer takes.
export const WRITING = {
  count: { said: "tokens", low: 1, high: 2000, step: 1 },
  temperature: { said: "temperature", low: 0, high: 2, step: 0.1 },
  topK: { said: "top-k", low: 0, high: 100000, step: 1 },
  seed: { said: "seed", low: 0, high: 2 ** 31, step: 1 },
};
const DEFAULTS = {
  run: 0,
  view: "attention",
  layer: 0,
  head: 0,
  pin: null,
  range: null,
  colours: "0",
  unit: "nats",
  logits: false,
  temperature: 0.8,
  topK: 40,
  seed: 0,
  count: 100,
};

// Facts about a model of the page's data. A value that differs between layers is that of the first one; `differ` names
// it.
export function factsOf({ name, step, parameters, kept, trained_context, packed: { config } }) {
  const { layers } = config;
  const { refused, scalings } = config.edits;
  const positions = layers.map((layer) => layer.position);
  const rotary = layers.filter((layer) => ["rope", "pope"].includes(layer.position));
  const differ = {};
  const own = (kinds, field) => {
    differ[field] = new Set(kinds.map((kind) => kind[field])).size > 1;
    return kinds[0][field];
  };
  return {
    name,
    step,
    parameters,
    context: trained_context,
    layers: config.num_layers,
    heads: config.num_heads,
    kept: kept ?? layers.map(() => [...Array(config.num_heads).keys()]), // the numbers of the heads of each layer
    differ,
    positions: [...new Set(positions)].join(", "),
    has: (position) => positions.includes(position),
    rope: rotary.length
      ? { base: own(rotary, "rope_base"), scaling: config.rope.scaling, factor: own(rotary, "rope_factor") }
      : null,
    window: own(layers, "window"),
    masks: MASKS.filter((mask) => !refused.mask[mask]),
    scalings: Object.keys(scalings).filter((scaling) => !refused.scaling[scaling]),
  };
}

// What was entered for a number of the writer, as the nearest possible value; null if it is not a number.
export function allowedNumber(id, entered) {
  const { low, high, step } = WRITING[id];
  const value = step === 1 ? Math.round(entered) : Number(entered);
  return (entered ?? "") === "" || Number.isNaN(value) ? null : clamped(value, low, high);
}

// The head, or if the layer does not have it, its first one.
export const keptHead = ({ kept }, layer, head) => (kept[layer].includes(head) ? head : kept[layer][0]);

// The state of the entries of a fragment. runs: facts of the models. text, other, opening: the texts, and the layer and
// head, to start with.
export function readState(entries, runs, { text, other, opening = [0, 0] }) {
  const numbers = Object.keys(WRITING).map((id) => [id, allowedNumber(id, entries[id]) ?? DEFAULTS[id]]);
  const run = fragment.index(entries.run, runs.length);
  const { layers, heads } = runs[run];
  const layer = fragment.index(entries.layer, layers, opening[0]);
  const firstHead = layer === opening[0] ? opening[1] : 0;
  return {
    ...DEFAULTS,
    run,
    text: entries.text ?? text,
    other: entries.other ?? other,
    edits: runs.map((_, n) => readEdits(entries[`edits${n}`])),
    view: VIEWS.some(([id]) => id === entries.view) ? entries.view : runs.length > 1 ? "loss" : DEFAULTS.view,
    layer,
    head: keptHead(runs[run], layer, fragment.index(entries.head, heads, firstHead)),
    pin: /^\d{1,5}$/.test(entries.pin) ? +entries.pin : null,
    range: readRange(entries.range),
    unit: Object.hasOwn(UNITS, entries.unit) ? entries.unit : DEFAULTS.unit,
    logits: entries.logits === "yes",
    colours: runs.length > 1 && ["0", "1", "difference"].includes(entries.colours) ? entries.colours : DEFAULTS.colours,
    ...Object.fromEntries(numbers),
  };
}

// Tokens from first to last, as `3-7`.
function readRange(text) {
  const [, first, last] = /^(\d{1,5})-(\d{1,5})$/.exec(text ?? "") ?? [];
  return first !== undefined && +first <= +last ? { first: +first, last: +last } : null;
}

// The entries of the fragment of a state.
export function entriesOf(state, first) {
  const entries = {};
  for (const name of ["text", "other"]) if (state[name] !== first[name]) entries[name] = state[name];
  state.edits.forEach((edits, n) => {
    entries[`edits${n}`] = Object.keys(edits).length ? JSON.stringify(edits) : null;
  });
  for (const name of ["run", "pin", "colours", "unit", ...Object.keys(WRITING)])
    entries[name] = state[name] === DEFAULTS[name] ? null : state[name];
  if (state.range) entries.range = `${state.range.first}-${state.range.last}`;
  const { view, layer, head } = state;
  return { ...entries, view, layer, head, logits: state.logits ? "yes" : null };
}
