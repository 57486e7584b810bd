"""What a study's cells have found: tables, comparisons and figures."""

from __future__ import annotations

import csv
import io
import math
from itertools import pairwise

import pytest

from cable_attn import comparisons, findings, report, summary
from cable_attn.tables import LengthTable


def test_seeds_are_counted_where_they_differ():
    caption = LengthTable("t", {"a": {8: [1.0] * 3}, "b": {8: [1.0] * 2}, "c": {8: [1.0]}}, 8).caption
    assert "Mean ± deviation over 2 to 3 seeds; one seed where there is no ±." in caption


def test_pass_keys_are_told_by_how_far_back_they_stood():
    """At 8, 6 and 0 tokens in a text of 8, at 16 and 12 in one of 16; one cannot read the longer text."""
    found = {(8, 0.0): 1.0, (8, 0.25): 0.5, (8, 1.0): 0.0, (16, 0.0): 0.0, (16, 0.25): 1.0}
    texts = [{"length": n, "depth": depth, "accuracy": share, "samples": 2} for (n, depth), share in found.items()]
    short = [*texts[:3], {"length": 16, "error": "too long"}, {"length": 32, "error": "too long"}]
    rows = [
        {"variant": "cable", "passkey": [*texts, {"length": 32, "error": "no such text"}]},
        {"variant": "learnable", "passkey": short},
    ]
    assert findings.found_by_distance(rows, 8) == {"cable": {8: [50.0], 16: [50.0]}}
    assert findings.texts_by_distance(rows, 8) == {8: 6, 16: 4}
    assert findings.found_by_distance(rows, 4) == {"cable": {4: [0.0], 8: [75.0], 16: [50.0]}}


VALUES = {"cable": {8: [2.0, 4.0], 16: [1.5, 1.5]}, "alibi": {8: [3.5, 3.5]}}


PAPER = {"cable": {"8": 2.5, "16": None}}


def test_a_table_in_every_form():
    table = LengthTable("t", VALUES, 8, PAPER)
    assert table.markdown().splitlines()[2:] == [
        "| cable | **3.00 ± 1.41 (2.5, +0.50)** | **1.50 ± 0.00** |",
        "| alibi | 3.50 ± 0.00 | – |",
    ]
    assert r"\textbf{3.00 $\pm$ 1.41 (2.5, +0.50)} & \textbf{1.50 $\pm$ 0.00} \\" in table.latex()
    rows = list(csv.DictReader(io.StringIO(table.csv())))
    assert rows[0] == {
        "name": "cable", "length": "8", "mean": "3.0", "deviation": "1.4142135623730951", "seeds": "2", "paper": "2.5",
        "difference": "0.5",
    }  # fmt: skip
    assert rows[3]["seeds"] == "0" and rows[3]["mean"] == ""


def test_variants_are_compared_with_the_first_on_the_same_documents():
    def row(variant, seed, *losses, tokens=100):
        result = {"length": 64, "by_document": [[tokens, loss] for loss in losses]}
        return {"variant": variant, "seed": seed, "results": [result, {"length": 128, "error": "cannot"}]}

    rows = [
        row("cable", 0, 1.0, 2.0),
        row("cable", 1, 1.0, 2.0),
        row("rope", 1, 1.25, 2.25),
        row("rope", 2, 1.75, 2.75),
    ]
    rows += [row("fox", 0, 1.0, 2.0, tokens=99), {"variant": "old", "seed": 0, "results": [{"length": 64}]}]
    told = comparisons.ratios(summary.Gathered("t", rows, {}, {}))
    assert told.splitlines()[2:] == [
        "| encoding | seeds | 64 | worse on |",
        "|---|---|---|---|",
        "| rope | 2 / 2 | 1.649 (1.649 – 1.649) | 2 of 2 |",
    ]
    assert comparisons.ratios(summary.Gathered("t", rows[:2], {}, {})) == ""
    rows.append(row("k-cable", 1, 2.0, 3.0))
    told = comparisons.ratios(summary.Gathered("t", rows, {}, {}, against={"k-cable": "rope", "fox": "nope"}))
    assert (
        told.splitlines()[-1] == "| k-cable over rope | 1 / 2 | 1.649 (1.649 – 1.649) | 2 of 2 |" and "fox" not in told
    )


