// Matrices and their changed cells as texts of the address, and back.

import { filled } from "./attention.js";

export const LARGEST = 1000; // absolute value of an entry of X or of a weight matrix

export const written = (matrix) => matrix.flat().join(",");

// A matrix of a trained head is large: only its changed cells are written, as row, column, number.
export const changesOf = (matrix, first) =>
  matrix.flatMap((row, i) => row.flatMap((value, j) => (value === first[i][j] ? [] : [i, j, value]))).join(",");

export function readChanges(text, first) {
  const numbers = (text ?? "").split(",").map(Number);
  if (!text || numbers.length % 3 || !numbers.every(Number.isFinite)) return null;
  const matrix = first.map((row) => [...row]);
  for (let n = 0; n < numbers.length; n += 3) {
    const [i, j, value] = numbers.slice(n, n + 3);
    if (matrix[i]?.[j] === undefined || Math.abs(value) > LARGEST) return null;
    matrix[i][j] = value;
  }
  return matrix;
}

// A matrix with the shape of the first one, or null.
export function readMatrix(text, first) {
  const [rows, width] = [first.length, first[0].length];
  const numbers = (text ?? "").split(",").map((part) => (part.trim() === "" ? NaN : Number(part)));
  if (
    numbers.length !== rows * width ||
    !numbers.every((value) => Number.isFinite(value) && Math.abs(value) <= LARGEST)
  )
    return null;
  return filled(rows, width, (i, j) => numbers[i * width + j]);
}
