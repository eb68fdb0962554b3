"""Untrusted data sets of TFDS and folders of texts can do no harm."""

import json

import pytest
import tensorflow_datasets as tfds

from mini_gpt.data import corpora
from mini_gpt.runtime.errors import UserError


@pytest.fixture
def data_set(tmp_path):
    """Write a TFDS data set that names files outside of it; return (directory of all data sets, its own directory)."""
    directory = tmp_path / "tfds" / "theirs" / "1.0.0"
    directory.mkdir(parents=True)
    tfds.features.FeaturesDict({"text": tfds.features.Text()}).save_config(directory)
    split = {"name": "train", "shardLengths": ["2"], "numBytes": "8"}
    split["filepathTemplate"] = "../../{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
    info = {"name": "theirs", "version": "1.0.0", "fileFormat": "array_record", "splits": [split]}
    (directory / "dataset_info.json").write_text(json.dumps(info))
    return tmp_path / "tfds", directory


def open_theirs(small, data_dir, name="tfds:theirs"):
    return corpora.open_corpus(small(data__corpus=name, data__path=str(data_dir)).data)


@pytest.mark.parametrize("style", ["pythonClassName", "type"])
def test_a_features_file_imports_no_module(small, data_set, style, tmp_path, monkeypatch):
    data_dir, directory = data_set
    (tmp_path / "evil_features.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    evil = {"pythonClassName": "evil_features.Text", "jsonFeature": {"json": "{}"}}
    evil = evil if style == "pythonClassName" else {"type": "evil_features.Text", "content": {}}
    (directory / "features.json").write_text(json.dumps(evil))
    with pytest.raises(UserError, match=r"features\.json: found the class 'evil_features\..*; must be"):
        open_theirs(small, data_dir)
    assert not (tmp_path / "owned").exists()


OTHER_NAMES = ["kaggle:ds", "huggingface:ds", "lm1b/x/data_dir=1", "../lm1b", "", "lm1b\n", "Theirs", "theirs/.."]


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_other_names_than_plain_ones_are_refused(small, name, tmp_path):
    """TFDS would open theirs for Theirs, and a directory of its own choice for ".."."""
    with pytest.raises(UserError, match=r"^data\.corpus: found 'tfds:.*must be tfds:NAME"):
        open_theirs(small, tmp_path, f"tfds:{name}")


def test_a_default_config_elsewhere_is_refused(small, data_set):
    data_dir, directory = data_set
    directory.rename(data_dir / "1.0.0")
    (data_dir / "theirs" / ".config").mkdir()
    (data_dir / "theirs" / ".config" / "metadata.json").write_text(json.dumps({"default_config_name": ".."}))
    with pytest.raises(UserError, match=r"metadata\.json: default_config_name: found '\.\.'; must be a name"):
        open_theirs(small, data_dir)


def test_nothing_is_prepared_from_downloads_in_a_directory_that_a_config_names(small, tmp_path):
    """The builder of math_qa calls eval() on its texts, and TFDS does not check extracted files again."""
    with pytest.raises(UserError, match=r"^data\.path: found no prepared lm1b in .*; prepare it there with TFDS"):
        open_theirs(small, tmp_path, "tfds:lm1b")
    assert list(tmp_path.iterdir()) == []


def test_addresses_are_not_joined(small, tmp_path):
    """fsspec renders the templates in a file of references."""
    (tmp_path / "references.json").write_text('{"version": 1, "templates": {"a": "{{1}}"}, "refs": {"a.txt": ["a"]}}')
    for address in (f"reference://a::file://{tmp_path}/references.json/*.txt", "reference://a/*.txt"):
        with pytest.raises(UserError, match=r"^reference://a.*: (found several addresses|.*fo.*; use s3://)"):
            corpora.open_corpus(small(data__path=address).data)


def test_a_data_set_that_names_files_elsewhere_is_refused(small, data_set):
    data_dir, _ = data_set
    with pytest.raises(UserError, match=r"data\.corpus: .*theirs.* names the file .*, outside "):
        open_theirs(small, data_dir)


def test_a_file_to_which_links_lead_again_and_again_is_read_once(small, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.txt").write_text("text")
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    (tmp_path / "link.txt").symlink_to("a/a.txt")
    assert corpora.open_corpus(small(data__path=f"{tmp_path}/**/*.txt").data).num_documents == 1
    (tmp_path / "out.txt").symlink_to(__file__)
    with pytest.raises(UserError, match=r"^data\.path: \S+out\.txt leads to .*, outside "):
        corpora.open_corpus(small(data__path=f"{tmp_path}/**/*.txt").data)
