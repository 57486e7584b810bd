"""The explorer page and the still figures: the numbers behind them, and the page in a real browser."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from cable_attn import ENCODINGS, CableBertForMaskedLM, CableGPTForCausalLM, recipe
from cable_attn.attention import attention_weights
from cable_attn.cli import app
from cable_attn.data import Document, embedded_corpus, train_bpe
from cable_attn.errors import CableError
from cable_attn.explore import extract, figures, page
from cable_attn.explore.tokens import KINDS, Tokenised, kind, tokenise
from cable_attn.files import write_json
from cable_attn.models.capture import layer_calls

from .conftest import small_bert, small_gpt, stir

VOCABULARY = 400
CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe([Document("a", embedded_corpus("test")[0].text[:100_000])], VOCABULARY)


def novel(characters: int) -> str:
    return embedded_corpus("test")[0].text[2000 : 2000 + characters]


def make(encoding: str, bert: bool = False, **overrides):
    fields = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, **overrides}
    model = CableBertForMaskedLM(small_bert(encoding, **fields)) if bert else None
    model = model or CableGPTForCausalLM(small_gpt(encoding, **fields))
    return stir(model).eval()


def save(model, tokenizer, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tokenizer) -> dict[str, Path]:
    """A checkpoint of several encodings, GPT and BERT."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("runs")
    found = {name: save(make(name), tokenizer, folder / name) for name in ("cable", "k-cable", "alibi", "rope", "fire")}
    for name in ("cable", "t5", "fire"):
        found[f"bert {name}"] = save(make(name, bert=True), tokenizer, folder / f"bert {name}")
    return found


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(novel(1500))
    return path


def cable(*arguments: str | Path):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and isinstance(result.exception, CableError):
        return 2, str(result.exception)
    return result.exit_code, result.output


def whole(call) -> np.ndarray:
    return attention_weights(call, range(call.q.shape[2]))[0].detach().double().numpy()


def test_tokens_are_the_text_and_each_has_its_kind(tokenizer):
    text = "It was 1803, and “Catherine”\n\nwas not extraordinary."
    found = tokenise(tokenizer, text, 1000)
    assert "".join(found.pieces[1:]) == text and found.pieces[0] == tokenizer.bos_token
    assert found.of == len(found.ids) == len(found.pieces) == len(found.kinds)
    assert len(tokenise(tokenizer, text, 5).pieces) == 5
    pieces = ["It", " was", " 18", "03", ",", " and", " Cath", "erine", "\n\n", "x", " not", "able", "", "  "]
    kinds = [KINDS[kind(pieces, n)] for n in range(len(pieces))]
    assert kinds == [
        "function word", "function word", "number", "number", "punctuation", "function word", "capitalised",
        "inside a word", "line break", "other word", "other word", "inside a word", "inside a word", "space",
    ]  # fmt: skip


@pytest.mark.parametrize("encoding", list(ENCODINGS))
def test_what_is_kept_of_every_encoding_gives_its_bias_back(encoding, tokenizer):
    model = make(encoding)
    tokens = tokenise(tokenizer, novel(400), 60)
    looked = extract.look(model, tokens, "x")
    call = layer_calls(model, tokens.ids[None])[1]
    if call.bias is None:
        assert looked.form == "none"
        return
    every = torch.arange(len(tokens.ids))
    wanted = call.bias.rows(every, every).double().expand(1, 4, -1, -1)[0].detach().numpy()
    seen = np.tril(np.ones(wanted.shape[-2:], dtype=bool))
    assert np.allclose(rebuilt(looked, 1)[:, seen], wanted[:, seen], rtol=1e-5, atol=1e-4)


def rebuilt(looked, layer: int) -> np.ndarray:
    """The bias [H, T, T] from the arrays, as the page computes it."""
    length = len(looked.tokens.ids)
    i, j = np.arange(length)[:, None], np.arange(length)[None]
    arrays = looked.arrays
    if looked.form == "potential":
        c = arrays["steps"][layer].cumsum(-1)
        b = -arrays["gains"][layer][:, :, None] * abs(c[:, :, None] - c[:, None])
        return -np.log1p(b * b) if looked.kernel == "log" else b
    if looked.form == "table":
        return arrays["table"][layer][:, (i - j) % length if looked.causal else i - j + length - 1]
    grid, out = arrays["grid"][layer], np.zeros((looked.heads, length, length))
    for head in range(looked.heads):
        by_place = np.stack([np.interp(np.arange(length), arrays["distances"], row) for row in grid[head]])
        for n in range(length):
            column = np.array([np.interp(n, arrays["places"], by_place[:, d]) for d in range(length)])
            out[head, n] = column[abs(n - np.arange(length))]
    return out


