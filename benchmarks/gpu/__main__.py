"""`python -m benchmarks.gpu`: see `run`."""

from benchmarks.gpu import run

if __name__ == "__main__":
    run.main()
