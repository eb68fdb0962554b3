"use strict";
// Two comparisons: one head beside two, and the sentence before and after a change of its order.

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

function OneBesideTwo({ page }) {
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

// The words in order. They move by drag, or by the buttons on both sides, which keep the focus.
function OrderChips({ page }) {
  const { data, state, set, say } = page;
  const words = wordsOf(data, state);
  const [dragged, setDragged] = useState(null);
  const pressed = useRef(null);
  useLayoutEffect(() => {
    const [word, side] = pressed.current ?? [];
    const buttons = document.querySelectorAll(`.chip[data-word="${word}"] button`);
    pressed.current = null;
    if (buttons.length) (buttons[side].disabled ? buttons[1 - side] : buttons[side]).focus();
  }, [state.order]);
  const press = (place, step) => {
    pressed.current = [state.order[place], step < 0 ? 0 : 1];
    move(place, place + step);
  };
  const move = (from, to) => {
    if (from === null || to < 0 || to >= words.length || from === to) return;
    const order = [...state.order];
    order.splice(to, 0, ...order.splice(from, 1));
    set({ order });
    say(`${words[from]} is now word ${to + 1}.`);
  };
  const over = (event) => {
    if (dragged === null) return;
    const chip = document.elementFromPoint(event.clientX, event.clientY)?.closest(".chip");
    if (chip && +chip.dataset.place !== dragged) {
      move(dragged, +chip.dataset.place);
      setDragged(+chip.dataset.place);
    }
  };
  return html`<ol
    class="chips"
    aria-label="Order of the words"
    onPointerMove=${over}
    onPointerUp=${() => setDragged(null)}
    onPointerCancel=${() => setDragged(null)}>
    ${words.map(
      (word, place) =>
        html`<li
          class=${`chip ${dragged === place ? "dragged" : ""}`}
          data-place=${place}
          data-word=${state.order[place]}
          key=${state.order[place]}>
          <button
            onClick=${() => press(place, -1)}
            disabled=${place === 0}
            aria-label=${`Move ${word}, word ${place + 1}, to the left`}>
            ←
          </button>
          <span
            class="grip"
            onPointerDown=${(event) => {
              event.target.closest("ol").setPointerCapture(event.pointerId);
              setDragged(place);
            }}
            >${word}</span
          >
          <button
            onClick=${() => press(place, 1)}
            disabled=${place === words.length - 1}
            aria-label=${`Move ${word}, word ${place + 1}, to the right`}>
            →
          </button>
        </li>`,
    )}
  </ol>`;
}

function Reorder({ page }) {
  const { state, set, held, result } = page;
  const { result: before, state: original } = page.views.before;
  const first = original.order;
  const isChanged = state.order.some((n, place) => n !== place);
  const changes = first.map((n) =>
    Math.max(...result.y[state.order.indexOf(n)].map((value, k) => Math.abs(value - before.y[n][k]))),
  );
  const words = state.sentence.split(" ");
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
    <${OrderChips} page=${page} />
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
          <thead>
            <tr>
              <th scope="col">word</th>
              <th scope="col">largest change</th>
            </tr>
          </thead>
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
