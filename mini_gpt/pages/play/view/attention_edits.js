// The controls of scale, mask, temperature and positions.

import { Choice, Slider } from "../../common/controls.js";
import { thousands } from "../../common/numbers.js";
import { html } from "../../common/preact.js";
import { withEntry, withPart } from "./edits.js";

// A slider with steps of equal ratio, or with `zero` also 0 at its left end. own: the run's value, at which onChange
// gets undefined.
function LogSlider({ id, name, low, high, value, own, said, zero = false, digits = 2, title, onChange }) {
  const steps = 120;
  const ratio = Math.log(high / low) / steps;
  const stepOf = (number) => (zero && number === 0 ? -1 : Math.round(Math.log(number / low) / ratio));
  const valueAt = (n) => (n < 0 ? 0 : Number((low * Math.exp(ratio * n)).toPrecision(digits)));
  return html`<${Slider}
    ...${{ id, name, said, title }}
    min=${zero ? -1 : 0}
    max=${steps}
    step="1"
    value=${stepOf(value)}
    onChange=${(n) => onChange(n === stepOf(own) ? undefined : valueAt(n))} />`;
}

export function PositionEdits({ facts, edits, change }) {
  const { rope = {}, start = 0, slopes = 1 } = edits;
  const { differ, rope: ownRope, context } = facts;
  const set = (name, value) => change(withEntry(edits, name, value));
  const changeRope = (next) => change(withPart(edits, "rope", next));
  const setRope = (name, value) => changeRope(withEntry(rope, name, value));
  const { base, scaling, factor } = { ...ownRope, ...rope };
  const longest = 4 * context;
  const window = edits.window === undefined ? facts.window : edits.window;
  const chooseScaling = (name) => {
    if (name === ownRope.scaling) changeRope(withEntry(withEntry(rope, "scaling"), "factor"));
    else if (name === "none") changeRope({ ...withEntry(rope, "factor"), scaling: name });
    else changeRope({ ...rope, scaling: name, factor: Math.max(2, factor) });
  };
  const ownOf = (field, value) => (differ[field] ? undefined : value);
  const said = (edited, field, text) => (edited === undefined && differ[field] ? "by layer" : text);
  return html`${
      facts.positions !== "none" &&
      html`<${LogSlider}
        id="start"
        name="first position"
        title="The position of the first token. Those of the later tokens move with it."
        low=${1}
        high=${Math.max(4096, longest)}
        zero
        value=${start}
        own=${0}
        said=${thousands(start)}
        onChange=${(value) => set("start", value && Math.round(value))} />`
    }
    ${
      ownRope &&
      html`<${LogSlider}
          id="rope-base"
          name="RoPE base"
          low=${10}
          high=${Math.max(1e6, ownRope.base)}
          value=${base}
          own=${ownOf("rope_base", ownRope.base)}
          said=${said(rope.base, "rope_base", thousands(base))}
          onChange=${(value) => setRope("base", value)} />
        ${
          facts.has("rope") &&
          html`<label title=${SCALING_TITLE}
              ><span class="soft">RoPE scaling</span
              ><select id="rope-scaling" value=${scaling} onChange=${(event) => chooseScaling(event.target.value)}>
                ${facts.scalings.map((name) => html`<option value=${name}>${name}</option>`)}
              </select></label
            >
            ${
              scaling !== "none" &&
              html`<${LogSlider}
                id="rope-factor"
                name="factor"
                low=${1}
                high=${Math.max(16, ownRope.factor)}
                value=${factor}
                own=${scaling === ownRope.scaling ? ownOf("rope_factor", ownRope.factor) : undefined}
                said=${said(rope.factor, "rope_factor", `× ${factor}`)}
                onChange=${(value) => setRope("factor", value)} />`
            }`
        }`
    }
    ${
      facts.has("alibi") &&
      html`<${LogSlider}
        id="slopes"
        name="ALiBi's slopes"
        title="A factor of how much the logits fall with the distance of a key."
        low=${0.05}
        high=${20}
        zero
        value=${slopes}
        own=${1}
        said=${`× ${slopes}`}
        onChange=${(value) => set("slopes", value)} />`
    }
    <${LogSlider}
      id="window"
      name="window"
      title="How many keys a query sees: its own and those just before it."
      low=${1}
      high=${longest}
      digits=${3}
      value=${window ?? longest}
      own=${ownOf("window", facts.window ?? longest)}
      said=${said(edits.window, "window", window === null ? "all keys" : `${window} keys`)}
      onChange=${(value) =>
        set("window", value === undefined ? undefined : value >= longest ? null : Math.round(value))} />`;
}

const SCALING_TITLE =
  "How RoPE changes its frequencies so that a run can read longer texts. " +
  "linear: all are divided by the factor; ntk: the base grows, so that fast pairs change least; " +
  "dynamic: ntk that grows with the text; yarn and llama3: only slow pairs are divided by the factor.";
const MASK_NAMES = { causal: "causal", shifted: "one token late", none: "none" };
const MASK_TITLES = {
  causal: "A query sees its own key and the earlier ones.",
  shifted: "A query also sees the key of the next token: a common error.",
  none: "A query sees the keys of the whole text.",
};

export function AttentionEdits({ facts, edits, change }) {
  const set = (name, value) => change(withEntry(edits, name, value));
  return html`<${Choice}
      id="scale"
      name="divide logits by √K"
      options=${[
        ["on", "yes"],
        ["off", "no"],
      ]}
      titleOf=${() => "K is the number of dimensions of a key of one head."}
      value=${edits.scale ?? "on"}
      onChoose=${(value) => set("scale", value === "off" ? "off" : undefined)} />
    ${
      facts.masks.length > 1 &&
      html`<${Choice}
        id="mask"
        name="mask"
        options=${facts.masks.map((mask) => [mask, MASK_NAMES[mask]])}
        titleOf=${(mask) => MASK_TITLES[mask]}
        value=${edits.mask ?? "causal"}
        onChoose=${(value) => set("mask", value === "causal" ? undefined : value)} />`
    }
    <${LogSlider}
      id="attention-temperature"
      name="attention temperature"
      title="The attention logits are divided by it: below 1, the weights become sharper."
      low=${0.1}
      high=${10}
      value=${edits.temperature ?? 1}
      own=${1}
      said=${(edits.temperature ?? 1).toFixed(2)}
      onChange=${(value) => set("temperature", value)} />`;
}
