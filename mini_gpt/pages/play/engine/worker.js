// The worker of the playground: it holds one or two models, and computes so that the page stays responsive.
//
// Requests, and the kinds of their replies. A reply has the request's id. All arrays of a reply are typed arrays.
//
// {id, kind: "load", model: 0 | 1, packed}: the dict of pack.py → {kind: "loaded", model}
//
// {id, kind: "run", model, slot, tokens: [int], edits: {…}, ask: {top: 8, lens: 3}} → {kind: "result", …}
//   slot: "main" (by default) and "plain", of the edited and the unedited model; "probe", of single heads; "order", of
//   words in their first order; "generated". Each slot of a model keeps the last text and its caches. A newer run of
//   the same model and slot cancels an older one.
//   edits: see edits.js. ask.top: number of likely next tokens; ask.lens: the same for the logit lens, 0: no lens.
//   The result, with L tokens, N layers and V tokens in the vocabulary:
//   length, layers  L and N
//   nll             [L], nats of each token given the earlier ones; NaN for the first
//   next            {top, tokens: [L × top], probabilities: [L × top]}: the most likely tokens after each place
//   norms           [(N + 1) × L], of the residual stream: before the first layer, then after each layer
//   lens            {top, tokens: [N × L × top], probabilities: [N × L × top]}, or null: `next` by the stream after
//                   each layer; that of the last layer equals `next`. top is at most V.
//   milliseconds    of computation; computed: the number of places that did not come from the cache
//
// {id, kind: "attention", model, slot, layer, head} → {kind: "attention", layer, head, length, weights, logits}
//   [L × L] each, query by key, of the last run of this slot. Masked logits are -Infinity, their weights 0.
//
// {id, kind: "generate", model, tokens, edits, temperature, topK, seed, count}
//   → {kind: "token", token, probability} for each token, then {kind: "done", generated}
//   temperature 0: the most likely token. topK 0: all tokens. Runs are answered between two tokens. Its slot is
//   "generated": a newer generation of the same model cancels an older one.
//
// {kind: "cancel", model, slot}: ends all runs and generations; with a model or a slot, only its own. It has no reply.
//
// Instead of its reply, a request can get {kind: "cancelled"}, or {kind: "refused", message}: a sentence to show, such
// as that a learned table of positions is too short.

import { randomNumbers } from "../../common/random.js";
import { Refusal } from "./edits.js";
import { Pass } from "./engine.js";
import { Model } from "./model.js";
import { drawn, lastLogits, predictions } from "./predictions.js";

const WORK = 10; // milliseconds of computation between two looks at new messages

class JobQueue {
  // reply: a function that sends a reply; pause: returns a promise that is resolved when new messages have been read.
  constructor(reply, pause) {
    Object.assign(this, { reply, pause, models: [], passes: new Map(), jobs: [], busy: false });
  }

  receive(request) {
    const { kind, model } = request;
    if (kind === "cancel") return this.cancel(request);
    const slot = kind === "generate" ? "generated" : (request.slot ?? "main");
    if (kind === "run" || kind === "generate") this.cancel({ model, slot });
    this.jobs.push({ ...request, slot, cancelled: false, finished: false });
    if (!this.busy) this.work();
  }

  cancel({ model, slot }) {
    const isMeant = (job) => (model ?? job.model) === job.model && (slot ?? job.slot) === job.slot;
    for (const job of this.jobs) job.cancelled ||= job.kind !== "load" && isMeant(job);
  }

  // Do the jobs in order. A generation goes to the end of the queue after each token.
  async work() {
    this.busy = true;
    while (this.jobs.length) {
      const job = this.jobs[0];
      try {
        await this.do(job);
      } catch (error) {
        if (!(error instanceof Refusal)) console.error(error);
        this.answer(job, { kind: "refused", message: error.message });
        job.finished = true;
      }
      this.jobs.splice(this.jobs.indexOf(job), 1);
      if (!job.finished) this.jobs.push(job);
    }
    this.busy = false;
  }

  async do(job) {
    job.steps ??= this[job.kind](job);
    let began = performance.now();
    while (!job.cancelled && !job.finished) {
      const { value, done } = job.steps.next();
      job.finished = done;
      if (value === TURN) break; // another job's turn
      if (value instanceof Promise) await value;
      if (performance.now() - began < WORK) continue;
      await this.pause();
      began = performance.now();
    }
    if (job.cancelled) this.answer(job, { kind: "cancelled" });
    job.finished ||= job.cancelled;
    await this.pause();
  }

  answer(job, reply) {
    this.reply({ id: job.id, ...reply });
  }

  // The pass of a slot, a new one if the edits have changed.
  passOf({ model, slot, edits = {} }) {
    if (!this.models[model]) throw new Refusal(`The model ${model} is not loaded.`);
    const key = `${model} ${slot}`;
    const written = JSON.stringify(edits);
    if (this.passes.get(key)?.written !== written)
      this.passes.set(key, { written, pass: new Pass(this.models[model], edits) });
    return this.passes.get(key).pass;
  }

  *load(job) {
    yield Model.unpack(job.packed).then((model) => {
      this.models[job.model] = model;
    });
    for (const key of this.passes.keys()) if (key.startsWith(`${job.model} `)) this.passes.delete(key);
    this.answer(job, { kind: "loaded", model: job.model });
  }

  *run(job) {
    const began = performance.now();
    const pass = this.passOf(job);
    const { top = 8, lens = 0 } = job.ask ?? {};
    const computed = yield* pass.run(job.tokens);
    const result = yield* predictions(pass, top, lens);
    this.answer(job, { kind: "result", ...result, computed, milliseconds: performance.now() - began });
  }

  *attention(job) {
    const found = this.passes.get(`${job.model} ${job.slot}`);
    if (!found?.pass.complete) return void (job.cancelled = true);
    const maps = yield* found.pass.blocks[job.layer].attention.maps(job.head);
    this.answer(job, { kind: "attention", layer: job.layer, head: job.head, ...maps });
  }

  *generate(job) {
    const pass = this.passOf(job);
    const tokens = [...job.tokens];
    const random = randomNumbers(job.seed ?? 0);
    for (let n = 0; n < job.count; n++) {
      yield* pass.run(tokens);
      const logits = lastLogits(pass);
      if (!logits.every(Number.isFinite)) throw new Refusal(NOT_FINITE);
      const { token, probability } = drawn(logits, job.temperature ?? 1, job.topK ?? 0, random);
      tokens.push(token);
      this.answer(job, { kind: "token", token, probability });
      yield TURN;
    }
    this.answer(job, { kind: "done", generated: job.count });
  }
}

const NOT_FINITE = "The model's logits are not finite with these edits: no token can be drawn.";
const TURN = Symbol("another job's turn");

// In a worker, requests are messages. A message to oneself comes after all messages that wait already.
if (typeof WorkerGlobalScope !== "undefined" && self instanceof WorkerGlobalScope) {
  const channel = new MessageChannel();
  const waiting = [];
  channel.port1.onmessage = () => waiting.shift()();
  const pause = () =>
    new Promise((done) => {
      waiting.push(done);
      channel.port2.postMessage(null);
    });
  // The largest arrays are handed over, not copied.
  const buffers = (reply) => [reply.weights, reply.logits].filter(Boolean).map((array) => array.buffer);
  const queue = new JobQueue((reply) => self.postMessage(reply, buffers(reply)), pause);
  self.onmessage = (message) => queue.receive(message.data);
}
