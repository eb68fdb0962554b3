// What the reader can change, and its short form in the URL's fragment. No view.
// A weight matrix is held as {preset, seed, cells}: the name of a preset, "random" with a seed, or "edited" with cells.

import { randomNumbers } from "../common/random.js";
import { shown } from "../common/tokens.js";
import { filled } from "./attention.js";
import { written } from "./cells.js";
import { subjectOf } from "./subject.js";

const LETTERS = ["Q", "K", "V", "O"];
export const LARGEST_SEED = 9999;
export const COLDEST = 0.1;
export const HOTTEST = 5; // temperatures

// Normal numbers, rounded to one decimal. Each letter has its own for the same seed.
function randomCells(letter, seed, rows, width) {
  const next = randomNumbers(1000 * seed + LETTERS.indexOf(letter));
  const normal = () => Math.sqrt(-2 * Math.log(1 - next())) * Math.cos(2 * Math.PI * next());
  return filled(rows, width, () => Math.round(10 * normal()) / 10 || 0);
}

function cellsOf(data, letter, { preset, seed, cells }) {
  if (preset === "edited") return cells;
  const first = firstOf(data, letter);
  return preset === "random"
    ? randomCells(letter, seed, first.length, first[0].length)
    : presetOf(data, letter, preset);
}

// The matrix of a preset: one for all letters, or in a trained head one for each.
const presetOf = (data, letter, preset) => data.presets[preset][letter] ?? data.presets[preset];
const firstOf = (data, letter) => presetOf(data, letter, data.defaults[letter]);

const matricesOf = (data, state) =>
  Object.fromEntries(LETTERS.map((letter) => [letter, cellsOf(data, letter, state.matrices[letter])]));

export const sentencesOf = (data) => Object.keys(data.sentences);
export const wordsOf = (data, state) => {
  const words = data.words ?? state.sentence.split(" ");
  return state.order.map((n) => shown(words[n]));
};

// The state of a sentence whose words and numbers were not changed.
export const opened = (data, sentence) => ({
  sentence,
  x: data.sentences[sentence],
  order: data.sentences[sentence].map((_, n) => n),
});

export function defaultState(data) {
  const matrices = Object.fromEntries(
    LETTERS.map((letter) => [letter, { preset: data.defaults[letter], seed: 1, cells: null }]),
  );
  return {
    ...opened(data, sentencesOf(data)[0]),
    matrices,
    heads: 2,
    position: "none",
    causal: false,
    scale: true,
    temperature: 1,
    ...data.settings,
  };
}

// The inputs of attention().
export function settingsOf(data, state) {
  const { heads, position, causal, scale, temperature } = state;
  const { numbers, ...about } = data.encodings[position];
  return {
    x: state.order.map((n) => state.x[n]),
    matrices: matricesOf(data, state),
    heads,
    encoding: { name: position, ...about, ...(numbers.all ?? numbers[[heads, causal]]) },
    causal,
    scale,
    temperature,
  };
}

// All that the reader can change, as entries of the fragment.
function allEntries(data, { sentence, order, x, heads, position, causal, scale, temperature, matrices }) {
  const { write } = subjectOf(data);
  const entries = {
    sentence: sentencesOf(data).indexOf(sentence),
    order: written([order]),
    x: write(x, data.sentences[sentence]),
    heads,
    position,
    mask: causal ? "causal" : "none",
    scale: scale ? "on" : "off",
    temperature,
  };
  for (const letter of LETTERS) {
    const { preset, seed, cells } = matrices[letter];
    entries[letter] =
      preset === "edited" ? write(cells, firstOf(data, letter)) : preset === "random" ? `random.${seed}` : preset;
  }
  return Object.fromEntries(Object.entries(entries).map(([name, value]) => [name, String(value)]));
}

// The entries of a sentence that need not be written: the first sentence, and what is not changed.
function usualEntries(data, sentence) {
  const first = defaultState(data);
  const { sentence: index } = allEntries(data, first);
  return { ...allEntries(data, { ...first, ...opened(data, sentence) }), sentence: index };
}

// Entries of the fragment; what is as by default is left out.
export function entriesOf(data, state) {
  const usual = usualEntries(data, state.sentence);
  return Object.fromEntries(Object.entries(allEntries(data, state)).filter(([name, text]) => text !== usual[name]));
}

// The entries of a fragment that stateOf leaves out, as "name=value". An entry that spells a default is read.
export function unreadOf(data, entries) {
  const { theme, ...own } = entries;
  const usual = usualEntries(data, stateOf(data, { sentence: own.sentence }).sentence);
  const changes = (name) =>
    JSON.stringify(stateOf(data, own)) !== JSON.stringify(stateOf(data, { ...own, [name]: undefined }));
  const isRead = (name) => own[name] === "" || own[name] === usual[name] || changes(name);
  const unread = Object.keys(own)
    .filter((name) => !isRead(name))
    .map((name) => `${name}=${own[name]}`);
  return [undefined, "light", "dark"].includes(theme) ? unread : [...unread, `theme=${theme}`];
}

// The state of a fragment; an entry that is not valid counts as left out.
export function stateOf(data, entries) {
  const state = defaultState(data);
  const { heads, read } = subjectOf(data);
  const sentences = sentencesOf(data);
  if (/^\d+$/.test(entries.sentence ?? "") && +entries.sentence < sentences.length)
    Object.assign(state, opened(data, sentences[+entries.sentence]));
  const order = (entries.order ?? "").split(",").map(Number);
  if (entries.order && written([[...order].sort((a, b) => a - b)]) === written([state.order])) state.order = order;
  state.x = read(entries.x, state.x) ?? state.x;
  if (heads.includes(+entries.heads)) state.heads = +entries.heads;
  if (Object.hasOwn(data.encodings, entries.position)) state.position = entries.position;
  if (["none", "causal"].includes(entries.mask)) state.causal = entries.mask === "causal";
  if (["on", "off"].includes(entries.scale)) state.scale = entries.scale === "on";
  if (+entries.temperature >= COLDEST && +entries.temperature <= HOTTEST) state.temperature = +entries.temperature;
  for (const letter of LETTERS) {
    const text = entries[letter] ?? "";
    const cells = read(text, firstOf(data, letter));
    const random = /^random\.(\d{1,4})$/.exec(text);
    if (Object.hasOwn(data.presets, text)) state.matrices[letter] = { preset: text, seed: 1, cells: null };
    else if (random) state.matrices[letter] = { preset: "random", seed: +random[1], cells: null };
    else if (cells) state.matrices[letter] = { preset: "edited", seed: 1, cells };
  }
  return state;
}
