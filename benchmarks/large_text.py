"""Measure the tokenization of a large text: speed on one and two cores, memory, and the next start.

python -m benchmarks.large_text [--gigabytes=3] [--directory=DIR] [--vocab_size=8192]

It writes JSON lines from the source files of this Python's packages, in random order, until there is enough, and prints
a JSON line for each measurement. `library` is the tokenizers library alone, on texts in memory: its encode_batch_fast.
Run nothing else.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

STORE = """
import json, logging, resource, sys, time
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
from mini_gpt.config import loading
from mini_gpt.data import corpora, token_store
fields = json.loads(sys.argv[1])
config = loading.override(loading.load("configs/tiny.py"), fields)
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
times = [time.perf_counter()]
corpus = corpora.open_corpus(config.data); times.append(time.perf_counter())
tokenizer = token_store.fit_tokenizer(corpus, config.data); times.append(time.perf_counter())
store = token_store.open_store(corpus, config.data, tokenizer); times.append(time.perf_counter())
counts = store.meta["splits"].values()
seconds = [round(b - a, 2) for a, b in zip(times, times[1:])]
print(json.dumps({
    "seconds": dict(zip(("open", "tokenizer", "tokens"), seconds)),
    "bytes": sum(c["bytes"] for c in counts), "tokens": sum(c["tokens"] for c in counts),
    "peak_mb_above_imports": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1024),
}))
"""


def write_corpus(path: Path, size: int) -> None:
    """Write JSON lines with about `size` bytes of text from source files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = sorted(root.rglob("*.py")) + sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py"))
    rng, written = random.Random(0), 0
    with open(path, "w", encoding="utf-8") as file:
        while written < size:
            for source in rng.sample(sources, len(sources)):
                text = source.read_text(encoding="utf-8", errors="ignore").replace("\0", "")
                written += len(text.encode())
                file.write(json.dumps({"path": source.name, "text": text}) + "\n")
                if written >= size:
                    return


def _on(cores: set[int]) -> list[str]:
    return ["taskset", "--cpu-list", ",".join(map(str, cores))]


def library(path: Path, tokenizer: Path, cores: set[int], size: int) -> dict:
    """Return the speed of the library alone on the first `size` bytes of the texts."""
    program = (
        "import json, sys, time, tokenizers\n"
        "model = json.load(open(sys.argv[2]))['bpe']\n"
        "model = tokenizers.Tokenizer.from_str(json.dumps(model))\n"
        "texts, count = [], 0\n"
        "for line in open(sys.argv[1]):\n"
        "    texts.append(json.loads(line)['text']); count += len(texts[-1].encode())\n"
        "    if count > int(sys.argv[3]): break\n"
        "begin = time.perf_counter()\n"
        "for first in range(0, len(texts), 64): model.encode_batch_fast(texts[first:first + 64])\n"
        "print(json.dumps({'bytes': count, 'seconds': round(time.perf_counter() - begin, 2)}))\n"
    )
    command = [*_on(cores), sys.executable, "-c", program, str(path), str(tokenizer), str(size)]
    environment = os.environ | {"RAYON_NUM_THREADS": str(len(cores)), "TOKENIZERS_PARALLELISM": "true"}
    return json.loads(subprocess.run(command, env=environment, check=True, stdout=-1).stdout)


def store(path: Path, cache: Path, cores: set[int], vocab_size: int) -> dict:
    """Return the times of opening a corpus, its tokenizer and its tokens in a new process on `cores`."""
    fields = {"data.corpus": "text", "data.path": str(path)}
    fields |= {"data.tokenizer": "bpe", "data.vocab_size": str(vocab_size)}
    command = [*_on(cores), sys.executable, "-c", STORE, json.dumps(fields)]
    environment = os.environ | {"MINI_GPT_CACHE": str(cache)}
    return json.loads(subprocess.run(command, env=environment, check=True, stdout=-1).stdout)


def measurements(directory: Path, size: int, vocab_size: int) -> Iterator[dict]:
    small, large = directory / "small.jsonl", directory / "large.jsonl"
    write_corpus(small, size // 10)
    write_corpus(large, size)
    cores = sorted(os.sched_getaffinity(0))
    for count in sorted({1, min(2, len(cores))}):
        cache = directory / f"cache{count}"
        yield {"what": "store", "cores": count} | store(small, cache, set(cores[:count]), vocab_size)
        (tokenizer,) = cache.glob("tokenizers/*/tokenizer.json")
        yield {"what": "library", "cores": count} | library(small, tokenizer, set(cores[:count]), size // 10)
    for what in ("first start", "second start"):
        yield {"what": what, "cores": len(cores)} | store(large, directory / "cache", set(cores), vocab_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--directory", help="for the texts and the caches; default: a temporary one")
    parser.add_argument("--vocab_size", type=int, default=8192)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=flags.directory) as directory:
        for found in measurements(Path(directory), int(flags.gigabytes * 1e9), flags.vocab_size):
            seconds = found["seconds"] if isinstance(found["seconds"], float) else found["seconds"]["tokens"]
            print(
                json.dumps(found | {"mb_per_second": round(found["bytes"] / 1e6 / max(seconds, 0.01), 2)}), flush=True
            )


if __name__ == "__main__":
    main()
