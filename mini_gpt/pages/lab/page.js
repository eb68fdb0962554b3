// The page: its controls, its state, and which number is explained.

import { seriesColour } from "../common/colours.js";
import { Choice, Slider } from "../common/controls.js";
import { fragment, useFragment } from "../common/fragment.js";
import { ColourBar } from "../common/maps.js";
import { html, useMemo, useState } from "../common/preact.js";
import { startPage } from "../common/start.js";
import { ThemeButton, useDark } from "../common/theme.js";
import { attention } from "./attention.js";
import { OneBesideTwo, Reorder } from "./compare.js";
import { explain } from "./explain.js";
import { CLEAR, Links } from "./links.js";
import { matricesShown } from "./matrices.js";
import { SCALES, TALLEST, WIDEST, typeset } from "./matrix.js";
import { Section, sectionOf, useSections } from "./sections.js";
import { Shapes } from "./shapes.js";
import {
  COLDEST,
  HOTTEST,
  defaultState,
  entriesOf,
  opened,
  sentencesOf,
  settingsOf,
  stateOf,
  unreadOf,
} from "./state.js";
import { CopyButtons, Input, Mix, Output, Project, Score, Split, headName } from "./steps.js";
import { isTrained, subjectOf } from "./subject.js";
import { number } from "./terms.js";

function Controls({ page }) {
  const { data, state, set } = page;
  return html`<div class="card controls" role="group" aria-label="Settings">
    ${
      !isTrained(data) &&
      html`<label
          ><span class="soft">sentence</span
          ><select id="sentence" value=${state.sentence} onChange=${(event) => set(opened(data, event.target.value))}>
            ${sentencesOf(data).map((text) => html`<option value=${text}>${text}</option>`)}
          </select></label
        >
        <${Choice}
          id="heads"
          name="heads"
          options=${subjectOf(data).heads}
          value=${state.heads}
          onChoose=${(heads) => set({ heads })} />`
    }
    ${
      Object.keys(data.encodings).length > 1 &&
      html`<label
        ><span class="soft">positions</span
        ><select id="position" value=${state.position} onChange=${(event) => set({ position: event.target.value })}>
          ${Object.entries(data.encodings).map(([name, { title }]) => html`<option value=${name}>${title}</option>`)}
        </select></label
      >`
    }
    <${Choice}
      id="mask"
      name="mask"
      options=${["none", "causal"]}
      value=${state.causal ? "causal" : "none"}
      onChoose=${(mask) => set({ causal: mask === "causal" })} />
    <${Choice}
      id="scale"
      name="scale 1/√d"
      options=${["on", "off"]}
      value=${state.scale ? "on" : "off"}
      onChoose=${(scale) => set({ scale: scale === "on" })} />
    <${Slider}
      id="temperature"
      name="temperature"
      min=${COLDEST}
      max=${HOTTEST}
      step="0.1"
      value=${state.temperature}
      said=${state.temperature.toFixed(1)}
      onChange=${(temperature) => set({ temperature })} />
    <button id="reset" onClick=${() => set(defaultState(data))}>reset all</button>
    <${CopyButtons}
      ...${{ matrices: Object.values(page.held), what: "all steps", onCopied: page.say, name: "copy all" }} />
  </div>`;
}

// What is computed: as the reader has set it, with one head, with two, and in the sentence's own order.
function viewsOf(data, state) {
  const view = (changes) => {
    const own = { ...state, ...changes };
    const result = attention(settingsOf(data, own));
    return { state: own, result, held: matricesShown(data, own, result) };
  };
  if (isTrained(data)) return { main: view({}) };
  return {
    main: view({}),
    one: view({ heads: 1 }),
    two: view({ heads: 2 }),
    before: view({ order: state.x.map((_, n) => n) }),
  };
}

