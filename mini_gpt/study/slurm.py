"""A batch script that runs a study as an array of Slurm jobs on a shared directory."""

import shlex
import sys
from collections.abc import Sequence

from mini_gpt.runtime import files
from mini_gpt.study.definition import Plan

SIGNAL_SECONDS = 120  # before the time limit
AGAIN = "; the comparison, when all tasks of the tuning have ended: again"
SCRIPT = """#!/bin/bash
# {runs} runs of the study {name}, in {shards} tasks. Submit: sbatch THIS_FILE{again}
#SBATCH --job-name={job} --array=0-{last} --cpus-per-task={jobs}
#SBATCH --requeue --open-mode=append --signal=B:USR1@{seconds}
# Add what your cluster needs, with one # less:
##SBATCH --partition=... --time=04:00:00 --mem=... --gpus=1
# SIGUSR1: the time limit is near. SIGTERM: pre-empted or cancelled; Slurm sends it to the study as well.
trap 'near_limit=1; kill -TERM "$!"' USR1
trap : TERM
{command} --shard="$SLURM_ARRAY_TASK_ID/{shards}" &
child=$!
wait "$child"; status=$?
# A trapped signal ends `wait` before the study ends.
while kill -0 "$child" 2>/dev/null; do wait "$child"; status=$?; done
if [ -n "$near_limit" ] && [ "$status" -eq 143 ]; then
    scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
fi
exit "$status"
"""


def script(plan: Plan, arguments: Sequence[str], shards: int, jobs: int) -> str:
    """Return the script.

    arguments: of `study run`.
    shards: array tasks.
    jobs: runs at a time, one core each.
    """
    runs = len(plan.runs) + len(plan.tuning.runs if plan.tuning else ())
    command = shlex.join([sys.executable, "-m", "mini_gpt.study", "run", *arguments, f"--jobs={jobs}"])
    return SCRIPT.format(
        name=plan.name, job=files.plain_name(plan.name), runs=runs, shards=shards, last=shards - 1, jobs=jobs,
        seconds=SIGNAL_SECONDS, command=command, again=AGAIN if plan.is_untuned else "",
    )  # fmt: skip
