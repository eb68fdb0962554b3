// What the engine answered. An old result stays until the new one is there; late answers are ignored.

import { useEffect, useRef, useState } from "../../common/preact.js";
import { ask } from "./engines.js";

export const SHOWN = 8; // likely next tokens on the page
export const ASKED = 48; // likely next tokens of a place that the engine returns: also those of the other model can be found
const LENS = 3; // likely tokens of each layer in the logit lens

// The predicted tokens of a range {first, last}, or of the whole text: from the first to before the end.
export function predicted(result, range) {
  const from = Math.max(1, range?.first ?? 1);
  const end = Math.min(result.length, (range?.last ?? Infinity) + 1);
  return { from, end, count: Math.max(0, end - from) };
}

// The mean loss of a range, or null if no token of it is predicted.
export function meanLoss(result, range) {
  const { from, end, count } = predicted(result, range);
  let sum = 0;
  for (let n = from; n < end; n++) sum += result.nll[n];
  return count ? sum / count : null;
}

// A hook: for each model {plain, edited, refused, busy}. plain, edited: results with `tokens` and `mean`; without edits
// they are the same; `mean` is the loss of the range {first, last}, or of the whole text. refused: a sentence, or null.
// busy: the results are not yet those of these tokens and edits. needsLens: whether a result needs the logit lens. With
// many tokens in the vocabulary, the lens takes longer than all else.
export function useResults(count, ids, edits, range, needsLens) {
  const empty = () => ({ plain: null, edited: null, refused: null, busy: true });
  const [results, setResults] = useState(() => Array.from({ length: count }, empty));
  const versions = useRef([]);
  const written = edits.map((each) => JSON.stringify(each));
  const isOf = (found, n) =>
    found?.tokens === ids && found.written === written[n] && (!needsLens || found.lens || found.message);
  const isThere = ({ edited, refused, busy }, n) => !busy && isOf(edited ?? refused, n);
  for (let model = 0; model < count; model++)
    useEffect(() => {
      if (isThere(results[model], model)) return;
      const version = (versions.current[model] = (versions.current[model] ?? 0) + 1);
      const hasEdits = written[model] !== "{}";
      const update = (part) =>
        versions.current[model] === version &&
        setResults((old) => old.map((each, n) => (n === model ? { ...each, ...part(each) } : each)));
      const take = (reply) => ({ ...reply, tokens: ids, written: written[model] });
      const refuse = (message) =>
        update(() => ({ plain: null, edited: null, refused: take({ message }), busy: false }));
      if (!ids.length) return void refuse("Type a text: the model needs at least one token.");
      update(() => ({ busy: true }));
      const known = results[model].plain; // edits do not change it
      const run = (slot, own, wanted) => ask({ kind: "run", model, slot, tokens: ids, edits: own, ask: wanted });
      (async () => {
        const wanted = { top: ASKED, lens: needsLens ? LENS : 0 };
        const reply = await run("main", edits[model], wanted);
        if (reply.kind === "cancelled") return;
        if (reply.kind === "refused") return refuse(reply.message);
        const edited = take(reply);
        if (!hasEdits) return update(() => ({ plain: edited, edited, refused: null, busy: false }));
        if (sameTokens(known, ids)) return update(() => ({ plain: known, edited, refused: null, busy: false }));
        update(() => ({ edited, plain: null, refused: null }));
        const other = await run("plain", {}, { ...wanted, lens: 0 });
        if (other.kind === "cancelled") return;
        update(() => ({ plain: other.kind === "refused" ? null : take(other), busy: false }));
      })();
    }, [ids, written[model], needsLens]);
  for (const { edited, plain } of results)
    for (const result of [edited, plain]) if (result) result.mean = meanLoss(result, range);
  return results.map((each, n) => ({ ...each, refused: each.refused?.message ?? null, busy: !isThere(each, n) }));
}

export const sameTokens = (result, ids) =>
  result !== null && result.length === ids.length && result.tokens.every((token, n) => token === ids[n]);

// [{token, probability, before}] of the likely next tokens after a place; before: without edits, or null if unknown.
export function likelyNext({ edited, plain }, place, most = SHOWN) {
  const of = (result) => {
    const found = new Map();
    if (result && place < result.length)
      for (let n = place * result.next.top; n < (place + 1) * result.next.top; n++)
        found.set(result.next.tokens[n], result.next.probabilities[n]);
    return found;
  };
  const now = of(edited);
  const before = of(plain);
  const tokens = [...new Set([...[...now.keys()].slice(0, most), ...[...before.keys()].slice(0, 3)])];
  return tokens
    .map((token) => ({ token, probability: now.get(token) ?? 0, before: before.get(token) ?? null }))
    .sort((a, b) => b.probability - a.probability || b.before - a.before);
}

// A hook: the attention of a head for a result, {weights, logits, length}; null until it is there.
// While another head is computed, the maps of the old head stay.
export function useAttention(model, result, layer, head) {
  const [maps, setMaps] = useState(null);
  useEffect(() => {
    let isWanted = result !== null;
    if (isWanted)
      ask({ kind: "attention", model, slot: "main", layer, head }).then((reply) => {
        if (isWanted && reply.kind === "attention" && reply.length === result.length)
          setMaps({ ...reply, model, result });
      });
    return () => {
      isWanted = false;
    };
  }, [model, result, layer, head]);
  return maps?.model === model && maps.result === result ? maps : null;
}

// The token that a view marks until the reader chooses one. A token that was chosen is marked in all views.

export const OPENINGS = {
  attention: "the last token",
  map: "the last token, and the key that it pays the most attention to",
  loss: "the token with the largest loss",
  lens: "the last token",
  stream: "the token with the largest norm after the last layer",
};

// The index of the largest value from `first` to before `end`, counted from `first`; null if there is no number.
export function indexOfLargest(values, first, end) {
  let found = null;
  for (let n = first; n < end; n++) if (values[n] > (found === null ? -Infinity : values[found])) found = n;
  return found === null ? null : found - first;
}

// result: with losses, norms, and the numbers of tokens and layers. last: the last token.
export function openingOf(view, { nll, norms, length, layers }, last) {
  if (view === "stream") return indexOfLargest(norms, layers * length, (layers + 1) * length) ?? last;
  if (view !== "loss") return last;
  const after = indexOfLargest(nll, 1, length); // the first token has no loss
  return after === null ? last : after + 1;
}