@pytest.mark.parametrize("bert", [False, True])
def test_windows_maps_and_heaviest_keys_are_those_of_the_whole_matrix(bert, tokenizer, monkeypatch):
    model = make("cable", bert=bert)
    tokens = tokenise(tokenizer, novel(600), 101)
    monkeypatch.setattr(extract, "BLOCK", 7 * 4 * 101)  # several blocks of rows, the last one short
    looked = extract.look(model, tokens, "x", [0, -1])
    assert looked.attention_layers == [0, 1]
    at = 0
    for layer, call in enumerate(layer_calls(model, tokens.ids[None])):
        weights = whole(call)
        assert np.array_equal(looked.arrays["windows"][layer], slow_windows(weights))
        assert np.allclose(looked.arrays["maps"][layer].sum(-1), 1, atol=1e-5)
        for head in range(4):
            for i in range(101):
                number = looked.arrays["counts"][layer, head, i]
                keys, kept = (looked.arrays[name][at : at + number] for name in ("keys", "weights"))
                at += number
                assert list(keys) == sorted(keys, reverse=True) and number <= extract.TOP
                assert np.allclose(kept, weights[head, i, keys], atol=1e-6)
                enough = sorted(weights[head, i], reverse=True)[: extract.TOP]
                assert math.isclose(kept.sum(), sum(w for w in enough if w >= extract.LIGHTEST), abs_tol=1e-5)
    assert at == len(looked.arrays["keys"])


def slow_windows(weights: np.ndarray) -> np.ndarray:
    """By the definition, in loops: queries of the second half, mean weight beyond a distance."""
    heads, length, _ = weights.shape
    found = np.zeros((heads, 2), dtype=int)
    late = range(length // 2, length)
    for head in range(heads):
        for n, share in enumerate((0.01, 0.5)):
            for distance in range(length):
                beyond = [sum(w for j, w in enumerate(weights[head, i]) if abs(i - j) > distance) for i in late]
                if np.mean(beyond) < share:
                    found[head, n] = distance
                    break
    return found


def test_steps_by_kind_are_means_without_the_first_token():
    steps = np.array([[[9.0, 1.0, 2.0, 6.0]]])
    punctuation, number = KINDS.index("punctuation"), KINDS.index("number")
    found = extract.steps_by_kind(steps, [number, punctuation, punctuation, number])
    assert found[0, 0, punctuation] == 1.5 and found[0, 0, number] == 6.0
    assert np.isnan(found[0, 0, KINDS.index("space")])


def test_the_page_asks_nothing_of_any_network_and_text_cannot_break_out(tokenizer):
    model = make("cable")
    nasty = 'a </script><script>alert("x")</script> <!-- data --> http://example.org <img src=x>'
    html = page.render([extract.look(model, tokenise(tokenizer, nasty, 200), "<b>")], "<i>&")
    assert "default-src 'none'" in html and html.count("<script") == 2 and "<img" not in html
    assert not re.search(r"""(src|href)\s*=\s*["']?(?!data:,)[a-z]*:?//""", html)
    without = re.sub(r'<script type="application/json".*?</script>', "", html, flags=re.DOTALL)
    assert "http://" not in without and "https://" not in without


def test_a_page_of_4096_tokens_is_small(tokenizer):
    model = make("cable")
    tokens = tokenise(tokenizer, novel(30_000), 4096)
    assert len(tokens.ids) == 4096
    assert len(page.render([extract.look(model, tokens, "x")], "x").encode()) < 5e6


def test_explore_writes_a_page_for_any_checkpoint(runs, text, tmp_path):
    for name, folder in runs.items():
        out = tmp_path / f"{name}.html"
        code, told = cable("explore", folder, "--text", text, "--tokens", "100", "--attention", "all", "--out", out)
        assert code == 0 and str(out) in told.replace("\n", ""), told
        data = embedded(out)
        assert [model["encoding"] for model in data["models"]] == [name.removeprefix("bert ")]
        assert data["models"][0]["attentionLayers"] == [0, 1]
    code, told = cable("explore", runs["cable"], runs["alibi"], "--text", text, "--out", tmp_path / "two.html")
    assert code == 0 and len(embedded(tmp_path / "two.html")["models"]) == 2, told


def embedded(path: Path) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(), re.DOTALL)[1])


