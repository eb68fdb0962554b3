// All heads as small maps: layers downwards from layer 0, heads across.

import { scales } from "../common/colours.js";
import { Bands } from "../common/controls.js";
import { ColourBar, Frames, PixelMap } from "../common/maps.js";
import { indices } from "../common/numbers.js";
import { html } from "../common/preact.js";
import { reducedMap } from "./attention.js";
import { NoLabels, isRemoved, labelOf, masked } from "./heads.js";

const THUMB = 128; // points of a small map's side, for long texts
const WIDEST = 220; // pixels of a head

export function HeadsView({ data, attention, set }) {
  const { layers, heads, rows, columns } = attention;
  const by = attention.others ? Math.ceil(attention.longest / THUMB) : 1;
  const makeValueAt = (layer, head) => () =>
    by > 1 ? reducedMap(attention, layer, head, by) : attention.weightsAt(layer, head);
  const measured =
    data.labels_from === "--suite=heads" ? html`many texts by <code>eval.py --suite=heads</code>` : data.labels_from;
  const name = (layer, head) => {
    const label = labelOf(attention, layer, head);
    if (!label) return `${layer}.${head}`;
    return label.strength === null ? label.name : `${label.name} ${label.strength.toFixed(2)}`;
  };
  const button = (layer, head) =>
    isRemoved(attention, layer, head)
      ? html`<span class="soft small" id=${`thumb-${layer}-${head}`}>removed</span>`
      : html`<button class="thumb" id=${`thumb-${layer}-${head}`} onClick=${() => set({ layer, head, tab: "Map" })}>
          <span class="framed-map"
            ><${PixelMap}
              rows=${Math.ceil(rows / by)}
              columns=${Math.ceil(columns / by)}
              makeValueAt=${makeValueAt(layer, head)}
              scale=${scales.weights}
              deps=${[attention]}
              name=${`layer ${layer}, head ${head}`}
              style=${`aspect-ratio:${columns}/${rows}`} />${attention.alignment && html`<${Frames} ...${{ rows, columns }} frames=${attention.alignment} />`}</span
          >
          <span>${name(layer, head)}</span>
        </button>`;
  const grid = (first, end) =>
    html`<div
      class="thumbs"
      role="group"
      aria-label=${end - first < layers ? `heads of layers ${first} to ${end - 1}` : "heads"}
      style=${`grid-template-columns:auto repeat(${heads}, minmax(${heads > 8 ? 76 : 66}px, ${WIDEST}px))`}>
      <span></span>${indices(heads).map((head) => html`<span class="soft small">head ${head}</span>`)}
      ${indices(end - first).map(
        (n) =>
          html`<span class="soft small layer">layer ${first + n}</span>${indices(heads).map((head) =>
              button(first + n, head),
            )}`,
      )}
    </div>`;
  return html`<p>
      Each small map is a head: the tokens ${attention.isCross ? "of the target" : "of the text"} (queries) downwards,
      the tokens ${attention.isCross ? "of the source" : "that they read"} (keys) across. Choose one to enlarge it.
      ${by > 1 && ` A point is the weight on ${by} keys together, averaged over ${by} queries.`}
    </p>
    <div class="controls">
      <${ColourBar} scale=${scales.weights} name="attention weight" masked=${masked(attention)} />
      ${attention.alignment && html`<span class="soft small" id="legend"><i class="frame"></i> true alignment</span>`}
      ${
        attention.labels
          ? html`<span class="soft small" id="labels-from"
              >Labels say what a head attends to most, measured on ${measured}. The number is its strength: 0 is chance,
              1 is all attention.</span
            >`
          : html`<${NoLabels} />`
      }
    </div>
    <${Bands} layers=${layers} rows=${grid} isOpen=${(first) => first === 0} />`;
}