def test_what_far_text_is_worth_is_told_of_whole_documents_each_by_its_tokens():
    """Far text takes 0.4 off the first one's loss, nothing off the second's; long windows cut the third off."""
    read = {
        32: [[100, 2.0], [300, 2.0], [50, 5.0]],
        64: [[100, 2.0], [300, 2.0], [50, 5.0]],
        128: [[300, 2.0], [20, 9.0]],
    }
    read[128].insert(0, [100, 1.8])  # 2.0 in the first half of a window, 1.6 in the second
    incomplete = {32: [[100, 2.0], [300, 2.0], [50, 5.0]], 64: [[100, 1.0], [300, 1.0], [50, 5.0]]}
    rows = [
        {
            "variant": "cable",
            "seed": seed,
            "results": [{"length": n, "by_document": losses} for n, losses in own.items()],
            "settings": {"recipe": {"data": {"length": 64}}},
        }
        for seed, own in enumerate((incomplete, read))
    ]
    told = comparisons.by_context(summary.Gathered("t", rows, {}, {}))["cable"]
    assert told[64, 128][0] == pytest.approx(math.exp(-0.4 * 100 / 400))
    assert told[64, 128][1:] == pytest.approx((math.exp(-0.4), 1.0))  # one of the two drawn twice
    for one in rows:
        one["results"] = [{**result, "by_document": result["by_document"][2:] * 2} for result in one["results"]]
    rows[1]["results"][-1]["by_document"] = [[20, 9.0], [20, 9.0]]
    assert comparisons.by_context(summary.Gathered("t", rows, {}, {})) == {}, "no document is read whole"


def test_what_far_text_is_worth_leaves_out_that_fewer_tokens_begin_a_text():
    """A loss of 3 in windows of 32, of 2 in those of 64: 1 in the second half of these. It is 1 in that of windows of
    128 that have 1.5, and 0.9 where they have 1.45. Another document has 1 more at each."""

    def row(variant, seed, far):
        losses = {32: 3.0, 64: 2.0, 128: far}
        read = [
            {"length": n, "perplexity": math.exp(loss), "by_document": [[100, loss], [300, loss + 1]]}
            for n, loss in losses.items()
        ]
        settings = {"recipe": {"data": {"length": 64}}}
        results = [*read, {"length": 512, "error": "cannot"}]
        return {"variant": variant, "seed": seed, "results": results, "settings": settings}

    rows = [row("cable", 0, 1.45), row("alibi", 0, 1.5), row("cable", 1, 1.4), row("learnable", 0, 1.5)]
    rows[-1]["results"] = rows[-1]["results"][:2]  # reads no further
    paper = {"cable": {"32": math.exp(3), "64": math.exp(2), "128": math.exp(1.75)}, "nope": {"64": 7.0}}
    told = comparisons.contexts(summary.Gathered("t", rows, {}, {}, like=paper)).splitlines()
    fifteen, half = (f"{100 * (math.exp(loss) - 1):+.0f}".replace("-", "−") for loss in (-0.15, 0.5))
    assert "that of tokens with 32 to 64;" in told[0] and told[2] == "| encoding | 64 to 128 |"
    assert told[4:] == [f"| cable | {fifteen} ({fifteen} to {fifteen}) [{half}] |", "| alibi | 0.0 (0.0 to 0.0) |"]
    assert "paper" not in comparisons.contexts(summary.Gathered("t", rows, {}, {}))
    # Without far text it would be 1.5: half of a window of 128 would have 1 instead of 2. Seeds of 1.45 and 1.4: less.
    far = comparisons.by_far_text(summary.Gathered("t", [*rows, row("rope", 0, 2.1)], {}, {}))
    assert far["cable"] == {128: pytest.approx(math.exp(-0.075))} and far["alibi"] == {128: pytest.approx(1)}
    assert far["rope"] == {128: pytest.approx(math.exp(0.6))} and far["learnable"] == {}, "reads no further"
    assert comparisons.contexts(summary.Gathered("t", rows[-1:], {}, {})) == ""
    fewer = row("rope", 0, 1.5)
    for shorter in fewer["results"][:2]:  # the longest windows leave out the end of a text, and a document with it
        shorter["by_document"].append([50, 9.0])
    told = comparisons.contexts(summary.Gathered("t", [*rows, fewer], {}, {})).splitlines()
    assert told[-1] == "| rope | 0.0 (0.0 to 0.0) |"
    overlap = [{**one, "settings": {**one["settings"], "reading": {"stride": 8}}} for one in rows]
    assert comparisons.contexts(summary.Gathered("t", overlap, {}, {})) == ""
    for one in rows:  # without the shorter windows: over the first band past the training length
        one["results"] = one["results"][1:]
    assert comparisons.reference(summary.Gathered("t", rows, {}, {})) == (64, 128)
    assert comparisons.by_far_text(summary.Gathered("t", rows, {}, {})) == {}
    assert comparisons.contexts(summary.Gathered("t", rows, {}, {})) == ""