def test_what_cannot_be_explored_is_named(runs, text, tmp_path):
    out = ["--out", str(tmp_path / "x.html")]
    assert cable("explore", runs["cable"], "--text", tmp_path / "none.txt", *out) == (
        2, f"no such file or folder: {str(tmp_path / 'none.txt')!r}.",
    )  # fmt: skip
    for arguments, words in (
        ([runs["cable"], "--attention", "7"], "no layer 7: it has the layers 0 to 1"),
        ([runs["cable"], "--attention", "x"], "like 0,5"),
        ([tmp_path, "--text", text], "no config.json"),
        ([runs["cable"]] * 3, "one checkpoint or two"),
    ):
        code, told = cable("explore", *arguments, *out)
        assert code == 2 and words in told
    bare = tmp_path / "bare"
    make("cable").save_pretrained(bare)
    assert "no tokenizer.json" in cable("explore", bare, *out)[1]
    assert not (tmp_path / "x.html").exists()
    code, told = cable("explore", runs["cable"], "--out", tmp_path)
    assert code == 2 and "is a folder" in told
    with pytest.raises(CableError, match="at most 65536"):
        extract.look(make("cable"), Tokenised(torch.zeros(65537), [], [], 0), "x")


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("chromium is missing: apt-get install chromium")
    options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=options)
        yield chromium
        chromium.close()


class Opened:
    """A page in the browser, and what went wrong in it."""

    def __init__(self, browser, **options):
        self.page = browser.new_context(**options).new_page()
        self.wrong: list[str] = []
        self.page.on("console", lambda message: self.wrong.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda request: self._require_own(request.url))

    def _require_own(self, url: str) -> None:
        if not url.startswith(("file://", "data:", "about:")):
            self.wrong.append(f"asked for {url}")

    def open(self, path: Path, fragment: str = ""):
        self.page.goto("about:blank")
        self.page.goto(f"file://{path}{fragment}")
        self.page.wait_for_selector("#panels[aria-busy=false]")
        return self.page

    def wait(self, condition: str) -> None:
        """The page's own policy forbids eval, with which playwright would wait."""
        deadline = time.monotonic() + 20
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline, f"never: {condition}"
            self.page.wait_for_timeout(20)

    def number(self, selector: str) -> float:
        return float(self.page.locator(selector).first.inner_text().replace("−", "-").removesuffix(" %"))


@pytest.fixture
def opened(browser):
    found = Opened(browser, viewport={"width": 1200, "height": 900})
    yield found
    found.page.context.close()
    assert found.wrong == []


