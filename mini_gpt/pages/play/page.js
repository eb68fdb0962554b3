"use strict";
// The page: its state, and where its parts are.

function TextCard({ data, facts, state, set, ids, spans, held, place, setPointed, writer, unknown, cut }) {
  const run = state.run, isDifference = state.colours === "difference", context = facts[run].context, shownRun = isDifference ? 0 : +state.colours;
  const scale = isDifference ? differenceScale(state.unit) : surprisalScale(data.tokenizer.texts.length, state.unit);
  const known = held.map(({ edited }) => (edited ? commonStart(edited.tokens, ids) : 0)), lossOf = (model, n) => (n > 0 && n < known[model] ? held[model].edited.nll[n] : null);
  const valueOf = (n) => (!isDifference ? lossOf(shownRun, n) : lossOf(0, n) === null || lossOf(1, n) === null ? null : lossOf(1, n) - lossOf(0, n));
  const colours = [["0", facts[0].name], ["1", facts[1]?.name], ["difference", "difference"]];
  const meaning = isDifference ? `surprisal of a token in ${state.unit}: ${facts[1].name} minus ${facts[0].name}` : `surprisal of a token in ${state.unit}${facts.length > 1 ? `, ${facts[shownRun].name}` : ""}`;
  const { temperature, topK, seed } = state, room = data.most_tokens - ids.length, count = Math.min(state.count, room);
  const begin = () => writer.start({ model: run, tokens: ids, edits: held.edits[run], temperature, topK, seed, count }, state.text);
  const better = `Blue: ${facts[1]?.name} predicts the token better. Orange: ${facts[0].name} does.`;
  const edited = held.edits.some((each) => Object.keys(each).length) ? " The runs are compared with their edits." : "";
  const legend = isDifference ? better + edited : "The stronger a token's colour, the more it surprises the model.";
  const notes = [];
  if (unknown.length) notes.push(`Not in the run's vocabulary, so left out: ${[...new Set(unknown)].slice(0, 12).map(shown).join(" ")}`);
  if (cut) notes.push(`Only the first ${data.most_tokens.toLocaleString("en")} tokens are computed.`);
  if (!spans && ids.length) notes.push("The tokenizer changes this text, so that its tokens can't be shown in the field; the view Attention shows them.");
  return html`<section class="card" aria-labelledby="text-title"><div class="bar-of-card"><h2 id="text-title">Text</h2>
      <span class="soft small numbers" id="count-of-tokens">${ids.length.toLocaleString("en")} tokens${ids.length > context ? `; trained with a context of ${context.toLocaleString("en")}` : ""}</span>
      ${facts.length > 1 && html`<${Choice} id="colours" name="colours" options=${colours} value=${state.colours} onChoose=${(value) => set({ colours: value })} />`}
      <${Choice} id="unit" name="unit" options=${[["nats", "nats"], ["bits", "bits"]]} value=${state.unit} onChoose=${(unit) => set({ unit })} /></div>
    <${Editor} ...${{ text: state.text, spans, scale, context, place, range: held.range }} onRange=${(range) => set({ range })} name="Text, one token after the other coloured by its surprisal" valueOf=${valueOf}
      onText=${(text) => { writer.stop(false); setPointed(null); set({ text, pin: null, range: null }); }} onCaret=${(pin) => { setPointed(null); set({ pin }); }} onPoint=${setPointed} />
    ${notes.map((note) => html`<p class="note small" role="status">${note}</p>`)}
    <${ColourBar} scale=${scale} name=${meaning} format=${(v) => String(v).replace("-", "−")} />
    <p class="small soft" data-picture="no">${legend} Select a part of the text to see its loss alone.</p>
    ${ids.length > context && html`<p class="small soft"><i class="key boundary"></i>marks the end of the trained context of ${context} tokens; later tokens are underlined.</p>`}
    <${Writer} ...${{ writer, state, set, room }} isEmpty=${!ids.length} name=${facts.length > 1 ? facts[run].name : ""} onStart=${begin} /></section>`;
}

function NextCard({ facts, state, set, ids, held, place, textOf, tokenizer }) {
  if (!ids.length) return html`<section class="card" aria-labelledby="next-title"><h2 id="next-title">Next token</h2><p class="soft">Type a text first.</p></section>`;
  const isEnd = place >= ids.length - 1, actual = isEnd ? null : ids[place + 1], before = tokenizer.decode(ids.slice(Math.max(0, place - 11), place + 1));
  const onToken = isEnd ? (token) => set({ text: state.text + textOf(token), pin: null, range: null }) : null;
  return html`<section class="card" aria-labelledby="next-title"><h2 id="next-title">Next token</h2>
    <p class="soft after">most likely after <q>${[...before].slice(-18).map((c) => (c === " " ? " " : shown(c))).join("")}</q></p>
    ${facts.map((run, n) => html`${facts.length > 1 && html`<h3 style=${`color:${seriesColour(n)}`}>${run.name}</h3>`}
      <${NextTokens} id=${`next-${n}`} held=${held[n]} colour=${seriesColour(n)} most=${facts.length > 1 ? 6 : SHOWN} ...${{ place, tokenizer, actual, onToken }} />`)}
    <${NextLegend} isEdited=${held.some((each) => each.edited !== each.plain)} hasActual=${!isEnd} />
    <p class="small soft" data-picture="no">${isEnd ? "Choose a token to append it." : "The place is the token before the cursor, or the last one that is selected; at the start of the text, the first token."}</p></section>`;
}

