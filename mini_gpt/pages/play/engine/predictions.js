// What a pass says about next tokens: losses, likely tokens, the logit lens, and sampling.

import { dot, logSumExp, softmax } from "./arrays.js";

const LOGIT_ROWS = 4; // places whose logits are computed together

// The most likely tokens by some logits, with their probabilities; lse: the logarithm of the sum of e^logit.
function likely(logits, top, lse) {
  const tokens = [];
  for (let token = 0; token < logits.length; token++) {
    if (tokens.length === top && !(logits[token] > logits[tokens[top - 1]])) continue;
    let at = Math.min(tokens.length, top - 1);
    for (; at > 0 && logits[tokens[at - 1]] < logits[token]; at--) tokens[at] = tokens[at - 1];
    tokens[at] = token;
  }
  return { tokens, probabilities: tokens.map((token) => Math.exp(logits[token] - lse)) };
}

// Compute losses and predictions of all places of a complete pass, and yield in between. Places that are known from an
// earlier text are not computed again. See worker.js for the result. lens: 0 for none.
export function* predictions(pass, top, lens) {
  const { model, config, tokens, predicted } = pass;
  const N = config.num_layers;
  const V = model.vocabulary;
  [top, lens] = [Math.min(top, V), Math.min(lens, V)];
  if (pass.asked !== `${top} ${lens}`) predicted.length = 0;
  pass.asked = `${top} ${lens}`;
  while (predicted.length < tokens.length) {
    const from = predicted.length;
    const to = Math.min(from + LOGIT_ROWS, tokens.length);
    const places = Array.from({ length: to - from }, () => ({ layers: [] }));
    for (let n = lens ? 1 : N; n <= N; n++) {
      const logits = pass.logits(n, from, to);
      places.forEach((place, r) => {
        const own = logits.subarray(r * V, (r + 1) * V);
        const lse = logSumExp(own);
        place.layers.push(likely(own, n === N ? Math.max(top, lens) : lens, lse));
        if (n === N) place.nll = lse - own[tokens[from + r + 1]];
      });
      yield;
    }
    predicted.push(...places);
  }
  return result(pass, top, lens);
}

// The reply of worker.js, from the predictions of each place.
function result({ config, tokens, predicted, stream }, top, lens) {
  const N = config.num_layers;
  const L = tokens.length;
  const D = config.d_model;
  const table = (layers, each, layer) => {
    const size = layers * L * each;
    const found = { top: each, tokens: new Int32Array(size), probabilities: new Float32Array(size) };
    for (let n = 0; n < layers; n++)
      for (let place = 0; place < L; place++)
        for (const name of ["tokens", "probabilities"])
          found[name].set(predicted[place].layers.at(layer(n))[name].slice(0, each), (n * L + place) * each);
    return found;
  };
  return {
    length: L,
    layers: N,
    nll: Float32Array.from(tokens, (_, place) => (place ? predicted[place - 1].nll : NaN)),
    next: table(1, top, () => -1),
    norms: Float32Array.from({ length: (N + 1) * L }, (_, n) => {
      const at = (n % L) * D;
      const x = stream[Math.floor(n / L)];
      return Math.sqrt(dot(x, at, x, at, D));
    }),
    lens: lens ? table(N, lens, (n) => n) : null,
  };
}

// The logits of the token after the last place of a complete pass.
export function lastLogits(pass) {
  return pass.logits(pass.config.num_layers, pass.length - 1, pass.length);
}

const FEW = 100; // likely tokens that are found one by one; sorting the vocabulary is faster for more

// The topK most likely tokens, the most likely one first; all tokens, as they are numbered, if topK is 0.
function candidates(logits, topK) {
  const tokens = [...logits.keys()];
  if (topK === 0) return tokens;
  if (topK <= FEW) return likely(logits, topK, 0).tokens;
  return tokens.sort((a, b) => logits[b] - logits[a]).slice(0, topK);
}

// Draw a token from softmax(logits / temperature), among the topK most likely ones (0: all). Temperature 0: the most
// likely token. probability: of the token among those.
export function drawn(logits, temperature, topK, random) {
  const tokens = candidates(logits, temperature === 0 ? 1 : topK);
  const weights = Float64Array.from(tokens, (token) => logits[token] / (temperature || 1));
  softmax(weights, 0, weights.length - 1);
  let left = random();
  let at = 0;
  while (at < tokens.length - 1 && left >= weights[at]) left -= weights[at++];
  return { token: tokens[at], probability: weights[at] };
}
