// The game: the reader clicks the key that a head reads the most.

import { scales, shadeStyle } from "../common/colours.js";
import { html, useMemo, useState } from "../common/preact.js";
import { FlowingText } from "../common/tokens.js";
import { LEAST_KEYS, largestKey, queriesOf, scoresOf, trueKeys } from "./guess.js";
import { HeadChoice, inContext, truthOf } from "./heads.js";

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
