// Edits of a model, for one pass. All can be combined; without a field, nothing is edited. Layers and heads count
// from 0. model.config.edits, written by limits.py, has the bounds of values, and what a model can't have.
//
// heads: {"layer.head": "off" | "mean"}   off: the head's output is 0. mean: it is replaced by its mean over all places
//                                         of this text. An output is what enters the output projection.
// layers, attentions, feedForwards: [int] these layers, or sublayers, add nothing to the residual stream
// scale: "off"                            logits are not divided by √(scale_width), which is √K by default
// mask: "none" | "shifted" | "causal"     none: a query sees all keys. shifted: it also sees the next token's key, a
//                                         common error. Segments and windows still hold.
// temperature: number                     the attention logits are divided by it
// window: int | null                      keys per query, its own included, in all layers; null: no window
// start: int ≥ 0                          position of the first token; later positions move with it
// rope: {base, scaling, factor}           of all layers with RoPE, each optional; base also for PoPE
// slopes: number | [number, …]            ALiBi's slopes: a factor of them, or those of all heads
// patch: {tokens: [int], heads: ["layer.head", …], places: [int] | "all"}
//                                         at these places (default: all), the outputs of these heads are those of a
//                                         pass over other tokens, as many as in the text, with the other edits

// A request that can't be answered. The message is for the reader of the page.
export class Refusal extends Error {}

const isWithin = (number, [least, most]) => Number.isFinite(number) && number >= least && number <= most;
const isBelow = (number, end) => Number.isInteger(number) && number >= 0 && number < end;
const areLayers = (layers, { config }) => layers.every((layer) => isBelow(layer, config.num_layers));

function isHead(name, { config }) {
  const [, layer, head] = /^(\d+)\.(\d+)$/.exec(name) ?? [];
  return layer !== undefined && isBelow(Number(layer), config.num_layers) && isBelow(Number(head), config.num_heads);
}

function isRope({ base = 2, scaling = "none", factor = 1, ...others }, { config }) {
  const { bounds, scalings } = config.edits;
  const arePossible =
    isWithin(base, bounds.base) && isWithin(factor, bounds.factor) && Object.hasOwn(scalings, scaling);
  return arePossible && !Object.keys(others).length;
}

function areSlopes(slopes, { config }) {
  const isSlope = (slope) => isWithin(slope, config.edits.bounds.slope);
  return isSlope(slopes) || (slopes.length === config.num_heads && slopes.every(isSlope));
}

function isPatch({ tokens, heads, places = "all" }, model) {
  const arePlaces = places === "all" || places.every((place) => isBelow(place, tokens.length));
  return arePlaces && heads.every((name) => isHead(name, model));
}

// {edit: whether a model can have a value of it}
const POSSIBLE = {
  heads: (heads, model) =>
    Object.entries(heads).every(([name, how]) => isHead(name, model) && ["off", "mean"].includes(how)),
  layers: areLayers,
  attentions: areLayers,
  feedForwards: areLayers,
  scale: (scale) => scale === "off",
  mask: (mask) => ["none", "shifted", "causal"].includes(mask),
  temperature: (temperature, { config }) => isWithin(temperature, config.edits.bounds.temperature),
  window: (window) => window === null || (Number.isInteger(window) && window >= 1),
  start: (start, { config }) => Number.isInteger(start) && isWithin(start, config.edits.bounds.start),
  rope: isRope,
  slopes: areSlopes,
  patch: isPatch,
};

// Throw a Refusal if a model can't be edited in this way.
export function checkEdits(edits, model) {
  for (const [name, value] of Object.entries(edits)) {
    if (value === undefined) continue;
    if (!POSSIBLE[name]) throw new Refusal(`There is no edit “${name}”.`);
    if (!POSSIBLE[name](value, model))
      throw new Refusal(`The edit “${name}” can't have the value ${JSON.stringify(value)}.`);
  }
  const { mask, scaling } = model.config.edits.refused;
  const reason = mask[edits.mask] ?? scaling[edits.rope?.scaling];
  if (reason) throw new Refusal(reason);
}

// Throw a Refusal if the tokens can't be read.
export function checkText(tokens, { vocabulary, config }, { patch }) {
  if (!tokens.length) throw new Refusal("The text is empty: type at least one token.");
  const bad = tokens.find((token) => !isBelow(token, vocabulary));
  if (bad !== undefined) throw new Refusal(`The token ${bad} is not in the vocabulary of ${vocabulary} tokens.`);
  const most = config.random_positions ?? Infinity;
  if (tokens.length > most)
    throw new Refusal(`The model draws from ${most} positions; the text has ${tokens.length} tokens.`);
  if (patch && patch.tokens.length !== tokens.length) {
    const found = `The other text has ${patch.tokens.length} tokens, this text ${tokens.length}`;
    throw new Refusal(`${found}: patching needs equal lengths.`);
  }
}

// Throw a Refusal if a position is past the end of a learned table.
export function checkPositions({ positions }, model, { start = 0 }) {
  const table = model.parameters.get("positions/learned/embedding");
  const needed = Math.max(...positions) + 1;
  if (!table || needed <= table.shape[0]) return;
  const text = `a text of ${positions.length} tokens${start ? ` from position ${start}` : ""}`;
  throw new Refusal(`The learned table has ${table.shape[0]} positions: ${text} needs ${needed}.`);
}

// RoPE's fields in a layer: those of the config, with the edits. Another scaling has fields of its own.
export function ropeOf({ rope, edits: { scalings } }, kind, { rope: edited = {} }) {
  const { base = kind.rope_base, factor = kind.rope_factor, scaling = rope.scaling } = edited;
  const others = scaling === rope.scaling ? {} : scalings[scaling];
  return { ...rope, ...others, base, factor, scaling: factor === 1 && scaling !== "dynamic" ? "none" : scaling };
}

// ALiBi's slopes, with the edits.
export function slopesOf({ tables }, { slopes = 1 }) {
  return Array.isArray(slopes) ? slopes : tables.slopes.map((slope) => slope * slopes);
}

// Replace the outputs of edited heads of a block, at these places.
export function editHeads({ pass, n, attention }, from, to) {
  const { heads = {}, patch } = pass.edits;
  const { width, outputs } = attention;
  const at = (place, head) => (place * attention.heads + head) * width;
  const mean = (head) => {
    const sum = new Float64Array(width);
    for (let place = from; place < to; place++)
      for (let c = 0; c < width; c++) sum[c] += outputs[at(place, head) + c] / (to - from);
    return sum;
  };
  const patched = (place, head) => {
    const others = pass.donor.blocks[n].attention.outputs;
    return others.subarray(at(place, head), at(place, head) + width);
  };
  for (let head = 0; head < attention.heads; head++) {
    const name = `${n}.${head}`;
    const constant = heads[name] === "mean" ? mean(head) : new Float64Array(width); // of a head that is off: 0
    const isPatched = patch?.heads.includes(name);
    const isAt = (place) => (patch.places ?? "all") === "all" || patch.places.includes(place);
    for (let place = from; place < to; place++) {
      if (heads[name]) outputs.set(constant, at(place, head));
      if (isPatched && isAt(place)) outputs.set(patched(place, head), at(place, head));
    }
  }
}
