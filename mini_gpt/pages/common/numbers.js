// Round numbers, and numbers within bounds.

export const clamped = (value, low, high) => Math.max(low, Math.min(high, value));

export const thousands = (number) => number.toLocaleString("en");

// [0, 1, …] up to below `count`.
export const indices = (count) => [...Array(count).keys()];

// The smallest number of 1, 2, 5, 10, 20, 50, … (and of 0.5, 0.2, …) that is at least `least`.
export function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((n) => n * power >= least);
}

// The multiples of a step from low to high.
export function multiples(step, low, high) {
  const first = Math.ceil(low / step - 1e-9);
  const count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: count }, (_, n) => +((first + n) * step).toPrecision(12));
}

// Round numbers from low to high, about `count` of them.
export const ticksOf = (low, high, count) =>
  multiples(roundStep((0.999 * (high - low)) / Math.max(1, count)), low, high);
