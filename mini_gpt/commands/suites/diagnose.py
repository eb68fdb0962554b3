"""Check a checkpoint for known faults."""

import dataclasses
import math

from mini_gpt.commands.suites import base
from mini_gpt.commands.suites.base import Result, Row, Suite, SuiteOptions
from mini_gpt.insight.diagnosis import checks
from mini_gpt.training import monitor
from mini_gpt.training import workdir as workdirs
from mini_gpt.training.run import Run


class Diagnose(Suite):
    name = "diagnose"
    needs_text = True

    def measure(self, run: Run, options: SuiteOptions) -> Result:
        tokens, train_tokens = (base.split_tokens(run, split) for split in (options.split, "train"))
        path = run.workdir / workdirs.METRICS
        history = [row for row in (monitor.read(path) if path.exists() else []) if row["step"] <= run.step]
        findings = checks.diagnose(run.model, tokens, train_tokens, history)
        value = lambda finding: finding.value if math.isfinite(finding.value) else None
        return {
            "context_length": run.config.context_length,
            "found": [finding.check for finding in findings if finding.found],
            "most_likely": checks.most_likely(findings),
            "rows": [
                dataclasses.asdict(finding) | {"value": value(finding), "causes": finding.causes}
                for finding in findings
            ],
        }

    def rows(self, result: Result) -> list[Row]:
        return [row | {"causes": "; ".join(row["causes"]) if row["found"] else ""} for row in result["rows"]]

    def printed(self, result: Result) -> str:
        lines = []
        for row in result["rows"]:
            lines.append(f"{'FOUND' if row['found'] else 'ok':>5}  {row['check']}: {row['says']}")
            if row["found"]:
                lines.append(f"         limit: {row['limit']}; likely causes:")
                lines += [f"           - {cause}" for cause in row["causes"]]
        if not result["found"]:
            return "\n".join([*lines, "", "Nothing found."])
        found = f"{len(result['found'])} of {len(result['rows'])} checks found something: {', '.join(result['found'])}."
        return "\n".join([*lines, "", found, f"Most likely: {result['most_likely']}."])
