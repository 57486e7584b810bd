"""Studies, their tables and figures."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cable_attn import (
    cells,
    evaluation,
    findings,
    jobs,
    passkey,
    pretraining,
    study,
    summary,
)
from cable_attn.cli import app
from cable_attn.errors import CableError
from cable_attn.files import alone
from cable_attn.tables import LengthTable

TOML = """
title = "A test"
recipe = "gpt-embedded"
encodings = ["cable", "alibi"]
lengths = [16, 64]
overrides = [
  "overrides={hidden_size = 32, num_hidden_layers = 1, num_attention_heads = 2}", "vocab_size=300", "length=16",
  "micro_batch=4", "tokens_per_update=64", "steps=6", "save_every=2", "log_every=1", "eval_windows=4",
]
paper = "wikitext103-tiny"

[reading]
tokens = 2000
passkey = 1
"""


@pytest.fixture
def file(tmp_path, shards) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(TOML.replace("passkey = 1", "").replace("overrides = [", f'overrides = ["path={shards}",'))
    return path


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "cable_attn", "study", *map(str, arguments)]


def measured(out: Path) -> dict[str, list]:
    """The results of each cell, without what differs between two runs."""
    found = {}
    for path in sorted(out.glob("*/evaluation.json")):
        row = json.loads(path.read_text())
        found[row["cell"]] = [{**result, "seconds": 0} for result in row["results"]], row["checkpoint_sha256"]
    return found


def kill_at(moment: Path, arguments: list[str]) -> None:
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not moment.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_a_study_killed_twice_goes_on_and_ends_the_same(file, tmp_path):
    """While a cell is read, and while the next one saves a checkpoint."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert cells.run(study.load(str(file)), whole) == {}
    for moment in ("cable-0/config.json", "alibi-0/checkpoints/checkpoint-2"):
        kill_at(cut / moment, command("run", file, "--out", cut))
        assert (cut / moment).exists() and not (cut / "alibi-0" / "evaluation.json").exists()
    assert cells.run(study.load(str(file)), cut) == {}
    assert measured(cut) == measured(whole) and len(measured(cut)) == 2


@pytest.mark.parametrize("is_same", [True, False])
def test_a_reading_that_was_cut_off_goes_on_with_the_next_length(is_same, file, tmp_path, monkeypatch):
    """If it was of the same model."""
    found, whole, cut = study.load(str(file)), tmp_path / "whole", tmp_path / "cut"
    assert cells.run(found, whole, only=["cable-0"]) == {}
    real, read = evaluation.measure, []

    def measure(model, text, length, *rest):
        read.append(length)
        if len(read) == 2:
            raise KeyboardInterrupt
        return real(model, text, length, *rest)

    monkeypatch.setattr(evaluation, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        cells.run(found, cut, only=["cable-0"])
    kept = cut / "cable-0/reading.json"
    if not is_same:
        kept.write_text(kept.read_text().replace('"checkpoint_sha256": "', '"checkpoint_sha256": "0'))
    assert cells.run(found, cut, only=["cable-0"]) == {}
    first, *others = found.lengths
    assert read[2:] == (others if is_same else [first, *others])
    assert measured(cut) == measured(whole) and not kept.exists()


def test_a_failed_cell_does_not_stop_the_others_and_jobs_share_the_work(file, tmp_path):
    text = file.read_text() + '\n[variants]\nbroken = ["encoding=alibi", "path=nowhere"]\n'
    text = text.replace('"cable", "alibi"]', '"cable"]')
    file.write_text(text.replace("tokens = 2000", 'tokens = 2000\npath = "embedded"'))
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["study", "run", str(file), "--out", str(out), "--jobs", "2"])
    assert done.exit_code == 1
    assert re.search(r"broken-0 failed: .*nowhere", done.output)
    assert set(measured(out)) == {"cable-0"}
    assert "nowhere" in (out / "broken-0" / "failure.txt").read_text()
    file.write_text("speeds = true\n" + file.read_text())
    refused = CliRunner().invoke(app, ["study", "run", str(file), "--out", str(out), "--jobs", "9"])
    assert "would let them share a GPU" in str(refused.exception)
    again = CliRunner().invoke(app, ["study", "report", str(file), "--out", str(out)])
    assert again.exit_code == 0 and "Not done: broken-0" in again.output
    launched = cells.command("f.toml", out, study.load(str(file)).cells()[0], ["steps=1"], ["srun", "--gpus=1"])
    assert launched[:2] == ["srun", "--gpus=1"] and launched[-4:] == ["--out", str(out), "--only", "cable-0"]


