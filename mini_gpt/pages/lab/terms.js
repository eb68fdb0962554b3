// Numbers and terms of sums in words.

import { isHidden } from "./attention.js";

const MOST_TERMS = 8; // of a sum that is written in full; of a longer one, the largest

export const number = (value, digits = 2) =>
  isHidden(value) ? "−∞" : (Math.abs(value) < 0.5 * 10 ** -digits ? 0 : value).toFixed(digits).replace("-", "−");

export const term = (value) => (value < -0.005 ? `(${number(value)})` : number(value));

export function terms(a, b) {
  const one = (n) => `${term(a[n])}·${term(b[n])}`;
  if (a.length <= MOST_TERMS) return a.map((_, n) => one(n)).join(" + ");
  const size = (n) => Math.abs(a[n] * b[n]);
  const largest = [...a.keys()].sort((m, n) => size(n) - size(m)).slice(0, MOST_TERMS - 2);
  return `${largest.map(one).join(" + ")} + ${a.length - largest.length} smaller terms`;
}

export const columnOf = (matrix, j) => matrix.map((row) => row[j]);
