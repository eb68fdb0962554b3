// The text goes on: tokens are sampled one by one and appended to the text.

import { html, useRef, useState } from "../../common/preact.js";
import { ask } from "./engines.js";
import { WRITING, allowedNumber } from "./state.js";

const PACE = 80; // milliseconds between two changes of the text, which the page draws again

// A hook: {busy, message, start, stop}. message: why the writing has ended before the wished number of tokens, or "".
// onText(text): the text with what is written. stop(false) drops what is not yet shown.
export function useWriter(tokenizer, onText) {
  const [busy, setBusy] = useState(false);
  const [message, say] = useState("");
  const model = useRef(null);
  const keeps = useRef(true);
  const stop = (keep) => {
    say("");
    if (model.current === null) return;
    keeps.current = keep;
    ask({ kind: "cancel", model: model.current, slot: "generated" });
    model.current = null;
  };
  const start = async (request, text) => {
    const written = [];
    let timer = null;
    const show = () => {
      timer = null;
      if (keeps.current) onText(text + tokenizer.decode(written));
    };
    model.current = request.model;
    keeps.current = true;
    setBusy(true);
    say("");
    const last = await ask({ ...request, kind: "generate" }, (reply) => {
      if (reply.kind !== "token" || model.current === null) return;
      if (reply.token === tokenizer.separator) {
        stop(true);
        return say("The model ends the text here. Another seed may continue it.");
      }
      written.push(reply.token);
      timer ??= setTimeout(show, PACE);
    });
    if (timer !== null) {
      clearTimeout(timer);
      show();
    }
    if (last.kind === "refused") say(last.message);
    model.current = null;
    setBusy(false);
  };
  return { busy, message, start, stop };
}

export function Writer({ writer, state, set, room, isEmpty, name, onStart }) {
  const number = ([id, { said, low, high, step }]) =>
    html`<label
      ><span class="soft">${said}</span
      ><input
        type="number"
        id=${id}
        min=${low}
        max=${high}
        step=${step}
        value=${state[id]}
        onChange=${(event) => set({ [id]: allowedNumber(id, event.target.value) ?? state[id] })}
    /></label>`;
  return html`<div class="controls writer" data-picture="no">
    ${
      writer.busy
        ? html`<button id="stop" class="strong" onClick=${() => writer.stop(true)}>Stop</button>`
        : html`<button id="write" class="strong" disabled=${room < 1 || isEmpty} onClick=${onStart}>
            Continue${name ? ` with ${name}` : ""}
          </button>`
    }
    ${Object.entries(WRITING).map(number)}
    <span class="soft" role="status" id="writer-message"
      >${writer.message || (room < 1 ? "The text is as long as this page allows." : "")}</span
    >
  </div>`;
}
