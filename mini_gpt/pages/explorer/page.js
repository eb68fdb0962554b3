"use strict";
// The page's views and their state. attention.js computes the weights and draws maps.

const { html, render, useState, useEffect, useRef } = htmPreact;
const TABS = ["Heads", "Model", "Map", "Positions", "Toy"];
const COLOURS = ["#3b6fe0", "#d9572b", "#2c9c63", "#b23fa8", "#c79a00", "#0d9cb5", "#7a5bd6", "#c43a5e"];
const THUMB = 128; // points of a thumbnail's side, for long texts
const FEWEST = 0.02; // weight from which a line is drawn
const MEANINGS = { // of the kinds of attention in a model with an encoder
  encoder: "source tokens attend to source tokens",
  decoder: "tokens of the target attend to themselves and earlier ones",
  cross: "tokens of the target, as they are written, attend to the source",
};

function Pixels({ width, height, colourAt, deps, ...rest }) {
  const canvas = useRef();
  useEffect(() => paint(canvas.current, width, height, colourAt.length ? colourAt : colourAt()), deps);
  return html`<canvas ref=${canvas} ...${rest}></canvas>`;
}

// Frames in a map around the tokens that belong together, if the true alignment of source and target is known.
function Frames({ attention }) {
  const { alignment, rows, columns } = attention;
  const frame = (name, [key, endKey, query, endQuery]) => html`<rect class=${name} x=${key} y=${query} width=${endKey - key} height=${endQuery - query} />`;
  return alignment && html`<svg class="frames" viewBox=${`0 0 ${columns} ${rows}`} preserveAspectRatio="none" aria-hidden="true">
    ${["edge", "line"].map((name) => alignment.map((link) => frame(name, link)))}</svg>`;
}

const FrameLegend = ({ attention, said }) => attention.alignment && html`<span class="soft" id="legend"><i class="swatch"></i> ${said}</span>`;

// Whether a token belongs to the one that is pointed at: {key, at}, a key or a query.
const isAligned = (attention, pointed, n) => (attention.alignment ?? []).some(([key, endKey, query, endQuery]) => {
  const [i, j] = pointed.key ? [n, pointed.at] : [pointed.at, n];
  return i >= query && i < endQuery && j >= key && j < endKey;
});

// The views.

function Pickers({ attention, state, set, many }) {
  const pick = (head, add) => {
    const others = state.more.filter((h) => h !== head);
    if (!many || !add) return set({ head, more: [] });
    if (head !== state.head) set({ more: others.length < state.more.length ? others : [...others, head] });
  };
  const button = (what, n, on, click, colour) => html`<button aria-pressed=${on} id=${`${what}-${n}`} onClick=${click}
    style=${colour && on ? `color:${colour}` : ""}>${n}</button>`;
  return html`<div class="controls">
    <div class="group">layer ${Array.from({ length: attention.layers }, (_, n) =>
      button("layer", n, n === state.layer, () => set({ layer: n })))}</div>
    <div class="group">head ${Array.from({ length: attention.heads }, (_, n) =>
      button("head", n, n === state.head || (many && state.more.includes(n)), (event) => pick(n, event.shiftKey), COLOURS[n % COLOURS.length]))}</div>
    ${attention.labels && html`<span class="soft" id="label">${attention.labels[state.layer][state.head]}</span>`}
    ${many && html`<button onClick=${() => set({ more: Array.from({ length: attention.heads }, (_, n) => n).filter((n) => n !== state.head) })}>all heads</button>`}
  </div>`;
}

