"""A random model, items of each kind, and what EleutherAI's lm-evaluation-harness computes for them.

python -m tests.suites.harness

This writes the numbers again. It needs requirements-hugging-face.txt and lm_eval.
"""

import json
import pathlib
import tempfile

from mini_gpt.config import loading
from mini_gpt.data.tokenizers import ByteTokenizer
from tests.random_models import random_model

STORED = pathlib.Path(__file__).parent / "harness.json"
FIELDS = {"context_length": 48, "model.num_layers": 2, "model.d_model": 32, "model.dtype": "float32", "mesh.data": 1}
ITEMS = {
    "HellaSwag": [
        {"activity_label": "Cooking", "ctx_a": "[header] She cuts  it.", "ctx_b": "then she", "label": "1"}
        | {"endings": ["runs [title] Far away.", " eats it [step] all.", "sings", "puts the größte pan on the stove."]},
        {"activity_label": "Rowing", "ctx_a": "Four people sit in a long and narrow boat.", "ctx_b": "", "label": 0}
        | {"endings": ["They row.", "They fly over the lake.", "A dog barks", "It is a boat, and it is long."]},
        {"activity_label": "Ski", "ctx_a": "A man", "ctx_b": "falls and", "endings": ["stands up", "x"], "label": 1},
    ],
    "ARC": [
        {"question": "What melts?", "choices": {"text": ["Ice", "A stone"], "label": ["A", "B"]}, "answerKey": "A"},
        {"question": "Which of these planets of the sun is the largest one of all?", "answerKey": "3"}
        | {"choices": {"text": ["Mars", "Earth", "Jupiter", "Venus, the second"], "label": ["1", "2", "3", "4"]}},
        {"question": "Why?", "choices": {"text": ["Because", "No"], "label": ["A", "B"]}, "answerKey": "B"},
    ],
    "PIQA": [
        {"goal": "Open a jar", "sol1": "Turn the lid.", "sol2": "Turn the table around it twice.", "label": 0},
        {"goal": "Dry a shirt", "sol1": "Hang it in the sun.", "sol2": "Swim.", "label": 1},
        {"goal": "Boil an egg", "sol1": "Wait for seven minutes.", "sol2": "Wait 7 min.", "label": 0},
    ],
    "BLiMP": [
        {"sentence_good": "The cats sleep.", "sentence_bad": "The cats sleeps."},
        {"sentence_good": "Who did she see?", "sentence_bad": "Who did she see him?"},
        {"sentence_good": "No one ever came.", "sentence_bad": "Someone ever came."},
    ],
    "own": [
        {"query": "one two  ", "choices": ["three", "four", "größer"], "gold": 0},
        {"query": "a\n", "choices": ["b", "日本"], "gold": 1},
        {"query": "no space", "choices": ["end", "en", "e"], "gold": 2},
    ],
    "LAMBADA": [
        {"text": "He opened the door of the old house, went in, and then he closed the door"},
        {"text": "word"},
        {"text": "She said yes."},
    ],
}


def model(**fields):
    tokenizer = ByteTokenizer()
    return random_model(loading.load("configs/default.py", FIELDS | fields), tokenizer.token_bytes), tokenizer


def write(records, path):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def by_harness(directory):
    """Return {kind: its metrics and the log-probability of each continuation}."""
    from benchmarks import evaluation_harness
    from mini_gpt.hugging_face import exporting, tokenizer_files

    made, tokenizer = model()
    (directory / "model").mkdir()
    ids = tokenizer_files.write(tokenizer, directory / "model", made.config.context_length)
    exporting.write_model(made, directory / "model", ids=ids)
    found = {}
    for kind, records in ITEMS.items():
        path = write(records, directory / f"{kind}.jsonl")
        metrics, p_P = evaluation_harness.choices_by_harness(directory / "model", path, kind, directory, "cpu")
        found[kind] = metrics | {"log_probabilities": p_P}
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        STORED.write_text(json.dumps(by_harness(pathlib.Path(place)), indent=1) + "\n")
