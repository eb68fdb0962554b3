"""`python -m benchmarks.gpu`: see `run`."""

import sys

try:
    from benchmarks.gpu import run
except ModuleNotFoundError as error:
    sys.exit(f"error: found no {error.name} in the environment of {sys.executable}; pip install -r requirements.txt")

if __name__ == "__main__":
    run.main()