def test_passkeys_are_part_of_a_study(tmp_path):
    file = tmp_path / "small.toml"
    file.write_text(TOML.replace("lengths = [16, 64]", "lengths = [96, 128]").replace('"alibi"]', "]"))
    small = study.load(str(file), ["steps=2"])
    told = []
    assert cells.run(small, tmp_path / "out", watch=lambda *what: told.append(what[1:])) == {}
    shares = [share for what, share in told if what.startswith("looking for pass keys in ")]
    assert len(shares) == 2 * len(passkey.DEPTHS) and sorted(shares) == shares and shares[-1] == 1
    [row] = cells.results(small, tmp_path / "out")
    assert {(r["length"], r["depth"]) for r in row["passkey"]} == {(n, d) for n in (96, 128) for d in passkey.DEPTHS}
    assert list(findings.found_by_length([row])["cable"]) == [96, 128]


def test_a_trained_model_is_read_again_with_another_config(file, tmp_path):
    """Each stands in the tables below the model that was trained."""
    text = file.read_text().replace('"alibi"]', '"rope"]')
    file.write_text(f"""{text}
[again."rope, YaRN"]
of = "rope"
encoding_options = {{scaling = "yarn", factor = 4.0}}

[again."cable, backwards"]
of = "cable"
attention_backend = "reference"
""")
    small = study.load(str(file), ["steps=2"])
    assert cells.run(small, tmp_path / "out") == {}
    found = findings.by_variant(list(cells.results(small, tmp_path / "out")))
    assert list(found) == ["cable", "cable, backwards", "rope", "rope, YaRN"]
    assert found["cable, backwards"][64] == pytest.approx(found["cable"][64], rel=1e-4)
    assert found["rope, YaRN"][64] != found["rope"][64]
    done = CliRunner().invoke(app, ["study", "report", str(file), "steps=2", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0 and "rope, YaRN" in (tmp_path / "out" / "table.md").read_text()
    gathered = summary.gather(tmp_path / "out")
    [places] = [figure for figure in summary.figures(gathered) if figure.name == "places"]
    assert list(places.content[0]) == ["cable", "cable, backwards", "rope", "rope, YaRN"]
    without = re.sub(r"\[again.*", "", text := file.read_text(), flags=re.DOTALL)
    file.write_text(without)
    with pytest.raises(CableError, match=r"\(again was .* and is None\)"):
        list(cells.results(study.load(str(file), ["steps=2"]), tmp_path / "out"))
    file.write_text(text.replace('"yarn"', '"ntk"'))
    with pytest.raises(CableError, match=r"again.rope, YaRN.encoding_options.scaling was 'yarn' and is 'ntk'"):
        list(cells.results(study.load(str(file), ["steps=2"]), tmp_path / "out"))


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ('[again.more]\nof = "rop"', "unknown variant (of) in [again.'more'] 'rop'"),
        ('[again.more]\nof = "cable"\nattention_prun = 0.1', "Did you mean 'attention_prune'?"),
        ('[again.alibi]\nof = "cable"', "has the name of a variant"),
        ("[seeds_of]\nrope = [1]", "unknown variant in seeds_of 'rope'"),
        ('[same_as]\nrope = "first/rope"', "unknown variant in same_as 'rope'"),
        ('[same_as]\ncable = "first"', "same_as.cable must be like 'books/cable', got 'first'"),
    ],
)
def test_bad_names_in_a_study_are_found_before_training(section, words, file):
    file.write_text(f"{file.read_text()}\n{section}\n")
    with pytest.raises(CableError) as error:
        study.load(str(file))
    assert words in str(error.value)