function EditsCard({ facts, state, set, held, counts, place, rows }) {
  const run = state.run, own = facts[run], edits = state.edits[run];
  const { effects, measure, busy } = useEffects(run, own, held[run], held.edits[run], held.range);
  const change = (next) => set((old) => ({ edits: old.edits.map((each, n) => (n === run ? next : each)) }));
  const canPatch = counts.own === counts.other && counts.other > 0, isEdited = Object.keys(edits).length > 0;
  return html`<section class="card edits" aria-labelledby="edits-title"><div class="bar-of-card"><h2 id="edits-title">Edit the model</h2>
      ${facts.length > 1 && html`<${Choice} id="run" name="run" options=${facts.map((each, n) => [n, each.name])} value=${run} onChoose=${(n) => set({ run: n, layer: 0, head: 0 })} />`}
      <button id="measure" data-picture="no" disabled=${busy || !held[run].edited} onClick=${measure}>${busy ? `Measuring: ${Object.keys(effects ?? {}).length} of ${own.layers * own.heads} heads` : "Measure each head"}</button>
      <button id="reset" data-picture="no" disabled=${!isEdited} onClick=${() => change({})}>Reset</button></div>
    <p class="small soft lead" data-picture="no">Each edit changes how the model computes this text; its weights stay as they are. The sentence at the top shows the loss before and after.</p>
    <div class=${own.heads > 8 ? "columns wide" : "columns"}><div><h3>Heads and layers</h3><${HeadGrid} facts=${own} unit=${state.unit} ...${{ edits, change, canPatch, effects }} />
        ${effects && html`<${Effects} ...${{ effects, edits }} unit=${state.unit} />`}</div>
      <div class="sliders"><h3>Attention and positions</h3><${AttentionEdits} facts=${own} ...${{ edits, change }} /><${PositionEdits} facts=${own} ...${{ edits, change }} /></div>
      <div><h3>Another text</h3><${Patching} ...${{ state, set, edits, change, counts }} pin=${place} /><${History} rows=${rows} unit=${state.unit} /></div></div></section>`;
}

function InsideCard({ facts, state, set, held, texts, place, tokenizer, setPointed }) {
  const run = state.run, own = held[run], needsMaps = ["attention", "map"].includes(state.view);
  const maps = useAttention(run, needsMaps ? own.edited : null, state.layer, state.head);
  const lines = facts.flatMap((each, n) => {
    const { edited, plain } = held[n], line = (result, name, dashed) => ({ name, values: result.nll, colour: seriesColour(n), dashed, context: each.context, mean: result.mean });
    if (!edited) return [];
    const name = facts.length > 1 ? each.name : "loss";
    return edited === plain || !plain ? [line(edited, name, false)] : [line(edited, `${name}, edited`, false), line(plain, `${name}, unedited`, true)];
  });
  const common = { facts: facts[run], state, set, held: own, maps, texts, place, tokenizer };
  const view = () => {
    if (state.view === "loss" ? !lines.length : !own.edited) return own.refused ? html`<p>${own.refused}</p>` : html`<${Waiting} />`;
    if (state.view === "loss") return html`<${LossChart} ...${{ lines, unit: state.unit, texts, place: state.pin }} onPin=${(pin) => set({ pin })} />`;
    if (state.view === "attention") return html`<${AttentionView} ...${common} onPoint=${setPointed} />`;
    if (state.view === "map") return html`<${MapView} ...${common} />`;
    return state.view === "lens" ? html`<${LensView} ...${common} />` : html`<${StreamView} ...${common} />`;
  };
  return html`<section aria-label="Inside the model"><${Tabs} tabs=${VIEWS} selected=${state.view} onSelect=${(id) => set({ view: id })} name="Views" />
    <${TabPanel} selected=${state.view}>${facts.length > 1 && state.view !== "loss" && html`<p class="small soft">This view shows the run <b style=${`color:${seriesColour(run)}`}>${facts[run].name}</b> with its edits. To see the other run, choose it under “Edit the model”.</p>`}${view()}<//></section>`;
}

const thousands = (number) => number.toLocaleString("en");
const describe = ({ parameters, layers, heads, positions, context, step }) => [
  `${thousands(Number((parameters / 1e6).toPrecision(2)))}M parameters`, `${layers} layers of ${heads} heads`,
  `position=${positions}`, `trained with a context of ${thousands(context)} tokens`, `step ${thousands(step)}`,
].join(", ");

