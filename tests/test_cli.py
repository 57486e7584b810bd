"""The command line as people meet it: in its own process, with its exit codes."""

from __future__ import annotations

import csv
import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import cable_attn
from cable_attn import CableError, CableGPTForCausalLM, cli, summary
from cable_attn.cli import app
from cable_attn.cli import study as study_commands
from cable_attn.data import embedded_corpus, train_bpe
from cable_attn.models.loading import load_causal_lm
from cable_attn.report import forgetting_figure
from cable_attn.tables import LengthTable

from .conftest import small_gpt

SMALL = ["--steps", "6", "--length", "16", "--eval-tokens", "1024", "--encodings", "cable,rope"]


def start(*args: str, **kwargs) -> subprocess.Popen:
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    command = [sys.executable, "-m", "cable_attn", *args]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **kwargs
    )


def cable(*args: str) -> tuple[int, str, str]:
    process = start(*args)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


@pytest.fixture
def in_process(monkeypatch, capsys):
    """The same without waiting for a new process."""

    def call(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["cable", *args])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    return call


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """One small demo, for all tests that only look."""
    out = tmp_path_factory.mktemp("demo") / "run"
    code, printed, err = cable("demo", "--out", str(out), *SMALL)
    assert code == 0, err
    assert "cable" in printed and "rope" in printed and "16×" in printed
    assert printed.strip().endswith(str(out / "report.html"))
    return out


def table(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "table.csv").open(encoding="utf-8")))


def test_demo_leaves_numbers_figure_and_checkpoints(run):
    rows = table(run)
    assert [(row["name"], row["length"]) for row in rows] == [
        (name, str(length)) for name in ("cable", "rope") for length in (16, 32, 64, 128, 256)
    ]
    assert all(float(row["mean"]) > 1 for row in rows)
    assert (run / "perplexity.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (run / "perplexity.svg").read_text()
    model = AutoModelForCausalLM.from_pretrained(run / "cable-0")
    tokenizer = AutoTokenizer.from_pretrained(run / "cable-0")
    assert type(model).__name__ == "CableGPTForCausalLM"
    ids = tokenizer("It is a truth", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] == ids.shape[1] + 3
    assert {path.name for path in run.iterdir()} == {
        "cable-0", "rope-0", "table.md", "table.csv", "table.tex", "perplexity.png", "perplexity.svg",
        "perplexity.pdf", "places.png", "places.svg", "places.pdf", "loss.png", "loss.svg", "loss.pdf", "demo.json",
        "report.html",
    }  # fmt: skip


def test_demo_keeps_what_is_done_and_can_add(run, tmp_path, in_process):
    out = tmp_path / "copy"
    shutil.copytree(run, out)
    before = (out / "cable-0" / "model.safetensors").stat().st_mtime_ns
    code, _, err = in_process("demo", "--out", str(out), *SMALL[:-1], "cable,nope")
    assert code == 0, err
    assert (out / "cable-0" / "model.safetensors").stat().st_mtime_ns == before
    assert {row["name"] for row in table(out)} == {"cable", "nope"}


def test_a_killed_demo_goes_on_and_ends_the_same(run, tmp_path, in_process):
    """kill −9 while it works; the second call ends with the numbers of the uninterrupted run."""
    process = start("demo", "--out", str(tmp_path), *SMALL)
    deadline = time.monotonic() + 120
    while (
        not (tmp_path / "rope-0" / "metrics.jsonl").exists() and time.monotonic() < deadline and process.poll() is None
    ):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (tmp_path / "cable-0" / "evaluation.json").exists()
    assert not (tmp_path / "rope-0" / "evaluation.json").exists()
    code, _, err = in_process("demo", "--out", str(tmp_path), *SMALL)
    assert code == 0, err
    assert table(tmp_path) == table(run)


def test_demo_on_own_text(tmp_path, in_process):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 400)
    options = ["--steps", "2", "--length", "4", "--encodings", "alibi"]
    code, _, err = in_process("demo", "--text", str(text), "--out", str(tmp_path / "run"), *options)
    assert code == 0, err
    assert {row["name"] for row in table(tmp_path / "run")} == {"alibi"}


