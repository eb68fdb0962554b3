"use strict";
// Things to try: states of the page with what a reader sees in them.

const EXPERIMENTS = [ // [fragment, what to do, what is seen]
  ["", "Start", "head 1 pairs “cat” and “sat”, head 2 the determiners and “mat”."],
  ["K=identity", "Let W_K be the identity", "each word finds words like itself."],
  ["heads=1", "Use one head", "“sat” must divide its weight between “cat” and “mat”."],
  ["K=swapped%2C+half+negated", "Negate the keys of head 2", "its logits change their signs; head 1 stays as it is."],
  ["order=5%2C1%2C2%2C3%2C4%2C0", "Swap “The” and “mat”", "outputs are only permuted. Then choose RoPE."],
  ["position=rope", "Choose RoPE", "“mat” prefers the nearer “the”. Before, both were equal."],
  ["mask=causal", "Hide later words", "the determiners no longer find “mat”."],
];
