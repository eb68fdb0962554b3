// The page's state, its tabs and its shortcuts. The state is kept in the fragment of the URL.

import { unpack } from "../common/arrays.js";
import { Choice, TabPanel, Tabs, useShortcuts } from "../common/controls.js";
import { fragment, useFragment } from "../common/fragment.js";
import { indices } from "../common/numbers.js";
import { html, useState } from "../common/preact.js";
import { startPage } from "../common/start.js";
import { ThemeButton, theme, useDark } from "../common/theme.js";
import { Attention } from "./attention.js";
import { BesideView } from "./beside_view.js";
import { GuessView, MOST_GAMES } from "./guess.js";
import { MEAN, TYPICAL, headsOf } from "./heads.js";
import { HeadsView } from "./heads_view.js";
import { LinesView } from "./lines_view.js";
import { MapView } from "./map_view.js";
import { LENGTHS, Positions, basesOf } from "./positions_view.js";
import { TextView } from "./text_view.js";

const TABS = [
  ["Text", "Text"],
  ["Heads", "All heads"],
  ["Map", "One head"],
  ["Positions", "Positions"],
  ["Lines", "Lines"],
  ["Beside", "Side by side"],
  ["Guess", "Guess"],
];
const OF_ATTENTION = ["Text", "Heads", "Map", "Lines", "Beside", "Guess"];
const OF_ONE_HEAD = ["Map", "Lines", "Guess"];
// Of the kinds of attention in a model with an encoder.
const MEANINGS = {
  encoder: "source tokens attend to source tokens",
  decoder: "tokens of the target attend to themselves and earlier ones",
  cross: "tokens of the target, as they are written, attend to the source",
};

// The state that a fragment describes; what it leaves out, or what does not exist here, has its default.
function stateOf(entries, data, kinds) {
  const among = (value, names, otherwise) => (names.includes(value) ? value : otherwise);
  const kind = among(entries.kind, Object.keys(kinds), Object.keys(kinds).at(-1));
  const attention = kinds[kind];
  const bases = basesOf(data);
  const [tellingLayer, tellingHead] = attention.telling; // the page opens on this head
  const layer = fragment.index(entries.layer, attention.layers, tellingLayer);
  const firstHead = layer === tellingLayer ? tellingHead : 0;
  const side = among(entries.show, ["query", "key"], "query");
  const count = side === "key" ? attention.columns : attention.rows;
  const [i, j] = (entries.cell ?? "")
    .split(",")
    .map((text, n) => fragment.index(text, n ? attention.columns : attention.rows, null));
  const number = (text, { min, max, own }) => (text !== undefined && +text >= min && +text <= max ? +text : own);
  return {
    kind,
    side,
    tab: among(
      entries.tab,
      TABS.map(([id]) => id),
      "Text",
    ),
    layer,
    head: entries.head === MEAN ? MEAN : fragment.index(entries.head, attention.heads, firstHead),
    pin: entries.pin === "none" ? null : fragment.index(entries.pin, count, TYPICAL),
    cell: i !== null && j !== null && j !== undefined ? { i, j } : null,
    values: among(entries.values, ["weights", "logits"], "weights"),
    from: fragment.index(entries.from, attention.longest),
    beside: among(entries.beside, ["six", "layer"], "six"),
    game: fragment.index(entries.game, MOST_GAMES + 1, 1),
    length: number(entries.length, LENGTHS),
    baseLog: number(entries.base, bases),
    shortcuts: entries.shortcuts !== "off",
  };
}

function entriesOf(state, data, kinds) {
  const isOther = (value, usual) => (value === usual ? null : value);
  const { cell } = state;
  return {
    tab: state.tab,
    kind: isOther(state.kind, Object.keys(kinds).at(-1)),
    layer: state.layer,
    head: state.head,
    pin: isOther(state.pin ?? "none", TYPICAL),
    show: isOther(state.side, "query"),
    cell: cell && `${cell.i},${cell.j}`,
    values: isOther(state.values, "weights"),
    from: isOther(state.from, 0),
    beside: isOther(state.beside, "six"),
    game: isOther(state.game, 1),
    length: isOther(state.length, LENGTHS.own),
    base: isOther(state.baseLog, basesOf(data).own),
    shortcuts: state.shortcuts ? null : "off",
  };
}