def test_eval(run, in_process):
    code, out, err = in_process("eval", str(run / "cable-0"), "--lengths", "16,64", "--tokens", "512")
    assert code == 0, err
    assert re.search(r"64\s*│\s*\d+\.\d\d", out)


def test_eval_stores_all_that_it_measured(run, in_process, tmp_path):
    checkpoint, out = str(run / "cable-0"), tmp_path / "results.json"
    measured = ["--stride", "8", "--by-place", "--same-tokens", "--passkey", "1", "--form", "needle"]
    code, told, err = in_process(
        "eval", checkpoint, "--lengths", "32,256", "--tokens", "1024", *measured, "--out", str(out)
    )
    assert code == 0, err
    result = json.loads(out.read_text())
    assert [row["length"] for row in result["perplexity"]] == [32, 256]
    assert len({row["tokens"] for row in result["perplexity"]}) == 1  # on the same tokens
    assert {"stride": 8, "form": "needle", "lengths": [32, 256]}.items() <= result["settings"].items()
    assert {row["length"] for row in result["passkey"] if "error" not in row} == {256}
    assert "place" in told and (tmp_path / "results-passkey.png").stat().st_size > 1000
    code, told, err = in_process(
        "eval", checkpoint, "--lengths", "16", "--tokens", "64", "--passkey", "1", "--out", str(out)
    )
    assert code == 0, err  # texts that are too short for a passkey have no figure
    assert all("error" in row for row in json.loads(out.read_text())["passkey"]) and "Figure" not in told


def test_a_bad_tiles_file_is_told_when_tiles_are_needed(tmp_path):
    environment = {**os.environ, "CABLE_TILES": str(tmp_path / "absent.json"), "TRITON_INTERPRET": "0"}
    read = "import torch; from cable_attn.attention import tiles; print(tiles.tiles_for(64, torch.bfloat16, 0, (9, 0)))"
    done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, env=environment)
    assert "is not a tiles file of cable bench tiles" in done.stderr
    tiles = {name: [16, 16, 4, 1, False] for name in ("forward_tile", "keys_tile", "queries_tile")}
    (tmp_path / "absent.json").write_text(json.dumps([{"dim": 64, "dtype": "bfloat16", "kernel": 0, **tiles}]))
    done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, env=environment)
    assert "queries=16, keys=16, warps=4, stages=1" in done.stdout


def test_encodings_lists_all(in_process):
    code, out, _ = in_process("encodings")
    assert code == 0
    assert all(name in out for name in cable_attn.ENCODINGS)
    assert "gain_floor=0.0" in out


def test_help_teaches(in_process):
    code, out, _ = in_process("--help")
    assert code == 0 and "Train short, read long" in out and "demo" in out
    code, out, _ = in_process("demo", "--help")
    assert code == 0 and "AutoModelForCausalLM.from_pretrained" in out
    code, out, _ = in_process("--version")
    assert (code, out.strip()) == (0, f"cable-attn {cable_attn.__version__}")


