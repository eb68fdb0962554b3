"""The rivals' processes of benchmarks/rivals.py and benchmarks/growth.py, in PyTorch. They start it.

python -m benchmarks.programs_torch JSON

JSON: an entry of `rivals.WORKS`, with its `program`, `dtype`, `text` and directory of `weights`.
"""

import json
import sys
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks import nanogpt_step, tasks, turns


class XTransformer(torch.nn.Module):
    """The decoder of x-transformers that is nearest to nanoGPT's: no biases, tied embeddings, flash attention."""

    def __init__(self, vocabulary: int, work: dict):
        from x_transformers import Decoder, TransformerWrapper  # the other programs run without it

        super().__init__()
        size = {"dim": work["width"], "depth": work["layers"], "heads": work["heads"]}
        options = {"attn_dim_head": work["width"] // work["heads"], "attn_flash": True, "ff_no_bias": True}
        layers = Decoder(**size, **options)
        self.net = TransformerWrapper(
            num_tokens=vocabulary, max_seq_len=work["length"], attn_layers=layers, tie_embedding=True
        )

    def forward(self, inputs, targets):
        return F.cross_entropy(self.net(inputs).flatten(0, 1), targets.flatten())


def training(work: dict) -> tasks.Program:
    """Train on the first nine tenths of a text, with nanoGPT's loop."""
    ids, vocabulary = nanogpt_step.character_ids(work["text"])
    if work["program"] == "x-transformers":
        model: Any = XTransformer(vocabulary, work)
    else:
        model = nanogpt_step.GPT(vocabulary, work["length"], work["width"], work["heads"], work["layers"])
    parameters = sum(p.numel() for p in model.parameters())
    if work["program"].endswith("compiled"):
        model = torch.compile(model)
    train, about = ids[: int(0.9 * len(ids))], {"parameters": parameters, "vocabulary": vocabulary}

    def batch():
        return nanogpt_step.random_batch(train, work["batch"], work["length"])

    return tasks.training(nanogpt_step.training(model, batch, work["dtype"]), work, about)


def transformers_model(work: dict) -> Any:
    """Return the model that our process wrote."""
    import transformers  # the other programs run without it

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(work["weights"], dtype=getattr(torch, work["dtype"])).eval()


def scoring(work: dict) -> tasks.Program:
    """Compute the loss of each token of a random text."""
    model = transformers_model(work)

    def nll(inputs, targets):
        return F.cross_entropy(model(inputs).logits[0].float(), targets, reduction="none")

    compiled = torch.compile(nll) if work["program"].endswith("compiled") else nll

    @torch.inference_mode()
    def score(text_L: np.ndarray) -> np.ndarray:
        text = torch.from_numpy(text_L)
        return compiled(text[None, :-1], text[1:]).numpy()

    return tasks.scoring(score, work, {"parameters": model.num_parameters(), "model": type(model).__name__})


def decoding(work: dict) -> tasks.Program:
    """Generate the most likely tokens after a random prompt, with the default cache."""
    model, tokens = transformers_model(work), work["tokens"]

    @torch.inference_mode()
    def generate(prompt_L: np.ndarray) -> np.ndarray:
        prompt = torch.from_numpy(prompt_L)[None]
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0, len(prompt_L) :].numpy()

    return tasks.decoding(generate, work, {"parameters": model.num_parameters(), "model": type(model).__name__})


def main() -> None:
    work = json.loads(sys.argv[1])
    torch.manual_seed(0)
    measure, about = {"training": training, "scoring": scoring, "decoding": decoding}[work["task"]](work)
    memory = lambda: {"peak_bytes": turns.peak_resident_bytes()}
    turns.serve(about | {"torch": torch.__version__, "threads": torch.get_num_threads()}, measure, memory)


if __name__ == "__main__":
    main()
