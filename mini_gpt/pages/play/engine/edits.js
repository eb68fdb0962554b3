// Edits of a model, for one pass. All can be combined; without a field, nothing is edited. Layers and heads count
// from 0. The page checks them: view/edits.js.
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
// slopes: number                          a factor of ALiBi's slopes
// patch: {tokens: [int], heads: ["layer.head", …], places: [int] | "all"}
//                                         at these places (default: all), the outputs of these heads are those of a
//                                         pass over other tokens, as many as in the text, with the other edits

// A request that can't be answered. The message is for the reader of the page.
export class Refusal extends Error {}

// Throw a Refusal if the tokens can't be read.
export function checkText(tokens, { vocabulary, config }, { patch }) {
  if (!tokens.length) throw new Refusal("The text is empty: type at least one token.");
  const bad = tokens.find((token) => !(Number.isInteger(token) && token >= 0 && token < vocabulary));
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
