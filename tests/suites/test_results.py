"""The files of results: JSON with a checksum."""

import json
import re

import pytest

from mini_gpt.runtime import files
from mini_gpt.suites import results

RESULT = {"nll": 1.25, "by_position": {64: [0.5, 2.0], 256: [1e-9]}, "rows": [{"length": 8, "label": "é", "x": None}]}


def test_any_altered_number_of_a_result_is_found(tmp_path):
    path, text = tmp_path / "result.json", results.json_text(RESULT)
    path.write_text(text)
    assert files.read_with_checksum(path, must=True) == json.loads(json.dumps(RESULT))
    content = text[: text.index('"sha256"')]
    for digit in re.finditer(r"\d", content):
        other = "3" if digit[0] != "3" else "4"
        path.write_text(text[: digit.start()] + other + text[digit.end() :])
        with pytest.raises(ValueError, match="sha256 does not match"):
            files.read_with_checksum(path)
    path.write_text(json.dumps(RESULT))  # of an earlier version
    assert files.read_with_checksum(path)["nll"] == 1.25


def test_a_result_with_non_finite_numbers_is_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        results.json_text({"nll": float("nan")})


def test_reasons_below_a_table_are_those_of_their_rows():
    found = {2: "too short", 3: "no words", 4: "too short"}
    rows = [{"length": n, "status": "undefined" if n in found else "ok", "reason": found.get(n)} for n in range(1, 5)]
    assert results.table(rows).splitlines() == [
        "length         status",
        "     1             ok",
        "     2  undefined (1)",
        "     3  undefined (2)",
        "     4  undefined (1)",
        "undefined (1): too short",
        "undefined (2): no words",
    ]
    assert results.table(rows[:2]).splitlines()[2:] == ["     2  undefined", "undefined: too short"]
