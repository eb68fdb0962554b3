// Two comparisons: one head beside two, and the sentence before and after a change of its order.

import { TableHead } from "../common/controls.js";
import { OrderChips, movedOrder } from "../common/order.js";
import { html } from "../common/preact.js";
import { wordsAbout } from "./encodings.js";
import { keysInWords, strongest } from "./links.js";
import { Matrix } from "./matrix.js";
import { Section } from "./sections.js";
import { wordsOf } from "./state.js";
import { number } from "./terms.js";

const ROUNDING = 1e-9; // relative differences that are only rounding
const WITHOUT_ORDER = " Without positions and without a mask, attention does not know the order of its words.";

// The page with the numbers of another view.
const inView = (page, view) => ({ ...page, ...page.views[view], view });

// The word for which two heads find different keys most clearly, as its index, or null.
function wordOfTwoRoles([first, second]) {
  const tops = [first, second].map(({ weights }) => strongest(weights));
  const candidates = first.weights.map((_, i) => ({
    i,
    least: Math.min(tops[0][i].weight, tops[1][i].weight),
    apart: !tops[0][i].keys.some((j) => tops[1][i].keys.includes(j)) && tops.every((top) => top[i].isClear),
  }));
  return candidates.filter(({ apart }) => apart).sort((a, b) => b.least - a.least)[0]?.i ?? null;
}

export function OneBesideTwo({ page }) {
  const words = page.held.X.rows;
  const [{ result: one }, { result: two }] = [page.views.one, page.views.two];
  const word = wordOfTwoRoles(two.heads);
  const keys = word === null ? null : two.heads.map((head) => strongest(head.weights)[word]);
  const shown = [
    ["one head of width 4", "one", "A0"],
    ["head 1 of two, width 2", "two", "A0"],
    ["head 2 of two, width 2", "two", "A1"],
  ];
  const found = (n) => `${keysInWords(keys[n], words)} in head ${n + 1}`;
  const forBoth = () => {
    const weights = keys
      .flatMap((each) => each.keys)
      .map((j) => `${words[j]} ${number(one.heads[0].weights[word][j])}`);
    return `One head has one softmax for both: ${weights.join(" and ")}.`;
  };
  return html`<${Section} id="one-beside-two" page=${page} title="One head beside two">
    <p class="soft">
      The same X, the same matrices, the same number of parameters. One head compares all four columns at once and has
      one softmax for each word. Two heads have two.
    </p>
    <div class="thirds">
      ${shown.map(
        ([name, view, id]) =>
          html`<div>
            <h3>${name}</h3>
            <${Matrix} matrix=${page.views[view].held[id]} page=${inView(page, view)} />
          </div>`,
      )}
    </div>
    <p id="two-roles">
      ${
        keys === null
          ? "With these numbers, no word finds clearly different keys in the two heads."
          : html`<b>“${words[word]}”</b> finds ${found(0)}, and ${found(1)}. ${forBoth()}`
      }
    </p>
  </${Section}>`;
}

export function Reorder({ page }) {
  const { state, set, held, result } = page;
  const { result: before, state: original } = page.views.before;
  const first = original.order;
  const isChanged = state.order.some((n, place) => n !== place);
  const changes = first.map((n) =>
    Math.max(...result.y[state.order.indexOf(n)].map((value, k) => Math.abs(value - before.y[n][k]))),
  );
  const words = state.sentence.split(" ");
  const shownWords = wordsOf(page.data, state);
  const move = (from, to) => {
    set({ order: movedOrder(state.order, from, to) });
    page.say(`${shownWords[from]} is now word ${to + 1}.`);
  };
  const most = Math.max(...changes);
  const largest = Math.max(...result.y.flat().map(Math.abs));
  const swap = () => {
    const order = [...state.order];
    [order[1], order[order.length - 1]] = [order[order.length - 1], order[1]];
    set({ order });
  };
  const reason = [wordsAbout(result.encoding).cause, state.causal ? "the causal mask" : null]
    .filter(Boolean)
    .join(" and ");
  const verdict = () => {
    if (!isChanged) return "The words have their original order. Move one, and compare.";
    if (most <= ROUNDING * largest)
      return `Each word has the same output as before; only the rows are permuted.${reason ? "" : WITHOUT_ORDER}`;
    return `Outputs change by up to ${number(most)}${reason && `, because of ${reason}`}: the order matters.`;
  };
  const buttons = html`<button id="swap" onClick=${swap}>swap second and last</button>
    <button id="reverse" onClick=${() => set({ order: [...state.order].reverse() })}>reverse</button>
    <button id="original" disabled=${!isChanged} onClick=${() => set({ order: first })}>original order</button>`;
  return html`<${Section} id="reorder" page=${page} title="Change the order of the words" beside=${buttons}>
    <${OrderChips} words=${shownWords} ids=${state.order} onMove=${move} />
    <div class="row tops">
      <div>
        <h3>before</h3>
        <${Matrix} matrix=${page.views.before.held.Y} page=${inView(page, "before")} />
      </div>
      <div>
        <h3>after</h3>
        <${Matrix} matrix=${held.Y} page=${page} place="after-Y" />
      </div>
      <div>
        <h3>change of Y</h3>
        <table>
          <${TableHead} columns=${["word", "largest change"]} />
          <tbody>
            ${words.map(
              (word, n) =>
                html`<tr>
                  <th scope="row">${word}</th>
                  <td>${number(changes[n])}</td>
                </tr>`,
            )}
          </tbody>
        </table>
      </div>
      <div class="verdict">
        <p id="verdict"><b>${verdict()}</b></p>
        <p class="soft small">
          Each word's output is compared with its output in the original order. The table has the largest change among
          its four numbers.
        </p>
      </div>
    </div>
  </${Section}>`;
}