@pytest.fixture(scope="module")
def made(runs, tmp_path_factory):
    """The page of a checkpoint, and the same things computed here."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "text.txt").write_text(novel(1500))

    def page_of(*names: str) -> Path:
        out = folder / f"{'-'.join(names)}.html"
        checkpoints = [runs[name] for name in names]
        code, told = cable("explore", *checkpoints, "--text", folder / "text.txt", "--tokens", "300", "--out", out)
        assert code == 0, told
        return out

    return page_of


def test_in_a_browser_a_head_is_picked_and_a_token_hovered_and_the_numbers_are_right(opened, made, runs, tokenizer):
    page = opened.open(made("cable"))
    page.locator('button[data-head="1.2"]').click()
    assert page.locator('button[aria-pressed="true"]').get_attribute("data-head") == "1.2"
    page.locator(".text span").nth(40).hover()
    opened.wait("document.querySelector('.readout').textContent.includes('Query 40 ')")
    model = CableGPTForCausalLM.from_pretrained(runs["cable"]).eval()
    tokens = tokenise(tokenizer, novel(1500), 300)
    call = layer_calls(model, tokens.ids[None])[1]
    steps, gains = extract.steps_and_gains(call.bias, 4, 300)
    assert math.isclose(opened.number(".readout .step"), steps[2, 40], rel_tol=6e-3)
    assert math.isclose(opened.number(".readout .gain"), gains[2, 40], rel_tol=6e-3)
    every = torch.arange(300)
    bias = call.bias.rows(every, every)[0, 2].detach().numpy()
    assert opened.number(".readout .sees") == (bias[40, :41] > math.log(0.01)).sum()
    weights = whole(call)[2]
    for n, key in enumerate(weights[40].argsort()[::-1][:4]):
        row = page.locator(".columns table.data").first.locator("tr").nth(n + 1)
        told = [cell.replace("−", "-").removesuffix(" %") for cell in row.locator("td").all_inner_texts()]
        assert int(told[1]) == key
        assert math.isclose(float(told[3]), bias[40, key], rel_tol=6e-3, abs_tol=1e-3)
        assert abs(float(told[4]) / 100 - weights[40, key]) < 1e-4
    asked = "[[70, 3], [299, 150], [5, 5]].map(([i, j]) => panels[0].head.bias(i, j))"
    assert np.allclose(page.evaluate(asked), [bias[70, 3], bias[299, 150], bias[5, 5]], rtol=2e-3, atol=1e-3)
    assert math.isclose(page.evaluate("panels[0].head.attention(299).reduce((s, [, w]) => s + w, 0)"),
                        sum(w for w in sorted(weights[299])[-32:] if w >= 1e-3), abs_tol=2e-3)  # fmt: skip


def test_in_a_browser_a_link_restores_the_state(opened, made):
    page = opened.open(made("cable", "alibi"), "#t=77&h0=0.3&h1=1.1&span=32&shade=attention&heat=attention&numbers=1")
    assert page.locator(".query").count() == 2
    assert [page.evaluate(f"panels[{n}].t") for n in (0, 1)] == [77, 77]
    pressed = page.locator('button[aria-pressed="true"]')
    assert [pressed.nth(n).get_attribute("data-head") for n in (0, 1)] == ["0.3", "1.1"]
    assert [page.locator(f"#{name}").input_value() for name in ("span", "shade", "heat")] == [
        "32", "attention", "attention",
    ]  # fmt: skip
    page.locator(".text").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.locator('button[aria-pressed="true"]').first.focus()
    page.keyboard.press("ArrowDown")
    opened.wait("location.hash.includes('t=88') && location.hash.includes('h0=1.3')")
    again = opened.open(made("cable", "alibi"), page.evaluate("location.hash"))
    assert again.locator(".readout").first.inner_text().startswith("Query 88")
    assert again.locator('button[aria-pressed="true"]').first.get_attribute("data-head") == "1.3"
    opened.open(made("cable"), "#t=99999&h0=7.x&span=-1&shade=<b>")  # nonsense is passed over
    assert again.locator(".query").count() == 1


@pytest.mark.parametrize("name", ["k-cable", "alibi", "rope", "fire", "bert cable", "bert t5", "bert fire"])
def test_in_a_browser_every_form_of_bias_is_drawn(name, opened, made, runs, tokenizer):
    page = opened.open(made(name), "#t=100&h0=1.0")
    kind = CableBertForMaskedLM if "bert" in name else CableGPTForCausalLM
    tokens = tokenise(tokenizer, novel(1500), 300)
    call = layer_calls(kind.from_pretrained(runs[name]).eval(), tokens.ids[None])[1]
    asked = [(200, 3), (299, 298), (5, 5), (100, 90)] + ([(3, 200)] if "bert" in name else [])
    if call.bias is None:
        assert page.evaluate("panels[0].head.bias") is None
    else:
        found = page.evaluate(f"{json.dumps(asked)}.map(([i, j]) => panels[0].head.bias(i, j))")
        wanted = [call.bias.rows(torch.tensor([i]), torch.tensor([j]))[0, 0].item() for i, j in asked]
        assert np.allclose(found, wanted, rtol=5e-3, atol=2e-3)
    pixel = "document.querySelector('canvas.map').getContext('2d').getImageData(200, 200, 1, 1).data[3]"
    assert page.evaluate(pixel) == 255
    weights = whole(call)[0, 100]
    assert abs(opened.number(".columns table.data td.attention") / 100 - weights.max()) < 1e-4


def test_in_a_browser_the_page_fits_a_phone_and_a_tap_moves_the_query(browser, made):
    phone = Opened(browser, viewport={"width": 380, "height": 700}, has_touch=True, is_mobile=True, color_scheme="dark")
    page = phone.open(made("cable", "rope"))
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    page.locator(".text span").nth(12).tap()
    phone.wait("document.querySelector('.readout').textContent.includes('Query 12 ')")
    page.context.close()
    assert phone.wrong == []


def test_in_a_browser_4096_tokens_stay_smooth(opened, tokenizer, tmp_path):
    looked = extract.look(make("cable"), tokenise(tokenizer, novel(30_000), 4096), "x")
    path = tmp_path / "long.html"
    path.write_text(page.render([looked], "long"))
    browser_page = opened.open(path)
    times = browser_page.evaluate(
        """async () => {
            const times = [];
            for (const button of [...panels[0].buttons, ...panels[0].buttons]) {
                const start = performance.now();
                button.click();
                await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));  // drawn
                times.push(performance.now() - start);
            }
            return times.sort((a, b) => a - b);
        }"""
    )
    assert times[len(times) // 2] < 200, times


@pytest.mark.parametrize("encoding", ["cable", "k-cable", "alibi", "t5", "kerple-log", "fire", "dapev2-cable", "rope"])
def test_what_a_figure_shows_is_what_the_encoding_adds(encoding, tokenizer, tmp_path):
    model = make(encoding)
    tokens = tokenise(tokenizer, novel(300), 40)
    values, name = figures.added(model, tokens, 1)
    assert values.shape == (4, 40, 40) and np.isnan(values[:, 3, 4]).all() and not np.isnan(values[:, 4, :5]).any()
    call = layer_calls(model, tokens.ids[None])[1]
    scores = (call.q @ call.k.transpose(-1, -2) * call.scale)[0].detach().double().numpy()
    logits = scores + values if name != figures.SCORE else values
    logits = np.where(np.isnan(logits), -np.inf, logits)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    assert np.allclose(weights / weights.sum(-1, keepdims=True), whole(call), atol=1e-5)
    assert (name == figures.SCORE) == (encoding == "rope")
    for path in figures.bias_figure(model, tokens, -1, tmp_path / "bias"):
        assert path.stat().st_size > 1000


def test_plots_are_written_in_every_form(runs, text, tmp_path):
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    row = {"bench": "training", "size": "tiny", "commit": "abc", "peak_mib": 2048}
    rows = [{**row, "encoding": name, "tokens_per_second": 1e6 / n} for n, name in enumerate(("rope", "cable"), 1)]
    (tmp_path / "training.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, arguments in {
        "training": ["training", "--results", tmp_path / "training.jsonl"],
        "bias": ["bias", runs["bert cable"], "--text", text, "--layer", "0", "--tokens", "32"],
        "compare": ["compare", runs["cable"], runs["alibi"], "--text", text, "--head", "1", "--tokens", "32"],
        "diagram": ["diagram"],
    }.items():
        code, told = cable("plot", *arguments, "--out", tmp_path / "new" / name)
        assert code == 0, told
        for ending, start in starts.items():
            assert (tmp_path / "new" / f"{name}.{ending}").read_bytes().startswith(start)
    assert len(list((tmp_path / "new").iterdir())) == 12
    assert cable("plot", "diagram", "--out", tmp_path / "one" / "diagram.pdf")[0] == 0
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["diagram.pdf"]
    bars = (tmp_path / "new" / "training.svg").read_text()
    assert all(told in bars for told in ("rope", "cable", "seconds for a million tokens"))


@pytest.fixture
def stored(tmp_path) -> Path:
    """A study's folder: two cells that were read, one that failed, and one that is still in training."""
    folder = tmp_path / "<study>"
    for n, variant in enumerate(("alibi", "cable")):
        chosen = recipe.load("gpt-embedded", [f"encoding={variant}"])
        row = {
            "cell": f"{variant}-0", "variant": variant, "seed": 0, "settings": {"recipe": asdict(chosen)},
            "training": {"loss": 3.25 - n, "tokens": 4096, "curve": [[512, 5.0], [4096, 3.25 - n]]},
            "results": [{"length": 128, "perplexity": 40.5 - n}, {"length": 512, "perplexity": 39.25 - n}],
            "passkey": [{"length": 128, "depth": 0.5, "accuracy": 0.75, "samples": 4}], "commit": "abc", "gpu": None,
            "python": "3.12", "versions": {"torch": "2.13"}, "checkpoint_sha256": "f" * 64,
        }  # fmt: skip
        (folder / row["cell"]).mkdir(parents=True)
        write_json(folder / row["cell"] / "evaluation.json", row)
    (folder / "broken-0").mkdir()
    (folder / "broken-0" / "failure.txt").write_text("no <data>\n")
    (folder / "rope-0").mkdir()
    (folder / "rope-0" / "recipe.toml").write_text(recipe.to_toml(recipe.load("gpt-embedded", ["encoding=rope"])))
    (folder / "rope-0" / "metrics.jsonl").write_text('{"step": 1, "tokens": 512, "loss": 7.5}\n')
    return folder


