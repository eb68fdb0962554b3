"""Writes text with a trained run: python sample.py --workdir=runs/tiny --prompt='def '"""

import argparse

from mini_gpt import command_line, errors, generation
from mini_gpt.run import Run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--workdir", type=command_line.directory, required=True, help="the run directory")
    parser.add_argument("--prompt", required=True, help="the text to go on from")
    parser.add_argument("--length", type=int, default=256, help="tokens to write")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    parser.add_argument("--top_k", type=int, default=40, help="draw from the k likeliest tokens; 0: from all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", default="last", help="last, best, or a step")
    flags = parser.parse_args()
    command_line.set_up()
    run = Run(flags.workdir, checkpoint=flags.checkpoint)
    prompt = run.tokenizer.encode(flags.prompt)
    drawn = generation.generate(
        run.definition,
        run.parameters,
        prompt,
        length=flags.length,
        context_length=run.config.context_length,
        isolate_at=run.isolate_at,
        temperature=flags.temperature,
        top_k=flags.top_k,
        seed=flags.seed,
    )
    print(run.tokenizer.decode([*prompt, *drawn]))


if __name__ == "__main__":
    errors.run(main)