// The state of the view: one that cannot show the mean of all heads, or a removed head, shows the layer's first head.
function shownState(state, attention) {
  const heads = headsOf(attention, state.layer);
  const isMean = state.head === MEAN && !OF_ONE_HEAD.includes(state.tab);
  return isMean || heads.includes(state.head) ? state : { ...state, head: heads[0] };
}

function App({ data, kinds }) {
  const [state, setState] = useState(() => stateOf(fragment.read(), data, kinds));
  const set = (part) => setState((old) => ({ ...old, ...part }));
  const attention = kinds[state.kind];
  const show = (kind) =>
    setState((old) => stateOf({ ...entriesOf({ ...old, cell: null }, data, kinds), kind, pin: null }, data, kinds));
  // From the mean of all heads, a step goes to the first or the last head.
  const step = (what, by) =>
    setState((old) => {
      const values = what === "head" ? headsOf(kinds[old.kind], old.layer) : indices(kinds[old.kind].layers);
      const from = shownState(old, kinds[old.kind])[what];
      const at = from === MEAN ? Math.min(0, -by) : values.indexOf(from);
      return { ...old, [what]: values[(at + by + values.length) % values.length] };
    });
  useDark();
  useFragment(
    state,
    (shown) => entriesOf(shown, data, kinds),
    (entries) => setState(stateOf(entries, data, kinds)),
  );
  useShortcuts(
    {
      ...Object.fromEntries(TABS.map(([tab], n) => [n + 1, () => set({ tab })])),
      h: () => step("head", 1),
      H: () => step("head", -1),
      l: () => step("layer", 1),
      L: () => step("layer", -1),
      v: () => setState((old) => ({ ...old, values: old.values === "weights" ? "logits" : "weights" })),
      t: () => theme.exchange(),
    },
    state.shortcuts,
  );
  const view = { Text: TextView, Heads: HeadsView, Map: MapView, Lines: LinesView, Beside: BesideView };
  const View = { ...view, Guess: GuessView, Positions }[state.tab];
  return html`<header class="top">
      <h1>${data.title}</h1>
      <span class="soft">${data.subtitle}</span><${ThemeButton} />
    </header>
    <${Tabs} tabs=${TABS} selected=${state.tab} onSelect=${(tab) => set({ tab })} name="views" />
    <${TabPanel} selected=${state.tab}>
      ${
        Object.keys(kinds).length > 1 &&
        OF_ATTENTION.includes(state.tab) &&
        html`<div class="controls">
          <${Choice}
            id="kind"
            name="attention"
            options=${Object.keys(kinds)}
            value=${state.kind}
            onChoose=${show} /><span class="soft" id="meaning">${MEANINGS[state.kind]}</span>
        </div>`
      }
      <${View} key=${state.kind} ...${{ data, attention, state: shownState(state, attention), set }} />
    </${TabPanel}>
    <footer class="soft small">
      <label class="by-pointer"
        ><input
          type="checkbox"
          id="shortcuts"
          checked=${state.shortcuts}
          onChange=${(event) => set({ shortcuts: event.target.checked })} />
        keyboard shortcuts</label
      >
      <span class=${`by-pointer ${state.shortcuts ? "" : "unseen"}`}>
        <kbd>1</kbd>–<kbd>${TABS.length}</kbd> views, <kbd>h</kbd> <kbd>H</kbd> next and previous head,${" "}
        <kbd>l</kbd> <kbd>L</kbd> layer, <kbd>v</kbd> weights or logits, <kbd>t</kbd> colours.</span
      >
      <span> The address holds what you see, so that you can share it.</span>
    </footer>`;
}

startPage(async (data) => {
  document.title = data.title;
  const kinds = {}; // {kind: Attention}; a model without an encoder has one
  for (const [kind, held] of Object.entries(data.kinds ?? { decoder: data.attention }))
    kinds[kind] = new Attention({ ...held, meanings: data.meanings }, await unpack(held.logits));
  return html`<${App} ...${{ data, kinds }} />`;
});
