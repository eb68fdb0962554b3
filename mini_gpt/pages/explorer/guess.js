// The game of guessing where a head looks: its queries and its scores. No view.

import { indices } from "../common/numbers.js";
import { randomNumbers } from "../common/random.js";
import { truthOf } from "./heads.js";

const ROUNDS = 8;
export const LEAST_KEYS = 4; // visible keys of a query in the game

const keysSeen = (attention, layer, head, i) => {
  const weightAt = attention.weightsAt(layer, head);
  return indices(attention.columns).filter((j) => weightAt(i, j) !== null);
};

export const trueKeys = (attention, isTrue, i) =>
  isTrue ? indices(attention.columns).filter((j) => isTrue(i, j)) : [];

// The queries of a game, drawn with its number as the seed; first those whose true keys are known.
export function queriesOf(attention, layer, head, game) {
  const isTrue = truthOf(attention, layer, head);
  const left = indices(attention.rows).filter((i) => keysSeen(attention, layer, head, i).length >= LEAST_KEYS);
  const next = randomNumbers(game);
  const drawn = [];
  while (left.length) drawn.push(...left.splice(Math.floor(next() * left.length), 1));
  const isKnown = (i) => trueKeys(attention, isTrue, i).length > 0;
  return [...drawn.filter(isKnown), ...drawn.filter((i) => !isKnown(i))].slice(0, ROUNDS);
}

// The distance i - j with the largest mean weight over the queries that are not in the game; null without such queries.
function bestOffset(attention, layer, head, queries) {
  const weightAt = attention.weightsAt(layer, head);
  const sums = new Map();
  for (let i = 0; i < attention.rows; i++)
    if (!queries.includes(i))
      for (let j = 0; j < attention.columns; j++) sums.set(i - j, (sums.get(i - j) ?? 0) + (weightAt(i, j) ?? 0));
  return [...sums].reduce((best, each) => (best === null || each[1] > best[1] ? each : best), null)?.[0] ?? null;
}

// The key that a query reads the most, the first of equal ones.
export function largestKey(attention, layer, head, query) {
  const weightAt = attention.weightsAt(layer, head);
  const keys = keysSeen(attention, layer, head, query);
  return keys.reduce((best, j) => (weightAt(query, j) > weightAt(query, best) ? j : best), keys[0]);
}

// Mean weights of the keys that the reader, the head itself and the best distance choose, and of even weights. `hits`:
// shares of the choices that are true keys; null if these are not known. guesses: a key for each of the first queries.
export function scoresOf(attention, layer, head, queries, guesses) {
  const weightAt = attention.weightsAt(layer, head);
  const played = queries.slice(0, guesses.length);
  const mean = (valueOf) => played.reduce((sum, i, n) => sum + valueOf(i, n), 0) / played.length;
  const largest = (i) => largestKey(attention, layer, head, i);
  const offset = bestOffset(attention, layer, head, queries);
  const isTrue = truthOf(attention, layer, head);
  const known = played.filter((i) => trueKeys(attention, isTrue, i).length);
  const share = (chosen) => known.reduce((sum, i) => sum + isTrue(i, chosen(i)), 0) / known.length;
  return {
    reader: mean((i, n) => weightAt(i, guesses[n])),
    head: mean((i) => weightAt(i, largest(i))),
    offset: { by: offset, score: offset === null ? null : mean((i) => weightAt(i, i - offset) ?? 0) },
    even: mean((i) => 1 / keysSeen(attention, layer, head, i).length),
    hits: known.length
      ? {
          reader: share((i) => guesses[queries.indexOf(i)]),
          head: share(largest),
          offset: offset === null ? null : share((i) => i - offset),
        }
      : null,
  };
}
