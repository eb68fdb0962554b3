"use strict";
// What the reader can change, and its short form in the URL's fragment. No view.
// A weight matrix is held as {preset, seed, cells}: the name of a preset, "random" with a seed, or "edited" with cells.

const LETTERS = ["Q", "K", "V", "O"];
const POSITIONS = ["none", "sinusoidal", "rope", "alibi"];
const HEADS = [1, 2];
const LARGEST_SEED = 9999;
const COLDEST = 0.1, HOTTEST = 5; // temperatures

// Normal numbers, rounded to one decimal. Each letter has its own for the same seed.
function randomCells(letter, seed, width) {
  const next = randomNumbers(1000 * seed + LETTERS.indexOf(letter));
  const normal = () => Math.sqrt(-2 * Math.log(1 - next())) * Math.cos(2 * Math.PI * next());
  return filled(width, width, () => Math.round(10 * normal()) / 10 || 0);
}

function cellsOf(data, letter, { preset, seed, cells }) {
  if (preset === "edited") return cells;
  return preset === "random" ? randomCells(letter, seed, data.dimensions.length) : data.presets[preset];
}

const matricesOf = (data, state) => Object.fromEntries(LETTERS.map((letter) => [letter, cellsOf(data, letter, state.matrices[letter])]));

const sentencesOf = (data) => Object.keys(data.sentences);
const wordsOf = (data, state) => state.order.map((n) => state.sentence.split(" ")[n]);

// The state of a sentence whose words and numbers were not changed.
const opened = (data, sentence) => ({ sentence, x: data.sentences[sentence], order: data.sentences[sentence].map((_, n) => n) });

function defaultState(data) {
  const matrices = Object.fromEntries(LETTERS.map((letter) => [letter, { preset: data.defaults[letter], seed: 1, cells: null }]));
  return { ...opened(data, sentencesOf(data)[0]), matrices, heads: 2, position: "none", causal: false, scale: true, temperature: 1 };
}

// The inputs of attention().
function settingsOf(data, state) {
  const { heads, position, causal, scale, temperature } = state;
  return { x: state.order.map((n) => state.x[n]), matrices: matricesOf(data, state), heads, position, causal, scale, temperature };
}

const written = (matrix) => matrix.flat().join(",");

function readMatrix(text, rows, width) {
  const numbers = (text ?? "").split(",").map((part) => (part.trim() === "" ? NaN : Number(part)));
  if (numbers.length !== rows * width || !numbers.every((value) => Number.isFinite(value) && Math.abs(value) <= 1000)) return null;
  return filled(rows, width, (i, j) => numbers[i * width + j]);
}

// Entries of the fragment; what is as by default is left out.
function entriesOf(data, state) {
  const first = defaultState(data), base = opened(data, state.sentence);
  const entries = {
    sentence: state.sentence === first.sentence ? null : sentencesOf(data).indexOf(state.sentence),
    order: written([state.order]) === written([base.order]) ? null : written([state.order]),
    x: written(state.x) === written(base.x) ? null : written(state.x),
    heads: state.heads === first.heads ? null : state.heads,
    position: state.position === first.position ? null : state.position,
    mask: state.causal ? "causal" : null,
    scale: state.scale ? null : "off",
    temperature: state.temperature === 1 ? null : state.temperature,
  };
  for (const letter of LETTERS) {
    const { preset, seed, cells } = state.matrices[letter];
    if (preset !== data.defaults[letter]) entries[letter] = preset === "edited" ? written(cells) : preset === "random" ? `random.${seed}` : preset;
  }
  return entries;
}

// The entries of a fragment that stateOf leaves out, as "name=value". An entry that spells a default is read.
function unreadOf(data, entries) {
  const { theme, ...own } = entries, plain = stateOf(data, own.sentence === undefined ? {} : { sentence: own.sentence }), first = opened(data, plain.sentence);
  const spelled = { sentence: "0", order: written([first.order]), x: written(first.x), heads: "2", position: "none", mask: "none", scale: "on", temperature: "1", ...data.defaults };
  const isRead = (name) => own[name] === spelled[name] || JSON.stringify(stateOf(data, own)) !== JSON.stringify(stateOf(data, { ...own, [name]: undefined }));
  const unread = Object.keys(own).filter((name) => own[name] !== "" && !isRead(name)).map((name) => `${name}=${own[name]}`);
  return [undefined, "light", "dark"].includes(theme) ? unread : [...unread, `theme=${theme}`];
}

// The state of a fragment; an entry that is not valid counts as left out.
function stateOf(data, entries) {
  const state = defaultState(data), width = data.dimensions.length, sentences = sentencesOf(data);
  if (/^\d+$/.test(entries.sentence ?? "") && +entries.sentence < sentences.length) Object.assign(state, opened(data, sentences[+entries.sentence]));
  const order = (entries.order ?? "").split(",").map(Number);
  if (entries.order && written([[...order].sort((a, b) => a - b)]) === written([state.order])) state.order = order;
  state.x = readMatrix(entries.x, state.x.length, width) ?? state.x;
  if (HEADS.includes(+entries.heads)) state.heads = +entries.heads;
  if (POSITIONS.includes(entries.position)) state.position = entries.position;
  state.causal = entries.mask === "causal";
  state.scale = entries.scale !== "off";
  if (+entries.temperature >= COLDEST && +entries.temperature <= HOTTEST) state.temperature = +entries.temperature;
  for (const letter of LETTERS) {
    const text = entries[letter] ?? "", cells = readMatrix(text, width, width), random = /^random\.(\d{1,4})$/.exec(text);
    if (Object.hasOwn(data.presets, text)) state.matrices[letter] = { preset: text, seed: 1, cells: null };
    else if (random) state.matrices[letter] = { preset: "random", seed: +random[1], cells: null };
    else if (cells) state.matrices[letter] = { preset: "edited", seed: 1, cells };
  }
  return state;
}