function Heads({ attention, state, set }) {
  const canvas = useRef(), { rows, columns } = attention, row = 18, longest = Math.max(rows, columns);
  const heads = [state.head, ...state.more];
  const isolated = state.hover;
  const strengthOf = new Float32Array(longest), strongest = new Uint16Array(longest).fill(state.head); // of each token
  if (isolated !== null)
    for (const head of heads) {
      const weights = attention.weights(state.layer, head);
      for (let j = 0; j < (isolated.key ? rows : columns); j++) {
        const weight = isolated.key ? weights[j * columns + isolated.at] : weights[isolated.at * columns + j];
        if (weight > strengthOf[j]) [strengthOf[j], strongest[j]] = [weight, head];
      }
    }
  useEffect(() => {
    const element = canvas.current, width = element.clientWidth || 160, ratio = Math.min(2, devicePixelRatio || 1);
    element.width = width * ratio;
    element.height = longest * row * (longest > 400 ? 1 : ratio);
    const context = element.getContext("2d");
    context.scale(element.width / width, element.height / (longest * row));
    context.lineWidth = 1.4;
    for (const head of heads) {
      const weights = attention.weights(state.layer, head);
      context.strokeStyle = COLOURS[head % COLOURS.length];
      for (let i = 0; i < rows; i++)
        for (let j = 0, seen = attention.seen(i); j < seen; j++) {
          const weight = weights[i * columns + j];
          if (weight < FEWEST || (isolated !== null && isolated.at !== (isolated.key ? j : i))) continue;
          context.globalAlpha = Math.min(1, weight / Math.sqrt(heads.length));
          context.beginPath();
          context.moveTo(0, (i + 0.5) * row);
          context.lineTo(width, (j + 0.5) * row);
          context.stroke();
        }
    }
  }, [attention, state.layer, heads.join(), isolated && `${isolated.key}${isolated.at}`]);
  const column = (key) => html`<div class=${`tokens ${key ? "right" : "left"}`} onMouseLeave=${() => set({ hover: null })}>
    ${(key ? attention.keys : attention.tokens).map((token, n) => {
      const own = isolated !== null && isolated.key === key && isolated.at === n;
      const strength = isolated !== null && isolated.key !== key ? strengthOf[n] : 0;
      const name = own ? "on" : isolated !== null && isolated.key !== key && isAligned(attention, isolated, n) ? "aligned" : "";
      return html`<div class=${name} title=${n} id=${`${key ? "key" : "query"}-${n}`} onMouseEnter=${() => set({ hover: { key, at: n } })}
        style=${strength > 0.01 ? `background:color-mix(in srgb, ${COLOURS[strongest[n] % COLOURS.length]} ${Math.round(100 * strength)}%, transparent)` : ""}>${shown(token)}</div>`;
    })}</div>`;
  return html`<${Pickers} ...${{ attention, state, set, many: true }} />
    <p class="soft">Left: queries. Right: keys. Point at a token to see only its lines. Shift and click on a head to add it; a token then has the colour of the head with the largest weight.</p>
    <${FrameLegend} ...${{ attention, said: "frame: true alignment of the token you point at" }} />
    <div class="lines">${column(false)}<canvas ref=${canvas} id="lines" style=${`width:100%;height:${longest * row}px`}></canvas>${column(true)}</div>`;
}

function Model({ attention, set }) {
  const { layers, heads, rows, columns } = attention, by = attention.others ? Math.ceil(attention.longest / THUMB) : 1;
  const map = (layer, head) => by > 1 ? reducedMap(attention, layer, head, by) : weightMap(attention, layer, head);
  return html`<p class="soft">Square roots of the weights of all heads: queries downwards, keys across. ${by > 1 ? `A point is the weight on ${by} keys together, averaged over ${by} queries. ` : ""}Click on a head to enlarge it.${attention.labels ? "" : " Labels of heads need the result of eval.py --suite=heads."}</p>
    <${FrameLegend} ...${{ attention, said: "frame: true alignment" }} />
    <div class="thumbs" style=${`grid-template-columns:repeat(${heads}, minmax(${heads > 8 ? 72 : 84}px, 1fr))`}>
      ${Array.from({ length: layers * heads }, (_, n) => {
        const layer = Math.floor(n / heads), head = n % heads;
        return html`<button class="thumb" id=${`thumb-${layer}-${head}`} onClick=${() => set({ layer, head, more: [], tab: "Map" })}>
          <span class="framed"><${Pixels} width=${Math.ceil(columns / by)} height=${Math.ceil(rows / by)} colourAt=${() => map(layer, head)} deps=${[attention]} style=${`aspect-ratio:${columns}/${rows}`} /><${Frames} attention=${attention} /></span>
          ${layer}.${head} <span class="soft">${attention.labels ? attention.labels[layer][head] : ""}</span></button>`;
      })}</div>`;
}

