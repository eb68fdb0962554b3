// The heads and the parts of each layer, as buttons that switch them off.

import { colourOf, scales, textOn } from "../../common/colours.js";
import { Bands } from "../../common/controls.js";
import { html } from "../../common/preact.js";
import { useDark } from "../../common/theme.js";
import { HEAD_STATES, withEntry, withPart } from "./edits.js";
import { UNITS } from "./state.js";

const HEAD_SIGNS = { on: "", off: "×", mean: "x̄", patch: "⇄" };

const toggled = (list = [], n) =>
  list.includes(n) ? list.filter((other) => other !== n) : [...list, n].sort((a, b) => a - b);

// The layer of each edit of a head or of a part.
const layersOf = ({ heads = {}, layers = [], attentions = [], feedForwards = [] }) => [
  ...Object.keys(heads).map((name) => parseInt(name)),
  ...layers,
  ...attentions,
  ...feedForwards,
];

// effects: {"layer.head": change of the loss in nats if the head is off}, measured for this text.
export function HeadGrid({ facts, edits, change, canPatch, effects, unit }) {
  useDark();
  const { heads = {} } = edits;
  const states = Object.keys(HEAD_STATES).filter((state) => state !== "patch" || canPatch);
  const reach = Math.max(0.05, ...Object.values(effects ?? {}).map(Math.abs));
  const press = (name) => {
    const next = states[(states.indexOf(heads[name] ?? "on") + 1) % states.length];
    change(withPart(edits, "heads", withEntry(heads, name, next === "on" ? undefined : next)));
  };
  const flip = (name, layer) => {
    const list = toggled(edits[name], layer);
    change(withEntry(edits, name, list.length ? list : undefined));
  };
  const part = (name, text, label, layer) => {
    const isOff = edits[name]?.includes(layer);
    return html`<button
      class="part"
      id=${`${name}-${layer}`}
      aria-pressed=${isOff ? "true" : "false"}
      title=${isOff ? "Off. Click to switch it on." : "Click to switch it off."}
      aria-label=${`${label} off`}
      onClick=${() => flip(name, layer)}>
      ${text}
    </button>`;
  };
  const head = (layer, number) => {
    const name = `${layer}.${number}`;
    const state = heads[name] ?? "on";
    const effect = effects?.[name];
    const isInert = edits.layers?.includes(layer) || edits.attentions?.includes(layer);
    const measured =
      effect === undefined ? "" : `; off changes the loss by ${signedNumber(effect * UNITS[unit])} ${unit}`;
    const said = `head ${name}: ${HEAD_STATES[state]}${isInert ? ", in a part that is off" : ""}${measured}`;
    const style = effect === undefined || state !== "on" ? "" : textOn(colourOf(scales.signed(reach), effect));
    return html`<button
      class=${`head ${state} ${isInert ? "inert" : ""}`}
      id=${`head-${name}`}
      aria-label=${said}
      title=${said}
      style=${style}
      onClick=${() => press(name)}>
      ${number}${HEAD_SIGNS[state]}
    </button>`;
  };
  const row = (layer) =>
    html`<div class="layer" key=${layer}>
      <span class="name">layer ${layer}</span>
      <span class="heads">${facts.kept[layer].map((number) => head(layer, number))}</span>
      <span class="parts"
        >${part("attentions", "attention", `attention of layer ${layer}`, layer)}${part(
          "feedForwards",
          "feed-forward",
          `feed-forward of layer ${layer}`,
          layer,
        )}${part("layers", "whole layer", `layer ${layer}`, layer)}</span
      >
    </div>`;
  const rows = (first, end) => Array.from({ length: end - first }, (_, n) => row(first + n));
  const countIn = (first, end) => layersOf(edits).filter((layer) => layer >= first && layer < end).length;
  const said = (first, end) => {
    const count = countIn(first, end);
    return count ? `: ${count} edit${count > 1 ? "s" : ""}` : "";
  };
  const isOpen = (first, end) => first === 0 || countIn(first, end) > 0;
  return html`<div class="grid"><${Bands} layers=${facts.layers} ...${{ rows, said, isOpen }} /></div>
    <p class="small soft">
      Click a head to switch it off (×). Click again: its output is its mean over this text
      (x̄).${canPatch ? " Click again: its output is that of the other text (⇄)." : ""} A last click switches it on. A
      part of a layer that is off is struck through.
    </p>`;
}

export const signedNumber = (value) =>
  `${Math.abs(value) < 0.0005 ? "±" : value < 0 ? "−" : "+"}${Math.abs(value).toFixed(3)}`;
