"use strict";
// Writing on: tokens are sampled one by one and appended to the text.

const PACE = 80; // milliseconds between two changes of the text, which the page draws again

// A hook: {busy, ended, start, stop}. ended: whether the model has written the end of the text. onText(text): the text with what is written. stop(false) drops what is not yet shown.
function useWriter(tokenizer, onText) {
  const [busy, setBusy] = useState(false), [ended, setEnded] = useState(false), model = useRef(null), keeps = useRef(true);
  const stop = (keep) => {
    setEnded(false);
    if (model.current === null) return;
    keeps.current = keep;
    ask({ kind: "cancel", model: model.current, slot: "generated" });
    model.current = null;
  };
  const start = async (request, text) => {
    const written = [];
    let timer = null;
    const show = () => { timer = null; if (keeps.current) onText(text + tokenizer.decode(written)); };
    model.current = request.model;
    keeps.current = true;
    setBusy(true);
    setEnded(false);
    await ask({ ...request, kind: "generate" }, (reply) => {
      if (reply.kind !== "token" || model.current === null) return;
      if (reply.token === tokenizer.separator) return stop(true), setEnded(true);
      written.push(reply.token);
      timer ??= setTimeout(show, PACE);
    });
    if (timer !== null) { clearTimeout(timer); show(); }
    model.current = null;
    setBusy(false);
  };
  return { busy, ended, start, stop };
}

function Writer({ writer, state, set, room, name, onStart }) {
  const number = (id, said, low, high, step) => html`<label><span class="soft">${said}</span><input type="number" id=${id} min=${low} max=${high} step=${step} value=${state[id]}
    onChange=${(event) => { const value = Number(event.target.value); if (value >= low && value <= high) set({ [id]: value }); }} /></label>`;
  return html`<div class="controls writer" data-picture="no">
    ${writer.busy ? html`<button id="stop" class="strong" onClick=${() => writer.stop(true)}>Stop</button>` : html`<button id="write" class="strong" disabled=${room < 1} onClick=${onStart}>Write on${name ? ` with ${name}` : ""}</button>`}
    ${number("count", "tokens", 1, 2000, 1)}${number("temperature", "temperature", 0, 2, 0.1)}${number("topK", "top-k", 0, 100000, 1)}${number("seed", "seed", 0, 2 ** 31, 1)}
    ${writer.ended && html`<span class="soft" role="status" id="ended">The model ends the text here. Another seed may write on.</span>`}</div>`;
}
