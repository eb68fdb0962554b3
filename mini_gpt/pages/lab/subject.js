// What the page shows: the example, or a head of a trained model. All that differs, but the layout. No view.
// experiments: things to try, as [fragment, what to do, what is seen, id of the section in which it is seen].
// heads: their numbers that can be chosen. first: the number of the first column. write, read: a changed matrix in the
// address. Others: what the page says.

import { changesOf, readChanges, readMatrix, written } from "./cells.js";

export const BIAS = "bias"; // the column of ones in X of a trained head

const EXAMPLE = {
  experiments: [
    ["", "Start", "head 1 pairs “cat” and “sat”, head 2 the determiners and “mat”.", "roles"],
    ["K=identity", "Let W_K be the identity", "each word finds words like itself.", "roles"],
    ["heads=1", "Use one head", "“sat” must divide its weight between “cat” and “mat”.", "one-beside-two"],
    [
      "K=swapped%2C+half+negated",
      "Negate the keys of head 2",
      "its logits change their signs; head 1 stays as it is.",
      "step-score",
    ],
    [
      "order=5%2C1%2C2%2C3%2C4%2C0",
      "Swap “The” and “mat”",
      "each word keeps its output; only the rows are permuted.",
      "reorder",
    ],
    ["order=5%2C1%2C2%2C3%2C4%2C0&position=rope", "The same swap with RoPE", "the outputs change.", "reorder"],
    [
      "position=rope",
      "Choose RoPE in the original order",
      "“mat” prefers the nearer “the”. Without RoPE, both are equal.",
      "roles",
    ],
    ["mask=causal", "Hide later words", "the determiners no longer find “mat”.", "roles"],
  ],
  heads: [1, 2],
  first: 1,
  write: written,
  read: readMatrix,
  aboutX: (word, dimension) => `embedding of ${word} in the dimension “${dimension}”, chosen by hand`,
  input: "A row for each word. The four dimensions and their names were chosen by hand.",
  split: "One head has all four columns.",
  output: "W_O mixes the heads' outputs, put beside each other. In a model, Y is added to the residual stream.",
};

const TRAINED = {
  experiments: [
    ["", "Start", "the weights and outputs are those of the model.", "roles"],
    [
      "position=none",
      "Leave out positions",
      "the logits depend on X only, which has what the layers before added.",
      "roles",
    ],
    ["scale=off", "Do not divide by √d", "the weights are closer to 0 and 1.", "roles"],
    ["mask=none", "Let tokens see later ones", "the model was never trained for this.", "roles"],
    ["K=zero", "Let W_K be zero", "queries find nothing to compare with.", "roles"],
  ],
  heads: [1],
  first: 0, // as in NumPy, and as dimensions are named
  write: changesOf,
  read: readChanges,
  aboutX: (token, dimension) =>
    dimension === BIAS
      ? `at ${token}: it is multiplied with the biases, the rows “${BIAS}” of W_Q, W_K and W_V`
      : `the input of the head, after the layer's norm, at ${token}, dimension ${dimension}`,
  input: "A row for each token: the real input of this head, after the layer's norm.",
  split: "These are the columns of this head alone.",
  output: "Y is what this head adds to the output of the layer's attention, without the bias of W_O.",
};

export const isTrained = (data) => data.place !== undefined;
export const subjectOf = (data) => (isTrained(data) ? TRAINED : EXAMPLE);