function App({ data }) {
  const [state, setState] = useState(() => stateOf(data, fragment.read()));
  const [unread, setUnread] = useState(() => unreadOf(data, fragment.read()));
  const set = (part) => {
    setUnread([]);
    setState((old) => ({ ...old, ...part }));
  };
  const [hovered, hover] = useState(null);
  const [focused, setFocused] = useState(null);
  const [said, say] = useState("");
  const [pinned, pin] = useState(null);
  const sections = useSections(sectionOf(fragment.read()));
  const views = useMemo(() => viewsOf(data, state), [state]);
  const { result, held } = views.main;
  useDark();
  useFragment(
    state,
    (shown) => entriesOf(data, shown),
    (entries) => {
      setState(stateOf(data, entries));
      setUnread(unreadOf(data, entries));
      if (sectionOf(entries)) sections.goTo(sectionOf(entries));
    },
  );
  const exists = (cell) => cell && views[cell.view].held[cell.id]?.values[cell.i]?.[cell.j] !== undefined;
  const pointed = [hovered, focused].find(exists) ?? null;
  const explained = pointed && explain(views[pointed.view], pointed);
  const [point, focus] = [hover, setFocused].map((put) => (cell) => {
    put(cell);
    if (cell) say("");
  });
  const page = {
    data,
    set,
    views,
    view: "main",
    ...views.main,
    pointed,
    from: explained?.from ?? {},
    point,
    focus,
    say,
    sections,
  };
  return html`<header class="top">
      <h1>${data.title ?? "The attention lab"}</h1>
      <${ThemeButton} />
    </header>
    <p id="unread" class="note" role="status">
      ${
        unread.length > 0 &&
        `This page cannot read a part of its address: ${unread.join(", ")}. It shows the default instead.`
      }
    </p>
    <div class="opening">
      ${
        isTrained(data)
          ? html`<${AboutHead} data=${data} />`
          : html`<div>
              <p>
                A sentence, four numbers for each word, and four small matrices: this is multi-head attention, in five
                steps. You can change every number with a dotted line; all steps are then computed again. Point at a
                number,${" "}
                <span class="by-pointer">go to it with Tab and arrow keys, </span>or tap it, to see how it is computed.
              </p>
              <p>
                The words' numbers and the matrices were <b>chosen by hand</b>, so that each head has one clear role.
                Heads of trained models are rarely so clear.
              </p>
            </div>`
      }
      <${Experiments} page=${page} />
    </div>
    <${Controls} page=${page} />
    <${Section}
      id="roles"
      page=${page}
      title=${`What ${state.heads === 1 ? "the head attends" : "the heads attend"} to`}
      beside=${html`<${ColourBars} />`}>
      <p class="soft small">
        Each line joins a word that reads (above, the query) to a word that it reads (below, the key). Its width is the
        attention weight. Choose a word above to see only its lines. A word has no clear key if its largest weight is at
        most ${CLEAR} times the weight that it would have if all were equal.
      </p>
      <div class="lanes">
        ${result.heads.map(
          (head, n) =>
            html`<div class="lane" style=${`--head:${seriesColour(n)}`}>
              <h3>${headName(state, n)}</h3>
              <${Links}
                ...${{
                  head,
                  n,
                  words: held.X.rows,
                  name: headName(state, n),
                  pinned: pinned < state.x.length ? pinned : null,
                  onPin: pin,
                }} />
            </div>`,
        )}
      </div>
    </${Section}>
    ${(isTrained(data)
      ? [[Input], [Project], [Split], [Score, Mix], [Output]]
      : [[Input, Project], [Split, Score, Mix], [Output, Shapes], [OneBesideTwo], [Reorder]]
    ).map(
      (sections, n) =>
        html`<div class=${`line ${isTrained(data) ? "" : `line-${n}`} ${result.added ? "added" : ""}`}>
          ${sections.map((View) => html`<${View} page=${page} />`)}
        </div>`,
    )}
    <div id="explained" class=${explained || said ? "card" : "unseen"} role="status">
      ${
        explained
          ? html`<b>${typeset(explained.name)}</b> <span>${typeset(explained.text)}</span>`
          : html`<span class="soft">${said}</span>`
      }
    </div>`;
}

const AboutHead = ({ data: { place, dimensions, words } }) =>
  html`<div>
    <p>
      One head of a trained model, layer ${place.layer}, head ${place.head}, with its real numbers: its input X of
      ${" "}${words.length} tokens and ${dimensions.length} columns, ${typeset("W_Q, W_K, W_V and its part of W_O")}.
      All steps are computed here again. The weights and outputs are those of the model up to${" "}
      ${place.error.toExponential(0)}.
    </p>
    <p>
      A matrix with more than ${WIDEST} columns or ${TALLEST} rows is a map: point at a cell to read its number, click
      it to change it. You can change every number of X and of the four matrices. A token that is there twice has its
      position, from 0, in brackets.
    </p>
  </div>`;

// Links to states of the page, without those that change nothing in this head. A link also brings the section into view
// in which its result is seen.
function Experiments({ page: { data, state, sections } }) {
  const shortOf = (own) => JSON.stringify(entriesOf(data, own));
  const now = shortOf(state);
  const { experiments } = subjectOf(data);
  const each = useMemo(() => experiments.map(([hash]) => shortOf(stateOf(data, fragment.parse(hash)))), [data]);
  return html`<nav class="card" id="experiments" aria-label="Things to try">
    <h2>Things to try</h2>
    <ul>
      ${experiments.map(
        ([hash, name, seen, id], n) =>
          (n === 0 || each[n] !== each[0]) &&
          html`<li>
            <a href=${`#${hash}`} aria-current=${now === each[n] ? "true" : null} onClick=${() => sections.goTo(id)}
              >${typeset(name)}</a
            >: ${seen}
          </li>`,
      )}
    </ul>
  </nav>`;
}

const ColourBars = () =>
  html`<span class="bars"
    ><${ColourBar} scale=${SCALES.signed} name="numbers" format=${(value) => number(value, 0)} />
    <${ColourBar} scale=${SCALES.weights} name="weights" masked="hidden"
  /></span>`;

startPage((data) => html`<${App} data=${data} />`);
