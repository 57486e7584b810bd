"""Checkpoints that were cut off, and files that are never half-written."""

from __future__ import annotations

import fcntl

import pytest

from cable_attn import CableError
from cable_attn.files import alone, read_json, writable_folder, write_atomically, write_json
from cable_attn.training import last_complete_checkpoint, remove_cut_off


def test_a_checkpoint_that_was_cut_off_is_passed_over(tmp_path):
    for step, state in ((4, '{"global_step": 4}'), (8, '{"half')):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    (tmp_path / "checkpoint-12").mkdir()
    assert last_complete_checkpoint(tmp_path).endswith("checkpoint-4")
    assert len(list(tmp_path.iterdir())) == 3  # to look takes nothing from a run that is writing
    remove_cut_off(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]
    assert last_complete_checkpoint(tmp_path / "nowhere") is None


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "results.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    with pytest.raises(TypeError):
        write_atomically(path, 3)
    assert read_json(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_lock_that_was_taken_away_is_none(tmp_path, monkeypatch):
    """Its last owner ends between the opening and the locking; a third process then makes a new one."""
    lock, real = tmp_path / ".work.lock", fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lambda *rest: (lock.unlink(), real(*rest)))
    with pytest.raises(CableError, match="being worked on by another process"), alone(tmp_path, "work"):
        pytest.fail("two hold it")
    monkeypatch.setattr(fcntl, "flock", lambda *rest: (lock.unlink(), lock.touch(), real(*rest)))
    with pytest.raises(CableError, match="being worked on by another process"), alone(tmp_path, "work"):
        pytest.fail("two hold it")


def test_unreadable_json_is_named(tmp_path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(CableError, match=r"cannot read .*x\.json"):
        read_json(tmp_path / "x.json")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CableError, match=r"cannot write to folder .*file.*Choose another"):
        writable_folder(tmp_path / "file" / "below")
