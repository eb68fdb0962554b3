// The token that a view marks until the reader chooses one. A token that was chosen is marked in all views.

export const OPENINGS = {
  attention: "the last token",
  map: "the last token, and the key that it pays the most attention to",
  loss: "the token with the largest loss",
  lens: "the last token",
  stream: "the token with the largest norm after the last layer",
};

// The index of the largest value from `first` to before `end`, counted from `first`; null if there is no number.
export function indexOfLargest(values, first, end) {
  let found = null;
  for (let n = first; n < end; n++) if (values[n] > (found === null ? -Infinity : values[found])) found = n;
  return found === null ? null : found - first;
}

// result: with losses, norms, and the numbers of tokens and layers. last: the last token.
export function openingOf(view, { nll, norms, length, layers }, last) {
  if (view === "stream") return indexOfLargest(norms, layers * length, (layers + 1) * length) ?? last;
  if (view !== "loss") return last;
  const after = indexOfLargest(nll, 1, length); // the first token has no loss
  return after === null ? last : after + 1;
}