@pytest.fixture
def bad_folders(run, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "triplets.jsonl").write_text('{"query": "a", "positive": "b", "negative": "c"}\n')
    (tmp_path / "short.txt").write_text("Too short to train on.")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    (tmp_path / "runs" / "other").mkdir(parents=True)
    (tmp_path / "runs" / "other" / "recipe.toml").write_text("")
    shutil.copytree(run, tmp_path / "run")
    shutil.copytree(run / "cable-0", tmp_path / "corrupt")
    weights = tmp_path / "corrupt" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    return tmp_path


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["demo", "--encodings", "cabel"], "unknown encoding 'cabel'. Did you mean 'cable'?"),
        (["demo", "--encodings", ","], "--encodings is empty"),
        (["demo", "--text", "{}/nowhere.txt"], "no such file or folder"),
        (["demo", "--text", "{}/empty.txt"], "is empty"),
        (["demo", "--text", "{}/short.txt"], "fewer than one window of 128"),
        (["demo", "--out", "{}/file/run"], "cannot write to folder"),
        (
            ["demo", "--out", "{}/run", "--steps", "7", "--length", "16"],
            "(recipe.train.steps was 6 and is 7)",
        ),
        (["demo", "--out", "{}/run", "--steps", "7", "--length", "16"], "With --fresh the demo begins anew"),
        (["demo", "--out", "{}/run", "--fresh", "--encodings", "nosuch"], "unknown encoding 'nosuch'"),
        (["train", "gpt-embedded", "seed=4294967296", "--out", "{}/seed"], "train.seed must be at most 4294967295"),
        (["demo", "--out", "{}/mine", "--fresh"], "is not empty and no run of the demo"),
        (["demo", "--out", "{}/runs"], "is not empty and no run of the demo"),
        (["demo", "--steps", "0"], "--steps"),
        (["eval", "{}/corrupt"], "cannot be loaded"),
        (["eval", "{}/mine"], "is not a checkpoint: it has no config.json"),
        (["eval", "{}/run"], "run/rope-0."),
        (
            ["eval", "{}/run/cable-0", "--lengths", "96,100", "--tokens", "999", "--same-tokens"],
            "from 2400 on, and need one",
        ),
        (["bench", "train", "--results", "{}/rows"], "cable bench train, at its own sizes, needs an NVIDIA GPU"),
        (
            ["train", "gpt-embedded", "overrides.dtype=foo", "--dry-run"],
            "'dtype': 'foo'}: module 'torch' has no attribute 'foo'.",
        ),
        (["eval", "{}/run/cable-0", "--lengths", "12,x"], "whole numbers like 128,512, got 'x'"),
        (["eval", "{}/run/cable-0", "--text", "{}/short.txt", "--lengths", "512"], "fewer than one window"),
        (["dmeo"], "dmeo"),
        (["eval", "{}/run/cable-0", "--out", "{}/file/results.json"], "cannot write to folder"),
        (["eval", "{}/run/cable-0", "--out", "{}/mine"], "is a folder. Name a file in it"),
        (["data", "prepare", "{}/short.txt", "{}/file", "--tokenizer", "bpe:300"], "cannot write to folder"),
        (["data", "prepare", "{}/empty.txt", "{}/runs/x", "--tokenizer", "bpe:300"], "has no text for train"),
        (["retrieve", "eval", "embedded", "bm25", "--out", "{}/mine"], "is a folder"),
        (["retrieve", "search", "{}/mine", "it", "--encoder", "x", "--cache", "{}/file"], "cannot write to folder"),
        (["retrieve", "embedded", "{}/file"], "cannot write to folder"),
        (["bench", "decode", "rope", "--results", "{}/file/rows"], "cannot write to folder"),
        (["bench", "report", "--docs", "{}/mine", "--results", "{}/mine"], "holds no measurements"),
        (["plot", "training", "--results", "{}/empty.txt"], "holds no measurement yet"),
        (["plot", "training", "--results", "{}/short.txt"], "does not hold one JSON object a line"),
        (["train", "{}/nowhere.toml"], "there is no file"),
        (["study", "run", "{}/nowhere.toml"], "there is no file"),
        (["reproduce", "figure3"], "cable bench train"),
        (
            ["retrieve", "train", "x", "{}/triplets.jsonl", "--out", "{}/new", "--epochs", "0"],
            "epochs must be above 0, got 0.0",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args, words, bad_folders, in_process):
    args = [arg.format(bad_folders) for arg in args]
    if args[0] == "demo" and "--out" not in args:
        args += ["--out", str(bad_folders / "new")]
    before = sorted(str(path) for path in bad_folders.rglob("*"))
    code, _, err = in_process(*args)
    assert code == 2
    assert words in " ".join(err.split()), err
    assert "Traceback" not in err
    after = sorted(str(path) for path in bad_folders.rglob("*"))
    assert after == before, "nothing may be left behind, and nothing may go"
    assert (bad_folders / "mine" / "thesis.txt").exists()


