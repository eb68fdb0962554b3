// The views of the inside of a run, in tabs.

import { seriesColour } from "../../common/colours.js";
import { TabPanel, Tabs } from "../../common/controls.js";
import { html } from "../../common/preact.js";
import { AttentionView, LensView, MapView, StreamView, Waiting } from "./inside_views.js";
import { LossChart } from "./loss_chart.js";
import { OPENINGS, openingOf, useAttention } from "./results.js";
import { VIEWS } from "./state.js";

// chosen: the token that is pointed at or pinned, or null. last: the last one.
export function InsideCard({ facts, state, set, results, texts, chosen, last, tokenizer, setPointed }) {
  const run = state.run;
  const own = results[run];
  const measured = results[state.view === "loss" ? 0 : run].edited;
  const place = Math.min(chosen ?? (measured ? openingOf(state.view, measured, last) : last), texts.length - 1);
  const needsMaps = ["attention", "map"].includes(state.view);
  const maps = useAttention(run, needsMaps ? own.edited : null, state.layer, state.head);
  const lines = facts.flatMap((each, n) => {
    const { edited, plain } = results[n];
    const line = (result, name, dashed) => ({
      name,
      values: result.nll,
      colour: seriesColour(n),
      dashed,
      context: each.context,
      mean: result.mean,
    });
    if (!edited) return [];
    const name = facts.length > 1 ? each.name : "loss";
    return edited === plain || !plain
      ? [line(edited, name, false)]
      : [line(edited, `${name}, edited`, false), line(plain, `${name}, unedited`, true)];
  });
  const common = { facts: facts[run], state, set, result: own, maps, texts, place, tokenizer };
  const view = () => {
    if (state.view === "loss" ? !lines.length : !own.edited)
      return own.refused ? html`<p>${own.refused}</p>` : html`<${Waiting} />`;
    if (state.view === "loss")
      return html`<${LossChart} ...${{ lines, unit: state.unit, texts, place }} onPin=${(pin) => set({ pin })} />`;
    if (state.view === "attention") return html`<${AttentionView} ...${common} onPoint=${setPointed} />`;
    if (state.view === "map") return html`<${MapView} ...${common} />`;
    return state.view === "lens" ? html`<${LensView} ...${common} />` : html`<${StreamView} ...${common} />`;
  };
  return html`<section aria-label="Inside the model">
    <${Tabs} tabs=${VIEWS} selected=${state.view} onSelect=${(id) => set({ view: id })} name="Views" />
    <${TabPanel} selected=${state.view}>
      ${
        facts.length > 1 &&
        state.view !== "loss" &&
        html`<p class="small soft">
          This view shows the run <b style=${`color:${seriesColour(run)}`}>${facts[run].name}</b> with its edits. To see
          the other run, choose it under “Edit the model”.
        </p>`
      }${view()}${
        state.pin === null &&
        own.edited &&
        html`<p class="small soft" id="opening" data-picture="no">
          Marked at first:
          ${` ${OPENINGS[state.view]}${state.view === "loss" && facts.length > 1 ? ` of ${facts[0].name}` : ""}`}. A
          token that you choose is marked in all views.
        </p>`
      }
    </${TabPanel}>
  </section>`;
}
