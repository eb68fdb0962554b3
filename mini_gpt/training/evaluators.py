"""What training watches: the loss on held-out text or problems, the attention on a probe, and what the model writes."""

import functools
from abc import ABC, abstractmethod

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mini_gpt.config.schema import Config
from mini_gpt.data import batches, tasks, tokenizers
from mini_gpt.data.token_store import TokenSplit
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation import perplexity, task_accuracy
from mini_gpt.evaluation.scoring import Score
from mini_gpt.generation import decoding as generation
from mini_gpt.generation.sampling import Sampling
from mini_gpt.insight import images
from mini_gpt.insight.attention_statistics import attention_statistics
from mini_gpt.model.parameters import Parameters
from mini_gpt.runtime import sharding

PROMPT_TOKENS = 32  # of the validation text, which a sample goes on from
SAMPLE_PROBLEMS = 5
SAMPLING = Sampling(temperature=0.8, top_k=40)


class Evaluator(ABC):
    """Measures a model's parameters on what it is not trained on."""

    suite_flag = ""  # what eval.py needs for the first look
    sample_title: str

    def __init__(self, config: Config, definition: nnx.GraphDef, tokenizer: Tokenizer, mesh: Mesh):
        self.config = config
        self.definition = definition
        self.tokenizer = tokenizer
        self.mesh = mesh
        self.writes = config.eval.sample_tokens > 0
        self.isolate_at = tokenizers.isolate_at(config.data, tokenizer.token_bytes)

    @abstractmethod
    def scalars(self, parameters: Parameters) -> dict[str, float]:
        """Gives validation/loss, and what else is scored."""

    @abstractmethod
    def sample(self, parameters: Parameters, length: int) -> str:
        """Gives something that the model writes: text of so many tokens, or answers to a few problems."""

    @abstractmethod
    def prompt(self) -> str:
        """Gives a prompt to try the model with."""

    @abstractmethod
    def conclusion(self, parameters: Parameters) -> str:
        """Gives the line that sums up a run."""

    @property
    @abstractmethod
    def probe_BL(self) -> np.ndarray:
        """One row of the context length, always the same."""

    def watch(self, parameters: Parameters) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """Gives what is watched beside the scores: curves of attention, and pictures, RGB pixels in uint8: the
        attention at the start of the probe, and how alike the positions of a learned table are."""
        curves, maps_NHLS = attention_statistics(
            self.definition, parameters, self.probe_BL, self.mesh, isolate_at=self.isolate_at
        )
        pictures = {"attention/maps": images.map_grid(maps_NHLS)}
        if "learned" in self.config.model.position_pattern:
            table_PD = sharding.whole(parameters["positions"]["learned"]["embedding"], self.mesh)
            pictures["positions/similarity"] = images.similarity(table_PD)
        return curves, pictures


class TextEvaluator(Evaluator):
    """Scores a split in blocks of the context length: a sample of it while training, all of it at the end."""

    sample_title = "The model, going on from the start of the validation text:"

    def __init__(self, config: Config, definition: nnx.GraphDef, tokenizer: Tokenizer, mesh: Mesh, split: TokenSplit):
        super().__init__(config, definition, tokenizer, mesh)
        self.writes = self.writes and config.model.causal
        self.split = split
        perplexity.check_scorable(config, len(split.tokens))

    def score(self, parameters: Parameters, *, most_tokens: int | None = None) -> Score:
        """Scores the split, or about so many tokens in stretches spread over it."""
        return perplexity.score_split(
            self.definition,
            parameters,
            self.config,
            self.split.tokens,
            self.tokenizer.token_bytes,
            self.mesh,
            most_tokens=most_tokens,
        )

    def scalars(self, parameters: Parameters) -> dict[str, float]:
        score = self.score(parameters, most_tokens=self.config.eval.tokens)
        values = {"validation/loss": score.nll}
        if score.bytes:
            values["validation/bits_per_byte"] = score.bits_per_byte
        return values

    @property
    def probe_BL(self) -> np.ndarray:
        return np.asarray(self.split.tokens[: self.config.context_length], np.int32)[None]

    def sample(self, parameters: Parameters, length: int) -> str:
        context = self.config.context_length
        prompt = self.split.tokens[: min(PROMPT_TOKENS, (context + 1) // 2)]
        (drawn,) = generation.generate(
            self.definition,
            parameters,
            prompts=[prompt],
            length=min(length, context - len(prompt)),
            isolate_at=self.isolate_at,
            sampling=SAMPLING,
            seed=self.config.seed,
        )
        return self.tokenizer.decode([*prompt, *drawn])

    def prompt(self) -> str:
        return (self.tokenizer.decode(self.split.tokens[:PROMPT_TOKENS]).split() or [" "])[0]

    def conclusion(self, parameters: Parameters) -> str:
        score = self.score(parameters)
        kind = "masked tokens" if self.config.train.objective == "masked" else "tokens"
        bits = f", {score.bits_per_byte:.3f} bits a byte" if score.bytes else ""
        return (
            f"Validation loss {score.nll:.4f} nats a token{bits} "
            f"({score.tokens:,} {kind}, the whole split, in blocks of {self.config.context_length})."
        )


class TaskEvaluator(Evaluator):
    """Scores problems of the validation split, of all lengths up to the longest trained; of each, the answer alone."""

    suite_flag = " --suite=tasks"
    sample_title = "Problems of the validation split, and what the model answers:"

    @functools.cached_property
    def problems(self) -> list[tuple[str, str]]:
        """Gives as many problems as `eval.tokens` has rows, no question twice."""
        data = self.config.data
        count = max(1, self.config.eval.tokens // self.config.context_length)
        shortest = tasks.find(data.corpus).shortest
        return tasks.different(data.corpus, "validation", count, shortest=shortest, longest=data.task_length)

    def score(self, parameters: Parameters, problems: list[tuple[str, str]]) -> task_accuracy.TaskScore:
        return task_accuracy.accuracy(
            self.definition,
            parameters,
            self.config,
            self.tokenizer,
            self.mesh,
            problems,
            self.config.context_length,
        )

    def scalars(self, parameters: Parameters) -> dict[str, float]:
        score = self.score(parameters, self.problems)
        return {
            "validation/loss": score.nll,
            "validation/exact_match": score.exact_match,
            "validation/token_accuracy": score.token_accuracy,
        }

    @property
    def probe_BL(self) -> np.ndarray:
        some = self.problems[:1]
        return batches.problem_batch(some, self.config, self.tokenizer, self.config.context_length)["inputs"]

    def sample(self, parameters: Parameters, length: int) -> str:
        problems = self.problems[:SAMPLE_PROBLEMS]
        answers = self.score(parameters, problems).answers
        shown = []
        for (question, answer), written in zip(problems, map(self.tokenizer.decode, answers), strict=True):
            verdict = "right" if written == answer + tasks.END else f"wrong, must be {answer}"
            shown.append(f"{question}{tasks.ANSWER}{written.rstrip(tasks.END).replace(tasks.END, '⏎')}    {verdict}")
        return "\n".join(shown)

    def prompt(self) -> str:
        return self.problems[0][0] + tasks.ANSWER

    def conclusion(self, parameters: Parameters) -> str:
        score = self.score(parameters, self.problems)
        return (
            f"{score.solved:,} of {score.problems:,} validation problems solved ({score.exact_match:.1%}), "
            f"{score.token_accuracy:.2%} of the answers' tokens right; up to {self.config.data.task_length} "
            f"{tasks.find(self.config.data.corpus).unit}."
        )
