"use strict";
// Edits of a model, for one pass. All can be combined; without a field, nothing is edited. Layers and heads count from 0.
//
// heads: {"layer.head": "off" | "mean"}   off: the head's output is 0. mean: it is replaced by its mean over all places of
//                                         this text. An output is what enters the output projection.
// layers, attentions, feedForwards: [int] these layers, or sublayers, add nothing to the residual stream
// scale: "off"                            logits are not divided by √(scale_width), which is √K by default
// mask: "none" | "shifted" | "causal"     none: a query sees all keys. shifted: it also sees the next token's key, which
//                                         is a common error. Segments and windows still hold.
// temperature: number > 0                 the attention logits are divided by it
// window: int | null                      keys per query, its own included, in all layers; null: no window
// start: int ≥ 0                          position of the first token; later positions move with it
// rope: {base, scaling, factor}           of all layers with RoPE, each optional; base also for PoPE. scaling: "none",
//                                         "linear", "ntk", "dynamic", "yarn", "yarn_by_index", "llama3"
// slopes: number | [number, …]            ALiBi's slopes: a factor of them, or those of all heads
// patch: {tokens: [int], heads: ["layer.head", …], places: [int] | "all"}
//                                         at these places (default: all), the outputs of these heads are those of a pass
//                                         over other tokens, as many as in the text, with the other edits

const SCALINGS = ["none", "linear", "ntk", "dynamic", "yarn", "yarn_by_index", "llama3"];
const EDITS = {
  heads: (heads, model) => Object.entries(heads).every(([name, how]) => isHead(name, model) && ["off", "mean"].includes(how)),
  layers: (layers, model) => layers.every((layer) => isBelow(layer, model.config.num_layers)),
  attentions: (layers, model) => EDITS.layers(layers, model),
  feedForwards: (layers, model) => EDITS.layers(layers, model),
  scale: (scale) => scale === "off",
  mask: (mask) => ["none", "shifted", "causal"].includes(mask),
  temperature: (temperature) => Number.isFinite(temperature) && temperature > 0,
  window: (window) => window === null || (Number.isInteger(window) && window >= 1),
  start: (start) => isBelow(start, 2 ** 24),
  rope: ({ base = 2, scaling = "none", factor = 1, ...others }) =>
    base > 1 && SCALINGS.includes(scaling) && factor >= 1 && Number.isFinite(base * factor) && !Object.keys(others).length,
  slopes: (slopes, model) =>
    Number.isFinite(slopes) || (slopes.length === model.config.num_heads && slopes.every(Number.isFinite)),
  patch: ({ tokens, heads, places = "all" }, model) =>
    tokens.every((token) => isBelow(token, model.vocabulary)) && heads.every((name) => isHead(name, model)) &&
    (places === "all" || places.every((place) => isBelow(place, tokens.length))),
};

const isBelow = (number, end) => Number.isInteger(number) && number >= 0 && number < end;

function isHead(name, { config }) {
  const [, layer, head] = /^(\d+)\.(\d+)$/.exec(name) ?? [];
  return layer !== undefined && isBelow(Number(layer), config.num_layers) && isBelow(Number(head), config.num_heads);
}

// Throw a Refusal if a model can't be edited in this way.
function checkEdits(edits, model) {
  const { variants } = model.config, positions = model.config.layers.map((kind) => kind.position);
  for (const [name, value] of Object.entries(edits)) {
    if (value === undefined) continue;
    if (!EDITS[name]) throw new Refusal(`There is no edit “${name}”.`);
    if (!EDITS[name](value, model)) throw new Refusal(`The edit “${name}” can't have the value ${JSON.stringify(value)}.`);
  }
  if ((edits.mask ?? "causal") !== "causal") {
    const ordered = positions.find((position) => ["fox", "cope"].includes(position));
    const reason = ordered ?? (variants.selective ? "selective attention" : variants.normaliser === "stick_breaking" && "stick-breaking");
    if (reason) throw new Refusal(`The mask can't be changed: ${reason} is only defined with a causal mask.`);
  }
  const { scaling = "none" } = edits.rope ?? {};
  if (["ntk", "dynamic"].includes(scaling) && model.config.rotated_width <= 2)
    throw new Refusal(`RoPE's scaling “${scaling}” needs more than one pair of rotated dimensions.`);
}

// Throw a Refusal if the tokens can't be read.
function checkText(tokens, { vocabulary }, { patch }) {
  if (!tokens.length) throw new Refusal("The text is empty: type at least one token.");
  const bad = [...tokens].find((token) => !isBelow(token, vocabulary));
  if (bad !== undefined) throw new Refusal(`The token ${bad} is not in the vocabulary of ${vocabulary} tokens.`);
  if (patch && patch.tokens.length !== tokens.length)
    throw new Refusal(`The other text has ${patch.tokens.length} tokens, this text ${tokens.length}: patching needs equal lengths.`);
}

// Throw a Refusal if a position is past the end of a learned table.
function checkPositions({ positions }, model, { start = 0 }) {
  const table = model.parameters.get("positions/learned/embedding"), needed = Math.max(...positions) + 1;
  if (!table || needed <= table.shape[0]) return;
  const first = start ? ` from position ${start}` : "";
  throw new Refusal(`The learned table has ${table.shape[0]} positions: a text of ${positions.length} tokens${first} needs ${needed}.`);
}

// RoPE's fields in a layer: those of the config, with the edits.
function ropeOf(rope, kind, { rope: edited = {} }) {
  const { base = kind.rope_base, factor = kind.rope_factor, scaling = rope.scaling } = edited;
  const { beta_slow, beta_fast } = scaling === rope.scaling ? rope : { beta_slow: 1, beta_fast: scaling === "llama3" ? 4 : 32 };
  return { ...rope, base, factor, scaling: factor === 1 ? "none" : scaling, beta_slow, beta_fast };
}

// ALiBi's slopes, with the edits.
function slopesOf(heads, { slopes = 1 }) {
  return Array.isArray(slopes) ? slopes : alibiSlopes(heads).map((slope) => slope * slopes);
}

// Replace outputs of heads at these places of a block.
function editHeads({ pass, n, attention }, from, to) {
  const { heads = {}, patch } = pass.edits, { width, outputs } = attention;
  const at = (place, head) => (place * attention.heads + Number(head)) * width;
  for (const [name, how] of Object.entries(heads)) {
    const [layer, head] = name.split(".");
    if (Number(layer) !== n) continue;
    const mean = new Float64Array(width); // if the head is off, it stays 0
    if (how === "mean")
      for (let place = from; place < to; place++)
        for (let c = 0; c < width; c++) mean[c] += outputs[at(place, head) + c] / (to - from);
    for (let place = from; place < to; place++) outputs.set(mean, at(place, head));
  }
  for (const name of patch?.heads ?? []) {
    const [layer, head] = name.split(".");
    if (Number(layer) !== n) continue;
    const others = pass.donor.blocks[n].attention.outputs;
    for (let place = from; place < to; place++)
      if ((patch.places ?? "all") === "all" || patch.places.includes(place))
        outputs.set(others.subarray(at(place, head), at(place, head) + width), at(place, head));
  }
}
