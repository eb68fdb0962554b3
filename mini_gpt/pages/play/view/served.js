// The engine on a server: the requests of worker.js as JSON, one reply a line. Arrays are base64 of their bytes.

import { bytesOf } from "../../common/arrays.js";

const ARRAYS = { float32: Float32Array, int32: Int32Array };

// Replace {float32: …} and {int32: …} by typed arrays, also inside `next` and `lens`.
function unpacked(value) {
  if (value === null || typeof value !== "object") return value;
  const [type] = Object.keys(value);
  if (ARRAYS[type]) return new ARRAYS[type](bytesOf(value[type]).buffer);
  return Object.fromEntries(Object.entries(value).map(([name, part]) => [name, unpacked(part)]));
}

async function* lines(response) {
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    rest += decoder.decode(value, { stream: !done });
    const whole = rest.split("\n");
    rest = whole.pop();
    yield* whole;
    if (done) break;
  }
  if (rest) yield rest;
}

export function served() {
  const running = new Map(); // {key: {model, slot, own: AbortController}} of runs and generations
  const asked = async (request, reply) => {
    const { kind, model, slot = kind === "generate" ? "generated" : "main" } = request;
    const own = new AbortController();
    const key = `${model} ${slot}`;
    if (kind === "run" || kind === "generate") {
      running.get(key)?.own.abort();
      running.set(key, { model, slot, own });
    }
    try {
      const options = { method: "POST", headers: { "Content-Type": "application/json" }, signal: own.signal };
      const response = await fetch("ask", { ...options, body: JSON.stringify({ ...request, slot }) });
      if (!response.ok)
        return void reply({ kind: "refused", message: `The server refuses the request: ${await response.text()}.` });
      for await (const line of lines(response)) if (line) reply(unpacked(JSON.parse(line)));
    } catch (error) {
      if (error.name === "AbortError") reply({ kind: "cancelled" });
      else
        reply({
          kind: "refused",
          message: `The server does not answer (${error.message}). Start python -m mini_gpt.play again.`,
        });
    }
  };
  return {
    send(request, onReply) {
      if (request.kind === "load") return void onReply({ kind: "loaded", model: request.model });
      if (request.kind !== "cancel") return void asked(request, onReply);
      const { model, slot } = request;
      for (const job of running.values())
        if ((model ?? job.model) === job.model && (slot ?? job.slot) === job.slot) job.own.abort();
    },
  };
}