function MapView({ attention, state, set }) {
  const { rows, columns } = attention, [at, point] = useState(null), { layer, head } = state;
  let least = 0, most = 1;
  if (state.logits) {
    [least, most] = [Infinity, -Infinity];
    for (let i = 0; i < rows; i++)
      for (let j = 0; j < attention.seen(i); j++) {
        const logit = attention.logit(layer, head, i, j);
        if (logit > -Infinity) { least = Math.min(least, logit); most = Math.max(most, logit); }
      }
  }
  const reach = Math.max(Math.abs(least), Math.abs(most)) || 1;
  const logitAt = (x, y) => {
    const logit = attention.logit(layer, head, y, x);
    return logit === -Infinity ? [128, 128, 128] : signed(logit / reach);
  };
  const colourAt = state.logits ? logitAt : weightMap(attention, layer, head);
  const move = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const place = (offset, size, count) => Math.max(0, Math.min(count - 1, Math.floor((offset / size) * count)));
    point({ j: place(event.clientX - box.left, box.width, columns), i: place(event.clientY - box.top, box.height, rows) });
  };
  const context = (tokens, n) => `${tokens.slice(Math.max(0, n - 12), n).map(shown).join("").slice(-20)}[${shown(tokens[n])}]`;
  let said = `weights are computed from logits quantised in ${attention.steps} steps; their error is at most ${(Math.ceil(attention.error * 1e4) / 1e4).toFixed(4)}` +
    (attention.others ? `. This holds for the ${attention.kept} largest weights of each query; all others are shown as the mean of their block of ${attention.block} keys` : "");
  if (at) {
    const logit = attention.logit(layer, head, at.i, at.j), weight = attention.weights(layer, head)[at.i * columns + at.j];
    const isMean = at.j < attention.seen(at.i) && logit > -Infinity && attention.isMean(layer, head, at.i, at.j);
    const exact = () => `logit ${attention.cut(layer, head, at.i, at.j) ? `at most ${logit.toFixed(1)}` : withError(logit, attention.logitError(layer, head, at.i, at.j))}   weight ${withError(weight, attention.error)}`;
    const block = Math.floor(at.j / attention.block) * attention.block;
    const mean = () => `weight at most ${attention.leastOwn(layer, head, at.i).toFixed(4)}: not one of the query's ${attention.kept} largest; the mean of such keys from ${block} to ${Math.min(block + attention.block, attention.columns) - 1} is ${weight.toFixed(4)}`;
    said = `query ${at.i}  ${context(attention.tokens, at.i)}\nkey   ${at.j}  ${context(attention.keys, at.j)}\n` +
      (logit === -Infinity ? "not visible" : isMean ? mean() : exact());
  }
  return html`<${Pickers} ...${{ attention, state, set }} />
    <div class="controls"><div class="group">
      <button id="show-weights" aria-pressed=${!state.logits} onClick=${() => set({ logits: false })}>weights</button>
      <button id="show-logits" aria-pressed=${state.logits} onClick=${() => set({ logits: true })}>logits</button></div>
      <span class="soft" id="range">${state.logits ? `logits from ${least.toFixed(1)} to ${most.toFixed(1)}, clipped at ${attention.floor} below each row's largest` : "square roots of the weights"}</span>
      <${FrameLegend} ...${{ attention, said: "frame: true alignment" }} /></div>
    <output id="pointed">${said}</output>
    <div class=${`map${attention.others ? " long" : ""}`}><${Pixels} id="map" width=${columns} height=${rows} colourAt=${colourAt} deps=${[attention, layer, head, state.logits]}
      onMouseMove=${move} onMouseLeave=${() => point(null)} /><${Frames} attention=${attention} /></div>`;
}

// Formulas of the positional encodings.

const frequency = (base, pair, width) => base ** ((-2 * pair) / width);
const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
const similarityOf = (frequencies, distance) => mean(frequencies.map((f) => Math.cos(distance * f)));

function Curve({ lines, x, y, low, high }) {
  const [w, h, left, bottom] = [440, 230, 38, 26], last = Math.max(...lines.map((line) => line.values.length)) - 1;
  const path = (values) => values.map((v, n) => `${left + (n / last) * (w - left - 8)},${h - bottom - ((Math.max(low, Math.min(high, v)) - low) / (high - low)) * (h - bottom - 10)}`).join(" ");
  return html`<svg viewBox=${`0 0 ${w} ${h}`} role="img">
    ${[low, (low + high) / 2, high].map((v) => html`<text x="2" y=${h - bottom - ((v - low) / (high - low)) * (h - bottom - 10) + 4}>${+v.toFixed(2)}</text>`)}
    <text x=${left} y=${h - 6}>0</text><text x=${w - 8} y=${h - 6} text-anchor="end">${last} ${x}</text>
    ${lines.map((line, n) => html`<polyline fill="none" stroke=${COLOURS[n % COLOURS.length]} stroke-width="1.6" points=${path(line.values)} />
      <text x=${w - 10} y=${16 + 14 * n} text-anchor="end" style=${`fill:${COLOURS[n % COLOURS.length]}`}>${line.name}</text>`)}
  </svg><p class="soft">${y}</p>`;
}

// The vector (1, 0) in pairs of a head's dimensions, rotated by RoPE to positions 0 to 7.
function Turns({ frequencies }) {
  const half = frequencies.length, pairs = [...new Set([0, half >> 2, half >> 1, half - 1])].filter((pair) => pair in frequencies), reach = 42;
  return html`<svg viewBox="0 0 440 ${pairs.length > 2 ? 252 : 136}" role="img">
    ${pairs.map((pair, n) => {
      const radians = frequencies[pair], x = 110 + 220 * (n % 2), y = 58 + 126 * (n >> 1);
      return html`<g><circle cx=${x} cy=${y} r=${reach} fill="none" stroke="var(--line)" />
        ${Array.from({ length: 8 }, (_, place) => {
          const [dx, dy] = [Math.cos(place * radians), -Math.sin(place * radians)];
          return html`<line id=${`turn-${pair}-${place}`} x1=${x} y1=${y} x2=${x + reach * dx} y2=${y + reach * dy} stroke=${COLOURS[0]} stroke-width="2" opacity=${0.3 + 0.1 * place} />
            ${(radians > 0.25 || place === 0) && html`<text x=${x + 52 * dx} y=${y + 52 * dy + 4} text-anchor="middle">${place}</text>`}`;
        })}
        <text x=${x} y=${y + 68} text-anchor="middle">pair ${pair}: ${radians.toPrecision(3)} radians per token</text></g>`;
    })}
  </svg>`;
}

function Positions({ data, state, set }) {
  const { width, turned, factors, scaling, slopes, learned, t5 } = data.positions, length = state.length, base = 10 ** state.baseLog;
  const distances = Array.from({ length }, (_, n) => n), least = Math.log10(data.positions.base);
  const waves = Array.from({ length: Math.ceil(width / 2) }, (_, pair) => frequency(base, pair, width));
  const turns = factors.map((factor, pair) => factor * frequency(base, pair, turned)); // radians per token
  const similar = distances.map((d) => similarityOf(waves, d));
  const wave = (place, dimension) => {
    const angle = place * waves[Math.floor(dimension / 2)];
    return dimension % 2 ? Math.cos(angle) : Math.sin(angle);
  };
  // The score of equal unit vectors with the same norm in each pair.
  const rotated = (offset, place) => mean(turns.map((f) => Math.cos((place + offset) * f) * Math.cos(place * f) + Math.sin((place + offset) * f) * Math.sin(place * f)));
  const cosines = learned && new Int8Array(bytesOf(learned.cosines).buffer);
  const longest = 2 * Math.PI / waves[waves.length - 1];
  const slider = (id, label, min, max, step, value, said, change) => html`<label class="group">${label}
    <input type="range" id=${id} min=${min} max=${max} step=${step} value=${value} onInput=${(event) => change(+event.target.value)} /> <b id=${`${id}-value`}>${said}</b></label>`;
  return html`<div class="controls">
      ${slider("length", "length", 16, 1024, 16, length, `${length} tokens`, (value) => set({ length: value }))}
      ${slider("base", "base", Math.min(1, least), Math.max(6, least), "any", state.baseLog, base.toLocaleString("en", { maximumFractionDigits: 0 }), (value) => set({ baseLog: value }))}
    </div>
    <div class="panels">
      <div class="panel"><h2>Sinusoids, width ${width}</h2>
        <${Pixels} id="waves" width=${width} height=${length} colourAt=${(x, y) => signed(wave(y, x))} deps=${[length, base]} style="height:260px" />
        <p class="soft">Positions downwards, dimensions across; wavelengths from 6.28 to <b id="longest">${longest.toLocaleString("en", { maximumFractionDigits: 0 })}</b> tokens.</p></div>
      <div class="panel"><h2>Similarity of two positions</h2>
        <${Curve} low=${-1} high=${1} x="tokens apart" y=${`Cosine of two positions' sinusoids: ${similar[1].toFixed(3)} at distance 1, ${similar[10].toFixed(3)} at 10. With RoPE: score of equal vectors.`}
          lines=${[{ name: `sinusoids, ${width} dimensions`, values: similar }, { name: `RoPE, ${turned} dimensions`, values: distances.map((d) => similarityOf(turns, d)) }]} /></div>
      <div class="panel"><h2>RoPE rotates pairs of a head's ${turned} dimensions</h2>
        <${Turns} frequencies=${turns} />
        ${scaling && html`<p class="soft" id="scaling">Frequencies with this run's scaling: ${scaling}.</p>`}
        <p class="soft">The vector (1, 0) at positions 0 to 7. High frequencies separate near tokens, low frequencies far tokens.</p></div>
      <div class="panel"><h2>RoPE: only the offset counts</h2>
        <${Curve} low=${-1} high=${1} x="tokens of offset" y="Scores of equal vectors. The curves for a key at 0 and at 1000 are equal."
          lines=${[{ name: "key at 0", values: distances.map((d) => rotated(d, 0)) }, { name: "key at 1000", values: distances.map((d) => rotated(d, 1000)) }]} /></div>
      <div class="panel"><h2>ALiBi: one slope per head</h2>
        <${Curve} low=${0} high=${1} x="tokens apart" y="Factors exp(−slope · distance); at most 8 heads are shown."
          lines=${slopes.slice(0, 8).map((slope, n) => ({ name: `head ${n}: ${slope.toPrecision(3)}`, values: distances.map((d) => Math.exp(-slope * d)) }))} /></div>
      ${learned && html`<div class="panel"><h2>This run's learned positions</h2>
        <${Pixels} id="learned" width=${learned.size} height=${learned.size} colourAt=${(x, y) => signed(cosines[y * learned.size + x] / 127)} deps=${[]} />
        <p class="soft">Cosines of ${learned.size} positions${learned.every > 1 ? `, every ${learned.every}th` : ""}: red 1, white 0, blue −1.</p></div>`}
      ${t5 && html`<div class="panel" id="t5"><h2>This run's T5 biases</h2>
        <${Curve} low=${Math.min(...t5.flat())} high=${Math.max(...t5.flat(), Math.min(...t5.flat()) + 0.01)} x="tokens to the left" y="Biases of the logits; at most 8 heads are shown."
          lines=${t5.slice(0, 8).map((values, n) => ({ name: `head ${n}`, values }))} /></div>`}
    </div>`;
}

// The toy: Q = X·W_Q, K = X·W_K, two heads of two dimensions.

const product = (a, b) => a.map((row) => b[0].map((_, j) => row.reduce((sum, v, k) => sum + v * b[k][j], 0)));
function toyMaps(toy, preset, temperature, order) {
  const x = order.map((n) => toy.x[n]), [q, k] = toy.presets[preset].map((w) => product(x, w)), width = 4 / toy.heads;
  return Array.from({ length: toy.heads }, (_, head) => {
    const part = (row) => row.slice(head * width, (head + 1) * width);
    const logits = q.map((a) => k.map((b) => part(a).reduce((sum, v, n) => sum + v * part(b)[n], 0) / Math.sqrt(width) / temperature));
    const weights = logits.map((row) => {
      const top = Math.max(...row), exps = row.map((v) => Math.exp(v - top)), sum = exps.reduce((a, b) => a + b);
      return exps.map((v) => v / sum);
    });
    return { logits, weights };
  });
}

function Table({ name, values, words, colourOf }) {
  return html`<table><tr><th></th>${words.map((word) => html`<th>${word}</th>`)}</tr>
    ${values.map((row, i) => html`<tr><th>${words[i]}</th>${row.map((value, j) => {
      const [r, g, b] = colourOf(value), light = r * 0.3 + g * 0.6 + b * 0.1 > 140;
      return html`<td id=${`${name}-${i}-${j}`} data-value=${value} style=${`background:rgb(${r},${g},${b});color:${light ? "#111" : "#fff"}`}>${value.toFixed(3)}</td>`;
    })}</tr>`)}</table>`;
}

function Toy({ data, state, set }) {
  const { toy } = data, maps = toyMaps(toy, state.preset, state.temperature, state.order), words = state.order.map((n) => toy.words[n]);
  const forward = (n) => { const order = [...state.order]; [order[n - 1], order[n]] = [order[n], order[n - 1]]; set({ order }); };
  return html`<p>Four words of four numbers each. Head 1 reads the first two columns of X·W<sub>Q</sub> and X·W<sub>K</sub>, head 2 the others; no pair is masked.</p>
    <div class="controls">
      <div class="group">${Object.keys(toy.presets).map((name) => html`<button id=${`preset-${name.replace(/ /g, "-")}`} aria-pressed=${name === state.preset} onClick=${() => set({ preset: name })}>${name}</button>`)}</div>
      <label class="group">temperature <input type="range" id="temperature" min="0.1" max="5" step="0.1" value=${state.temperature} onInput=${(event) => set({ temperature: +event.target.value })} /> <b>${state.temperature.toFixed(1)}</b></label>
      <div class="group">order ${words.map((word, n) => html`<button id=${`word-${n}`} disabled=${n === 0} title="moves forward" onClick=${() => forward(n)}>${n ? "← " : ""}${word}</button>`)}
        <button id="reset" onClick=${() => set({ order: [0, 1, 2, 3], temperature: 1 })}>reset</button></div>
    </div>
    <div class="panels">${maps.map(({ logits, weights }, head) => html`<div class="panel"><h2>Head ${head + 1}</h2>
      <p class="soft">Logits qᵀk/√2${state.temperature === 1 ? "" : " over the temperature"}</p><${Table} name=${`toy-logit-${head}`} values=${logits} words=${words} colourOf=${(v) => signed(v / 4)} />
      <p class="soft">Weights: the softmax of each row</p><${Table} name=${`toy-weight-${head}`} values=${weights} words=${words} colourOf=${(v) => magma(v)} /></div>`)}</div>
    <p class="soft">“head 2 negated” changes the signs of head 2's logits and leaves head 1 as it is. Another order of the words permutes rows and columns and changes no number: attention alone does not depend on order.</p>`;
}

