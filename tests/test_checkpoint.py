"""Checkpoints hold what they were given, exactly, and a crash at any moment leaves one that can be
read.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpkfc import checkpoint
from dpkfc.checkpoint import CheckpointError, read, write

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
KEYS = st.text(max_size=5) | st.integers() | st.sampled_from(["!tensor", "!tuple", "!dict"])
TREES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)


@given(TREES)
def test_plain_values_come_back_as_they_were(tmp_path, tree):
    write(tmp_path / "c", {}, {"extra": tree})
    assert read(tmp_path / "c") == ({}, {"extra": tree})
    assert repr(read(tmp_path / "c")[1]["extra"]) == repr(tree)  # 1, 1.0 and True are not the same


def test_tensors_inside_come_back_in_their_type(tmp_path):
    inside = {
        "a.b": torch.arange(3, dtype=torch.bfloat16),
        "a": {"b": torch.zeros((), dtype=torch.int64)},  # the same path as the one above
        4: [torch.ones(2, 3).T, (torch.zeros(0), np.float64(0.1), np.int64(7))],
    }
    write(tmp_path / "c", {"model": {"w": torch.ones(2)}}, {"extra": inside})
    tensors, meta = read(tmp_path / "c")
    found = meta["extra"]
    assert set(tensors) == {"model"}
    assert torch.equal(found["a.b"], inside["a.b"]) and found["a.b"].dtype == torch.bfloat16
    assert torch.equal(found["a"]["b"], inside["a"]["b"])
    assert torch.equal(found[4][0], inside[4][0]) and found[4][1][0].shape == (0,)
    assert found[4][1][1:] == (0.1, 7)


@pytest.mark.parametrize("value", [{"x": {1, 2}}, [object()], (lambda: 0,), {(1, object()): 2}, 1j])
def test_other_values_are_refused_before_anything_is_written(tmp_path, value):
    write(tmp_path / "c", {}, {"extra": 1})
    with pytest.raises(CheckpointError, match=r"meta\.extra.* no checkpoint can hold"):
        write(tmp_path / "c", {}, {"extra": value})
    assert read(tmp_path / "c")[1] == {"extra": 1}


def test_views_and_shared_memory_are_saved_by_value(tmp_path):
    whole = torch.arange(12.0)
    named = {
        "whole": whole,
        "part": whole[2:5],
        "again": whole.view(3, 4),
        "turned": whole.view(3, 4).T,
    }
    write(tmp_path / "c", {"model": named}, {})
    for name, tensor in read(tmp_path / "c")[0]["model"].items():
        assert torch.equal(tensor, named[name])


class Crash(BaseException):
    """The process ends here."""


class Fragile:
    """Lets so many operations on the disk through and then ends the process, also in the middle of
    a removal.
    """

    def __init__(self, monkeypatch):
        self.left = None
        for owner, name in (
            (safetensors.torch, "save_file"),
            (checkpoint, "sync"),
            (Path, "rename"),
            (Path, "write_text"),
            (Path, "unlink"),
            (Path, "rmdir"),
        ):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _tick(self):
        if self.left is not None:
            if self.left == 0:
                raise Crash
            self.left -= 1

    def _counted(self, real):
        def call(*args, **kwargs):
            self._tick()
            return real(*args, **kwargs)

        return call


@pytest.mark.parametrize(
    "crashes", [1, 2], ids=["one crash", "a crash, and another while writing again"]
)
def test_a_crash_at_any_moment_leaves_a_checkpoint(tmp_path, monkeypatch, crashes):
    fragile, target = Fragile(monkeypatch), tmp_path / "c"

    def save(value):
        write(
            target,
            {"model": {"w": torch.full((3,), float(value))}},
            {"value": value, "t": torch.tensor(value)},
        )

    def read_saved():
        tensors, meta = read(target)
        assert meta["value"] == int(meta["t"]) == int(tensors["model"]["w"][0])
        return meta["value"]

    for left in range(0, *((200,) if crashes == 1 else (20, 2))):
        for again in range(0, 1 if crashes == 1 else 20, 3):
            fragile.left = None
            for stale in tmp_path.iterdir():
                for file in stale.iterdir():
                    file.unlink()
                stale.rmdir()
            save(1)
            finished = 1
            for value, budget in ((2, left), (3, again))[:crashes]:
                fragile.left = budget
                try:
                    save(value)
                except Crash:
                    assert finished <= read_saved() <= value
                else:
                    assert read_saved() == value
                fragile.left = None
                finished = read_saved()
            save(4)
            assert read_saved() == 4
            assert {p.name for p in tmp_path.iterdir()} == {"c"}
        if crashes == 1 and finished == 2 and left > 12:
            break
    else:
        assert crashes == 2


def test_a_file_in_the_way_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write the checkpoint"):
        write(tmp_path / "file" / "c", {}, {})
    with pytest.raises(CheckpointError, match="make room, change its rights"):
        checkpoint.place_file(tmp_path / "file" / "card.json", lambda part: None)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        read(tmp_path / "nothing")


def test_a_file_that_is_not_finished_leaves_nothing_behind(tmp_path):
    def write_half(part):
        part.write_text("half")
        raise ImportError("no package")

    with pytest.raises(ImportError):
        checkpoint.place_file(tmp_path / "card.json", write_half)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("other", ["ledger.jsonl", "weights.safetensors", "folder/file"])
def test_what_is_no_checkpoint_is_never_replaced(tmp_path, other):
    """A ledger that went with a checkpoint would let its budget be spent twice."""
    for name in ("c", "c.old", "c.new"):
        if name != "c" and other.endswith(".safetensors"):
            continue  # what a crash leaves there
        held = tmp_path / name / other
        held.parent.mkdir(parents=True)
        held.write_text("spent")
        with pytest.raises(
            CheckpointError,
            match=rf"holds '{other.partition('/')[0]}', which is not part .* a folder of its own",
        ):
            write(tmp_path / "c", {}, {"step": 1})
        assert held.read_text() == "spent"
        shutil.rmtree(tmp_path / name)
    (tmp_path / "c").mkdir()
    write(tmp_path / "c", {}, {"step": 1})  # an empty one is free to take
    (tmp_path / "c" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds 'notes\.txt'"):
        write(tmp_path / "c", {}, {"step": 2})
    assert read(tmp_path / "c")[1] == {"step": 1}


def test_a_link_leads_to_the_folder(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "c").symlink_to(tmp_path / "disk")
    for step in range(3):
        write(tmp_path / "c", {}, {"step": step})
        assert read(tmp_path / "c")[1] == read(tmp_path / "disk")[1] == {"step": step}
    assert (tmp_path / "c").is_symlink() and {x.name for x in tmp_path.iterdir()} == {"c", "disk"}
    # as a crash between the two renames leaves it
    (tmp_path / "disk").rename(tmp_path / "disk.old")
    assert checkpoint.exists(tmp_path / "c") and read(tmp_path / "c")[1] == {"step": 2}
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write(".", {}, {"step": 4})
    assert read(tmp_path / "here")[1] == {"step": 4}
    write(tmp_path / "runs" / "1", {}, {"step": 5})  # folders on the way are made
    assert read(tmp_path / "runs" / "1")[1] == {"step": 5}


def test_a_write_that_dies_too_keeps_what_a_crash_left(tmp_path, monkeypatch):
    write(tmp_path / "c", {}, {"step": 1})
    # as a crash between the two renames leaves it
    (tmp_path / "c").rename(tmp_path / "c.old")
    rename = Path.rename

    def die_at_the_new_one(path, target):
        if path.name == "c.new":
            raise Crash
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", die_at_the_new_one)
    with pytest.raises(Crash):
        write(tmp_path / "c", {}, {"step": 2})
    assert read(tmp_path / "c")[1] == {"step": 1}


def test_another_format_is_refused(tmp_path):
    write(tmp_path / "c", {}, {})
    path = tmp_path / "c" / "manifest.json"
    path.write_text(path.read_text().replace('"format": 3', '"format": 1'))
    with pytest.raises(CheckpointError, match="has format 1, this version reads 3"):
        read(tmp_path / "c")
