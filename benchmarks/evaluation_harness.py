"""Score one text with mini_gpt, Transformers and EleutherAI's harness. The three losses must agree.

python -m benchmarks.evaluation_harness --workdir=runs/tiny --output=DIR [--items=FILE] [--device=cpu]

DIR is a new directory for the exported model and the harness's task. The text is the longest document of the validation
split, cut to whole blocks of the context length that end with a whole character. A separator precedes it, so that its
first token is scored too. Needs requirements-hugging-face.txt, and lm_eval for the third loss.

--items: JSON lines of --suite=choices; compares its numbers and log-probabilities with those of the harness instead.
"""

from benchmarks import needs_transformers  # noqa: F401

# isort: split
import argparse
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from mini_gpt.commands import command_line
from mini_gpt.data import tokenizers
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation import perplexity, scoring
from mini_gpt.hugging_face import exporting
from mini_gpt.suites import choices
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training.run import Run

TASK = """\
task: blocks_of_one_text
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: bits_per_byte
"""

# {kind of --suite=choices: task of the harness}
TASKS = {"HellaSwag": "hellaswag/hellaswag.yaml", "ARC": "arc/arc_easy.yaml", "PIQA": "piqa/piqa.yaml"}
TASKS |= {"BLiMP": "blimp/_template_yaml", "LAMBADA": "lambada/lambada_openai.yaml"}
OWN: dict[str, Any] = {"output_type": "multiple_choice", "doc_to_text": "{{query}}", "doc_to_choice": "choices"}
OWN |= {"doc_to_target": "gold", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}


@command_line.command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=command_line.directory, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--items")
    parser.add_argument("--device", default="cpu")
    flags = parser.parse_args()
    run = Run(flags.workdir, overrides={"model.dtype": "float32"})
    if flags.items is not None:
        compare_choices(run, flags.items, flags.output, flags.device)
        return
    length, separator = run.config.context_length, tokenizers.separator(run.tokenizer)
    split = np.asarray(run.store.tokens("validation"), np.int64)
    longest = max(np.split(split, np.flatnonzero(split == separator)), key=len)
    document = longest[longest != separator]
    text = longest_whole_blocks(run.tokenizer, document, length)
    document = run.tokenizer.encode(text)
    if not len(document):
        raise SystemExit(f"the longest document of the validation split has no text of whole blocks of {length} tokens")
    stream, size = np.append(separator, document), len(text.encode())

    flags.output.mkdir(parents=True, exist_ok=True)
    model_directory = flags.output / "model"
    print(f"exported as {exporting.export(run, model_directory)}; {len(document):,} tokens, {size:,} bytes")
    show = lambda name, nats: print(
        f"{name:<16} {nats / len(document):.6f} nats per token, {nats / math.log(2) / size:.6f} bits per byte"
    )
    nll_fn = perplexity.make_nll_fn(run.model)
    show("mini_gpt", scoring.score_tokens(nll_fn, stream, window=length, stride=length, batch_size=8).sum(dtype=float))
    show("Transformers", by_transformers(model_directory, stream, text, length, flags.device))
    if importlib.util.find_spec("lm_eval"):
        show("harness", by_harness(model_directory, text, flags.output, flags.device) * math.log(2) * size)


def compare_choices(run: Run, pattern: str, output: Path, device: str) -> None:
    """Print the numbers of --suite=choices and of the harness, and the largest difference of log-probabilities."""
    output.mkdir(parents=True, exist_ok=True)
    exporting.export(run, output / "model")
    for row in choices.Choices().measure(run, SuiteOptions(items=pattern))["rows"]:
        (path,) = [path for path in choices.paths(SuiteOptions(items=pattern)) if path.name == row["file"]]
        theirs, of_prompts = choices_by_harness(output / "model", path, row["kind"], output, device)
        ours = choices.log_probabilities(run.model, run.tokenizer, choices.read(path)[1])[0]
        difference = np.abs(np.array(of_prompts) - ours).max()
        named = {"acc": row["acc"], "acc_norm": row["acc_norm"], "perplexity": math.exp(row["nll"])}
        compared = ", ".join(f"{name} {named[name]:.6f} {value:.6f}" for name, value in theirs.items())
        print(f"{row['file']} ({row['problems']} items, {row['cut']} cut): {compared}; difference {difference:.1e}")


def choices_by_harness(
    directory: Path, path: Path, kind: str, output: Path, device: str
) -> tuple[dict[str, float], list[float]]:
    """Return the harness's metrics of a file, and the log-probability of each continuation, in their order."""
    import lm_eval
    from lm_eval import tasks

    task: dict[str, Any] = OWN if kind == "own" else {"include": str(Path(tasks.__file__).parent / TASKS[kind])}
    task |= {"task": "items", "tag": None, "dataset_path": "json", "dataset_name": None, "training_split": None}
    task |= {"dataset_kwargs": {"data_files": {"validation": str(path.absolute())}}}
    task |= {"validation_split": "validation", "test_split": None}
    (output / "tasks").mkdir(exist_ok=True)
    (output / "tasks" / "items.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML
    result = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={directory},dtype=float32",
        tasks=["items"],
        task_manager=tasks.TaskManager(include_path=str(output / "tasks")),
        device=device,
        batch_size=1,
        bootstrap_iters=0,
    )
    metrics = {name: result["results"]["items"].get(f"{name},none") for name in ("acc", "acc_norm", "perplexity")}
    samples = sorted(result["samples"]["items"], key=lambda sample: sample["doc_id"])
    of_prompts = [pair[0] for sample in samples for pair in sample["filtered_resps"]]
    return {name: value for name, value in metrics.items() if value is not None}, of_prompts


def longest_whole_blocks(tokenizer: Tokenizer, document: np.ndarray, length: int) -> str:
    """Return the longest prefix of a document that ends with a whole block and a whole character."""
    for blocks in range(len(document) // length, 0, -1):
        text = tokenizer.decode(document[: blocks * length])
        if np.array_equal(tokenizer.encode(text), document[: blocks * length]):
            return text
    return ""


def by_transformers(directory: Path, stream: np.ndarray, text: str, length: int, device: str) -> float:
    """Return the summed loss of the text in nats, scored in blocks of `length` tokens."""
    ids = transformers.AutoTokenizer.from_pretrained(directory)(text)["input_ids"]
    if ids != stream[1:].tolist():
        raise SystemExit("the exported tokenizer encodes this text differently; the losses cannot be compared")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).to(device).eval()
    nats = 0.0
    for begin in range(0, len(stream) - 1, length):
        block = torch.from_numpy(stream[begin : begin + length + 1]).to(device)
        with torch.inference_mode():
            logits_LV = model(block[None, :-1]).logits[0]
        nats += torch.nn.functional.cross_entropy(logits_LV.double(), block[1:], reduction="sum").item()
    return nats


def by_harness(directory: Path, text: str, output: Path, device: str) -> float:
    """Return the text's bits per byte, from lm_eval's rolling log-likelihood in windows of the context length."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    (output / "text.jsonl").write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
    (output / "task.yaml").write_text(TASK.format(file=output / "text.jsonl"), encoding="utf-8")
    result = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={directory},dtype=float32",
        tasks=["blocks_of_one_text"],
        task_manager=TaskManager(include_path=str(output)),
        device=device,
        batch_size=1,
        bootstrap_iters=0,
    )
    return result["results"]["blocks_of_one_text"]["bits_per_byte,none"]


if __name__ == "__main__":
    main()
