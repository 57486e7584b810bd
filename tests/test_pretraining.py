"""Recipes, and runs that survive whatever happens to them."""

from __future__ import annotations

import copy
import errno
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, Trainer
from typer.testing import CliRunner

from cable_attn import pretraining, recipe
from cable_attn.bench import records
from cable_attn.cli import app
from cable_attn.data.shards import Request, prepare
from cable_attn.data.sources import open_source
from cable_attn.data.tokenizers import find_tokenizer
from cable_attn.errors import CableError
from cable_attn.training import last_complete_checkpoint

TINY = [
    "overrides={hidden_size = 32, num_hidden_layers = 1, num_attention_heads = 2}",
    "vocab_size=300",
    "length=16",
    "micro_batch=4",
    "tokens_per_update=64",
    "warmup_steps=2",
    "eval_windows=4",
    "log_every=1",
]


def small(shards: Path, name: str = "gpt-embedded", **settings) -> recipe.Recipe:
    return recipe.load(name, [*TINY, f"path={shards}", *(f"{key}={value}" for key, value in settings.items())])


def metrics(folder: Path, key: str = "loss") -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [(row["step"], row[key]) for row in rows if key in row]
    assert len(found) == len(dict(found)), "a step was logged twice"
    return dict(found)


def command(shards: Path, folder: Path, *extra: str) -> list[str]:
    settings = [*TINY, f"path={shards}", "save_every=2", "eval_every=1000", "steps=24"]
    return [sys.executable, "-m", "cable_attn", "train", "gpt-embedded", *settings, "--out", str(folder), *extra]


@given(st.text(), st.dictionaries(st.text(min_size=1), st.text() | st.booleans() | st.integers(-9, 9), max_size=3))
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_recipe_is_read_as_it_was_written(tmp_path, path, overrides):
    """Whatever stands in a path or in a field of a config: otherwise a run could not go on."""
    found = recipe.load("gpt-embedded")
    found = replace(
        found, data=replace(found.data, path=path or "."), model=replace(found.model, overrides={"a table": overrides})
    )
    (tmp_path / "again.toml").write_text(recipe.to_toml(found), encoding="utf-8", newline="")
    assert recipe.load(str(tmp_path / "again.toml")) == found


def test_the_steps_of_the_paper_are_its_epochs():
    tokens = {"wikitext103": 118e6, "fineweb-edu": 10e9}  # of GPT-2, in the training sets
    for size, corpus, epochs in (
        ("tiny", "wikitext103", 10),
        ("small", "wikitext103", 5),
        ("medium", "wikitext103", 3),
        ("tiny", "fineweb-edu", 1),
    ):
        train = recipe.load(f"gpt2-{size}-{corpus}").train
        assert train.steps * train.tokens_per_update / tokens[corpus] == pytest.approx(epochs, rel=0.15)


@pytest.mark.parametrize("name", recipe.builtin())
def test_recipes_of_the_package_are_whole(name, tmp_path):
    found = recipe.load(name)
    (tmp_path / "again.toml").write_text(recipe.to_toml(found))
    assert recipe.load(str(tmp_path / "again.toml")) == found
    plan = pretraining.plan(found, devices=4 if name.startswith("bert-base") else 1)
    if "gpt2" in name:
        assert found.model.vocab_size == 50304
        millions = {"tiny": 45, "small": 124, "medium": 355}[found.model.preset]
        assert round(plan["parameters"] / 1e6) == millions
    if name == "bert-base-fineweb-edu":
        assert plan["micro batches to an update"] == 11


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.stpes=3", "nearest is 'train.steps'"),
        ("lr=3", "is not known; the nearest"),
        ("steps=many", "train.steps must be a whole number"),
        ("learning_rate=-1", "train.learning_rate must be above 0, got -1"),
        ("seed=-1", "train.seed must be at least 0, got -1"),
        ("betas=[0.9]", "train.betas must be two numbers, got [0.9]"),
        ("betas=['a', 'b']", "train.betas must be two numbers"),
        ("overrides.hidden_act=foo", "unknown hidden_act 'foo'"),
        ("betas=[0.9,2.0]", "train.betas must lie between 0 and 1, got [0.9, 2.0]"),
        ("steps=0", "at least 1, got 0"),
        ("steps", "an override is key=value"),
        ("model.family=t5", "unknown model.family 't5'"),
        ("tokens_per_update=1000", "not a multiple"),
        ("overrides={hidden = 3}", "hidden"),
    ],
)
def test_bad_overrides_are_one_line_with_the_fix(override, words):
    result = CliRunner().invoke(app, ["train", "gpt-embedded", override, "--dry-run"])
    assert isinstance(result.exception, CableError) and words in str(result.exception)


