"use strict";
// Things to try: states of the page with what a reader sees in them, and the section in which it is seen.

// [fragment, what to do, what is seen, id of a section], of a trained head.
const TRIALS = [
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
];

// The same, of the example.
const EXPERIMENTS = [
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
];
