// The order duel: words that the reader moves, and how far that moves the prediction of each run.

import { seriesColour } from "../../common/colours.js";
import { TableHead } from "../../common/controls.js";
import { indices } from "../../common/numbers.js";
import { OrderChips, movedOrder } from "../../common/order.js";
import { html, useEffect, useLayoutEffect, useMemo, useState } from "../../common/preact.js";
import { ask } from "./engines.js";
import { labelOf, percent } from "./next_card.js";
import { ASKED, meanLoss } from "./results.js";
import { UNITS } from "./state.js";

const MOST_MOVED = 16; // the last words of the text can be moved

// The last words of a text, with what stays in its place: {before, gaps, words}. gaps: white space before each word.
function wordsOf(text) {
  const found = [...text.matchAll(/(\s*)(\S+)/g)].slice(-MOST_MOVED);
  const end = found.length ? found.at(-1).index + found.at(-1)[0].length : 0;
  return {
    before: text.slice(0, found[0]?.index ?? 0),
    gaps: found.map(([, gap]) => gap),
    words: found.map(([, , word]) => word),
    after: text.slice(end),
  };
}
const inOrder = ({ before, gaps, words, after }, order) =>
  before + order.map((n, place) => gaps[place] + words[n]).join("") + after;

// The likely tokens after the whole text, {token: probability}.
function lastNext({ length, next: { top, tokens, probabilities } }) {
  const at = (length - 1) * top;
  return new Map(indices(top).map((n) => [tokens[at + n], probabilities[at + n]]));
}

// How far a prediction moved: the probability that went to other tokens, which is the sum of max(0, p − q) over all
// tokens, or of max(0, q − p). Only likely tokens are known, and others have at most the least known probability, so
// this is a lower bound; it is exact if all tokens are known.
function movement(before, after) {
  const gone = (from, to) => {
    const most = Math.min(...to.values());
    return [...from].reduce((sum, [token, probability]) => sum + Math.max(0, probability - (to.get(token) ?? most)), 0);
  };
  return Math.max(gone(before, after), gone(after, before));
}

// A hook: for each model the reply to the first order with the edits of now; null until all are there. ids: its tokens,
// or null if no word has moved.
function useFirstOrder(ids, edits) {
  const [found, setFound] = useState(null);
  const written = JSON.stringify(edits);
  useEffect(() => {
    let isWanted = ids !== null;
    const request = { kind: "run", slot: "order", tokens: ids, ask: { top: ASKED, lens: 0 } };
    if (isWanted)
      Promise.all(edits.map((own, model) => ask({ ...request, model, edits: own }))).then(
        (replies) => isWanted && setFound({ ids, written, replies }),
      );
    return () => {
      isWanted = false;
    };
  }, [ids, written]);
  return found?.ids === ids && found.written === written ? found.replies : null;
}

export function OrderCard({ data, facts, state, set, edits, results, tokenizer, writer }) {
  const [moved, setMoved] = useState({ text: state.text, order: null });
  const base = useMemo(() => wordsOf(moved.text), [moved.text]);
  const order = moved.order ?? base.words.map((_, n) => n);
  const isOwn = inOrder(base, order) === state.text;
  useLayoutEffect(() => {
    if (!isOwn) setMoved({ text: state.text, order: null }); // typed, or another address
  }, [isOwn, state.text]);
  const isMoved = isOwn && order.some((n, place) => n !== place);
  const firstIds = useMemo(
    () => (isMoved ? tokenizer.encode(moved.text).ids.slice(0, data.most_tokens) : null),
    [isMoved, moved.text],
  );
  const first = useFirstOrder(firstIds, edits);
  const rearrange = (next) => {
    writer.stop(false);
    setMoved({ text: moved.text, order: next });
    set({ text: inOrder(base, next), pin: null, range: null });
  };
  const duel = facts.map((run, n) => {
    const { busy, refused, edited } = results[n];
    if (busy || first === null) return null;
    if (refused || first[n].kind === "refused") return { refused: refused ?? first[n].message };
    const [before, after] = [first[n], edited].map(lastNext);
    return {
      name: run.name,
      before,
      after,
      moved: movement(before, after),
      losses: [first[n], edited].map((r) => meanLoss(r, null)),
    };
  });
  if (base.words.length < 2) return null;
  return html`<section class="card" id="order" aria-labelledby="order-title">
    <div class="bar-of-card">
      <h2 id="order-title">Order of the words</h2>
      <span class="soft small"
        >${base.before ? `the last ${base.words.length} words` : `${base.words.length} words`}</span
      >
      <button id="order-reverse" onClick=${() => rearrange([...order].reverse())}>reverse</button>
      <button id="order-first" disabled=${!isMoved} onClick=${() => rearrange(base.words.map((_, n) => n))}>
        first order
      </button>
    </div>
    <p class="small soft" data-picture="no">
      Move words, and see how far the prediction after the text moves${facts.length > 1 ? " in each run" : ""}.
    </p>
    <${OrderChips}
      words=${order.map((n) => base.words[n])}
      ids=${order}
      onMove=${(from, to) => rearrange(movedOrder(order, from, to))} />
    ${isMoved && html`<${Duel} ...${{ facts, duel, tokenizer, unit: state.unit }} />`}
  </section>`;
}

function Duel({ facts, duel, tokenizer, unit }) {
  const likely = (next) => {
    const [token, probability] = [...next][0];
    return `${labelOf(tokenizer, token)} ${percent(probability)}`;
  };
  const loss = (nats) => (nats === null ? "—" : (nats * UNITS[unit]).toFixed(3));
  const known = duel.every((found) => found?.before);
  const sorted = known ? [...duel].sort((a, b) => b.moved - a.moved) : [];
  return html`<div class="wide" tabindex="0" role="group" aria-label="How far predictions moved">
      <table id="duel">
        <${TableHead} columns=${["run", "moved", "most likely next token", `mean loss (${unit})`]} />
        <tbody>
          ${facts.map((run, n) => {
            const { refused, ...found } = duel[n] ?? {};
            return html`<tr data-moved=${found.moved}>
              <th scope="row" style=${`color:${seriesColour(n)}`}>${run.name}</th>
              <td>
                <b>${found.before ? percent(found.moved) : refused ? "—" : "…"}</b>
              </td>
              <td>${found.before ? `${likely(found.before)} → ${likely(found.after)}` : refused}</td>
              <td>${found.before ? `${loss(found.losses[0])} → ${loss(found.losses[1])}` : ""}</td>
            </tr>`;
          })}
        </tbody>
      </table>
    </div>
    <p id="duel-said" class="small" role="status">
      ${
        known && sorted.length > 1
          ? `The order matters more to ${sorted[0].name}: its prediction moves by ` +
            `${percent(sorted[0].moved)}, that of ${sorted[1].name} by ${percent(sorted[1].moved)}. `
          : ""
      }
      <span class="soft"
        >“Moved” is the probability that went to other tokens: a lower bound, from the ${ASKED} most likely ones before
        and after.</span
      >
    </p>`;
}
