"""Runs that go on where they were cut off, and files that are never half-written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from cable_attn import CableError, CableGPTForCausalLM
from cable_attn import training as training_module
from cable_attn.data import Windows
from cable_attn.files import new_folder, read_json, writable_folder, write_atomically, write_json
from cable_attn.training import TrainSettings, last_complete_checkpoint, train

from .conftest import small_gpt

TOKENS = np.random.default_rng(0).integers(0, 97, 640)
SETTINGS = TrainSettings(steps=12, batch_size=2, learning_rate=1e-2, warmup_steps=2, save_every=4)


class Cut(Exception):
    pass


def trained(folder, cut_after=None):
    torch.manual_seed(0)
    model = CableGPTForCausalLM(small_gpt())

    def on_step(step, loss):
        if step == cut_after:
            raise Cut

    train(model, Windows(TOKENS, 16), SETTINGS, folder, on_step)
    return model


def test_a_cut_run_ends_as_if_never_cut(tmp_path):
    """Cut after step 6: it goes on from the checkpoint of step 4 and ends bit for bit the same."""
    whole = trained(tmp_path / "whole")
    with pytest.raises(Cut):
        trained(tmp_path / "cut", cut_after=6)
    assert last_complete_checkpoint(tmp_path / "cut").endswith("checkpoint-4")
    steps = []

    class Count(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            steps.append(state.global_step)

    original = training_module.Watching
    training_module.Watching = lambda on_step: Count()
    try:
        again = trained(tmp_path / "cut")
    finally:
        training_module.Watching = original
    assert steps == list(range(5, 13))
    for a, b in zip(whole.parameters(), again.parameters()):
        assert torch.equal(a, b)


def test_a_checkpoint_that_was_cut_off_is_passed_over(tmp_path):
    with pytest.raises(Cut):
        trained(tmp_path, cut_after=10)
    (tmp_path / "checkpoint-8" / "trainer_state.json").write_text('{"half')
    assert last_complete_checkpoint(tmp_path).endswith("checkpoint-4")
    assert not (tmp_path / "checkpoint-8").exists()
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


def test_a_failed_folder_leaves_the_old_one(tmp_path):
    target = tmp_path / "model"
    with new_folder(target) as folder:
        (folder / "weights").write_text("old")
    with pytest.raises(Cut), new_folder(target) as folder:
        (folder / "weights").write_text("half")
        raise Cut
    assert (target / "weights").read_text() == "old"
    with new_folder(target) as folder:
        (folder / "other").write_text("new")
    assert [path.name for path in target.iterdir()] == ["other"]
    assert list(tmp_path.iterdir()) == [target]


def test_unreadable_json_is_named(tmp_path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(CableError, match=r"cannot read .*x\.json"):
        read_json(tmp_path / "x.json")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CableError, match=r"cannot write to folder .*file.*Choose another with --out"):
        writable_folder(tmp_path / "file" / "below")
