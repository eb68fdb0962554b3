"use strict";
// The controls of the edits of one run.

const HEAD_STATES = { on: "on", off: "off", mean: "at its mean", patch: "from the other text" };
const HEAD_SIGNS = { on: "", off: "×", mean: "x̄", patch: "⇄" };

// A copy of an object without the entry, or with another value; undefined removes it.
function withEntry(record, name, value) {
  const { [name]: _, ...others } = record;
  return value === undefined ? others : { ...others, [name]: value };
}
const withPart = (edits, name, part) => withEntry(edits, name, Object.keys(part).length ? part : undefined);
const toggled = (list = [], n) => (list.includes(n) ? list.filter((other) => other !== n) : [...list, n].sort((a, b) => a - b));

// effects: {"layer.head": change of the loss in nats if the head is off}, measured for this text.
function HeadGrid({ facts, edits, change, canPatch, effects, unit }) {
  useDark();
  const { heads = {} } = edits, states = Object.keys(HEAD_STATES).filter((state) => state !== "patch" || canPatch);
  const reach = Math.max(0.05, ...Object.values(effects ?? {}).map(Math.abs));
  const press = (name) => {
    const next = states[(states.indexOf(heads[name] ?? "on") + 1) % states.length];
    change(withPart(edits, "heads", withEntry(heads, name, next === "on" ? undefined : next)));
  };
  const flip = (name, layer) => { const list = toggled(edits[name], layer); change(withEntry(edits, name, list.length ? list : undefined)); };
  const part = (name, said, layer) => {
    const isOff = edits[name]?.includes(layer);
    return html`<button class="part" id=${`${name}-${layer}`} aria-pressed=${isOff ? "true" : "false"}
      title=${isOff ? "Off. Click to switch it on." : "Click to switch it off."}
      aria-label=${`${said} of layer ${layer} off`.replace("whole of ", "")} onClick=${() => flip(name, layer)}>${said}</button>`;
  };
  const head = (layer, number) => {
    const name = `${layer}.${number}`, state = heads[name] ?? "on", effect = effects?.[name];
    const isInert = edits.layers?.includes(layer) || edits.attentions?.includes(layer);
    const measured = effect === undefined ? "" : `; off changes the loss by ${signedNumber(effect * UNITS[unit])} ${unit}`;
    const said = `head ${name}: ${HEAD_STATES[state]}${isInert ? ", in a part that is off" : ""}${measured}`;
    const style = effect === undefined || state !== "on" ? "" : textOn(colourOf(scales.signed(reach), effect));
    return html`<button class=${`head ${state} ${isInert ? "inert" : ""}`} id=${`head-${name}`} data-state=${state}
      aria-label=${said} title=${said} style=${style} onClick=${() => press(name)}>${number}${HEAD_SIGNS[state]}</button>`;
  };
  const row = (layer) => html`<div class="layer" key=${layer}><span class="name">layer ${layer}</span>
    <span class="heads">${Array.from({ length: facts.heads }, (_, number) => head(layer, number))}</span>
    <span class="parts">${part("attentions", "attention", layer)}${part("feedForwards", "feed-forward", layer)}${part("layers", "whole", layer)}</span></div>`;
  return html`<div class="grid">${Array.from({ length: facts.layers }, (_, layer) => row(layer))}</div>
    <p class="small soft">Click a head to switch it off (×). The next clicks replace its output by its mean over this text (x̄)${canPatch ? ", by that of the other text (⇄)," : ""} and switch it on again. A part of a layer that is off is struck through.</p>`;
}

const signedNumber = (value) => `${Math.abs(value) < 0.0005 ? "±" : value < 0 ? "−" : "+"}${Math.abs(value).toFixed(3)}`;

// A slider with steps of equal ratio, or with `zero` also 0 at its left end. own: the run's value, at which onChange
// gets undefined.
function LogSlider({ id, name, low, high, value, own, said, zero = false, digits = 2, title, onChange }) {
  const steps = 120, ratio = Math.log(high / low) / steps;
  const stepOf = (number) => (zero && number === 0 ? -1 : Math.round(Math.log(number / low) / ratio));
  const valueAt = (n) => (n < 0 ? 0 : Number((low * Math.exp(ratio * n)).toPrecision(digits)));
  return html`<${Slider} ...${{ id, name, said, title }} min=${zero ? -1 : 0} max=${steps} step="1" value=${stepOf(value)}
    onChange=${(n) => onChange(n === stepOf(own) ? undefined : valueAt(n))} />`;
}