// first: the texts to start with.
function App({ data, tokenizer, facts, first }) {
  const [state, change] = useState(() => readState(facts, first)), [pointed, setPointed] = useState(null), page = useRef();
  const set = (part) => change((old) => ({ ...old, ...(typeof part === "function" ? part(old) : part) }));
  const isDark = useDark();
  useEffect(() => {
    const timer = setTimeout(() => writeState(state, first), 150); // browsers limit how often the address changes
    return () => clearTimeout(timer);
  }, [state, isDark]);
  const encoded = useMemo(() => tokenizer.encode(state.text), [state.text]), ids = useMemo(() => encoded.ids.slice(0, data.most_tokens), [encoded]);
  const spans = useMemo(() => tokenizer.spans(encoded.ids, state.text), [encoded]), other = useMemo(() => tokenizer.encode(state.other).ids, [state.other]);
  const isEqual = other.length === ids.length, edits = state.edits.map((each) => (isEqual ? each : withoutPatches(each)));
  const engine = edits.map((each) => engineEdits(each, other)), range = rangeOf(state, data, spans);
  const held = Object.assign(useResults(facts.length, ids, engine, range, state.view === "lens"), { edits: engine, range });
  const writer = useWriter(tokenizer, (text) => set({ text, pin: null, range: null }));
  const rows = useHistory(held[state.run], edits[state.run], state.run), textOf = (id) => tokenizer.decode([id]);
  const last = Math.max(0, ids.length - 1), place = Math.min(last, pointed ?? state.pin ?? last);
  const visible = ids.findLastIndex((id) => textOf(id).trim()), viewed = pointed ?? state.pin ?? (visible < 0 ? last : visible);
  const seen = held[state.run].edited?.tokens ?? ids, texts = useMemo(() => Array.from(seen, textOf), [seen]), counts = { own: ids.length, other: other.length };
  const common = { data, facts, state, set, ids, held, place, textOf, tokenizer, counts, setPointed };
  document.documentElement.dataset.busy = held.some((each) => each.busy) ? "yes" : "no";
  const picture = () => savePicture(page.current, "playground.png").catch(() => alert("This browser can't draw the picture. Take a screenshot."));
  return html`<main ref=${page}><header class="top"><h1>${data.title}</h1><span class="buttons" data-picture="no"><button id="picture" onClick=${picture}>Save a picture</button><${ThemeButton} /></span></header>
    ${facts.map((run, n) => html`<p class="soft small">${facts.length > 1 && html`<b style=${`color:${seriesColour(n)}`}>${run.name}</b>${": "}`}${describe(run)}</p>`)}
    <p class="small soft lead" data-picture="no">Change the text or the model: the run computes every number on this page again.</p>
    <div role="status" id="said">${facts.map((run, n) => html`<${Headline} held=${held[n]} first=${n ? { ...held[0], name: facts[0].name } : null} range=${range} edits=${edits[n]}
      unit=${state.unit} name=${facts.length > 1 ? run.name : ""} colour=${seriesColour(n)} />`)}</div>
    ${new Set(facts.map((run) => run.step)).size > 1 && html`<p class="small note lead" id="steps">The runs are not at the same step: ${facts.map((run) => `${run.name} at ${thousands(run.step)}`).join(", ")}. Part of the difference can come from this.</p>`}
    <div class="two"><${TextCard} ...${{ ...common, spans, writer, unknown: encoded.unknown, cut: encoded.ids.length > ids.length }} /><${NextCard} ...${common} /></div>
    <${EditsCard} ...${{ ...common, rows }} />
    <${InsideCard} ...${{ ...common, texts }} place=${Math.min(viewed, seen.length - 1)} />
    <p class="small soft" data-picture="no">${data.served ? "The server on this machine computes the run's forward pass in float32." : "The page computes the run's forward pass in float32. It uses no network."} The address of this page holds the text, the edits and the view: copy it to share them.</p></main>`;
}

// The tokens whose loss is said: those that are selected, the answer of a task, or null for all.
function rangeOf({ text, range }, { answer }, spans) {
  if (range) return { ...range, name: "the selected part" };
  const sign = answer ? text.lastIndexOf(answer) : -1, after = sign < 0 ? [] : (spans ?? []).filter(({ start }) => start > sign);
  return after.length ? { first: after[0].first, last: after.at(-1).last, name: "the answer" } : null;
}

// Edits without the heads that take their outputs from a text of another length.
function withoutPatches({ heads = {}, ...others }) {
  const kept = Object.fromEntries(Object.entries(heads).filter(([, how]) => how !== "patch"));
  return Object.keys(kept).length ? { ...others, heads: kept } : others;
}

(async () => {
  const data = JSON.parse(document.getElementById("data").textContent), root = document.getElementById("app");
  document.title = data.title;
  const facts = data.models.map(factsOf), tokenizer = Tokenizer.of(data.tokenizer), asTyped = (text) => text.replace(/\r\n?/g, "\n");
  const first = { text: asTyped(data.text), other: asTyped(data.other) };
  engines = data.served ? served() : workers();
  const loaded = await Promise.all(data.models.map(({ packed }, model) => ask({ kind: "load", model, packed })));
  for (const model of data.models) delete model.packed.data;
  root.textContent = "";
  const refused = loaded.find((reply) => reply.kind === "refused");
  if (refused) return void (root.textContent = refused.message);
  render(html`<${App} ...${{ data, tokenizer, facts, first }} />`, root);
  document.documentElement.dataset.ready = Math.round(performance.now());
})();
