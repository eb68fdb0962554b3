// The page: its state, and where its parts are.

import { seriesColour } from "../../common/colours.js";
import { fragment, useFragment } from "../../common/fragment.js";
import { thousands } from "../../common/numbers.js";
import { html, useMemo, useRef, useState } from "../../common/preact.js";
import { startPage } from "../../common/start.js";
import { ThemeButton, useDark } from "../../common/theme.js";
import { ask, served, start, workers } from "./engines.js";
import { engineEdits } from "./edits.js";
import { EditsCard } from "./edits_card.js";
import { InsideCard } from "./inside_card.js";
import { NextCard } from "./next_card.js";
import { OrderCard } from "./order_card.js";
import { savePicture } from "./picture.js";
import { useResults } from "./results.js";
import { Headline, useHistory } from "./said.js";
import { entriesOf, factsOf, readState } from "./state.js";
import { TextCard } from "./text_card.js";
import { Tokenizer } from "./tokenizers.js";
import { useWriter } from "./writer.js";

const describe = ({ parameters, layers, heads, kept, positions, context, step }) =>
  [
    `${thousands(Number((parameters / 1e6).toPrecision(2)))}M parameters`,
    kept.flat().length < layers * heads
      ? `${kept.flat().length} heads in ${layers} layers`
      : `${layers} layers of ${heads} heads`,
    `position=${positions}`,
    `trained with a context of ${thousands(context)} tokens`,
    step && `step ${thousands(step)}`, // an imported or pruned run is at none
    "computed in float32", // also on a server
  ]
    .filter(Boolean)
    .join(", ");

// first: the texts to start with.
function App({ data, tokenizer, facts, first }) {
  const [state, setState] = useState(() => readState(fragment.read(), facts, first));
  const [pointed, setPointed] = useState(null);
  const page = useRef();
  const set = (part) => setState((old) => ({ ...old, ...(typeof part === "function" ? part(old) : part) }));
  useDark();
  const encoded = useMemo(() => tokenizer.encode(state.text), [state.text]);
  const ids = useMemo(() => encoded.ids.slice(0, data.most_tokens), [encoded]);
  const spans = useMemo(() => tokenizer.spans(encoded.ids, state.text), [encoded]);
  const other = useMemo(() => tokenizer.encode(state.other).ids, [state.other]);
  const canPatch = ids.length > 0 && other.length === ids.length;
  const edits = state.edits.map((each) => (canPatch ? each : withoutPatches(each)));
  const engine = edits.map((each) => engineEdits(each, other));
  const range = rangeOf(state, data, spans);
  const results = useResults(facts.length, ids, engine, range, state.view === "lens");
  const writer = useWriter(tokenizer, (text) => set({ text, pin: null, range: null }));
  const rows = useHistory(results[state.run], edits[state.run], state.run, range);
  useFragment(
    state,
    (shown) => entriesOf(shown, first),
    (entries) => {
      writer.stop(false);
      setPointed(null);
      setState(readState(entries, facts, first));
    },
  );
  const textOf = (id) => tokenizer.textOf(id);
  const last = Math.max(0, ids.length - 1);
  const place = Math.min(last, pointed ?? state.pin ?? last);
  const visible = ids.findLastIndex((id) => textOf(id).trim());
  const seen = results[state.run].edited?.tokens ?? ids;
  const texts = useMemo(() => Array.from(seen, textOf), [seen]);
  const counts = { own: ids.length, other: other.length };
  const common = { data, facts, state, set, ids, results, place, textOf, tokenizer, setPointed };
  document.documentElement.dataset.busy = results.some((each) => each.busy) ? "yes" : "no";
  const picture = () =>
    savePicture(page.current, "playground.png").catch(() =>
      alert("This browser can't draw the picture. Take a screenshot."),
    );
  return html`<main ref=${page}>
    <header class="top">
      <h1>${data.title}</h1>
      <span class="buttons" data-picture="no"
        ><button id="picture" onClick=${picture}>Save a picture</button><${ThemeButton}
      /></span>
    </header>
    ${facts.map(
      (run, n) =>
        html`<p class="soft small">
          ${facts.length > 1 && html`<b style=${`color:${seriesColour(n)}`}>${run.name}</b>${": "}`}${describe(run)}
        </p>`,
    )}
    <p class="small soft lead" data-picture="no">
      Change the text or the model: the run computes every number on this page again.
    </p>
    <div role="status" id="said">
      ${facts.map(
        (run, n) =>
          html`<${Headline}
            result=${results[n]}
            first=${n ? { ...results[0], name: facts[0].name } : null}
            range=${range}
            edits=${edits[n]}
            unit=${state.unit}
            name=${facts.length > 1 ? run.name : ""}
            colour=${seriesColour(n)} />`,
      )}
    </div>
    ${
      facts.every((run) => run.step) &&
      new Set(facts.map((run) => run.step)).size > 1 &&
      html`<p class="small note lead" id="steps">
        The runs are not at the same step: ${facts.map((run) => `${run.name} at ${thousands(run.step)}`).join(", ")}.
        Part of the difference can come from this.
      </p>`
    }
    <div class="two">
      <${TextCard}
        ...${{
          ...common,
          edits: engine,
          range,
          spans,
          writer,
          unknown: encoded.unknown,
          cut: encoded.ids.length > ids.length,
        }} /><${NextCard} ...${common} />
    </div>
    <${EditsCard} ...${{ ...common, edits: engine, range, counts, canPatch, rows }} />
    <${OrderCard} ...${{ ...common, edits: engine, writer }} />
    <${InsideCard} ...${{ ...common, texts }} chosen=${pointed ?? state.pin} last=${visible < 0 ? last : visible} />
    <p class="small soft" data-picture="no">
      ${
        data.served
          ? "The server on this machine computes the run's forward pass in float32."
          : "The page computes the run's forward pass in float32. It uses no network."
      }${" "}
      The address of this page holds the text, the edits and the view: copy it to share them.
    </p>
  </main>`;
}

// The tokens whose loss is said: those that are selected, the answer of a task, or null for all.
function rangeOf({ text, range }, { answer }, spans) {
  if (range) return { ...range, name: "the selected part" };
  const sign = answer ? text.lastIndexOf(answer) : -1;
  const after = sign < 0 ? [] : (spans ?? []).filter(({ start }) => start > sign);
  return after.length ? { first: after[0].first, last: after.at(-1).last, name: "the answer" } : null;
}

// Edits without the heads that take their outputs from a text of another length.
function withoutPatches({ heads = {}, ...others }) {
  const kept = Object.fromEntries(Object.entries(heads).filter(([, how]) => how !== "patch"));
  return Object.keys(kept).length ? { ...others, heads: kept } : others;
}

startPage(async (data) => {
  document.title = data.title;
  const tokenizer = Tokenizer.of(data.tokenizer);
  const asTyped = (text) => text.replace(/\r\n?/g, "\n");
  const first = { text: asTyped(data.text), other: asTyped(data.other), opening: data.opening };
  const facts = data.models.map(factsOf);
  start(
    data.served ? served() : workers(),
    data.models.map(({ packed }) => packed.config),
  );
  const loaded = await Promise.all(data.models.map(({ packed }, model) => ask({ kind: "load", model, packed })));
  for (const model of data.models) delete model.packed.data;
  const refused = loaded.find((reply) => reply.kind === "refused");
  return refused ? refused.message : html`<${App} ...${{ data, tokenizer, facts, first }} />`;
});
