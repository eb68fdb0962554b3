// Edits of a model on the page: read from an address, checked, in words, and as the engine gets them. Nothing else checks
// them: neither the engine, whose edits.js says what they mean, nor the server.

import { thousands } from "../../common/numbers.js";

export const MASKS = ["causal", "shifted", "none"];
export const HEAD_STATES = { on: "on", off: "off", mean: "at its mean", patch: "from the other text" };

// A copy of an object without the entry, or with another value; undefined removes it.
export function withEntry(record, name, value) {
  const { [name]: _, ...others } = record;
  return value === undefined ? others : { ...others, [name]: value };
}
export const withPart = (edits, name, part) => withEntry(edits, name, Object.keys(part).length ? part : undefined);

const isWithin = (number, [least, most]) => Number.isFinite(number) && number >= least && number <= most;
const isBelow = (number, end) => Number.isInteger(number) && number >= 0 && number < end;
const areLayers = (layers, { num_layers: count }) => layers.every((layer) => isBelow(layer, count));

function isHead(name, { num_layers: layers, num_heads: heads }) {
  const [, layer, head] = /^(\d+)\.(\d+)$/.exec(name) ?? [];
  return layer !== undefined && isBelow(+layer, layers) && isBelow(+head, heads);
}

const areHeads = (heads, config) =>
  Object.entries(heads).every(([name, how]) => isHead(name, config) && ["off", "mean"].includes(how));

function isRope({ base = 2, scaling = "none", factor = 1, ...others }, { edits: { bounds, scalings } }) {
  const arePossible = isWithin(base, bounds.base) && isWithin(factor, bounds.factor);
  return arePossible && Object.hasOwn(scalings, scaling) && !Object.keys(others).length;
}

function isPatch({ tokens, heads, places }, config) {
  const arePlaces = places === "all" || places.every((place) => isBelow(place, tokens.length));
  return arePlaces && heads.every((name) => isHead(name, config));
}

// {edit: [a value of its type, whether a model with this config can have a value of this type]}. config.edits, written by
// limits.py, has the bounds. An address has `places` of heads that are patched, of which engineEdits makes a `patch`.
const EDITS = {
  __proto__: null, // so that it has no other names
  heads: [{}, areHeads],
  layers: [[], areLayers],
  attentions: [[], areLayers],
  feedForwards: [[], areLayers],
  scale: ["", (scale) => scale === "off"],
  mask: ["", (mask) => MASKS.includes(mask)],
  temperature: [0, (temperature, { edits }) => isWithin(temperature, edits.bounds.temperature)],
  window: [0, (window) => window === null || (Number.isInteger(window) && window >= 1)],
  start: [0, (start, { edits }) => Number.isInteger(start) && isWithin(start, edits.bounds.start)],
  rope: [{}, isRope],
  slopes: [0, (slope, { edits }) => isWithin(slope, edits.bounds.slope)],
  patch: [{}, isPatch],
  places: [[], () => false],
};

const typeOf = (value) => (Array.isArray(value) ? "list" : value === null ? "null" : typeof value);
const isOfType = ([name, value]) => {
  const [example] = EDITS[name] ?? [];
  return typeOf(value) === typeOf(example) || (name === "window" && value === null);
};

// Why a model can't be edited in this way: a sentence, or null if it can.
export function refusalOf(edits, config) {
  for (const [name, value] of Object.entries(edits)) {
    if (!EDITS[name]) return `There is no edit “${name}”.`;
    const [, isPossible] = EDITS[name];
    if (!isOfType([name, value]) || !isPossible(value, config))
      return `The edit “${name}” can't have the value ${JSON.stringify(value)}.`;
  }
  const { mask, scaling } = config.edits.refused;
  return mask[edits.mask] ?? scaling[edits.rope?.scaling] ?? null;
}

// The edits of an address, without what has another type. A model may refuse them: the names of heads are shown in a
// command to copy, so they have the form of names also then.
export function readEdits(text) {
  const only = (record, test) => Object.fromEntries(Object.entries(record).filter(test));
  const isOfHead = ([name, how]) => /^\d+\.\d+$/.test(name) && Object.hasOwn(HEAD_STATES, how);
  const recordOf = (value) => (typeOf(value) === "object" ? value : {});
  const found = recordOf(readJson(text));
  const isGiven = ([, value]) => typeof value !== "object" || value === null || Object.keys(value).length > 0;
  const heads = only(recordOf(found.heads), isOfHead);
  const { patch: _, ...others } = only({ ...found, heads }, (entry) => isOfType(entry) && isGiven(entry));
  return others;
}

function readJson(text) {
  try {
    return JSON.parse(text ?? "{}");
  } catch {
    return {};
  }
}

// The engine's edits: heads with "patch", and the places of them, become a patch from the other text.
export function engineEdits({ heads = {}, places, ...others }, otherIds) {
  const entries = Object.entries(heads);
  const patched = entries.filter(([, how]) => how === "patch").map(([name]) => name);
  const edited = entries.filter(([, how]) => how !== "patch");
  const edits = { ...others };
  if (edited.length) edits.heads = Object.fromEntries(edited);
  if (patched.length) edits.patch = { tokens: otherIds, heads: patched, places: places ?? "all" };
  return edits;
}

// What edits do, as phrases.
export function phrases({
  heads = {},
  layers = [],
  attentions = [],
  feedForwards = [],
  scale,
  mask,
  temperature,
  window,
  start,
  rope = {},
  slopes,
  places,
}) {
  const said = Object.entries(heads).map(([name, how]) => `head ${name} ${HEAD_STATES[how]}`);
  if (places && Object.values(heads).includes("patch")) said.push(`only at place ${places.join(", ")}`);
  for (const n of layers) said.push(`layer ${n} off`);
  for (const n of attentions) said.push(`attention of layer ${n} off`);
  for (const n of feedForwards) said.push(`feed-forward of layer ${n} off`);
  if (scale) said.push("no division by √K");
  if (mask) said.push(mask === "none" ? "no causal mask" : "mask one token late");
  if (temperature) said.push(`attention temperature ${temperature}`);
  if (window !== undefined) said.push(window === null ? "no window" : `window of ${window}`);
  if (start) said.push(`positions from ${thousands(start)}`);
  if (rope.base) said.push(`RoPE base ${thousands(rope.base)}`);
  if (rope.scaling || rope.factor)
    said.push(`RoPE scaling ${rope.scaling ?? ""}${rope.factor ? ` × ${rope.factor}` : ""}`);
  if (slopes !== undefined) said.push(`ALiBi's slopes × ${slopes}`);
  return said;
}
