// The engine behind one function: workers of this page, or a server that answers the same requests (worker.js).

import { bytesOf } from "../../common/arrays.js";
import { refusalOf } from "./edits.js";

let engines; // workers() or served()
let configs; // of the models

export function start(chosen, ofModels) {
  [engines, configs] = [chosen, ofModels];
}

// Each model has a worker of its own, so that two runs compute at the same time.
export function workers() {
  const source = document.querySelector('script[type="text/js-worker"]').textContent;
  const made = [];
  const waiting = new Map();
  let next = 0;
  const worker = (model) => {
    if (made[model]) return made[model];
    made[model] = new Worker(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
    made[model].onmessage = ({ data }) => waiting.get(data.id)?.(data);
    return made[model];
  };
  return {
    send(request, onReply) {
      const id = next++;
      worker(request.model).postMessage({ ...request, id });
      if (onReply)
        waiting.set(id, (reply) => {
          if (!PARTIAL.includes(reply.kind)) waiting.delete(id);
          onReply(reply);
        });
    },
  };
}
const PARTIAL = ["token"]; // kinds of replies that others follow

// Send a request. onReply: called with each reply. Returns a promise of the last reply. Edits that the model can't have
// are refused here.
export function ask(request, onReply) {
  const message = refusalOf(request.edits ?? {}, configs[request.model]);
  if (message) return Promise.resolve({ kind: "refused", message });
  return new Promise((done) => {
    if (request.kind === "cancel") return done(engines.send(request));
    engines.send(request, (reply) => {
      onReply?.(reply);
      if (!PARTIAL.includes(reply.kind)) done(reply);
    });
  });
}

// A server: the requests of worker.js as JSON, one reply a line. Arrays are base64 of their bytes.
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
