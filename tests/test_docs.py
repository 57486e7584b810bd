"""What the documents say is what the code does."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cable_attn import ENCODINGS, CableError, claims, evidence, findings, recipe
from cable_attn.bench import records
from cable_attn.cli import app
from cable_attn.encodings.base import option_names

ROOT = Path(__file__).parent.parent


def test_the_demo_shows_what_the_readme_says_of_it():
    stored = ROOT / "benchmarks/results/demo"
    rows = [json.loads(path.read_text()) for path in stored.glob("*/evaluation.json")]
    found = {row["variant"]: {result["length"]: result["perplexity"] for result in row["results"]} for row in rows}
    assert found["cable"][2048] <= found["cable"][128]
    for name in ("rope", "sinusoidal"):
        assert found[name][2048] > 1.1 * found[name][128]


def test_every_encoding_has_its_row_with_its_options():
    rows = dict(re.findall(r"^\| `([\w-]+)` (\|.*)$", (ROOT / "docs/encodings.md").read_text(), re.MULTILINE))
    assert list(rows) == list(ENCODINGS)
    for name, encoding in ENCODINGS.items():
        if "as `cable`" not in rows[name]:
            assert all(f"`{option}`" in rows[name] for option in option_names(encoding)), name


def test_the_readme_names_every_file():
    tree = (ROOT / "README.md").read_text()
    source = ROOT / "src/cable_attn"
    missing = [path.name for path in source.rglob("*.py") if path.name != "__init__.py" and path.name not in tree]
    assert missing == []


def test_readme_snippets_run():
    """The second Python block: models by preset. On the meta device, so that no weight is made."""
    import torch

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    with torch.device("meta"):
        exec(blocks[1], {})


@pytest.mark.parametrize(("name", "tables"), [("kernels", 3), ("training", 1), ("retrieval", 1), ("generation", 3)])
def test_the_pages_show_the_stored_measurements(name, tables):
    page = (ROOT / f"docs/{name}.md").read_text()
    assert page.count("<!-- end -->") == tables
    assert records.fill(page, ROOT / "benchmarks/results") == page


def test_the_benchmark_report_is_made_from_the_stored_rows(tmp_path):
    page = tmp_path / "kernels.md"
    page.write_text("before\n<!-- attention -->\nold\n<!-- end -->\nafter\n")
    (tmp_path / "training.md").write_text("")
    arguments = ["bench", "report", "--docs", str(tmp_path), "--results", str(ROOT / "benchmarks/results")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert text.startswith("before\n<!-- attention -->\n| B,H,T,D | cable |") and text.endswith("<!-- end -->\nafter\n")
    assert "<svg" in (tmp_path / "attention.svg").read_text()


def test_the_generation_tables_and_figure_are_made_from_rows(tmp_path):
    results = tmp_path / "results"
    results.mkdir()
    for kind, key in (("decode", "tokens_per_second"), ("prefill", "seconds_to_first_token")):
        rows = [
            {"model": model, "batch": 1, "length": length, key: value, "ms": 1e3 / value, "peak_mib": 512}
            for model, value in (("rope", 4.0), ("rope@sdpa", 2.0), ("cable, pruned", 5.0))
            for length in (1024, 65536)
        ]
        rows[-1] |= {"compared": 8, "as_dynamic": 7, "as_unpruned": 6}
        rows.append({**rows[0], "begun": 1, "piece": 8192})  # another run: not what the others are compared with
        rows.append({"model": "t5", "batch": 1, "length": 65536, "error": "out of memory"})
        (results / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = tmp_path / "generation.md"
    page.write_text("<!-- decode -->\n<!-- end -->\n<!-- prefill -->\n<!-- end -->\n")
    result = CliRunner().invoke(app, ["bench", "report", "--docs", str(tmp_path), "--results", str(results)])
    assert result.exit_code == 0, result.output
    assert "| cable, pruned | 1 | 5 (1.25), 0.5 GiB | 5 (1.25), 0.5 GiB |" in page.read_text()
    assert "- cable, pruned, 8 tokens behind 65,536: 7 as with a dynamic cache" in page.read_text()
    assert "| cable, pruned | 1 | 5.000 s (0.40), 0.5 GiB |" in page.read_text()
    assert "| rope, 8,192 at a time | 1 | 4.000 s (1.00), 0.5 GiB |" in page.read_text()
    assert (tmp_path / "generation.svg").stat().st_size > 1000
    with (results / "decode.jsonl").open("a") as file:  # a run that came to nothing
        file.write(json.dumps({"model": "cable", "batch": 1, "error": "no memory", "commit": "later"}) + "\n")
    before = page.read_text()
    report = ["bench", "report", "--docs", str(tmp_path), "--results", str(results)]
    assert CliRunner().invoke(app, report).exit_code == 0 and page.read_text() == before
    with (results / "decode.jsonl").open("a") as file:  # one of some models: the others stay, beside their own RoPE
        for model, value in (("rope", 6.0), ("rope", 8.0), ("nope", 4.0), ("nope", 2.0)):  # of two processes each
            row = {"model": model, "batch": 1, "length": 1024, "tokens_per_second": value, "ms": 1e3 / value}
            file.write(json.dumps(row | {"commit": "later", "begun": 2}) + "\n")
    assert CliRunner().invoke(app, report).exit_code == 0
    text = page.read_text()
    assert "| cable, pruned | 1 | 5 (1.25), 0.5 GiB | 5 (1.25), 0.5 GiB |" in text
    assert "| nope | 1 | 4 (0.50) | – |" in text and "| rope | 1 | 8 (1.00) | – |" in text
    with (results / "decode.jsonl").open("a") as file:  # at the same commit the other length, without RoPE beside it
        row = {"model": "nope", "batch": 1, "length": 65536, "tokens_per_second": 3.0, "ms": 300.0}
        file.write(json.dumps(row | {"commit": "later", "begun": 3}) + "\n")
    assert CliRunner().invoke(app, report).exit_code == 0
    assert "| nope | 1 | 4 (0.50) | 3 | later |" in page.read_text()


def test_the_reproduction_page_lists_every_study_with_its_cost():
    table = CliRunner().invoke(app, ["study", "list", "--markdown"], env={"COLUMNS": "500"}).output.strip()
    assert len(table.splitlines()) > 10
    assert f"<!-- studies -->\n{table}\n<!-- end -->" in (ROOT / "docs/reproduce.md").read_text()


def test_the_training_page_lists_every_recipe():
    page = (ROOT / "docs/training.md").read_text()
    for name in recipe.builtin():
        part = recipe.load(name).train
        assert re.search(
            rf"^\| `{name}` \|.*\| {part.tokens_per_update:,} \| {part.steps:,} \|$", page, re.MULTILINE
        ), name


def test_the_results_page_is_made_from_the_stored_runs_byte_for_byte(tmp_path):
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    pages = {name: tmp_path / name for name in ("docs/results.md", "docs/claims.md", "README.md")}
    (tmp_path / "docs").mkdir()
    for name, page in pages.items():
        text = (ROOT / name).read_text()
        for mark in (evidence.MARK, evidence.CLAIMS):
            text = mark.sub(lambda found: f"{found.group(0).splitlines()[0]}\n<!-- end -->", text)
        page.write_text(evidence.NUMBER.sub(lambda found: f"{found['mark']}?<!-- end -->", text))
    arguments = ["--stored", str(tmp_path / "benchmarks"), "--figures", str(tmp_path / "docs/results")]
    result = CliRunner().invoke(app, ["study", "report", *arguments, "--pages", ",".join(map(str, pages.values()))])
    assert result.exit_code == 0, result.output
    for name, page in pages.items():
        assert page.read_text() == (ROOT / name).read_text(), name
    made, stored = tmp_path / "docs/results", ROOT / "docs/results"
    assert sorted(path.name for path in made.iterdir()) == sorted(path.name for path in stored.iterdir())
    for path in stored.iterdir():
        assert (made / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.fixture
def stored(tmp_path):
    """A copy of what is stored, to be changed."""
    return Path(shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks"))


def test_a_study_whose_cells_had_the_machine_alone_tells_their_speed(stored, tmp_path):
    page = tmp_path / "page.md"
    file = stored / "books.toml"
    file.write_text(file.read_text().replace("lengths =", "speeds = true\nlengths =", 1))
    page.write_text("<!-- study books -->\n<!-- end -->\n<!-- claims -->\n<!-- end -->\n")
    tests = ["books speed at reading: cable > 0.1 * fire", "books memory at training: cable < 0.1 * fire"]
    (stored / "claims.toml").write_text(f"[[claim]]\nnumber = 2\ntests = {json.dumps(tests)}\n")
    evidence.fill(page, stored, tmp_path)
    stored_run = json.loads((stored / "results/books/fire-0/evaluation.json").read_text())
    first = stored_run["results"][0]
    speeds = page.read_text().split("**Thousands of tokens a second")[1]
    row = next(line for line in speeds.splitlines() if line.startswith("| fire |")).split("|")
    assert row[2].strip() == f"{stored_run['training']['median_tokens_per_second'] / 1000:.1f}"
    assert row[3].strip() == f"{first['tokens'] / first['seconds'] / 1000:.1f}"
    assert "✓ books speed at reading: cable" in speeds and "✗ books memory at training: cable" in speeds


def test_a_study_of_models_of_another_one_leaves_their_training_to_that(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- study small-wikitext -->\n<!-- end -->\n")
    evidence.fill(page, ROOT / "benchmarks", tmp_path)
    told = page.read_text()
    assert "The models are those of *small*." in told and "| run | read in s |" in told
    assert "training" not in told.lower().split("<details>")[1]
    assert not list(tmp_path.glob("*-loss.svg")) and list(tmp_path.glob("*-perplexity.svg"))


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        ("study nowhere", "unknown stored study 'nowhere'. Allowed: books, "),
        ("figure books heights", "unknown figure of 'books' 'heights'. Allowed: perplexity, "),
        ("studies books", "<!-- studies books --> in page.md is no mark that is known"),
        ("~ books at 1024: cable", "<!-- ~ books at 1024: cable --> in page.md is no mark that is known"),
        ("× long passkey at 131072: rope, YaRN × 128 over rope", "nothing can be told over 0. Tell both numbers."),
        ("-% books at 1024: alibi over cable", "%: the sentence says that it lies on the other side"),
        ("= nowhere at 1024: cable", "unknown table in page.md 'nowhere'. Allowed: "),
        ("= books at 1024: nobody", "unknown name in page.md 'nobody'. Allowed: "),
        ("= books at 7: cable", "unknown column of 'cable' in page.md '7'. Allowed: 512, "),
        ("= books: cable", "names no column: write 'TABLE at COLUMN: NAME' or 'TABLE: NAME@COLUMN'."),
        ("= books", "is no number like '= books at 1024: cable'"),
        ("= books at 1024: cable over alibi", "is no number like '= books at 1024: cable'"),
        ("% books at 1024: cable", "'% books at 1024: alibi over cable' or '× books: "),
    ],
)
def test_marks_that_name_nothing_are_errors_and_the_page_stays(mark, words, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text := f"a <!-- {mark} -->\nold\n<!-- end -->\n")
    with pytest.raises(CableError) as error:
        evidence.fill(page, ROOT / "benchmarks", tmp_path)
    assert words in str(error.value) and page.read_text() == text


def test_sentences_tell_stored_numbers(tmp_path):
    page = tmp_path / "page.md"
    file = ROOT / "benchmarks/results/small/{}-0/evaluation.json"
    alibi, rope = (json.loads(Path(str(file).format(name)).read_text())["results"] for name in ("alibi", "rope"))
    (near, far), (_, other) = ([one[1]["perplexity"], one[-1]["perplexity"]] for one in (rope, alibi))
    asked = ("= small at 1024: rope", "-% small at 15360: alibi over rope", "× small: rope@15360 over rope@1024")
    page.write_text(" ".join(f"is <!-- {one} -->old<!-- end -->" for one in asked))
    evidence.fill(page, ROOT / "benchmarks", tmp_path)
    told = [f"{near:.2f}", f"{100 * (1 - other / far):.0f} %", f"{far / near:.1f}"]
    assert page.read_text() == " ".join(f"is <!-- {one} -->{text}<!-- end -->" for one, text in zip(asked, told))
    pruned = "<!-- % long at 131072: cable, pruned at 1e-4 over cable -->"
    page.write_text(f"- by {pruned}<!-- end -->, <!-- = long passkey back at 4096: cable --><!-- end -->")
    evidence.fill(page, ROOT / "benchmarks", tmp_path)
    by, found = re.findall(r"-->([^<]+)<!-- end -->", page.read_text())
    assert 0 < float(by.removesuffix(" %")) < 0.001 and found == "55 %"
    for begin in ("", "- ", "a\n  ", "1. "):
        page.write_text(f"{begin}{pruned}<!-- end -->")
        with pytest.raises(CableError, match="begins a line of"):
            evidence.fill(page, ROOT / "benchmarks", tmp_path)


def test_a_mark_without_its_end_swallows_nothing(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text := "a <!-- = books at 1024: cable --> b <!-- = books at 1024: alibi -->1<!-- end --> c")
    with pytest.raises(CableError, match="one of a pair alone"):
        evidence.fill(page, ROOT / "benchmarks", tmp_path)
    assert page.read_text() == text


@pytest.mark.parametrize(
    ("tests", "verdict"),
    [
        (["books: cable@15360 < rope@15360"], "holds"),
        (["books: cable@15360 < rope@15360", "books: cable@15360 > rope@15360"], "holds in part"),
        (["books at 1024, 15360: cable < alibi | rope"], "holds"),
        (["books at 1024: cable < rope | cable"], "holds in part"),
        (["books at 1024: cable < 0.5 * rope"], "refuted"),
        (["books at 1024: cable ~ rope", "books at 1024: rope ~ 1.1 * cable"], "holds"),
        (["books at 15360: cable ~ rope"], "refuted"),
        (["retrieval wiki: cable@8192 > rope@8192", "memory: cable@medium < 1.05 * rope@medium"], "holds"),
    ],
)
def test_a_verdict_follows_from_stored_numbers(tests, verdict, stored, tmp_path):
    (stored / "claims.toml").write_text(f"[[claim]]\nnumber = 2\ntests = {json.dumps(tests)}\n")
    lines = claims.table(stored, tmp_path / "page.md").splitlines()
    assert len(lines) == 4 + len(findings.claims()) and f"**{verdict}**" in lines[5] and "**not measured**" in lines[4]
    assert "](benchmarks/results/" in lines[5]
    assert lines[0].startswith(f"Of {len(lines) - 4} claims: 1 *{verdict}*, {len(lines) - 5} *not measured*.")
    assert lines[0].endswith("1 in half of them or fewer.") == (verdict == "holds in part")
    with (stored / "claims.toml").open("a") as file:
        file.write('verdict = "holds in part"\n')  # the best that they can show
    lines = claims.table(stored, tmp_path / "page.md").splitlines()
    assert f"**{'holds in part' if verdict == 'holds' else verdict}**" in lines[5]
    settled = (stored / "claims.toml").read_text().replace('"holds in part"', '"not at this scale"')
    (stored / "claims.toml").write_text(settled)  # and no comparison makes that better or worse
    assert "**not at this scale**" in claims.table(stored, tmp_path / "page.md").splitlines()[5]


def test_claims_compare_one_run_and_the_mean_of_seeds(stored, tmp_path):
    first = stored / "results/books/kerple-log-0"
    again = json.loads((first / "evaluation.json").read_text())
    again["training"]["eval_loss"] += 2
    again |= {"cell": "kerple-log-1", "seed": 1}
    again["settings"]["recipe"]["train"]["seed"] = 1
    (stored / "results/books/kerple-log-1").mkdir()
    (stored / "results/books/kerple-log-1/evaluation.json").write_text(json.dumps(again))
    study = stored / "books.toml"
    study.write_text(study.read_text().replace("[seeds_of]", "[seeds_of]\nkerple-log = [0, 1]\n"))
    row = {"batch": 1, "length": 1024, "commit": "new"}
    rows = [("rope", 1, 4.0, "bf16"), ("cable", 1, 1.0, "bf16"), ("cable", 1, 9.0, "fp32"), ("rope", 2, 0.5, "bf16")]
    lines = [row | dict(zip(("model", "begun", "ms", "precision"), one)) for one in rows]
    (stored / "results/decode.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tests = [
        "books loss: kerple-log@held-out > kerple-log@held-out",
        "decode: cable@1024 < rope@1024",
        "decode: rope@1024 > 0.1 * rope@1024",
    ]
    (stored / "claims.toml").write_text(f"[[claim]]\nnumber = 2\ntests = {json.dumps(tests)}\n")
    told = claims.table(stored, tmp_path / "page.md")
    assert f"✗ books loss at held-out: kerple-log {again['training']['eval_loss'] - 1:.3f} >" in told
    assert "✓ decode at 1024: cable 1.000 < rope 4.000" in told
    assert "✓ decode at 1024: rope 0.500 > 0.1 × rope 0.500" in told, "the last run that has both"


def test_a_claim_tells_a_number_once_with_all_that_it_was_compared_with(stored, tmp_path):
    """A line for those that came out as claimed, one for those that did not; columns that differ are named."""
    tests = ["books at 1024, 2048: cable < rope | cable | nope", "books: cable@2048 < 0.5 * rope@1024"]
    (stored / "claims.toml").write_text(f"[[claim]]\nnumber = 2\ntests = {json.dumps(tests)}\n")
    _, _, verdict, cell, _ = claims.table(stored, tmp_path / "page.md").splitlines()[5].split(" | ")
    assert verdict == "**holds in part**<br>4 of 7"
    told = [re.sub(r"\d+\.\d\d", "N", line) for line in cell.split("<br>")]
    assert told == [
        "✓ books at 1024: cable N < rope N, nope N",
        "✗ books at 1024: cable N < cable N",
        "✓ books at 2048: cable N < rope N, nope N",
        "✗ books at 2048: cable N < cable N",
        "✗ books: cable at 2048 N < 0.5 × rope at 1024 N",
    ]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ('tests = ["books: cable is best"]', "is no comparison"),
        ('tests = ["book: cable@1024 < rope@1024"]', "Did you mean 'books'?"),
        ('tests = ["books: cabel@1024 < rope@1024"]', "Did you mean 'cable'?"),
        ('tests = ["books: cable@1000 < rope@1024"]', "unknown column of 'cable'"),
        ('tests = ["books at 1000: cable < rope"]', "unknown column of 'cable'"),
        ('tests = ["books at 1024: cable < ropes"]', "Did you mean 'rope'?"),
        ('verdict = "true"', "unknown verdict in claims.toml 'true'"),
        (
            'verdict = "holds"\nshown_by = "tests/test_docs.py::test_no"',
            "there is no test 'tests/test_docs.py::test_no'",
        ),
    ],
)
def test_claims_that_compare_nothing_are_named(entry, words, stored, tmp_path):
    (stored / "claims.toml").write_text(f"[[claim]]\nnumber = 2\n{entry}\n")
    with pytest.raises(CableError) as error:
        claims.table(stored, tmp_path / "page.md")
    assert words in str(error.value)
