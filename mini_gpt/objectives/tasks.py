"""Answers to the problems of a task."""

from collections.abc import Sequence
from typing import Any

from mini_gpt.data import task_batches, tasks, tokenizers
from mini_gpt.evaluation import task_accuracy
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.objectives.base import SAMPLE_PROBLEMS, Objective, ProbeRow, TokensOf, scalars


class TaskObjective(Objective):
    """Scores the answers to validation problems, of all training lengths."""

    suite_flag = " --suite=tasks"
    sample_title = "Problems of the validation split, with the model's answers:"

    def prepare(self, tokens_of: TokensOf, rows: Sequence[int] | None) -> None:
        config, tokenizer = self.config, self.tokenizer
        self.train_batches = task_batches.TaskBatches(config, tokenizer, rows=rows)
        # Each problem (question, answer) counts as context_length tokens of `eval.tokens`.
        count = max(1, config.eval.tokens // config.context_length)
        lengths = tasks.trained_lengths(config.data)
        self.problems = tasks.different(config.data.corpus, "validation", count, **lengths)
        batch = task_batches.problem_batch(self.problems[:1], config, tokenizer, config.context_length)
        if "source" in batch:
            self.probe_row = ProbeRow(batch["inputs"], batch["weights"] > 0, batch["source"])
            self.prompt = self.problems[0][0]
        else:
            self.probe_row = ProbeRow(batch["inputs"], batch["inputs"] != tokenizers.separator(tokenizer))
            tags = tasks.find(config.data.corpus).tags
            self.prompt = None if tags else self.problems[0][0] + tasks.ANSWER

    def score(self, model: LoadedModel, problems: list[tuple[str, str]]) -> task_accuracy.TaskScore:
        return task_accuracy.accuracy(model, self.tokenizer, problems, self.config.context_length)

    def scalars(self, model: LoadedModel) -> dict[str, float]:
        score = self.score(model, self.problems)
        return scalars(score.nll, task_accuracy.metrics(score))

    def sample(self, model: LoadedModel, length: int) -> str:
        problems = self.problems[:SAMPLE_PROBLEMS]
        answers = self.score(model, problems).answers
        end = tokenizers.separator(self.tokenizer)
        if self.probe_row.source_BS is None:
            end = int(self.tokenizer.encode(tasks.END)[0])
        lines = []
        for (question, answer), predicted in zip(problems, answers, strict=True):
            *tokens, last = predicted[-len(answer) - 1 :]  # those before belong to the question
            written = self.tokenizer.decode(tokens)
            verdict = "right" if last == end and written == answer else f"wrong, must be {answer}"
            lines.append(f"{question}{tasks.ANSWER}{written.replace(tasks.END, '⏎')}    {verdict}")
        return "\n".join(lines)

    def conclusion(self, model: LoadedModel) -> tuple[str, dict[str, Any]]:
        score = self.score(model, self.problems)
        line = (
            f"{score.solved:,} of {score.problems:,} validation problems solved ({score.exact_match:.1%}), "
            f"{score.token_accuracy:.2%} of the answers' tokens right; up to {self.config.data.task_length} "
            f"{tasks.find(self.config.data.corpus).unit}."
        )
        return line, {}  # the last row of metrics.jsonl has the same numbers
