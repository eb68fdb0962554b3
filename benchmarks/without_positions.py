"""Measure how much the predictions of a run vary within a text and between texts.

    python -m benchmarks.without_positions --workdir=RUN

The run is causal, or predicts masked tokens. Reads 256 windows of 64 tokens of the validation split. "within" is the
total variation between the predictions for the 21st and the 41st token of a window; "between" is that between the
predictions for the 21st token of neighbouring windows. Also prints the loss at these places, and the losses of a
unigram model ("frequencies") and of a bigram model ("pairs").
"""

import argparse
from pathlib import Path

import jax
import numpy as np

from mini_gpt.commands import command_line
from mini_gpt.training.run import Run

WINDOWS, LENGTH = 256, 64
TARGETS = (20, 40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=Path, required=True)
    flags = parser.parse_args()
    command_line.set_up()
    run = Run(flags.workdir)
    vocab_size = len(run.tokenizer.token_bytes)
    tokens = run.store.tokens("validation")[: WINDOWS * LENGTH]
    windows_BL = np.array(tokens, np.int32).reshape(WINDOWS, LENGTH)
    inputs_BL, places = windows_BL.copy(), [target - 1 for target in TARGETS]
    if run.config.train.objective == "masked":
        inputs_BL[:, TARGETS], places = vocab_size, list(TARGETS)  # the id of the mask
    p_B2V = np.asarray(jax.nn.softmax(run.model.logits(inputs_BL)[:, places]))
    targets_B2 = windows_BL[:, TARGETS]
    print("loss", -np.log(np.take_along_axis(p_B2V, targets_B2[..., None], 2)).mean())
    print("within", np.abs(p_B2V[:, 0] - p_B2V[:, 1]).sum(-1).mean() / 2)
    print("between", np.abs(p_B2V[1:, 0] - p_B2V[:-1, 0]).sum(-1).mean() / 2)

    text, held_out = (np.array(run.store.tokens(name)) for name in ("train", "validation"))
    one_V = np.bincount(text, minlength=vocab_size) + 1e-9
    two_VV = np.full((vocab_size, vocab_size), 0.1)
    np.add.at(two_VV, (text[:-1], text[1:]), 1)
    nll_V, nll_VV = -np.log(one_V / one_V.sum()), -np.log(two_VV / two_VV.sum(1, keepdims=True))
    print("frequencies", nll_V[held_out].mean(), "at the places", nll_V[targets_B2].mean())
    print("pairs", nll_VV[held_out[:-1], held_out[1:]].mean())


if __name__ == "__main__":
    main()
