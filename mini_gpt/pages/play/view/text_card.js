// The text, with its tokens coloured by their loss, and the writer below it.

import { commonStart } from "../../common/arrays.js";
import { Choice } from "../../common/controls.js";
import { ColourBar } from "../../common/maps.js";
import { thousands } from "../../common/numbers.js";
import { html } from "../../common/preact.js";
import { shown } from "../../common/tokens.js";
import { Editor, differenceScale, surprisalScale } from "./editor.js";
import { UNITS } from "./state.js";
import { Writer } from "./writer.js";

export function TextCard({
  data,
  facts,
  state,
  set,
  ids,
  spans,
  results,
  edits,
  range,
  place,
  setPointed,
  writer,
  unknown,
  cut,
}) {
  const run = state.run;
  const isDifference = state.colours === "difference";
  const context = facts[run].context;
  const shownRun = isDifference ? 0 : +state.colours;
  const scale = isDifference ? differenceScale(state.unit) : surprisalScale(data.tokenizer.texts.length, state.unit);
  const known = results.map(({ edited }) => (edited ? commonStart(edited.tokens, ids) : 0));
  const lossOf = (model, n) => (n > 0 && n < known[model] ? results[model].edited.nll[n] : null);
  const valueOf = (n) => {
    if (!isDifference) return lossOf(shownRun, n);
    const [one, two] = [lossOf(0, n), lossOf(1, n)];
    return one === null || two === null ? null : two - one;
  };
  const colours = [
    ["0", facts[0].name],
    ["1", facts[1]?.name],
    ["difference", "difference"],
  ];
  const meaning = isDifference
    ? `surprisal of a token in ${state.unit}: ${facts[1].name} minus ${facts[0].name}`
    : `surprisal of a token in ${state.unit}${facts.length > 1 ? `, ${facts[shownRun].name}` : ""}`;
  const { temperature, topK, seed } = state;
  const room = data.most_tokens - ids.length;
  const count = Math.min(state.count, room);
  const begin = () =>
    writer.start({ model: run, tokens: ids, edits: edits[run], temperature, topK, seed, count }, state.text);
  const better = `Blue: ${facts[1]?.name} predicts the token better. Orange: ${facts[0].name} does.`;
  const edited = edits.some((each) => Object.keys(each).length) ? " The runs are compared with their edits." : "";
  const legend = isDifference ? better + edited : "The stronger a token's colour, the more it surprises the model.";
  const trained = ids.length > context ? `; trained with a context of ${thousands(context)}` : "";
  const size = `${thousands(ids.length)} tokens${trained}`;
  const notes = [];
  if (unknown.length)
    notes.push(`Not in the run's vocabulary, so left out: ${[...new Set(unknown)].slice(0, 12).map(shown).join(" ")}`);
  if (cut) notes.push(`Only the first ${thousands(data.most_tokens)} tokens are computed.`);
  if (!spans && ids.length)
    notes.push(
      "The tokenizer changes this text, so that its tokens can't be shown in the field; the view Attention shows them.",
    );
  return html`<section class="card" aria-labelledby="text-title">
    <div class="bar-of-card">
      <h2 id="text-title">Text</h2>
      <span class="soft small numbers" id="count-of-tokens">${size}</span>
      ${
        facts.length > 1 &&
        html`<${Choice}
          id="colours"
          name="colours"
          options=${colours}
          value=${state.colours}
          onChoose=${(value) => set({ colours: value })} />`
      }
      <${Choice}
        id="unit"
        name="unit"
        options=${Object.keys(UNITS)}
        value=${state.unit}
        onChoose=${(unit) => set({ unit })} />
    </div>
    <${Editor}
      ...${{ text: state.text, spans, scale, context, place, range }}
      onRange=${(range) => set({ range })}
      name="Text. Each token is coloured by its surprisal."
      valueOf=${valueOf}
      onText=${(text) => {
        writer.stop(false);
        setPointed(null);
        set({ text, pin: null, range: null });
      }}
      onCaret=${(pin) => {
        setPointed(null);
        set({ pin });
      }}
      onPoint=${setPointed} />
    ${notes.map((note) => html`<p class="note small" role="status">${note}</p>`)}
    <${ColourBar} scale=${scale} name=${meaning} format=${(v) => String(v).replace("-", "−")} />
    <p class="small soft" data-picture="no">${legend} Select a part of the text to see its loss alone.</p>
    ${
      ids.length > context &&
      html`<p class="small soft">
        <i class="key boundary"></i>marks the end of the trained context of ${context} tokens; later tokens are
        underlined.
      </p>`
    }
    <${Writer}
      ...${{ writer, state, set, room }}
      isEmpty=${!ids.length}
      name=${facts.length > 1 ? facts[run].name : ""}
      onStart=${begin} />
  </section>`;
}