def test_variants_may_have_seeds_of_their_own(file):
    file.write_text(f"{file.read_text()}\n[seeds_of]\ncable = [0, 1, 2]\n")
    assert [cell.name for cell in study.load(str(file)).cells()] == ["cable-0", "cable-1", "cable-2", "alibi-0"]


def test_stored_results_outlive_new_settings(file, tmp_path):
    """What was stored before a setting existed had its default."""
    small = study.load(str(file), ["steps=2"])
    cells.run(small, tmp_path / "out", only=["cable"])
    path = tmp_path / "out" / "cable-0" / "evaluation.json"
    row = json.loads(path.read_text())
    del row["settings"]["recipe"]["train"]["clip"], row["settings"]["reading"]["stride"]
    path.write_text(json.dumps(row))
    assert [found["cell"] for found in cells.results(small, tmp_path / "out")] == ["cable-0"]
    with pytest.raises(CableError, match=r"recipe.train.clip was 1.0 and is 2.0"):
        list(cells.results(study.load(str(file), ["steps=2", "clip=2.0"]), tmp_path / "out"))


def test_results_of_other_settings_never_mix(file, tmp_path):
    first = study.load(str(file), ["steps=2"])
    cells.run(first, tmp_path / "out", only=["cable"])
    assert [cell.name for cell in study.choose(first, ["alibi-0"])] == ["alibi-0"]
    with pytest.raises(CableError, match=r"recipe.train.steps was 2 and is 3"):
        cells.run(study.load(str(file), ["steps=3"]), tmp_path / "out", only=["cable"])


def test_a_file_that_holds_no_results_is_named(file, tmp_path):
    (tmp_path / "cable-0").mkdir()
    (tmp_path / "cable-0/evaluation.json").write_text("{}")
    with pytest.raises(CableError, match=r"evaluation.json' holds no results of a cell. Delete it"):
        cells.run(study.load(str(file)), tmp_path, only=["cable"])


def test_a_trained_cell_of_another_recipe_is_refused(file, tmp_path):
    """Also when its results are lost, or come from another study."""
    out = tmp_path / "out"
    cells.run(study.load(str(file), ["steps=2"]), out, only=["cable"])
    (out / "cable-0" / "evaluation.json").unlink()
    told = cells.run(study.load(str(file), ["steps=3"]), out, only=["cable"])
    assert "model of another recipe: train.steps was 2 and is 3" in told["cable-0"]
    file.write_text('trained_by = "elsewhere"\n' + file.read_text())
    told = cells.run(study.load(str(file), ["steps=2"]), out, only=["cable"])
    assert "Run the study 'elsewhere' first" in told["cable-0"]
    file.write_text(file.read_text().replace("elsewhere", "out"))
    reader = study.load(str(file), ["steps=2"])
    assert cells.run(reader, tmp_path / "reader", only=["cable"]) == {}
    assert {path.name for path in (tmp_path / "reader" / "cable-0").iterdir()} == {"evaluation.json"}


def test_a_study_takes_over_what_another_one_has_done(file, tmp_path):
    """Under its own names, if the settings are the same, and never trains it itself."""
    first, later = tmp_path / "first", tmp_path / "later"
    text = file.read_text().replace('["cable", "alibi"]', '["alibi"]')
    file.write_text(f'{text}\n[variants]\nmine = ["encoding=cable"]\n[same_as]\nmine = "first/cable"\n')
    taking = study.load(str(file), ["steps=2"])
    assert [row["tokens"] for row in study.plan(taking)] == [128, 0]
    told = cells.run(taking, later)
    assert list(told) == ["mine-0"] and "mine-0 is first/cable-0, whose results are not in" in told["mine-0"]
    assert not (later / "mine-0" / "config.json").exists()
    file.with_name("own.toml").write_text(text.replace('["alibi"]', '["cable"]'))
    own = study.load(str(file.with_name("own.toml")), ["steps=2"])
    assert cells.run(own, first) == {} == cells.run(taking, later) == summary.failures(later)
    [row] = cells.results(own, first)
    assert {found["cell"]: found["results"] for found in cells.results(taking, later)}["mine-0"] == row["results"]
    assert list(findings.by_variant(list(cells.results(taking, later)))) == ["alibi", "mine"]
    with pytest.raises(CableError, match=r"first.cable-0.*steps was 2 and is 3"):
        cells.run(study.load(str(file), ["steps=3"]), tmp_path / "again")