def test_a_report_has_the_tables_figures_settings_and_environment(stored):
    code, told = cable("report", stored)
    assert code == 0 and "report.html" in told
    page = (stored / "report.html").read_text()
    for words in ("&lt;study&gt;", "<b>39.50</b>", "40.50", "no &lt;data&gt;", "2.2500", "7.5000", "torch 2.13", "abc",
                  "recipe.model.encoding", "f" * 16, "75.0"):  # fmt: skip
        assert words in page, words
    assert page.count('<img src="data:image/svg+xml;base64,') == 3  # perplexity, loss, pass keys
    assert "http" not in re.sub(r'base64,[^"]*', "", page).replace("http-equiv", "")
    code, told = cable("report", stored / "rope-0", "--out", stored / "one.html")
    assert code == 0 and "7.5000" in (stored / "one.html").read_text()
    for name, arguments in {"perplexity": [stored], "loss": [stored / "rope-0", stored]}.items():
        code, told = cable("plot", name, *arguments, "--out", stored / name)
        assert code == 0 and (stored / f"{name}.pdf").exists(), told
    legend = (stored / "loss.svg").read_text()
    assert legend.count("<!-- rope-0 -->") == 1  # given twice, drawn once


def test_runs_of_one_name_are_told_apart_however_long_their_paths(stored, tmp_path):
    other = tmp_path / ("a long name " * 12).strip()
    shutil.copytree(stored, other)
    assert cable("plot", "loss", stored, other / "rope-0", "--out", tmp_path / "loss")[0] == 0
    legend = (tmp_path / "loss.svg").read_text()
    assert "&lt;study&gt;/rope-0" in legend and "a long name" in legend and "<!-- cable-0 -->" not in legend