def test_dry_run_says_what_the_run_would_be():
    result = CliRunner().invoke(app, ["train", "gpt2-tiny-wikitext103", "encoding=alibi", "--dry-run"])
    assert result.exit_code == 0, result.output
    for words in ("131,072", "9,000", "1,179,648,000", "MiB", "alibi"):
        assert words in result.output


@pytest.mark.parametrize(
    ("name", "loader"), [("gpt-embedded", AutoModelForCausalLM), ("bert-embedded", AutoModelForMaskedLM)]
)
def test_a_run_learns_and_leaves_a_model_that_loads_anywhere(shards, tmp_path, name, loader):
    chosen = small(shards, name, steps=30, eval_every=10, save_every=10, learning_rate=1e-2)
    pretraining.run(chosen, tmp_path / "run")
    losses, evaluated = metrics(tmp_path / "run"), metrics(tmp_path / "run", "eval_loss")
    assert sum(losses[n] for n in range(26, 31)) / 5 < losses[1] - 0.3
    assert list(evaluated) == [10, 20, 30] and evaluated[30] < losses[1] - 0.3
    model = loader.from_pretrained(tmp_path / "run")
    assert model.config.encoding == "cable"
    assert recipe.load(str(tmp_path / "run/recipe.toml")) == chosen
    assert json.loads((tmp_path / "run/environment.json").read_text())["versions"]["torch"] == torch.__version__
    assert not list((tmp_path / "run").glob("*.bin"))
    assert len(list((tmp_path / "run/checkpoints").glob("checkpoint-*"))) == chosen.train.keep


def test_accumulation_gives_the_losses_of_the_whole_batch(shards, tmp_path):
    pretraining.run(small(shards, steps=6), tmp_path / "one")
    pretraining.run(small(shards, steps=6, micro_batch=2), tmp_path / "two")
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert one == pytest.approx(two, abs=1e-5)


@pytest.mark.parametrize("name", ["gpt-embedded", "bert-embedded"])
def test_how_often_it_is_evaluated_touches_no_loss(shards, tmp_path, name):
    for every in (1, 100):
        settings = [*TINY, "overrides.hidden_dropout=0.5", f"path={shards}", "steps=4", f"eval_every={every}"]
        chosen = recipe.load(name, settings)
        pretraining.run(chosen, tmp_path / str(every))
    assert metrics(tmp_path / "1") == metrics(tmp_path / "100")


def test_an_encoding_may_learn_at_a_rate_of_its_own(shards, tmp_path):
    weights = {}
    for rate in (0, 0.5):
        chosen = small(shards, encoding="t5", steps=1, warmup_steps=0, learning_rate=1e-3, encoding_learning_rate=rate)
        pretraining.run(chosen, tmp_path / str(rate))
        weights[rate] = load_file(tmp_path / str(rate) / "model.safetensors")
    apart = {name: (weights[0.5][name] - weights[0][name]).abs() for name in weights[0]}
    (table,) = (apart.pop(name) for name in list(apart) if name.endswith(".table"))
    assert not any(value.any() for value in apart.values())
    torch.testing.assert_close(table[:8], torch.full((8, 2), 0.499), rtol=0, atol=0.02)  # Adam's first step