def test_who_is_ahead_in_training_is_told_over_its_course():
    def row(variant, seed, *losses):
        curve, settings = [[n, loss] for n, loss in enumerate(losses)], {"recipe": {"data": {"length": 64}}}
        return {"variant": variant, "seed": seed, "training": {"curve": curve}, "results": [], "settings": settings}

    six = [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    rows = [row("cable", 0, *six), row("cable", 1, *six), row("rope", 1, *(loss + 0.5 - loss / 10 for loss in six))]
    rows += [row("rope", 2, *(9 * loss for loss in six)), row("fox", 0, *six[:5]), row("t5", 0, *six, 0.5)]
    told = comparisons.learning(summary.Gathered("t", rows, {}, {})).splitlines()
    assert told[4:] == ["| rope | −0.100 | 0.000 | +0.100 | +0.200 | +0.300 | +0.400 |"]
    told = comparisons.learning(summary.Gathered("t", rows, {}, {}, against={"cable": "rope"})).splitlines()
    assert told[-1].startswith("| cable over rope | +0.100 |")
    others = [{**one, "settings": {"recipe": {"data": {"length": 32}}}} for one in rows[:1]]
    assert comparisons.learning(summary.Gathered("t", [*rows, *others], {}, {})) == ""
    assert comparisons.learning(summary.Gathered("t", rows[:2], {}, {})) == ""


def test_a_figure_keeps_close_rivals_apart_beside_one_that_fails(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(report, "save", lambda figure, stem: drawn.append(figure))
    seeds = {"cable": {64: [19.5, 20.5], 128: [19.0, 19.0]}, "rope": {64: [20.5], 128: [4000.0]}}
    report.perplexity_figure(seeds, 64, tmp_path / "x")
    report.place_figure({"cable": [(16, 3.0), (64, 2.9)], "rope": [(16, 3.1), (64, 8.25)]}, 64, tmp_path / "x")
    wanted = [(19, 20.5, "rope (20 to 4,000)"), (2.9, 3.1, "rope (3.1 to 8.2)")]
    for figure, (lowest, highest, named) in zip(drawn, wanted, strict=True):
        low, high = figure.axes[0].get_ylim()
        assert low < lowest and highest < high < 1.1 * highest
        assert [text.get_text() for text in figure.legends[0].get_texts()] == ["cable", named]


def test_an_encoding_looks_the_same_in_every_figure(monkeypatch, tmp_path):
    """Its variants have its colour and another line; what is no encoding has a colour of its own."""
    drawn = []
    monkeypatch.setattr(report, "save", lambda figure, stem: drawn.append(figure.axes[0]))
    names = ["cable", "k-cable-2-layers", "rope", "rope, YaRN × 16", "mine", "mine, pruned"]
    report.perplexity_figure({name: {64: [3.0], 128: [3.0]} for name in names}, 64, tmp_path / "x")
    report.loss_figure({f"{name}-0": [(10, 3.0), (90, 2.0)] for name in ("rope", "k-cable", "cable")}, tmp_path / "x")
    looks, alone = (
        {line.get_label(): (line.get_color(), line.get_marker(), line.get_linestyle()) for line in axes.lines}
        for axes in drawn
    )
    assert (looks["cable"], looks["rope"]) == (alone["cable-0"], alone["rope-0"])
    assert looks["k-cable-2-layers"] == alone["k-cable-0"]
    assert looks["rope, YaRN × 16"][:2] == looks["rope"][:2] and looks["mine, pruned"][:2] == looks["mine"][:2]
    assert len({looks[name] for name in names}) == len(names)
    assert len({looks[name][0] for name in names}) == 4


def test_figures_of_losses_show_what_is_told_apart(monkeypatch, tmp_path):
    """Not the first places one by one, nor the first steps of a training, nor the noise of single updates."""
    drawn = []
    monkeypatch.setattr(report, "save", lambda figure, stem: drawn.append(figure.axes[0]))
    report.place_figure(
        {"cable": [(1, 5.0), (8, 4.0), (16, 3.0), (20, 2.5), (32, 2.0), (36, 1.0)]}, None, tmp_path / "x"
    )
    report.loss_figure({"cable": [(1, 11.0), (20, 4.0), (100, 3.0)], "rope": [(1, 12.0), (100, 3.1)]}, tmp_path / "x")
    report.loss_figure({"cable": [(n, 3.0 + n % 3) for n in range(1, 300)]}, tmp_path / "x")
    close = {"cable": [(24, 9.0), (64, 3.0), (512, 3.3), (4096, 2.9)], "alibi": [(64, 3.0), (512, 3.4), (4096, 3.0)]}
    report.place_figure({**close, "rope": [(64, 3.0), (512, 5.0), (4096, 5.0)]}, 256, tmp_path / "x")
    assert drawn[0].lines[0].get_xydata().tolist() == [[16, 57 / 16], [36, (4 * 2.5 + 12 * 2 + 4) / 20]]
    assert 4.0 < drawn[1].get_ylim()[1] < 4.2
    assert drawn[2].lines[0].get_xydata().tolist() == [[n, 4.0] for n in range(3, 300, 3)] + [[299, 4.5]]
    assert 3.4 < drawn[3].get_ylim()[1] < 3.5, "all of close rivals is shown, past 1.3 times the lowest too"
    assert [line.get_label() for line in drawn[3].lines[:3]] == ["cable", "alibi", "rope (3.0 to 5.0)"]


def test_lengths_beside_each_other_can_be_read(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(report, "save", lambda figure, stem: drawn.append(figure))
    report.perplexity_figure({"cable": {n: [20.0] for n in (500, 1024, 65536, 131072)}}, 1024, tmp_path / "x")
    drawn[0].canvas.draw()
    labels = drawn[0].axes[0].get_xticklabels()
    assert [label.get_text() for label in labels] == ["500", "1k", "64k", "128k"]
    boxes = [label.get_window_extent() for label in labels]
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_what_is_told_by_the_same_digits_is_equally_good():
    table = LengthTable("t", {"cable": {8: [2.001]}, "pruned": {8: [2.0]}, "rope": {8: [2.02]}}, 8)
    assert [table.is_best(name, 8) for name in table.values] == [True, True, False]


def test_what_stands_beside_is_never_the_best():
    values = {"cable": {8: [2.0]}, "rope": {8: [3.0]}, "bm25": {8: [1.0]}}
    table = LengthTable("t", values, 8, beside=("bm25",))
    assert [table.is_best(name, 8) for name in table.values] == [True, False, False]
    assert "| bm25 | 1.00 |" in table.markdown()


def test_a_table_and_a_figure_bear_what_is_not_finite(tmp_path):
    values = {"a|b_c": {64: [math.nan]}, "cable": {64: [2.0, math.inf]}, "rope": {64: [3.0, 5.0]}}
    table = LengthTable("t", values, 64)
    lines = table.markdown().splitlines()
    assert lines[2:] == ["| a\\|b_c | nan |", "| cable | inf |", "| rope | **4.00 ± 1.41** |"]
    assert r"a|b\_c & nan" in table.latex()
    paths = report.perplexity_figure({"cable": {64: [math.nan]}, "rope": {64: [3.0]}}, 64, tmp_path / "x")
    assert all(path.stat().st_size > 1000 for path in paths)
    rows = [{"length": 8, "depth": 0.0, "accuracy": 1.0}, {"length": 16, "depth": 1.0, "accuracy": 0.5}]
    assert report.passkey_figure({"cable": rows}, tmp_path / "y")