def test_the_loss_of_fine_tuning_is_plotted(stored, tmp_path):
    tuned = tmp_path / "tuned"
    tuned.mkdir()
    write_json(tuned / "fine_tuning.json", {"log": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]})
    assert cable("plot", "loss", tuned, "--out", tmp_path / "tuned-loss")[0] == 0
    assert "updates" in (tmp_path / "tuned-loss.svg").read_text()
    assert "not both" in cable("plot", "loss", tuned, stored)[1]


def test_what_cannot_be_plotted_or_reported_is_named(runs, stored, tmp_path):
    for arguments, words in (
        (["report", tmp_path / "nowhere"], "neither a folder nor a study"),
        (["report", tmp_path / "<study>" / "broken-0"], "holds no run yet"),
        (["plot", "perplexity", stored / "rope-0"], "has no perplexities"),
        (["plot", "training", "--results", tmp_path / "none"], "cable bench train"),
        (["plot", "bias", runs["cable"], "--layer", "9"], "layers 0 to 1"),
        (["plot", "bias", runs["cable"], "--tokens", "5000"], "at most 1024"),
        (["plot", "compare", runs["cable"], runs["alibi"], "--head", "9"], "heads 0 to 3"),
    ):
        code, told = cable(*arguments)
        assert code == 2 and words in told, told


def test_a_report_opens_without_a_request(opened, stored):
    cable("report", stored)
    opened.page.goto(f"file://{stored / 'report.html'}".replace("<", "%3C").replace(">", "%3E"))
    widths = "[...document.images].map((image) => image.naturalWidth)"
    assert len(opened.page.evaluate(widths)) == 3 and all(opened.page.evaluate(widths))
