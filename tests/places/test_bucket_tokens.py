"""Token stores in a bucket: hosts read the blocks that their batches need, and train with the same bits."""

import json

import numpy as np
import pytest

from mini_gpt.data import bucket_tokens
from mini_gpt.data.bucket_tokens import BucketTokens
from mini_gpt.runtime import buckets
from mini_gpt.runtime.buckets import BucketError, Place
from tests.places.test_hosts import CONFIG, finish_both, one_device_each, start_two
from tests.places.test_runs_in_buckets import finish, metrics, start, texts
from tests.two_processes import BLOCK

__all__ = ["one_device_each", "texts"]  # fixtures


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_an_index_reads_the_blocks_that_it_needs_once(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(bucket_tokens, "BLOCK", 64)
    expected = np.random.default_rng(0).integers(60_000, size=1001).astype(dtype)
    place, per_block = Place(f"file://{tmp_path}/there"), 64 // expected.itemsize
    place.write("train.tokens", expected.tobytes())
    starts, read = [], Place.read_part
    noted = lambda self, name, start, size: starts.append(start) or read(self, name, start, size)
    monkeypatch.setattr(Place, "read_part", noted)
    open_it = lambda: BucketTokens(place, tmp_path / "train.tokens", dtype, len(expected))
    tokens, windows = open_it(), np.add.outer([700, 3], np.arange(5))
    for index in (windows, slice(10, 3, -2), slice(5, 5), -1, windows):
        np.testing.assert_array_equal(tokens[index], expected[index])
    needed = {position // per_block for position in [*windows.flat, *range(4, 11), len(expected) - 1]}
    assert sorted(starts) == [64 * block for block in sorted(needed)]
    np.testing.assert_array_equal(open_it()[expected > 59_000], expected[expected > 59_000])
    np.testing.assert_array_equal(open_it(), expected)  # the blocks above are there
    assert sorted(starts) == list(range(0, expected.nbytes, 64))
    np.testing.assert_array_equal(tokens == expected[5], expected == expected[5])
    np.testing.assert_array_equal(3 + tokens, 3 + expected)


def test_a_store_that_is_cut_off_or_gone_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(buckets, "ATTEMPTS", 1)
    place = Place(f"file://{tmp_path}/there")
    place.write("train.tokens", b"1234")
    tokens = BucketTokens(place, tmp_path / "train.tokens", "uint16", 4)
    for _ in range(2):  # no block counts as read
        with pytest.raises(BucketError, match=r"train\.tokens was cut off after 4 bytes"):
            tokens[0]


def test_another_store_has_another_folder_for_its_blocks(tmp_path):
    place = Place(f"file://{tmp_path}/there")
    for content, kept in ((b"one", False), (b"one", True), (b"two", False)):
        place.write("meta.json", content)
        path = bucket_tokens.fetch(place, tmp_path / "here", "meta.json")
        assert path.read_bytes() == content and (path.parent / "train.blocks").exists() == kept
        (path.parent / "train.blocks").touch()


@pytest.mark.slow
def test_two_hosts_read_less_than_the_store_and_train_with_the_same_bits(server, texts, tmp_path):
    fields = texts | {"mesh.data": 2, "train.steps": 6, "train.log_every": 1, "eval.every": 6, "eval.sample_tokens": 4}
    fields |= {"data.tokenizer": "bpe", "data.vocab_size": 300}
    hosts = [tmp_path / "a", tmp_path / "b"]
    finish_both(start_two(server, hosts, CONFIG, f"--workdir={tmp_path}/local", fields=fields))
    look = ("-m", "mini_gpt.data", "look", CONFIG)
    fields |= {"data.cache_dir": "s3://bucket/cache"}
    finish(start(server, tmp_path / "c", *look, fields=fields))  # makes the store
    stores = Place("s3://bucket/cache/tokens").files()
    (size,) = [entry.size for name, entry in stores.items() if name.endswith("/train.tokens")]
    server.log.clear()
    hosts = [tmp_path / "d", tmp_path / "e"]
    said = finish_both(start_two(server, hosts, CONFIG, f"--workdir={tmp_path}/there", fields=fields))
    assert "tokenizing" not in said[0] + said[1] and Place("s3://bucket/cache/tokens").files() == stores
    rows = [metrics((tmp_path / name / "metrics.jsonl").read_bytes()) for name in ("local", "there")]
    assert len(rows[0]) == 6 and rows[0] == rows[1]
    ends = [
        json.loads((tmp_path / name / "checkpoints/6/format/metadata").read_text())["checksums"]
        for name in ("local", "there")
    ]
    assert ends[0] == ends[1]
    read = [sum(np.fromfile(next(host.rglob("train.blocks")), bool)) for host in hosts]
    requests = [path for method, path in server.log if method == "GET" and path.endswith("/train.tokens")]
    assert len(requests) == sum(read)
    assert all(0 < count * BLOCK < size / 2 for count in read), (read, size)
    assert not list(hosts[1].rglob("*.jsonl.gz"))  # only process 0 reads the texts
