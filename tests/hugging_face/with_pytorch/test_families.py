"""Each family of models computes the same here and in Transformers (`make test-hugging-face`)."""

import pytest
import transformers

from mini_gpt.hugging_face.architectures import ARCHITECTURES
from tests.hugging_face import families


def test_the_table_has_each_family_and_each_architecture():
    rows = [line.split(" | ") for line in families.TABLE.read_text().splitlines() if line.startswith("| ")]
    assert [row[0].removeprefix("| ") for row in rows[1:]] == list(families.FAMILIES)
    assert rows[0] == ["| family", *families.COLUMNS[:-1], f"{families.COLUMNS[-1]} |"]
    compared = {kind for kind, _ in families.FAMILIES.values()}
    assert all(any(each.class_name.startswith(kind) for kind in compared) for each in ARCHITECTURES.values())


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_family_computes_the_same_as_in_transformers(family, seed, tmp_path):
    if not hasattr(transformers, f"{families.FAMILIES[family][0]}Config"):
        pytest.skip(f"Transformers {transformers.__version__} has no {family}")
    results = families.measure(family, seed, tmp_path)
    errors = {name: value for name, value in results.items() if isinstance(value, float)}
    assert max(errors.values()) < 1e-4, errors
    assert results["greedy text"] is not False, results
    assert results["same bits"] or family == "T5, T5 1.1", "only the last norm of T5 is rounded"
