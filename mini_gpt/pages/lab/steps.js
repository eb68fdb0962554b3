// The five steps, from the input to the output, with all matrices.

import { seriesColour } from "../common/colours.js";
import { html } from "../common/preact.js";
import { wordsAbout } from "./encodings.js";
import { STEPS, asNumpy, asTable, ofStep } from "./matrices.js";
import { Matrix, typeset } from "./matrix.js";
import { Section } from "./sections.js";
import { LARGEST_SEED } from "./state.js";
import { BIAS, subjectOf } from "./subject.js";

export const headName = (state, n) => (state.heads === 1 ? "the one head" : `head ${n + 1}`);

export function CopyButtons({ matrices, what, onCopied, name = "copy" }) {
  const copy = async (text, form) =>
    onCopied((await copied(text)) ? `${what} copied as ${form}.` : "The browser did not allow copying.");
  return html`<span class="copy"
    ><span class="soft small">${name}</span>
    <button class="small" onClick=${() => copy(asTable(matrices), "a table")} aria-label=${`Copy ${what} as a table`}>
      table
    </button>
    <button class="small" onClick=${() => copy(asNumpy(matrices), "NumPy")} aria-label=${`Copy ${what} as NumPy`}>
      NumPy
    </button></span
  >`;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // a page from a disk may not use the clipboard of some browsers
    const area = document.body.appendChild(Object.assign(document.createElement("textarea"), { value: text }));
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

// One step. formula: in plain text. children: its matrices.
function Step({ id, page, formula, said, children }) {
  const { number: count, title } = STEPS.find((step) => step.id === id);
  const matrices = ofStep(page.held, id);
  return html`<${Section}
    id=${`step-${id}`}
    page=${page}
    title=${html`${count && html`<span class="badge">${count}</span> `}${title}`}
    beside=${html`<${CopyButtons} ...${{ matrices, what: title, onCopied: page.say }} />`}>
    <div>
      <code>${typeset(formula)}</code>
      <p class="soft small">${typeset(said)}</p>
    </div>
    <div>${children}</div>
  </${Section}>`;
}

// Matrices of each head, by their letters, the heads beside each other. isBare: which have no labels of their rows.
const Lanes = ({ page, letters, isBare = () => false }) =>
  html`<div class="lanes">
    ${page.result.heads.map(
      (_, n) =>
        html`<div class="lane" style=${`--head:${seriesColour(n)}`} key=${n}>
          <h3>${headName(page.state, n)}</h3>
          <div class="row">
            ${letters.map(
              (letter) =>
                html`<${Matrix} ...${{ matrix: page.held[`${letter}${n}`], page, isBare: isBare(letter) }} />`,
            )}
          </div>
        </div>`,
    )}
  </div>`;

const sign = (text) => html`<span class="sign" aria-hidden="true">${text}</span>`;

function PresetPicker({ data, state, letter, set }) {
  const own = state.matrices[letter];
  const name = `W_${letter}`;
  const put = (matrix) => set({ matrices: { ...state.matrices, [letter]: { ...own, cells: null, ...matrix } } });
  return html`<span class="picker"
    ><select
      id=${`preset-${letter}`}
      aria-label=${`preset of ${name}`}
      value=${own.preset}
      onChange=${(event) => put({ preset: event.target.value })}>
      ${[...Object.keys(data.presets), "random"].map((preset) => html`<option value=${preset}>${preset}</option>`)}
      ${own.preset === "edited" && html`<option value="edited">edited</option>`}
    </select>
    ${
      own.preset === "random" &&
      html`<label class="soft small"
        >seed
        <input
          type="number"
          id=${`seed-${letter}`}
          aria-label=${`seed of ${name}`}
          min="0"
          max=${LARGEST_SEED}
          value=${own.seed}
          onInput=${(event) => {
            if (/^\d+$/.test(event.target.value) && +event.target.value <= LARGEST_SEED)
              put({ seed: +event.target.value });
          }}
      /></label>`
    }</span
  >`;
}

function WeightMatrix({ page, letter }) {
  const { data, state, set, held } = page;
  const matrix = held[`W${letter}`];
  const edit = (i, j, value) => {
    const cells = matrix.values.map((row, a) => row.map((old, b) => (a === i && b === j ? value : old)));
    set({ matrices: { ...state.matrices, [letter]: { preset: "edited", seed: 1, cells } } });
  };
  return html`<${Matrix} ...${{ matrix, page, onEdit: edit }}>
    <${PresetPicker} ...${{ data, state, letter, set }} />
  </${Matrix}>`;
}

const ONES = " The column “bias” is 1 for each token: its rows in W_Q, W_K and W_V are their biases.";

export function Input({ page }) {
  const { state, set, held, result } = page;
  const about = wordsAbout(result.encoding);
  const matrix = (id) => html`<${Matrix} ...${{ matrix: held[id], page }} />`;
  const edit = (i, j, value) =>
    set({ x: state.x.map((row, n) => row.map((old, k) => (n === state.order[i] && k === j ? value : old))) });
  return html`<${Step}
    id="input"
    page=${page}
    formula=${result.added ? "X + P" : "X"}
    said=${`${subjectOf(page.data).input}${page.data.dimensions.at(-1) === BIAS ? ONES : ""} ${about.input}`}>
    <div class="row">
      <${Matrix} ...${{ matrix: held.X, page, onEdit: edit }} />
      ${result.added && html`${sign("+")}${matrix("P")}${sign("=")}${matrix("input")}`}
    </div>
  </${Step}>`;
}

export function Project({ page }) {
  const input = page.result.added ? "(X + P)" : "X";
  return html`<${Step}
    id="project"
    page=${page}
    formula=${["Q", "K", "V"].map((letter) => `${letter} = ${input}·W_${letter}`).join("   ")}
    said="A word's query is compared with the keys of all words. Its output is a weighted mean of their values.">
    <div class="thirds">
      ${["Q", "K", "V"].map(
        (letter) =>
          html`<div class="row">
            <${WeightMatrix} ...${{ page, letter }} /><${Matrix} ...${{ matrix: page.held[letter], page }} />
          </div>`,
      )}
    </div>
  </${Step}>`;
}

export function Split({ page }) {
  const { state, result } = page;
  const ofHeads = state.heads === 1 ? subjectOf(page.data).split : "Each head gets two of the four columns.";
  return html`<${Step}
    id="split"
    page=${page}
    formula=${state.heads === 1 ? "Q₁ = Q   K₁ = K   V₁ = V" : "Q = [Q₁ Q₂]   K = [K₁ K₂]   V = [V₁ V₂]"}
    said=${`${ofHeads} ${wordsAbout(result.encoding).split}`}>
    <${Lanes} ...${{ page, letters: ["Q", "K", "V"] }} isBare=${(letter) => state.heads === 2 && letter !== "Q"} />
  </${Step}>`;
}

export function Score({ page }) {
  const { state, result } = page;
  const root = state.scale ? ` / √${result.width}` : "";
  const { formula, score, isShown } = wordsAbout(result.encoding);
  const mask = state.causal ? "The mask hides the keys after each query." : "No mask: each word sees all words.";
  return html`<${Step}
    id="score"
    page=${page}
    formula=${`S = Q·Kᵀ${root}${formula}`}
    said=${`A logit for each pair: queries down, keys across. ${mask} ${score}`}>
    <${Lanes} ...${{ page, letters: isShown ? ["B", "S"] : ["S"] }} />
  </${Step}>`;
}

export function Mix({ page }) {
  const { state } = page;
  const divided = state.temperature === 1 ? "" : ` / ${state.temperature}`;
  return html`<${Step}
    id="mix"
    page=${page}
    formula=${`A = softmax(S${divided})   O = A·V`}
    said="The weights of a row add up to 1. A word's output is the mean of the values, weighted by them.">
    <${Lanes} ...${{ page, letters: ["A", "O"] }} />
  </${Step}>`;
}

export function Output({ page }) {
  const { state, held } = page;
  return html`<${Step}
    id="output"
    page=${page}
    formula=${`O = ${state.heads === 1 ? "O₁" : "[O₁ O₂]"}   Y = O·W_O`}
    said=${subjectOf(page.data).output}>
    <div class="row tops">
      <${Matrix} ...${{ matrix: held.O, page }} />${sign("·")}<${WeightMatrix}
        ...${{ page, letter: "O" }} />${sign("=")}<${Matrix} ...${{ matrix: held.Y, page }} />
    </div>
  </${Step}>`;
}