def test_tokens_of_another_tokenizer_are_refused(run, shards, in_process):
    code, _, err = in_process("eval", str(run / "cable-0"), "--data", str(shards), "--lengths", "16")
    assert code == 2 and "were made with another tokenizer than the model's" in " ".join(err.split())


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), Exception("No space left on device (os error 28)")]
)
def test_a_full_disk_is_told(error, monkeypatch, in_process):
    """Also by a library that is not Python."""
    monkeypatch.setattr(cli, "app", lambda: (_ for _ in ()).throw(error))
    code, _, err = in_process("encodings")
    assert code == 2 and "the disk is full" in err


def test_a_real_process_prints_no_traceback(tmp_path):
    code, out, err = cable("demo", "--encodings", "cabel", "--out", str(tmp_path / "run"))
    assert (code, out) == (2, "")
    assert err.startswith("Error: unknown encoding 'cabel'") and err.count("\n") == 1


def test_importing_needs_no_extra_and_does_no_work():
    """Every optional package blocked, no network, no files written, no threads or kernels started."""
    code = """
import sys
for name in ("matplotlib", "triton", "datasets", "tiktoken", "sentence_transformers", "plotly", "tensorboard", "peft",
             "mteb", "lm_eval", "bitsandbytes"):
    sys.modules[name] = None
import socket
def refuse(*args, **kwargs): raise AssertionError("network at import")
socket.socket.connect = refuse
import cable_attn, cable_attn.cli, cable_attn.cells, cable_attn.harness, cable_attn.report
import torch
assert not torch.cuda.is_initialized()
model = cable_attn.CableGPTForCausalLM(cable_attn.CableGPTConfig.preset("tiny", vocab_size=50, hidden_size=32))
print(model(torch.tensor([[1, 2]])).logits.shape)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2, 50" in done.stdout


def test_the_demo_without_matplotlib_says_what_to_install(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    study_commands._draw(summary.gather(run), tmp_path)
    assert "cable-attn[plot]" in capsys.readouterr().out


def test_the_table_marks_the_best_and_what_cannot_be_read():
    console = Console(width=100, color_system=None, record=True)
    console.print(LengthTable("", {"cable": {8: [2.0], 16: [1.5]}, "learnable": {8: [1.75]}}, 8, digits=1).rich())
    text = console.export_text()
    assert re.search(r"learnable\s*│\s*1\.8\s*│\s*–", text)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = train_bpe(embedded_corpus("test"), 300)
    torch.manual_seed(0)
    CableGPTForCausalLM(small_gpt("cable", vocab_size=len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("options", [[], ["--cache", "static"], ["--prefill", "5"], ["--prune", "1e-4"]])
def test_generate_streams_what_the_model_says(checkpoint, options):
    prompt = "It is a truth universally acknowledged"
    model, tokenizer = load_causal_lm(checkpoint)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    wanted = model.generate(ids, max_new_tokens=12, do_sample=False, use_cache=False, pad_token_id=0)[0, ids.shape[1] :]
    done = CliRunner().invoke(
        app, ["generate", str(checkpoint), "--prompt", prompt, "-n", "12", "--temperature", "0", *options]
    )
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == tokenizer.decode(wanted, skip_special_tokens=True).strip()
    assert f"{ids.shape[1]} tokens read" in done.stderr and "12 in all" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--prompt or with --file"),
        (["--prompt", "a", "--cache", "paged"], "unknown cache 'paged'"),
        (["--prompt", "a", "--cache", "static", "--evict", "0.01"], "--evict needs a dynamic cache"),
        (["--prompt", "a", "--evict", "0.01"], "gain_floor above 0"),
        (["--file", "/nowhere/at-all"], "cannot read '/nowhere/at-all'"),
    ],
)
def test_generate_says_what_is_wrong(checkpoint, options, words):
    done = CliRunner().invoke(app, ["generate", str(checkpoint), *options])
    assert done.exit_code != 0 and words in str(done.exception)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_the_generation_benchmarks_measure_models_and_folders(checkpoint, tmp_path, kind):
    results = tmp_path / "rows.jsonl"
    options = ["--lengths", "9,20", "--prune", "1e-3", "--results", str(results)]
    own = {"decode": ["--steps", "3", "--no-compiled", "--batch", "2", "--compare", "4"], "prefill": ["--piece", "4"]}
    options += own[kind]
    done = CliRunner().invoke(app, ["bench", kind, str(checkpoint), *options])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(row["prune"], row["length"]) for row in rows] == [(None, 9), (None, 20), (1e-3, 9), (1e-3, 20)]
    assert all(row["tokens_per_second" if kind == "decode" else "seconds_to_first_token"] > 0 for row in rows)
    if kind == "decode":
        assert [row.get("as_dynamic") for row in rows] == [None, 4, None, 4]
        assert rows[3]["as_unpruned"] == 4 and "as_dynamic 4/4   as_unpruned 4/4" in done.output
    else:
        assert [row["piece"] for row in rows] == [4] * 4


def test_models_that_get_ready_together_are_measured_in_turn(checkpoint, tmp_path):
    """The pruned one in a process of its own; texts are compared behind one prompt."""
    options = ["--lengths", "9,70", "--steps", "2", "--no-compiled", "--jobs", "2", "--compare", "2", "--prune", "1e-3"]
    done = CliRunner().invoke(app, ["bench", "decode", str(checkpoint), *options, "--results", str(tmp_path / "rows")])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    texts = {(row["prune"], row["length"]): (row.get("as_dynamic"), row.get("as_unpruned")) for row in rows}
    assert texts == {(None, 9): (None, None), (None, 70): (2, None), (1e-3, 9): (None, None), (1e-3, 70): (2, 2)}
    assert all(row["tokens_per_second"] > 0 and row["room"] == 128 and "said" not in row for row in rows)


def test_what_reads_all_of_a_static_cache_gets_one_for_each_length():
    from cable_attn.bench import generation

    assert generation.shares("rope@sdpa", [9, 70], 2) == [[9], [70]]
    assert generation.shares("rope", [9, 70], 2) == generation.shares("rope@sdpa", [9, 70], 0) == [[9, 70]]


def test_a_measured_model_makes_room_for_the_next(monkeypatch):
    from cable_attn.bench import generation

    made, alive = [], []

    def build():
        alive.append(sum(one() is not None for one in made))
        model = CableGPTForCausalLM(small_gpt("cable"))
        made.append(weakref.ref(model))
        return model

    rows = list(generation.run({"first": build, "second": build}, [9], batch=1, steps=2, compile=False))
    assert alive == [0, 0] and not any("error" in row for row in rows)

    def fail(self, ids, steps):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(generation.Decoder, "measure", fail)
    rows = list(generation.run({"third": build, "fourth": build}, [9], batch=1, steps=2, compile=False))
    assert alive == [0] * 4 and all("error" in row for row in rows)


def test_a_model_that_fails_in_a_benchmark_does_not_stop_the_others(checkpoint, tmp_path, monkeypatch):
    from cable_attn.bench import generation

    def measure(self, ids, steps):
        if ids.shape[1] == 20:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        return {"tokens_per_second": 1.0, "ms": 1000.0, "peak_mib": None}

    monkeypatch.setattr(generation.Decoder, "measure", measure)
    options = ["--lengths", "9,20", "--prune", "1e-3", "--no-compiled", "--results", str(tmp_path / "rows")]
    done = CliRunner().invoke(app, ["bench", "decode", str(checkpoint), *options])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row.get("error", row.get("length")) for row in rows] == [9, "CUDA out of memory. Tried to allocate"] * 2
    assert generation._agreement(torch.tensor([[1, 2, 3], [1, 2, 3]]), torch.tensor([[1, 2, 3], [1, 4, 3]])) == 1
    options[1] = "20"
    nothing_measured = CliRunner().invoke(app, ["bench", "decode", str(checkpoint), *options])
    assert nothing_measured.exit_code == 1


def test_texts_are_compared_as_soon_as_both_are_there_and_none_is_lost():
    from cable_attn.bench.generation import compare_pruned

    def rows():
        yield {"model": "a, pruned", "said": [[1, 2, 3]]}
        yield {"model": "a", "said": [[1, 2, 4]]}
        yield {"model": "b, pruned", "said": [[1]]}
        raise KeyboardInterrupt

    told = []
    with pytest.raises(KeyboardInterrupt):
        for row in compare_pruned(rows()):
            told.append(row)
    assert told == [{"model": "a"}, {"model": "a, pruned", "as_unpruned": 2}, {"model": "b, pruned"}]


def test_what_a_cache_forgets_is_measured(tmp_path):
    """A short reach: the last layers stop growing, and the text stays the same."""
    torch.manual_seed(0)
    model = CableGPTForCausalLM(small_gpt("cable-nw", qk_norm=True))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("encoding.step.bias"):
                value.fill_(1.0)
    model.save_pretrained(tmp_path / "model")
    np.save(tmp_path / "text.npy", np.arange(600, dtype=np.uint16) % 97)
    command = [
        "bench",
        "forget",
        str(tmp_path / "model"),
        str(tmp_path / "text.npy"),
        "--results",
        str(tmp_path / "rows"),
    ]
    done = CliRunner().invoke(app, [*command, "--tokens", "600", "--piece", "100", "--compare", "20"])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["tokens"] for row in rows] == [100, 200, 300, 400, 500, 600]
    assert max(rows[-1]["kept"]) < 300 and rows[-1]["mib"] < rows[-1]["full_mib"] / 2
    assert rows[-1]["as_full"] == rows[-1]["compared"] == 20 and "as_full 20/20" in done.output
    assert forgetting_figure(rows, tmp_path / "figure")[0].stat().st_size > 1000
    done = CliRunner().invoke(app, [*command, "--tokens", "601"])
    assert "has 600 tokens, --tokens=601 are wanted" in str(done.exception)
    done = CliRunner().invoke(app, [*command, "--tokens", "100", "--piece", "100", "--compare", "0"])
    assert done.exit_code == 0 and "as_full 0/0" in done.output


def test_the_decoding_benchmark_measures_nothing_that_is_wrong(checkpoint, tmp_path, monkeypatch):
    from cable_attn.bench import generation

    monkeypatch.setattr(generation.Decoder, "text", lambda self, ids, steps: ids[:, :steps] * 0 + 7)
    options = ["--lengths", "9", "--no-compiled", "--results", str(tmp_path / "rows")]
    done = CliRunner().invoke(app, ["bench", "decode", str(checkpoint), *options])
    assert done.exit_code != 0 and "nothing is measured" in str(done.exception)
    assert not (tmp_path / "rows").exists()
    done = CliRunner().invoke(app, ["bench", "decode", "ropes", *options])
    assert "Did you mean 'rope'?" in str(done.exception)
    done = CliRunner().invoke(app, ["bench", "decode", "rope@sdp", *options])
    assert "Did you mean 'sdpa'?" in str(done.exception)
    done = CliRunner().invoke(app, ["bench", "decode", "cable, pruned", *options])
    assert "'cable, pruned' needs --prune" in str(done.exception)


def test_a_benchmark_takes_the_backend_that_it_is_told(checkpoint, tmp_path):
    from cable_attn.bench import generation

    made = generation.choose([f"{checkpoint}@reference", f"{checkpoint}@flash", "rope"], "tiny", 1e-3)
    told = [
        (model.config.attention_backend, model.config.attention_prune) for model in (make() for make in made.values())
    ]
    assert told == [("reference", None), ("reference", 1e-3), ("sdpa", None), ("sdpa", 1e-3), ("auto", None)]


def test_serve_speaks_openais_language(checkpoint):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "cable_attn", "serve", str(checkpoint), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        told = _ask(
            server, port, {"model": str(checkpoint), "prompt": "It is a truth", "max_tokens": 8, "temperature": 0}
        )
    finally:
        server.terminate()
        server.wait(30)
    model, tokenizer = load_causal_lm(checkpoint)
    ids = tokenizer("It is a truth", return_tensors="pt")["input_ids"]
    wanted = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert told["choices"][0]["text"] == tokenizer.decode(wanted, skip_special_tokens=True)
    assert told["usage"]["completion_tokens"] == 8


def _ask(server, port, body):
    """Once the server is there."""
    request = urllib.request.Request(f"http://localhost:{port}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    for _ in range(240):
        if server.poll() is not None:
            raise AssertionError(server.stdout.read())
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from error
        except OSError:
            time.sleep(0.5)
    raise AssertionError("no answer")


def test_serve_says_what_is_missing(checkpoint, tmp_path):
    done = CliRunner().invoke(app, ["serve", str(tmp_path)])
    assert done.exit_code != 0 and "has no config.json" in str(done.exception)
    cable_attn.CableBertConfig().save_pretrained(tmp_path)
    shutil.copy(checkpoint / "tokenizer.json", tmp_path)
    done = CliRunner().invoke(app, ["serve", str(tmp_path)])
    assert done.exit_code != 0 and "is an encoder" in str(done.exception)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = CliRunner().invoke(app, ["serve", str(checkpoint), "--host", "127.0.0.1", "--port", port])
    assert done.exit_code != 0 and f"cannot listen at 127.0.0.1:{port}" in str(done.exception)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["decode", "rope", "--size", "tiny", "--lengths", "9", "--text", "TEXT"], "is not a .npy file of token ids"),
        (["forget", "MODEL", "LARGE", "--tokens", "3"], "has a token 70000, and the model knows"),
        (["pruning", "MODEL", "LARGE", "--lengths", "3"], "has a token 70000, and the model knows"),
        (["forget", "MODEL", "TABLE"], "holds float64 [2, 3]; token ids are integers in one row"),
        (["decode", "BROKEN", "--lengths", "9"], "cannot be loaded"),
        (
            ["decode", "MODEL", "--lengths", "9", "--prune", "2"],
            "prune must lie between 0 and 1 (the weight that a row may lose), got 2.0",
        ),
        (["prefill", "rope", "--lengths", "²"], "wants whole numbers"),
    ],
)
def test_a_benchmark_that_cannot_begin_says_why_and_stores_nothing(command, words, checkpoint, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text("{")
    (tmp_path / "text.txt").write_text("It is a truth")
    np.save(tmp_path / "table.npy", np.zeros((2, 3)))
    places = {"MODEL": checkpoint, "BROKEN": tmp_path / "broken", "TEXT": tmp_path / "text.txt"}
    np.save(tmp_path / "large.npy", np.array([1, 2, 70000]))
    places |= {"TABLE": tmp_path / "table.npy", "LARGE": tmp_path / "large.npy"}
    arguments = [str(places.get(part, part)) for part in command]
    done = CliRunner().invoke(app, ["bench", *arguments, "--results", str(tmp_path / "rows")])
    assert isinstance(done.exception, CableError) and words in str(done.exception)
    assert not (tmp_path / "rows").exists()


def test_work_without_a_terminal_is_told_in_lines(monkeypatch):
    """Now and then, when it ends, and not at every step."""
    from io import StringIO

    from cable_attn.cli import common

    written = StringIO()
    monkeypatch.setattr(common, "console", Console(file=written, width=80))
    with common.working() as progress:
        task = progress.add_task("cell-0", total=1.0, what="waiting")
        for share in range(10):
            progress.update(task, completed=share / 10, what=f"training, loss {share}")
        before = written.getvalue()
        progress.told[task] = (progress.told[task][0] - common.LINE_EVERY, "training")
        progress.update(task, completed=0.95, what="training, loss 1")
        progress.update(task, completed=1.0, what="done")
        lines = written.getvalue().splitlines()
    assert before.splitlines() == ["       cell-0   0 %      0 s  training, loss 0"]
    assert [line.split(" s  ")[1] for line in lines] == ["training, loss 0", "training, loss 1", "done"]


def test_eval_refuses_tokens_that_the_model_cannot_read(checkpoint, tmp_path):
    from cable_attn.data.shards import import_tokens

    np.asarray([5, 5000, 5], dtype="<u2").tofile(tmp_path / "a.bin")
    np.asarray([5], dtype="<u2").tofile(tmp_path / "b.bin")
    import_tokens(tmp_path / "data", {"test": tmp_path / "a.bin", "validation": tmp_path / "b.bin"}, 6000, 5)
    for split, words in (("test", "has a token 5000"), ("validation", "hold more out")):
        done = CliRunner().invoke(app, ["eval", str(checkpoint), "--data", str(tmp_path / "data"), "--split", split])
        assert done.exit_code != 0 and words in str(done.exception), done.exception
