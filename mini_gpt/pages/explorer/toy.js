"use strict";
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

function Table({ name, values, words, scale }) {
  return html`<table class="grid"><tr><td></td>${words.map((word) => html`<th>${word}</th>`)}</tr>
    ${values.map((row, i) => html`<tr><th>${words[i]}</th>${row.map((value, j) => {
      return html`<td id=${`${name}-${i}-${j}`} data-value=${value} style=${textOn(colourOf(scale, value))}>${value.toFixed(3)}</td>`;
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
    <div class="cards">${maps.map(({ logits, weights }, head) => html`<div class="card"><h2>Head ${head + 1}</h2>
      <p class="soft">Logits qᵀk/√2${state.temperature === 1 ? "" : " over the temperature"}</p><${Table} name=${`toy-logit-${head}`} values=${logits} words=${words} scale=${scales.signed(4)} />
      <p class="soft">Weights: the softmax of each row</p><${Table} name=${`toy-weight-${head}`} values=${weights} words=${words} scale=${scales.weights} /></div>`)}</div>
    <p class="soft">“head 2 negated” changes the signs of head 2's logits and leaves head 1 as it is. Another order of the words permutes rows and columns and changes no number: attention alone does not depend on order.</p>`;
}