def test_such_a_run_goes_on_as_it_was(shards, tmp_path):
    chosen = small(shards, encoding="t5", steps=4, save_every=2, encoding_learning_rate=0.1)
    pretraining.run(chosen, tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    shutil.rmtree(tmp_path / "checkpoints/checkpoint-4")
    pretraining.run(chosen, tmp_path, resume=True)
    again = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_without_validation_text_it_trains_and_does_not_evaluate(tmp_path):
    (tmp_path / "a.txt").write_text("it is a truth universally acknowledged " * 50)
    streams = open_source(str(tmp_path / "a.txt"), held_out=0.0)
    tokenizer = find_tokenizer("bpe:300", streams["train"](0))
    prepare(tmp_path / "data", Request("a", "bpe:300"), streams, tokenizer)
    pretraining.run(small(tmp_path / "data", steps=2, eval_every=1, workers=1), tmp_path / "run")
    assert len(metrics(tmp_path / "run")) == 2 and metrics(tmp_path / "run", "eval_loss") == {}
    done = CliRunner().invoke(app, ["train", str(tmp_path / "run"), "--out", str(tmp_path / "again")])
    assert done.exit_code == 0 and "No loss on held-out text" in done.output


def test_a_run_that_never_saved_claims_nothing(shards, tmp_path):
    with pytest.raises(CableError, match="vocabulary"):
        pretraining.run(small(shards, vocab_size=290), tmp_path / "run")
    pretraining.run(small(shards, steps=2), tmp_path / "run")
    assert len(metrics(tmp_path / "run")) == 2


def test_documents_apart(shards, tmp_path):
    pretraining.run(small(shards, steps=3, separate_documents="true"), tmp_path / "run")
    assert len(metrics(tmp_path / "run")) == 3


def test_killed_at_random_moments_it_ends_with_the_same_losses(shards, tmp_path):
    """kill −9, also during checkpoint writes (every other step), then --resume: bit-identical losses and weights."""
    subprocess.run(command(shards, tmp_path / "whole"), check=True, capture_output=True)
    folder, dice = tmp_path / "killed", random.Random(4)
    kills = 0
    while not (folder / "model.safetensors").exists():
        extra = ["--resume"] if (folder / "recipe.toml").exists() else []
        process = subprocess.Popen(command(shards, folder, *extra), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if kills < 2:
            steps = metrics_lines(folder)
            deadline = time.monotonic() + 60
            while metrics_lines(folder) < steps + 2 and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(dice.random() * 0.4)
            process.kill()
            kills += 1
        output = process.communicate()[0].decode()
        assert process.returncode in (0, -signal.SIGKILL), output
    assert kills == 2
    assert metrics(folder) == metrics(tmp_path / "whole")
    ours, theirs = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "whole"))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_two_processes_never_train_in_one_folder(shards, tmp_path):
    """Nor does the second disturb the first, which writes a checkpoint after every other step."""
    folder = tmp_path / "run"
    first = subprocess.Popen(command(shards, folder, "steps=1000000"), stdout=subprocess.DEVNULL)
    try:
        while metrics_lines(folder) < 3:
            time.sleep(0.01)
            assert first.poll() is None
        written = (folder / "recipe.toml").read_text()
        for resume, encoding in itertools.product((False, True), ("cable", "rope")):
            with pytest.raises(CableError, match="being worked on by another process"):
                pretraining.run(small(shards, encoding=encoding), folder, resume)
        steps = metrics_lines(folder)
        while metrics_lines(folder) < steps + 9:
            time.sleep(0.01)
            assert first.poll() is None
        assert (folder / "recipe.toml").read_text() == written
    finally:
        first.kill()
        first.wait()


def test_a_recipe_that_somebody_wrote_is_never_written_over(shards, tmp_path):
    (tmp_path / "recipe.toml").write_text("# mine\n")
    with pytest.raises(CableError, match="of no run, and would be overwritten"):
        pretraining.run(small(shards, steps=1), tmp_path)
    assert (tmp_path / "recipe.toml").read_text() == "# mine\n"


def metrics_lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_text_ends_where_its_tokenizer_says(shards, tmp_path):
    pretraining.run(small(shards, steps=1), tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    for folder in ("run", "run/checkpoints/checkpoint-1"):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / folder)
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id == 0