function PositionEdits({ facts, edits, change }) {
  const { rope = {}, start = 0, slopes = 1 } = edits, { differ, rope: ownRope, context } = facts;
  const set = (name, value) => change(withEntry(edits, name, value));
  const changeRope = (next) => change(withPart(edits, "rope", next));
  const setRope = (name, value) => changeRope(withEntry(rope, name, value));
  const { base, scaling, factor } = { ...ownRope, ...rope }, longest = 4 * context;
  const window = edits.window === undefined ? facts.window : edits.window;
  const chooseScaling = (name) => {
    if (name === ownRope.scaling) changeRope(withEntry(withEntry(rope, "scaling"), "factor"));
    else if (name === "none") changeRope({ ...withEntry(rope, "factor"), scaling: name });
    else changeRope({ ...rope, scaling: name, factor: Math.max(2, factor) });
  };
  const ownOf = (field, value) => (differ[field] ? undefined : value);
  const said = (edited, field, text) => (edited === undefined && differ[field] ? "by layer" : text);
  return html`
    ${facts.positions !== "none" && html`<${LogSlider} id="start" name="first position"
      title="The position of the first token. Those of the later tokens move with it."
      low=${1} high=${Math.max(4096, longest)} zero value=${start} own=${0} said=${start.toLocaleString("en")}
      onChange=${(value) => set("start", value && Math.round(value))} />`}
    ${ownRope && html`<${LogSlider} id="rope-base" name="RoPE base" low=${10} high=${Math.max(1e6, ownRope.base)}
        value=${base} own=${ownOf("rope_base", ownRope.base)} said=${said(rope.base, "rope_base", base.toLocaleString("en"))}
        onChange=${(value) => setRope("base", value)} />
      ${facts.has("rope") && html`<label title=${SCALING_TITLE}><span class="soft">RoPE scaling</span><select id="rope-scaling" value=${scaling}
        onChange=${(event) => chooseScaling(event.target.value)}>${facts.scalings.map((name) => html`<option value=${name}>${name}</option>`)}</select></label>
        ${scaling !== "none" && html`<${LogSlider} id="rope-factor" name="factor" low=${1} high=${Math.max(16, ownRope.factor)}
          value=${factor} own=${scaling === ownRope.scaling ? ownOf("rope_factor", ownRope.factor) : undefined}
          said=${said(rope.factor, "rope_factor", `× ${factor}`)} onChange=${(value) => setRope("factor", value)} />`}`}`}
    ${facts.has("alibi") && html`<${LogSlider} id="slopes" name="ALiBi's slopes"
      title="A factor of how much the logits fall with the distance of a key."
      low=${0.05} high=${20} zero value=${slopes} own=${1} said=${`× ${slopes}`} onChange=${(value) => set("slopes", value)} />`}
    <${LogSlider} id="window" name="window" title="How many keys a query sees: its own and those just before it."
      low=${1} high=${longest} digits=${3} value=${window ?? longest} own=${ownOf("window", facts.window ?? longest)}
      said=${said(edits.window, "window", window === null ? "all keys" : `${window} keys`)}
      onChange=${(value) => set("window", value === undefined ? undefined : value >= longest ? null : Math.round(value))} />`;
}

const SCALING_TITLE = "How RoPE changes its frequencies so that a run can read longer texts. "
  + "linear: all are divided by the factor; ntk: the base grows, so that fast pairs change least; "
  + "dynamic: ntk that grows with the text; yarn and llama3: only slow pairs are divided by the factor.";
const MASK_NAMES = { causal: "causal", shifted: "one token late", none: "none" };
const MASK_TITLES = {
  causal: "A query sees its own key and the earlier ones.",
  shifted: "A query also sees the key of the next token: a common error.",
  none: "A query sees the keys of the whole text.",
};

function AttentionEdits({ facts, edits, change }) {
  const set = (name, value) => change(withEntry(edits, name, value));
  return html`<${Choice} id="scale" name="divide logits by √K" options=${[["on", "yes"], ["off", "no"]]}
      titleOf=${() => "K is the number of dimensions of a key of one head."} value=${edits.scale ?? "on"}
      onChoose=${(value) => set("scale", value === "off" ? "off" : undefined)} />
    ${facts.masks.length > 1 && html`<${Choice} id="mask" name="mask" options=${facts.masks.map((mask) => [mask, MASK_NAMES[mask]])}
      titleOf=${(mask) => MASK_TITLES[mask]} value=${edits.mask ?? "causal"}
      onChoose=${(value) => set("mask", value === "causal" ? undefined : value)} />`}
    <${LogSlider} id="attention-temperature" name="attention temperature"
      title="The attention logits are divided by it: below 1, the weights become sharper." low=${0.1} high=${10}
      value=${edits.temperature ?? 1} own=${1} said=${(edits.temperature ?? 1).toFixed(2)}
      onChange=${(value) => set("temperature", value)} />`;
}

// Patching: outputs of heads in a pass over another text.
function Patching({ state, set, edits, change, counts, pin }) {
  const { own, other } = counts, isEqual = own === other && other > 0;
  const found = state.other
    ? `${other} tokens; the text has ${own}. ${isEqual ? "Heads can take their outputs from it." : "Patching needs equal numbers."}`
    : "Write a text with the same number of tokens, such as the same sentence with one word changed.";
  return html`<label class="stack"><span class="soft">heads marked ⇄ take their outputs from this text</span>
      <textarea id="other" rows="2" spellcheck="false" value=${state.other} onInput=${(event) => set({ other: event.target.value })}></textarea></label>
    <p class="small soft" id="other-count">${found}
      ${state.other ? "" : html` <button id="copy-text" onClick=${() => set({ other: state.text })}>Copy the text</button>`}</p>
    ${isEqual && html`<${Choice} id="places" name="at" options=${[["all", "all places"], ["pin", `place ${pin} only`]]}
      value=${edits.places ? "pin" : "all"} onChoose=${(value) => change(withEntry(edits, "places", value === "pin" ? [pin] : undefined))} />`}`;
}
