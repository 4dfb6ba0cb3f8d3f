"""The run folder: one clear error before training when it cannot be used."""

import json
import os
from pathlib import Path

import pytest

from dpkfc.app.run_folder import RunFolder, RunFolderError, write_json, write_text


def test_create_makes_parents_and_takes_an_empty_folder(tmp_path):
    assert RunFolder.create(tmp_path / "a" / "b").path.is_dir()
    assert RunFolder.create(tmp_path / "a" / "b").path == tmp_path / "a" / "b"


def test_create_refuses_a_file_and_a_full_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match="is a file"):
        RunFolder.create(tmp_path / "file")
    with pytest.raises(RunFolderError, match=f"--resume {tmp_path}"):
        RunFolder.create(tmp_path)
    with pytest.raises(RunFolderError, match="cannot be written"):
        RunFolder.create(tmp_path / "file" / "below")


@pytest.mark.parametrize("method", ["create", "fresh"])
def test_a_folder_that_cannot_be_written_is_one_error(tmp_path, monkeypatch, method):
    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", refuse)
    arguments = (tmp_path / "run",) if method == "create" else (tmp_path, "run")
    with pytest.raises(RunFolderError, match=r"run cannot be written \(Permission denied\)"):
        getattr(RunFolder, method)(*arguments)


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="rights do not bind the superuser"
)
def test_a_read_only_folder_is_refused(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(RunFolderError, match="cannot be written"):
        RunFolder.create(tmp_path / "locked")


def test_fresh_counts_up(tmp_path):
    names = [RunFolder.fresh(tmp_path / "runs", "x").path.name for _ in range(3)]
    assert names == ["x", "x-2", "x-3"]


def test_open_wants_settings_and_a_checkpoint(tmp_path):
    with pytest.raises(RunFolderError, match=r"no config\.toml"):
        RunFolder.open(tmp_path)
    (tmp_path / "config.toml").touch()
    with pytest.raises(RunFolderError, match="no checkpoint"):
        RunFolder.open(tmp_path)
    (tmp_path / "checkpoint").mkdir()
    assert RunFolder.open(tmp_path).checkpoint.is_dir()


def test_files_are_written_whole_or_not_at_all(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    write_json(folder.card, {"ε": 1})
    assert json.loads(folder.card.read_text("utf-8")) == {"ε": 1}
    with pytest.raises(ValueError, match="JSON"):
        write_json(folder.card, {"ε": float("inf")})
    assert json.loads(folder.card.read_text("utf-8")) == {"ε": 1}
    assert [path.name for path in folder.path.iterdir()] == ["privacy_card.json"]
    with pytest.raises(RunFolderError, match="make room, change its rights"):
        write_text(folder.card / "inside a file", "x")


def test_only_an_empty_folder_is_taken_away(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    write_text(folder.config, "x")
    folder.remove_if_empty()
    assert folder.config.is_file()
    folder.config.unlink()
    folder.remove_if_empty()
    assert not folder.path.exists()