def test_a_finished_model_is_never_written_over(shards, tmp_path):
    pretraining.run(small(shards, steps=1), tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints")  # as a study leaves it
    for resume in (False, True):
        with pytest.raises(CableError, match="holds a finished model"):
            pretraining.run(small(shards, steps=2), tmp_path / "run", resume)


@pytest.mark.parametrize(("name", "devices"), [("gpt2-small-wikitext103", 8), ("gpt2-medium-fineweb-edu", 32)])
def test_many_devices_share_an_update(name, devices):
    """As README.md and docs/training.md start them."""
    chosen = recipe.load(name)
    windows, steps = chosen.batches(devices)
    assert windows * steps * devices == chosen.windows_per_update and windows < chosen.train.micro_batch


def test_an_override_may_set_one_entry_of_a_table():
    told = ["overrides.qk_norm=true", "model.encoding_options.init=spread", "encoding_options.b=2"]
    model = recipe.load("gpt-embedded", told).model
    assert model.overrides == recipe.load("gpt-embedded").model.overrides | {"qk_norm": True}
    assert model.encoding_options == {"init": "spread", "b": 2}
    assert recipe.load("gpt-embedded", ["overrides={qk_norm = true}"]).model.overrides == {"qk_norm": True}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_asked_to_stop_saves_and_exits(shards, tmp_path, number):
    """Sent to the whole group, as a scheduler and a terminal do: also to the processes that load data."""
    settings = ["save_every=1000", "steps=2000", "workers=1"]
    process = subprocess.Popen(
        command(shards, tmp_path / "run", *settings), stdout=subprocess.PIPE, start_new_session=True
    )
    while metrics_lines(tmp_path / "run") < 3:
        time.sleep(0.01)
        assert process.poll() is None
    os.killpg(process.pid, number)
    output = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 128 + number and "--resume" in output
    saved = last_complete_checkpoint(tmp_path / "run/checkpoints")
    assert saved is not None and int(saved.rsplit("-", 1)[1]) == max(metrics(tmp_path / "run"))


def test_a_loss_that_is_not_finite_stops_the_run_with_all_names(shards, tmp_path):
    with pytest.raises(CableError, match=r"not finite at step \d+ \(windows .*checkpoint-\d") as error:
        pretraining.run(
            small(shards, steps=40, save_every=1, log_every=7, learning_rate=1e30, clip=1e30), tmp_path / "run"
        )
    step = int(str(error.value).split("step ")[1].split()[0])
    saved = last_complete_checkpoint(tmp_path / "run/checkpoints")
    assert saved is not None and int(saved.rsplit("-", 1)[1]) < step


@pytest.mark.parametrize("file", ["optimizer.pt", "model.safetensors"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_goes_on(shards, tmp_path, file):
    pretraining.run(small(shards, steps=4, save_every=2), tmp_path / "run")
    last = tmp_path / "run/checkpoints/checkpoint-4"
    (last / file).write_bytes(b"damaged")
    with pytest.raises(CableError, match=r"checkpoint-4' cannot be read .*go on from the one before"):
        pretraining.run(small(shards, steps=4, save_every=2), tmp_path / "run", resume=True)
    shutil.rmtree(last)
    pretraining.run(small(shards, steps=4, save_every=2), tmp_path / "run", resume=True)
    assert list(metrics(tmp_path / "run")) == [1, 2, 3, 4]


def test_a_full_disk_loses_nothing_that_was_saved(shards, tmp_path, monkeypatch):
    save = Trainer._save_optimizer_and_scheduler

    def full(self, folder):
        if self.state.global_step > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, folder)

    monkeypatch.setattr(Trainer, "_save_optimizer_and_scheduler", full)
    with pytest.raises(CableError, match=r"step 4 could not be written .*No space left.*checkpoint-2"):
        pretraining.run(small(shards, steps=8, save_every=2), tmp_path / "run")
    monkeypatch.undo()
    pretraining.run(small(shards, steps=8, save_every=2), tmp_path / "run", resume=True)
    pretraining.run(small(shards, steps=8, save_every=2), tmp_path / "whole")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_a_finished_run_that_is_resumed_stays_as_it_was(shards, tmp_path):
    chosen = small(shards, steps=2)
    pretraining.run(chosen, tmp_path)
    before = [(tmp_path / name).read_bytes() for name in ("metrics.jsonl", "model.safetensors")]
    pretraining.run(chosen, tmp_path, resume=True)
    assert [(tmp_path / name).read_bytes() for name in ("metrics.jsonl", "model.safetensors")] == before


def test_a_run_folder_belongs_to_its_recipe(shards, tmp_path):
    chosen = small(shards, steps=2)
    with pytest.raises(CableError, match="no run to resume"):
        pretraining.run(chosen, tmp_path / "run", resume=True)
    pretraining.run(chosen, tmp_path / "run")
    with pytest.raises(CableError, match="Add --resume"):
        pretraining.run(chosen, tmp_path / "run")
    manifest = json.loads((tmp_path / "run/environment.json").read_text())
    (tmp_path / "run/environment.json").write_text(json.dumps({**manifest, "data": "another"}))
    with pytest.raises(CableError, match="the tokens have changed"):
        pretraining.run(chosen, tmp_path / "run", resume=True)
    with pytest.raises(CableError, match=r"train\.seed was 0 and is 1"):
        pretraining.run(small(shards, steps=2, seed=1), tmp_path / "run", resume=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_fsdp_without_a_gpu_is_refused(shards, tmp_path):
    with pytest.raises(CableError, match="needs GPUs"):
        pretraining.run(small(shards, fsdp="true"), tmp_path / "run")


def test_a_vocabulary_too_large_for_the_model_is_refused(shards, tmp_path):
    with pytest.raises(CableError, match=r"vocabulary of 300, model\.vocab_size is 290"):
        pretraining.run(small(shards, vocab_size=290), tmp_path / "run")


def test_tensorboard_by_name(shards, tmp_path):
    pretraining.run(small(shards, steps=2, report_to="tensorboard"), tmp_path / "run")
    assert list((tmp_path / "run").rglob("events.out.tfevents*"))
    with pytest.raises(CableError, match=r"unknown tracker in train\.report_to 'no_such_tracker'"):
        pretraining.run(small(shards, steps=2, report_to="no_such_tracker"), tmp_path / "other")


def test_two_processes_train_like_one(shards, tmp_path):
    settings = [*TINY, f"path={shards}", "steps=4", "eval_every=2", "train.micro_batch=2"]
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "cable_attn"]
    arguments = ["train", "gpt-embedded", *settings, "--out", str(tmp_path / "two")]
    done = subprocess.run([sys.executable, "-m", *launch, *arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    pretraining.run(small(shards, steps=4, eval_every=2), tmp_path / "one")
    assert metrics(tmp_path / "two") == pytest.approx(metrics(tmp_path / "one"), abs=1e-5)
    assert metrics(tmp_path / "two", "eval_loss") == pytest.approx(metrics(tmp_path / "one", "eval_loss"), abs=1e-5)
    assert os.listdir(tmp_path / "two/checkpoints") == ["checkpoint-4"]


def test_sharded_checkpoints_load_at_another_world_size(tmp_path):
    """Written by two processes under FSDP2, read by one."""
    from torch.distributed import checkpoint

    from tests.two_processes import make

    script = Path(__file__).parent / "two_processes.py"
    launch = [
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        "save",
        str(tmp_path / "dcp"),
    ]
    done = subprocess.run([sys.executable, "-m", *launch], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    expected, found = make().state_dict(), {key: torch.zeros_like(value) for key, value in make().state_dict().items()}
    checkpoint.load(found, checkpoint_id=tmp_path / "dcp")
    assert all(torch.equal(found[key], value + 1) for key, value in expected.items())


@pytest.mark.parametrize(("encodings", "more"), [("cable", []), ("rope,cable", ["--jobs", "2"])])
def test_the_training_benchmark_measures_one_cell_at_a_time(tmp_path, encodings, more):
    small = [TINY[0], "length=16", "micro_batch=2", "tokens_per_update=32", "vocab_size=2048", "workers=0"]
    settings = [part for setting in small for part in ("--set", setting)]
    results = tmp_path / "training.jsonl"
    arguments = ["bench", "train", "--sizes", "tiny", "--encodings", encodings, "--steps", "100" if more else "20"]
    result = CliRunner().invoke(app, [*arguments, *more, *settings, "--results", str(results)])
    assert result.exit_code == 0, result.output
    rows = records.read(results)
    assert {row["encoding"] for row in rows} == set(encodings.split(","))
    assert all(row["tokens_per_second"] > 0 for row in rows), rows
    assert "| cable |" in records.training_markdown(rows)


@pytest.mark.parametrize(
    ("name", "encoding"), [("gpt-embedded", "cable"), ("gpt-embedded", "rope"), ("bert-embedded", "cable")]
)
def test_compiled_layers_share_one_graph_and_change_nothing(shards, name, encoding):
    torch.manual_seed(0)
    overrides = "{hidden_size = 32, num_hidden_layers = 3, num_attention_heads = 2}"
    plain = pretraining.make_model(small(shards, name, encoding=encoding, overrides=overrides)).eval()
    compiled = copy.deepcopy(plain)
    counter = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    pretraining.compile_layers(compiled, backend=counter, fullgraph=True)
    text = torch.randint(0, 300, (2, 33))
    for model in (plain, compiled):
        model.config.use_cache = False
        model(input_ids=text, labels=text).loss.backward()
    assert counter.frame_count == 2, "one graph for all layers, one for the loss"
    for (key, a), (_, b) in zip(plain.named_parameters(), compiled.named_parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-6), key
