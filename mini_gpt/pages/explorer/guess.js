// The game: the reader clicks the key that a head reads the most. First its queries and its scores, then the view.

import { scales, shadeStyle } from "../common/colours.js";
import { indices } from "../common/numbers.js";
import { html, useMemo, useState } from "../common/preact.js";
import { randomNumbers } from "../common/random.js";
import { FlowingText } from "../common/tokens.js";
import { HeadChoice, inContext, truthOf } from "./heads.js";

const ROUNDS = 8;
const LEAST_KEYS = 4; // visible keys of a query in the game

const keysSeen = (attention, layer, head, i) => {
  const weightAt = attention.weightsAt(layer, head);
  return indices(attention.columns).filter((j) => weightAt(i, j) !== null);
};

const trueKeys = (attention, isTrue, i) => (isTrue ? indices(attention.columns).filter((j) => isTrue(i, j)) : []);

// The queries of a game, drawn with its number as the seed; first those whose true keys are known.
function queriesOf(attention, layer, head, game) {
  const isTrue = truthOf(attention, layer, head);
  const left = indices(attention.rows).filter((i) => keysSeen(attention, layer, head, i).length >= LEAST_KEYS);
  const next = randomNumbers(game);
  const drawn = [];
  while (left.length) drawn.push(...left.splice(Math.floor(next() * left.length), 1));
  const isKnown = (i) => trueKeys(attention, isTrue, i).length > 0;
  return [...drawn.filter(isKnown), ...drawn.filter((i) => !isKnown(i))].slice(0, ROUNDS);
}

// The distance i - j with the largest mean weight over the queries that are not in the game; null without such queries.
function bestOffset(attention, layer, head, queries) {
  const weightAt = attention.weightsAt(layer, head);
  const sums = new Map();
  for (let i = 0; i < attention.rows; i++)
    if (!queries.includes(i))
      for (let j = 0; j < attention.columns; j++) sums.set(i - j, (sums.get(i - j) ?? 0) + (weightAt(i, j) ?? 0));
  return [...sums].reduce((best, each) => (best === null || each[1] > best[1] ? each : best), null)?.[0] ?? null;
}

// The key that a query reads the most, the first of equal ones.
function largestKey(attention, layer, head, query) {
  const weightAt = attention.weightsAt(layer, head);
  const keys = keysSeen(attention, layer, head, query);
  return keys.reduce((best, j) => (weightAt(query, j) > weightAt(query, best) ? j : best), keys[0]);
}

// Mean weights of the keys that the reader, the head itself and the best distance choose, and of even weights. `hits`:
// shares of the choices that are true keys; null if these are not known. guesses: a key for each of the first queries.
function scoresOf(attention, layer, head, queries, guesses) {
  const weightAt = attention.weightsAt(layer, head);
  const played = queries.slice(0, guesses.length);
  const mean = (valueOf) => played.reduce((sum, i, n) => sum + valueOf(i, n), 0) / played.length;
  const largest = (i) => largestKey(attention, layer, head, i);
  const offset = bestOffset(attention, layer, head, queries);
  const isTrue = truthOf(attention, layer, head);
  const known = played.filter((i) => trueKeys(attention, isTrue, i).length);
  const share = (chosen) => known.reduce((sum, i) => sum + isTrue(i, chosen(i)), 0) / known.length;
  return {
    reader: mean((i, n) => weightAt(i, guesses[n])),
    head: mean((i) => weightAt(i, largest(i))),
    offset: { by: offset, score: offset === null ? null : mean((i) => weightAt(i, i - offset) ?? 0) },
    even: mean((i) => 1 / keysSeen(attention, layer, head, i).length),
    hits: known.length
      ? {
          reader: share((i) => guesses[queries.indexOf(i)]),
          head: share(largest),
          offset: offset === null ? null : share((i) => i - offset),
        }
      : null,
  };
}

export function GuessView(props) {
  const { layer, head, game } = props.state;
  return html`<${Game} key=${`${layer}.${head}.${game}`} ...${props} />`;
}