def test_a_folder_never_mixes_settings(file, tmp_path):
    """Told before the other cell is trained, and by a report."""
    cells.run(study.load(str(file), ["steps=2"]), tmp_path / "out", only=["cable"])
    other = study.load(str(file), ["steps=3"])
    with pytest.raises(CableError, match="Give the same overrides"):
        cells.run(other, tmp_path / "out", only=["alibi"])
    assert not (tmp_path / "out/alibi-0").exists()
    with pytest.raises(CableError, match="Give the same overrides"):
        list(cells.results(other, tmp_path / "out"))


def test_results_of_other_tokens_never_mix(file, shards, tmp_path):
    own = shutil.copytree(shards, tmp_path / "tokens")
    file.write_text(file.read_text().replace(str(shards), str(own)))
    small = study.load(str(file), ["steps=2"])
    assert cells.run(small, tmp_path / "out", only=["cable"]) == {}
    made_anew(own)
    with pytest.raises(CableError, match="has changed since cable-0 was trained"):
        cells.run(small, tmp_path / "out", only=["alibi"])
    assert not (tmp_path / "out/alibi-0").exists()


@pytest.mark.parametrize("what", ["trained", "read"])
def test_every_cell_is_trained_and_read_on_the_same_tokens(what, file, shards, tmp_path):
    own = {name: shutil.copytree(shards, tmp_path / name) for name in ("trained", "read")}
    text = file.read_text().replace(str(shards), str(own["trained"]))
    file.write_text(text.replace("tokens = 2000", f'tokens = 2000\npath = "{own["read"]}"'))
    small = study.load(str(file), ["steps=2"])
    assert cells.run(small, tmp_path / "out", only=["cable"]) == {}
    made_anew(own[what])
    with pytest.raises(CableError, match=f"{what}' has changed since cable-0 was {what}"):
        cells.run(small, tmp_path / "out", only=["alibi"])


def made_anew(shards: Path) -> None:
    manifest = json.loads((shards / "manifest.json").read_text())
    (shards / "manifest.json").write_text(json.dumps({**manifest, "made": "anew"}))


