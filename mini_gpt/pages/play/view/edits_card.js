// All edits of one run.

import { Choice } from "../../common/controls.js";
import { html } from "../../common/preact.js";
import { AttentionEdits, PositionEdits } from "./attention_edits.js";
import { withEntry } from "./edits.js";
import { HeadGrid } from "./head_grid.js";
import { Effects, History, useHeadEffects } from "./said.js";
import { keptHead } from "./state.js";

// Patching: outputs of heads in a pass over another text.
function Patching({ state, set, edits, change, counts, canPatch, place }) {
  const { own, other } = counts;
  const places = edits.places ?? [place];
  const verdict = canPatch ? "Heads can take their outputs from it." : "Patching needs equal numbers.";
  const found = state.other
    ? `${other} tokens; the text has ${own}. ${verdict}`
    : "Write a text with the same number of tokens, such as the same sentence with one word changed.";
  return html`<label class="stack"
      ><span class="soft">heads marked ⇄ take their outputs from this text</span>
      <textarea
        id="other"
        rows="2"
        spellcheck="false"
        value=${state.other}
        onInput=${(event) => set({ other: event.target.value })}></textarea>
    </label>
    <p class="small soft" id="other-count">
      ${found}
      ${
        state.other
          ? ""
          : html` <button id="copy-text" onClick=${() => set({ other: state.text })}>Copy the text</button>`
      }
    </p>
    ${
      canPatch &&
      html`<${Choice}
        id="places"
        name="at"
        options=${[
          ["all", "all places"],
          ["some", `place ${places.join(", ")} only`],
        ]}
        value=${edits.places ? "some" : "all"}
        onChoose=${(value) => change(withEntry(edits, "places", value === "some" ? places : undefined))} />`
    }`;
}

// The command that removes the heads that are off, for good.
function PruneCommand({ heads = {} }) {
  const off = Object.keys(heads).filter((name) => heads[name] === "off");
  if (!off.length) return null;
  return html`<p class="small soft" id="prune">
    To remove the heads that are off from the run:${" "}
    <code>python -m mini_gpt.prune --workdir=RUN --heads=${off.join(",")} --output=DIR</code>
  </p>`;
}

export function EditsCard({ facts, state, set, results, edits: computedEdits, range, counts, canPatch, place, rows }) {
  const run = state.run;
  const own = facts[run];
  const edits = state.edits[run];
  const { effects, measure, busy } = useHeadEffects(run, own, results[run], computedEdits[run], range);
  const change = (next) => set((old) => ({ edits: old.edits.map((each, n) => (n === run ? next : each)) }));
  const isEdited = Object.keys(edits).length > 0;
  return html`<section class="card edits" aria-labelledby="edits-title">
    <div class="bar-of-card">
      <h2 id="edits-title">Edit the model</h2>
      ${
        facts.length > 1 &&
        html`<${Choice}
          id="run"
          name="run"
          options=${facts.map((each, n) => [n, each.name])}
          value=${run}
          onChoose=${(n) => set({ run: n, layer: 0, head: keptHead(facts[n], 0, 0) })} />`
      }
      <button id="measure" data-picture="no" disabled=${busy || !results[run].edited} onClick=${measure}>
        ${
          busy
            ? `Measuring: ${Object.keys(effects ?? {}).length} of ${own.kept.flat().length} heads`
            : "Measure each head"
        }
      </button>
      <button id="reset" data-picture="no" disabled=${!isEdited} onClick=${() => change({})}>Reset</button>
    </div>
    <p class="small soft lead" data-picture="no">
      Each edit changes how the model computes this text; its weights stay as they are. The sentence at the top shows
      the loss before and after.
    </p>
    <div class=${own.heads > 8 ? "columns wide" : "columns"}>
      <div>
        <h3>Heads and layers</h3>
        <${HeadGrid} facts=${own} unit=${state.unit} ...${{ edits, change, canPatch, effects }} />
        ${effects && html`<${Effects} ...${{ effects, edits }} unit=${state.unit} />`}
        <${PruneCommand} heads=${edits.heads} />
      </div>
      <div class="sliders">
        <h3>Attention and positions</h3>
        <${AttentionEdits} facts=${own} ...${{ edits, change }} /><${PositionEdits}
          facts=${own}
          ...${{ edits, change }} />
      </div>
      <div>
        <h3>Another text</h3>
        <${Patching} ...${{ state, set, edits, change, counts, canPatch, place }} /><${History}
          rows=${rows}
          unit=${state.unit} />
      </div>
    </div>
  </section>`;
}
