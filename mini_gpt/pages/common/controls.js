// Tabs, groups of buttons, sliders and shortcuts, as screen readers and keyboards expect them.

import { indices } from "./numbers.js";
import { html, useLayoutEffect, useRef, useState } from "./preact.js";

export const hasModifier = (event) => event.ctrlKey || event.metaKey || event.altKey;

// tabs: [[id, name]]. The arrow keys, Home and End go from tab to tab.
export function Tabs({ tabs, selected, onSelect, name }) {
  const press = (event) => {
    const at = tabs.findIndex(([id]) => id === selected);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined || hasModifier(event)) return;
    event.preventDefault();
    event.stopPropagation();
    const [id] = tabs[(to + tabs.length) % tabs.length];
    onSelect(id);
    document.getElementById(`tab-${id}`).focus();
  };
  return html`<div role="tablist" aria-label=${name} onKeyDown=${press}>
    ${tabs.map(
      ([id, said]) =>
        html`<button
          role="tab"
          id=${`tab-${id}`}
          aria-selected=${id === selected ? "true" : "false"}
          aria-controls="panel"
          tabindex=${id === selected ? 0 : -1}
          onClick=${() => onSelect(id)}>
          ${said}
        </button>`,
    )}
  </div>`;
}

// The panel of the selected tab.
export const TabPanel = ({ selected, children }) =>
  html`<div role="tabpanel" id="panel" aria-labelledby=${`tab-${selected}`} tabindex="-1">${children}</div>`;

// Buttons of which one is pressed. options: values, or [value, text]. Buttons have the ids `${id}-${value}`.
export const Choice = ({ id, name, options, value, onChoose, titleOf }) =>
  html`<div class="choice" role="group" aria-label=${name}>
    <span class="name" aria-hidden="true">${name}</span>
    ${options
      .map((option) => (Array.isArray(option) ? option : [option, String(option)]))
      .map(
        ([own, text]) =>
          html`<button
            id=${`${id}-${own}`}
            aria-pressed=${own === value ? "true" : "false"}
            title=${titleOf?.(own)}
            onClick=${() => onChoose(own)}>
            ${text}
          </button>`,
      )}
  </div>`;

// The choice of a layer and of a head. heads: the values to choose from. The layers of a deep model fold, in bands of
// which one is open: at first that of the chosen layer.
export const LayerAndHead = ({ layers, heads, state, set, titleOf }) => {
  const isIn = (first, end) => state.layer >= first && state.layer < end;
  const buttons = (first, end) =>
    html`<${Choice}
      id="layer"
      name="layer"
      options=${indices(end - first).map((n) => first + n)}
      value=${state.layer}
      onChoose=${(layer) => set({ layer })} />`;
  const said = (first, end) => (isIn(first, end) ? `: ${state.layer}` : "");
  return html`<div class="bands">
      <${Bands} ...${{ layers, said }} id="fold" rows=${buttons} isOpen=${isIn} alone />
    </div>
    <${Choice}
      id="head"
      name="head"
      options=${heads}
      value=${state.head}
      onChoose=${(head) => set({ head })}
      titleOf=${titleOf} />`;
};

const UNFOLDED = 12; // layers that are shown without folding
const BAND = 6; // layers that fold together

// The rows of all layers. Those of a deep model fold in bands. rows: (first, end) => rows of layers. said: the same for
// what a folded band holds. isOpen: the same for whether it is open at first, and opens when this becomes true. alone:
// whether a band that opens closes the others. Bands have the ids `${id}-${first}`.
export function Bands({ layers, ...each }) {
  if (layers <= UNFOLDED) return each.rows(0, layers);
  return indices(Math.ceil(layers / BAND)).map((n) => {
    const first = n * BAND;
    return html`<${Band} key=${n} first=${first} end=${Math.min(first + BAND, layers)} ...${each} />`;
  });
}

function Band({ first, end, rows, said, isOpen, id = "band", alone }) {
  const opens = isOpen(first, end);
  const [open, setOpen] = useState(opens);
  useLayoutEffect(() => {
    if (opens) setOpen(true);
  }, [opens]);
  return html`<details class="band" name=${alone && id} open=${open} onToggle=${(event) => setOpen(event.target.open)}>
    <summary id=${`${id}-${first}`}>layers ${first} to ${end - 1}${said?.(first, end)}</summary>
    ${open && rows(first, end)}
  </details>`;
}

export const Slider = ({ id, name, min, max, step, value, said, title, onChange }) =>
  html`<label title=${title}
    ><span class="soft">${name}</span>
    <input
      type="range"
      id=${id}
      min=${min}
      max=${max}
      step=${step}
      value=${value}
      onInput=${(event) => onChange(+event.target.value)} />
    <b class="numbers" id=${`${id}-value`}>${said ?? value}</b></label
  >`;

// The first row of a table. columns: what its cells hold.
export const TableHead = ({ columns }) =>
  html`<thead>
    <tr>
      ${columns.map((column) => html`<th scope="col">${column}</th>`)}
    </tr>
  </thead>`;

const isTyping = (element) => /^(INPUT|SELECT|TEXTAREA)$/.test(element.tagName) || element.isContentEditable;

// A hook: keys is {key: action}. Shortcuts are off while typing, with Ctrl, Alt or Meta, and if `on` is false.
export function useShortcuts(keys, on) {
  const latest = useRef();
  latest.current = on ? keys : {};
  useLayoutEffect(() => {
    const press = (event) => {
      if (hasModifier(event) || isTyping(event.target) || !Object.hasOwn(latest.current, event.key)) return;
      event.preventDefault();
      latest.current[event.key]();
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
}