// One game: another head or another number has guesses of its own.
function Game({ attention, state, set }) {
  const { layer, head } = state;
  const [guesses, setGuesses] = useState([]);
  const [isOpen, setOpen] = useState(false); // whether the weights of the last guess are shown
  const queries = useMemo(() => queriesOf(attention, layer, head, state.game), [attention, layer, head, state.game]);
  const weightAt = attention.weightsAt(layer, head);
  const isDone = guesses.length === queries.length && !isOpen;
  const round = isOpen ? guesses.length - 1 : guesses.length;
  const query = queries[Math.min(round, queries.length - 1)];
  const guess = (j) => {
    if (isOpen || isDone || j === null || weightAt(query, j) === null) return;
    setGuesses([...guesses, j]);
    setOpen(true);
  };
  if (!queries.length)
    return html`<${HeadChoice} ...${{ attention, state, set }} />
      <p>This text has no query that sees ${LEAST_KEYS} keys or more.</p>`;
  const scores = guesses.length > 0 && scoresOf(attention, layer, head, queries, guesses);
  const marks = (j) => [
    weightAt(query, j) === null ? "masked" : "",
    isOpen && guesses[round] === j ? "pointed" : "",
    !attention.isCross && j === query ? (isOpen ? "framed" : "pinned") : "",
  ];
  const keys = html`<${FlowingText}
    id="guesses"
    name="keys"
    tokens=${attention.keys}
    onPin=${guess}
    styleOf=${(j) => (isOpen && weightAt(query, j) !== null ? shadeStyle(scales.weights, weightAt(query, j)) : "")}
    markOf=${(j) => marks(j).join(" ")} />`;
  return html`<${HeadChoice} ...${{ attention, state, set }} />
    <p>
      Where does layer ${layer}, head ${head} look? Click the key that the marked query reads the most. You have
      ${" "}${queries.length} queries. Hatched tokens cannot be seen.
    </p>
    <p id="round" role="status">
      <b>${isDone ? `All ${queries.length} queries are done.` : `Query ${round + 1} of ${queries.length}`}</b>
      ${" "}${!isDone && inContext(attention.tokens, query)}
      ${isOpen && html`<${Answer} ...${{ attention, layer, head, query, guessed: guesses[round] }} />`}
    </p>
    <div class="controls">
      <button id="next-query" disabled=${!isOpen} onClick=${() => setOpen(false)}>next query</button>
      <button id="new-game" onClick=${() => set({ game: (state.game % MOST_GAMES) + 1 })}>new game</button>
    </div>
    ${keys} ${scores && html`<${Scores} ...${scores} count=${guesses.length} />`}`;
}

export const MOST_GAMES = 9999;

function Answer({ attention, layer, head, query, guessed }) {
  const weightAt = attention.weightsAt(layer, head);
  const best = largestKey(attention, layer, head, query);
  const truths = trueKeys(attention, truthOf(attention, layer, head), query);
  return html`: the key that you chose, ${guessed}, has the weight <b>${weightAt(query, guessed).toFixed(2)}</b>${
      best === guessed
        ? ", the largest."
        : html`; the largest has key ${best}${" "}
          ${inContext(attention.keys, best)}:${" "}<b>${weightAt(query, best).toFixed(2)}</b>.`
    }${truths.length > 0 && html` The true keys: ${truths.map((j) => inContext(attention.keys, j))}.`}`;
}

function Scores({ reader, head, offset, even, hits, count }) {
  const distance = offset.by === null ? "" : offset.by < 0 ? `${-offset.by} later` : `${offset.by} earlier`;
  const lines = [
    ["you", reader, "", hits?.reader],
    ["the head's own largest weight, the best possible", head, "", hits?.head],
    ["the best fixed distance", offset.score, distance, hits?.offset],
    ["any visible key at random", even, ""],
  ];
  return html`<section id="scores">
    <h2>Scores after ${count} ${count === 1 ? "query" : "queries"}</h2>
    <div class="wide">
      <table>
        <thead>
          <tr>
            <th scope="col">who chooses the key</th>
            <th scope="col">mean weight</th>
            <td></td>
            ${hits && html`<th scope="col">true keys</th>`}
          </tr>
        </thead>
        <tbody>
          ${lines.map(
            ([name, score, said, share]) =>
              html`<tr>
                <th scope="row">${name}${said && ` (${said})`}</th>
                <td>${score === null ? "—" : score.toFixed(3)}</td>
                <td>
                  <span class="track"><i class="length" style=${`width:${100 * (score ?? 0)}%`}></i></span>
                </td>
                ${hits && html`<td>${share === undefined || share === null ? "" : `${Math.round(100 * share)}%`}</td>`}
              </tr>`,
          )}
        </tbody>
      </table>
    </div>
    <p class="soft small">
      A score is the mean of the weights that the head gives to the chosen keys, 0 to 1. The fixed distance is the one
      with the largest mean weight on the other queries of this text; a key that it cannot see counts as 0.
      ${hits && " “True keys”: of the queries whose right keys are known, the share of right choices."}
    </p>
  </section>`;
}