function App({ data, kinds }) {
  const [state, change] = useState({
    kind: Object.keys(kinds).at(-1), tab: TABS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "Heads", layer: 0, head: 0, more: [], hover: null, logits: false,
    length: 128, baseLog: Math.log10(data.positions.base), preset: Object.keys(data.toy.presets)[0], temperature: 1, order: [0, 1, 2, 3], theme: null,
  });
  const set = (part) => change((old) => ({ ...old, ...part })), attention = kinds[state.kind];
  const show = (kind) => change((old) => ({ ...old, kind, layer: Math.min(old.layer, kinds[kind].layers - 1), more: [], hover: null }));
  useEffect(() => { history.replaceState(null, "", `#${state.tab}`); }, [state.tab]);
  useEffect(() => { if (state.theme) document.documentElement.dataset.theme = state.theme; }, [state.theme]);
  const otherTheme = () => change((old) => {
    const dark = old.theme ? old.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    return { ...old, theme: dark ? "light" : "dark" };
  });
  useEffect(() => {
    const press = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
      const step = (what, by) => change((old) => {
        const count = kinds[old.kind][`${what}s`];
        return { ...old, [what]: (old[what] + by + count) % count, more: [] };
      });
      const keys = {
        ArrowRight: () => step("head", 1), ArrowLeft: () => step("head", -1),
        ArrowUp: () => step("layer", 1), ArrowDown: () => step("layer", -1),
        t: otherTheme, l: () => change((old) => ({ ...old, logits: !old.logits })),
      };
      TABS.forEach((tab, n) => { keys[n + 1] = () => set({ tab }); });
      if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
  const views = { Heads, Model, Map: MapView, Positions, Toy };
  return html`<header><h1>${data.title}</h1><span class="soft">${data.subtitle}</span><button id="theme" onClick=${otherTheme}>light / dark</button></header>
    <nav role="tablist">${TABS.map((tab) => html`<button role="tab" id=${`tab-${tab}`} aria-selected=${tab === state.tab} onClick=${() => set({ tab })}>${tab}</button>`)}</nav>
    ${Object.keys(kinds).length > 1 && TABS.indexOf(state.tab) < 3 && html`<div class="controls"><div class="group">attention
      ${Object.keys(kinds).map((kind) => html`<button id=${`kind-${kind}`} aria-pressed=${kind === state.kind} onClick=${() => show(kind)}>${kind}</button>`)}</div>
      <span class="soft" id="meaning">${MEANINGS[state.kind]}</span></div>`}
    <${views[state.tab]} ...${{ data, attention, state, set }} />
    <p class="soft"><kbd>1</kbd>–<kbd>5</kbd> views, <kbd>←</kbd> <kbd>→</kbd> heads, <kbd>↑</kbd> <kbd>↓</kbd> layers, <kbd>l</kbd> logits, <kbd>t</kbd> light or dark</p>`;
}

(async () => {
  const data = JSON.parse(document.getElementById("data").textContent), root = document.getElementById("app");
  document.title = data.title;
  const kinds = {}; // {kind: Attention}; a model without an encoder has one
  for (const [kind, held] of Object.entries(data.kinds ?? { decoder: data.attention }))
    kinds[kind] = new Attention(held, await unpack(held.logits));
  root.textContent = "";
  render(html`<${App} ...${{ data, kinds }} />`, root);
  document.documentElement.dataset.ready = Math.round(performance.now());
})();
