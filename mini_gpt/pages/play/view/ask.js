// The engine behind one function. A server that answers the same requests (worker.js) can take its place.

let engines; // workers() or served()

export function start(chosen) {
  engines = chosen;
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

// Send a request. onReply: called with each reply. Returns a promise of the last reply.
export function ask(request, onReply) {
  return new Promise((done) => {
    if (request.kind === "cancel") return done(engines.send(request));
    engines.send(request, (reply) => {
      onReply?.(reply);
      if (!PARTIAL.includes(reply.kind)) done(reply);
    });
  });
}