def test_a_model_never_reads_the_tokens_of_another_tokenizer(file, shards, tmp_path):
    """Of the same size, in the folder that its own were in."""
    own = shutil.copytree(shards, tmp_path / "tokens")
    file.write_text(file.read_text().replace(str(shards), str(own)))
    small = study.load(str(file), ["steps=2"])
    assert cells.run(small, tmp_path / "out", only=["cable"]) == {}
    (tmp_path / "out/cable-0/evaluation.json").unlink()
    tokenizer = json.loads((own / "tokenizer/tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, other = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (own / "tokenizer/tokenizer.json").write_text(json.dumps(tokenizer))
    told = cells.run(small, tmp_path / "out", only=["cable"])
    assert "made with another tokenizer than the model's. Prepare them with --tokenizer" in told["cable-0"]


def test_what_did_not_fit_into_memory_is_no_result_and_is_read_the_next_time(file, tmp_path, monkeypatch):
    small, real, read = study.load(str(file), ["steps=2"]), evaluation.measure, []

    def measure(model, text, length, *rest):
        read.append(length)
        if read == [16, 64]:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(model, text, length, *rest)

    monkeypatch.setattr(evaluation, "measure", measure)
    told = cells.run(small, tmp_path / "out", only=["cable"])
    assert "64 tokens at once did not fit into memory" in told["cable-0"]
    assert not (tmp_path / "out/cable-0/evaluation.json").exists()
    assert cells.run(small, tmp_path / "out", only=["cable"]) == {} and read == [16, 64, 64]
    [row] = cells.results(small, tmp_path / "out")
    assert [found["length"] for found in row["results"] if found["perplexity"] > 1] == [16, 64]


def test_a_failure_that_nobody_thought_of_is_kept_with_where_it_was(file, tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "find_held_out", lambda *rest: 1 / 0)
    told = cells.run(study.load(str(file), ["steps=2"]), tmp_path, only=["cable"])
    assert told["cable-0"] == "ZeroDivisionError: division by zero" == summary.failures(tmp_path)["cable-0"]
    assert "test_study.py" in (tmp_path / "cable-0/failure.txt").read_text()


@pytest.mark.parametrize(
    ("override", "words"),
    [("seed=7", "a study has its own seeds"), ("encoding=rope", "sets model.encoding itself. Choose variants")],
)
def test_an_override_that_would_be_lost_is_refused(file, override, words):
    with pytest.raises(CableError, match=words):
        study.load(str(file), [override])


def test_a_recipe_may_lie_beside_its_study(tmp_path):
    (tmp_path / "mine.toml").write_text("[train]\nsteps = 3\n")
    (tmp_path / "table.toml").write_text('recipe = "mine.toml"\nencodings = ["cable"]\nlengths = [8]\n')
    assert study.load(str(tmp_path / "table.toml")).cells()[0].recipe().train.steps == 3


def test_a_table_of_several_training_lengths_claims_none():
    row = {"results": [], "settings": {"recipe": {"data": {"length": 16}}}}
    other = {**row, "settings": {"recipe": {"data": {"length": 32}}}}
    assert summary.Gathered("x", [row, row], {}, {}).trained_at == 16
    assert summary.Gathered("x", [row, other], {}, {}).trained_at is None
    table = LengthTable("x", {"a": {16: [1.0]}, "b": {16: [2.0]}}, None)
    assert table.header() == ["16"] and "Trained" not in table.caption


def test_a_study_that_is_told_to_stop_starts_nothing_more(tmp_path):
    """Not even the next table of a paper."""
    script = f"""
from itertools import pairwise
from pathlib import Path
from cable_attn.jobs import run_in_processes
commands = {{name: ["sleep", "30"] for name in "abc"}}
run_in_processes(commands, Path({str(tmp_path)!r}), 1, lambda name, what: print(name, what, flush=True))
print("went on", flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "a running\n"
    process.send_signal(signal.SIGTERM)
    told = process.communicate(timeout=30)[0]
    assert process.returncode == 128 + signal.SIGTERM and "went on" not in told and "b running" not in told


def test_a_launcher_that_cannot_start_fails_every_cell_and_hangs_none(tmp_path):
    commands = {name: ["no-such-launcher", name] for name in "abcde"}
    failed = jobs.run_in_processes(commands, tmp_path, 2, lambda name, what: None)
    assert sorted(failed) == list("abcde") and "cannot start 'no-such-launcher'" in failed["a"]


def test_measuring_that_is_told_to_stop_leaves_no_process_behind(tmp_path):
    script = """
import sys
from itertools import pairwise
from pathlib import Path
from cable_attn.jobs import Process, in_turn

class Sleeper(Process):
    warm = measured = False
    def begin(self): pass
    def start(self, alone):
        self.open(["sleep", "600"], Path(sys.argv[1]) / "log")
        print(self.process.pid, flush=True)

list(in_turn([Sleeper(), Sleeper()], 2))
"""
    process = subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE, text=True)
    sleepers = [int(process.stdout.readline()) for _ in range(2)]
    process.terminate()
    assert process.wait(30) == 143
    for sleeper in sleepers:
        with pytest.raises(ProcessLookupError):
            os.kill(sleeper, 0)


def test_two_processes_never_work_on_one_cell(file, tmp_path):
    small = study.load(str(file), ["steps=2"])
    (tmp_path / "out" / "cable-0").mkdir(parents=True)
    with alone(tmp_path / "out" / "cable-0", "cell"):
        told = []
        assert cells.run(small, tmp_path / "out", only=["cable"], watch=lambda *what: told.append(what)) == {}
    assert told == [("cable-0", "another process works on it", 0.0)]
    assert not (tmp_path / "out/cable-0/failure.txt").exists()


def test_what_another_process_has_just_read_is_not_read_again(file, tmp_path, monkeypatch):
    """It ended between the look and the lock."""
    small, out = study.load(str(file), ["steps=2"]), tmp_path / "out"
    assert cells.run(small, out, only=["cable"]) == {}
    looks, real = [], cells.stored_result
    monkeypatch.setattr(cells, "_read", lambda *rest: pytest.fail("it is read again"))
    monkeypatch.setattr(cells, "stored_result", lambda *rest: looks.append(1) or (real(*rest) if looks[1:] else None))
    assert cells.run_cell(small.cells()[0], out)["cell"] == "cable-0" and len(looks) == 2


def test_what_reading_needs_is_checked_before_training(file, tmp_path):
    text = file.read_text().replace("tokens = 2000", "tokens = 2000\ntasks = ['hellaswag']\ntask_folder = 'none'")
    file.write_text(text)
    told = cells.run(study.load(str(file)), tmp_path / "out")
    assert "'hellaswag' needs a file that folder 'none' lacks" in told["cable-0"]
    assert not (tmp_path / "out" / "cable-0" / "recipe.toml").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('recipe = "gpt-embedded"\nencodings = ["cable"]\nlengths = [8]\npaper = "fineweb"', "Did you mean"),
        ('recipe = "gpt-embedded"\nlengths = [8]', "lacks encodings"),
        ('recipe = "gpt-embedded"\nencodings = "cable"\nlengths = [8]', "encodings must be a list, got 'cable'"),
        ('recipe = "gpt-embedded"\nvariants = ["cable"]\nlengths = [8]', "variants must be a table, got ['cable']"),
        ('recipe = "gpt-embedded"\nencodings = ["cabel"]\nlengths = [8]', "Did you mean 'cable'"),
        ('recipe = "gpt-embedded"\nencodings = ["cable"]\nlenghts = [8]', "Did you mean 'lengths'"),
        ('recipe = "gpt-embedded"\nencodings = ["cable"]\nlengths = [8]\n[reading]\ntoken = 1', "'tokens'"),
        ("a = [", "is not TOML"),
    ],
)
def test_bad_studies_are_named(text, words, tmp_path):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(CableError) as error:
        study.load(str(tmp_path / "bad.toml"))
    assert words in str(error.value)


def test_every_study_of_the_package_loads_and_the_papers_numbers_are_there():
    for name in study.builtin():
        found = study.load(name)
        numbers = findings.paper(found.paper)
        if numbers is not None:
            assert set(found.variants) <= set(numbers["rows"]), name
            assert all(str(length) in row for row in numbers["rows"].values() for length in found.lengths), name
    output = CliRunner().invoke(app, ["reproduce", "table1", "--dry-run"]).output
    assert output.count("cable-0") == 2 and "1,179,648,000" in output


def test_training_mixes_passkey_texts_in(tmp_path, monkeypatch):
    """And the next cell of a study finds the tokens that this one has made."""
    chosen = study.load("demo", ["passkey=0.5", "path=embedded", "vocab_size=400"]).cells()[0].recipe()
    data = pretraining.load_data(chosen, tmp_path / "cable-0")
    texts = [data.tokenizer.decode(data.train[n]["input_ids"]) for n in range(60)]
    share = sum("What is the pass key? The pass key is" in text for text in texts) / 60
    assert 0.3 < share < 0.7
    assert all(len(data.train[n]["input_ids"]) == chosen.data.length for n in range(60))
    monkeypatch.setattr(pretraining, "find_tokenizer", None)  # nothing is made twice
    (tmp_path / "alibi-0").mkdir()
    again = pretraining.load_data(chosen, tmp_path / "alibi-0")
    assert again.manifest == data.manifest
    assert torch.equal(again.train[3]["input_ids"], data.train[3]["input_ids"])
    assert torch.equal(data.train[3]["labels"], data.train[3]["input_ids"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("lengths = [0]", "lengths must be at least 1, got 0"),
        ("lengths = []", "lengths is empty, and cable-0 is read at some"),
        ('lengths = "128"', "lengths must be a list, got '128'"),
        ("lengths = [16, 1.5]", "lengths[1] must be a whole number, got 1.5"),
        ("lengths = [16]\nseeds = 0", "seeds must be a list, got 0"),
        ("lengths = [16]\nseeds_of = {cable = [-1]}", "seeds_of.cable must be at least 0, got -1"),
        ("lengths = [16]\nseeds = [0, 0]", "seeds has the same number twice"),
        ("lengths = [16]\nseeds = []", "seeds is empty. Give at least one"),
        ('lengths = [16]\nagain = {x = {of = "cable", attention_window = 0}}', "attention_window must be"),
        ("lengths = [16]\ntitle = 3", "title must be a text, got 3"),
        ("lengths = [16]\noverrides = [3]", "overrides[0] must be a text, got 3"),
        ("lengths = [16]\nreading = 3", "reading must be a table, got 3"),
        ('lengths = [16]\nagain = {x = "y"}', "again.x must be a table, got 'y'"),
        ("lengths = [16]\n[reading]\nstride = -1", "reading.stride must be at least 0, got -1"),
        ("lengths = [16]\n[reading]\nstride = 32", "reading.stride=32 is longer than the shortest length, 16"),
        ('lengths = [16]\n[reading]\ntasks = "hellaswag"', "reading.tasks must be a list, got 'hellaswag'"),
        ('lengths = [16]\n[reading]\ntasks = ["hellaswag"]\ntask_folder = "none"', "that folder 'none' lacks"),
        ('lengths = [16]\n[variants]\n"a/b" = []', "the variant 'a/b' must do as a folder's name"),
        ('lengths = [16]\n[variants]\n"a, b" = []', "the variant 'a, b' must do as a folder's name"),
        ("lengths = [1000000]", "'embedded', validation, gives"),
        ("lengths = [16]\n[reading]\nbeginnings = 64\ntokens = 40", "gives 1 tokens; 16 needs more"),
        ("lengths = [65536, 65537]\n[reading]\nsame_tokens = true", "lengths that predict the same tokens need"),
    ],
)
def test_bad_values_are_named_before_anything_is_trained(change, words, tmp_path):
    file = tmp_path / "bad.toml"
    file.write_text(f'recipe = "gpt-embedded"\nencodings = ["cable"]\n{change}\n')
    with pytest.raises(CableError) as error:
        for cell in study.load(str(file)).cells():
            cells.check_reading(cell)
    assert words in str(error.value)


def test_a_run_that_was_resumed_took_the_time_of_both_parts(file, tmp_path):
    """Also if the first was killed, and so could not tell."""
    chosen = study.load(str(file), ["save_every=2"]).cells()[0].recipe()
    pretraining.run(chosen, tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    killed = [{**json.loads(line), "seconds": 900.0 + n} for n, line in enumerate(lines[:4])]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in killed) + '{"step": 3, "lo')
    shutil.rmtree(tmp_path / "checkpoints/checkpoint-6")
    (tmp_path / "model.safetensors").unlink()
    pretraining.run(chosen, tmp_path, resume=True)
    assert 903 < cells.training_record(tmp_path)["train_runtime"] < 960


def test_speeds_are_those_of_the_second_half(tmp_path):
    lines = [
        {"step": n, "tokens": n, "loss": 1.0, "tokens_per_second": speed} for n, speed in enumerate((1, 9, 5, 6, 7))
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert cells.training_record(tmp_path)["median_tokens_per_second"] == 6
