"""``cable explore``, ``cable plot`` and ``cable report``: look inside a model, and at what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cable_attn.cli.common import say, working
from cable_attn.errors import CableError

LIGHT = 5 * 2**20
"""Pages above this many bytes are slow to send and to open."""

Checkpoint = Annotated[str, typer.Argument(help="A run folder, or a model of this package on the hub.")]
TextFile = Annotated[
    Path | None, typer.Option("--text", help="A text file to read; default: the beginning of the embedded test novel.")
]


def explore(
    checkpoints: Annotated[list[str], typer.Argument(help="A run folder, or two to stand side by side.")],
    text: TextFile = None,
    tokens: Annotated[int, typer.Option(min=2, help="Read at most so many tokens of the text.")] = 1024,
    attention: Annotated[
        str, typer.Option(help="Layers whose attention weights are kept, like 0,5 or all; −1 is the last.")
    ] = "-1",
    out: Annotated[Path, typer.Option(help="The page.")] = Path("explore.html"),
) -> None:
    """Write one HTML page that shows what each head of a model makes of a text. It needs no network.

    The text is shaded by the distance that each token adds; point at a token and see what it can still see. Any GPT or
    BERT of this package, with any encoding; two checkpoints stand side by side on the same text.

    ```
    A run of the demo:           cable explore runs/demo/cable-0
    Your text:                   cable explore runs/mine --text letter.txt --out letter.html
    CABLE beside ALiBi:          cable explore runs/demo/cable-0 runs/demo/alibi-0
    Attention of every layer:    cable explore runs/mine --attention all
    ```
    """
    from cable_attn.explore.page import render
    from cable_attn.files import writable_file, write_atomically

    if len(checkpoints) > 2:
        raise CableError(f"explore shows one checkpoint or two side by side, got {len(checkpoints)}.")
    writable_file(out)
    looked = _look(checkpoints, text, tokens, attention)
    title = " beside ".join(f"{one.encoding} ({one.name})" for one in looked)
    page = render(looked, f"Inside {title}").encode()
    write_atomically(out, page)
    say(f"Page: {out} ({len(page) / 2**20:.1f} MB). Open it in a browser.")
    if len(page) > LIGHT:
        say("It is large. Fewer --tokens, or fewer layers in --attention, make it smaller.")


def _look(checkpoints: list[str], text: Path | None, tokens: int, attention: str) -> list[Any]:
    from cable_attn.explore.extract import look

    looked = []
    with working() as progress:
        for checkpoint in checkpoints:
            model, found = _load(checkpoint, text, tokens)
            layers = _layers(attention, model.config.num_hidden_layers)
            bar = progress.add_task(Path(checkpoint).name[-13:], total=1, what="attention")

            def watch(done: int, total: int, bar: Any = bar) -> None:
                progress.update(bar, completed=done, total=total)

            looked.append(look(model, found, Path(checkpoint).name, layers, watch))
    return looked


def _load(checkpoint: str, text: Path | None, tokens: int) -> tuple[Any, Any]:
    """The model, and the text as its tokens."""

    from cable_attn.data.corpus import embedded_corpus, read_texts
    from cable_attn.devices import best_device
    from cable_attn.explore.tokens import tokenise
    from cable_attn.models.loading import checkpoint_folder, load_gpt_or_bert, tokenizer_of

    documents = embedded_corpus("test") if text is None else read_texts(text)
    folder = checkpoint_folder(checkpoint)
    model = load_gpt_or_bert(folder).float()
    if not hasattr(model.config, "encoding"):
        raise CableError(f"{checkpoint!r} is a {model.config.model_type}, not a model of this package (cable train).")
    tokenizer = tokenizer_of(folder)
    if tokenizer is None:
        raise CableError(f"{str(folder)!r} has no tokenizer.json. Save the model's tokenizer there: save_pretrained.")
    model.to(best_device())
    return model, tokenise(tokenizer, documents[0].text, tokens)


def _layers(text: str, layers: int) -> list[int]:
    if text == "all":
        return list(range(layers))
    try:
        return [int(part.replace("−", "-")) for part in text.split(",")]
    except ValueError as error:
        raise CableError(f"--attention wants layers like 0,5 or −1, or all; got {text!r}.") from error


def report(
    source: Annotated[str, typer.Argument(help="A run folder, a folder of runs, or a study's name.")],
    out: Annotated[Path | None, typer.Option(help="The page; default: report.html in the folder.")] = None,
) -> None:
    """Write one HTML page of a run or a study: tables, figures, loss curves, settings and environment.

    It is made from what the folder holds, also while cells are still missing, and needs no network.

    ```
    The demo:            cable report runs/demo
    A study by name:     cable report wikitext103-tiny
    One run:             cable report runs/gpt-embedded-cable
    ```
    """
    from cable_attn import summary
    from cable_attn.files import writable_file

    folder, title, paper = _find_study(source)
    if out is not None:
        writable_file(out)
    say(f"Report: {summary.write(folder, summary.gather(folder, title, paper), out)}")


def _find_study(source: str) -> tuple[Path, str, Any]:
    """The folder, and what the package knows of a study of that name."""
    from cable_attn import findings
    from cable_attn import study as studies

    folder = Path(source)
    if not folder.is_dir():
        folder = Path("runs/studies") / source
    if not folder.is_dir():
        raise CableError(
            f"{source!r} is neither a folder nor a study in runs/studies. Give the folder of a run or of a study."
        )
    name = folder.resolve().name
    if name not in studies.builtin():
        return folder, "", None
    known = studies.load(name)
    paper = findings.paper(known.paper)
    return folder, known.title, paper["rows"] if paper else None


plot_app = typer.Typer(
    help="Still figures, each as PNG, SVG and PDF.", rich_markup_mode="markdown", no_args_is_help=True
)
Layer = Annotated[int, typer.Option(help="From 0; −1 is the last.")]
Tokens = Annotated[int, typer.Option(min=2, help="Read at most so many tokens of the text.")]
Stem = Annotated[
    Path | None, typer.Option(help="Where to: a path for .png, .svg and .pdf, or with one of them; default: its name.")
]


@plot_app.command(name="bias")
def plot_bias(
    checkpoint: Checkpoint, text: TextFile = None, layer: Layer = -1, tokens: Tokens = 128, out: Stem = None
) -> None:
    """Heat maps of what a layer's encoding adds to the scores, for all its heads.

    For an encoding that adds no bias, like rope, the scores themselves. For one that looks at the scores, like
    dapev2-cable, all that it changes in them.

    Example: `cable plot bias runs/demo/cable-0 --layer 0 --tokens 64`
    """
    from cable_attn.explore.figures import bias_figure

    with working():
        model, found = _load(checkpoint, text, tokens)
    stem = _stem(out, f"bias-{model.config.encoding}")
    _draw(lambda: bias_figure(model, found, layer, stem))


@plot_app.command(name="compare")
def plot_compare(
    first: Checkpoint,
    second: Checkpoint,
    text: TextFile = None,
    layer: Layer = -1,
    head: Annotated[int, typer.Option(min=0, help="The head of the heat maps.")] = 0,
    tokens: Tokens = 128,
    out: Stem = None,
) -> None:
    """Two models on one text: one head's heat map, and one query's bias in all heads.

    Example: `cable plot compare runs/demo/cable-0 runs/demo/alibi-0`
    """
    from cable_attn.explore.figures import compare_figure

    with working():
        models = [_load(checkpoint, text, tokens) for checkpoint in (first, second)]
    stem = _stem(out, "-against-".join(model.config.encoding for model, _ in models))
    _draw(lambda: compare_figure(models, layer, head, stem))


@plot_app.command(name="diagram")
def plot_diagram(out: Stem = None) -> None:
    """How ALiBi and CABLE come to their biases, on six tokens."""
    from cable_attn.explore.figures import diagram_figure

    stem = _stem(out, "diagram")
    _draw(lambda: diagram_figure(stem))


@plot_app.command(name="perplexity")
def plot_perplexity(
    source: Annotated[str, typer.Argument(help="A folder of runs, or a study's name.")], out: Stem = None
) -> None:
    """Perplexity against length, from a study's stored results.

    Example: `cable plot perplexity runs/demo`
    """
    from cable_attn import findings, summary
    from cable_attn.report import perplexity_figure

    gathered = summary.gather(_find_study(source)[0])
    found = findings.by_variant(gathered.rows)
    if not found:
        raise CableError(f"{source!r} has no perplexities. Its cells must be read: cable study run, or cable eval.")
    stem = _stem(out, "perplexity")
    _draw(lambda: perplexity_figure(found, gathered.trained_at, stem))


@plot_app.command(name="loss")
def plot_loss(
    sources: Annotated[list[str], typer.Argument(help="Run folders, folders of runs, or a study's name.")],
    out: Stem = None,
) -> None:
    """Loss in training, a line for each run: next tokens (GPT), masked tokens (BERT), or fine-tuning for retrieval.

    ```
    Masked tokens:     cable plot loss runs/bert-embedded-cable runs/bert-embedded-alibi
    Fine-tuning:       cable plot loss runs/retrieval-cable runs/retrieval-alibi
    ```
    """
    from cable_attn import summary
    from cable_attn.report import loss_figure

    tuned = [Path(source) for source in sources if summary.is_fine_tuned(Path(source))]
    if tuned and len(tuned) < len(sources):
        raise CableError("give runs of fine-tuning or of pre-training, not both: their losses do not compare.")
    labels = {"what": "contrastive loss", "along": "updates"} if tuned else {}
    curves = summary.fine_tuning_curves(tuned) or summary.loss_curves([_find_study(one)[0] for one in sources])
    if not any(curves.values()):
        raise CableError(f"{', '.join(sources)}: no loss was logged yet.")
    stem = _stem(out, "loss")
    _draw(lambda: loss_figure(curves, stem, **labels))


@plot_app.command(name="training")
def plot_training(
    results: Annotated[Path, typer.Option(help="What cable bench train has stored.")] = Path(
        "benchmarks/results/training.jsonl"
    ),
    out: Stem = None,
) -> None:
    """Training time and memory of each encoding, from the stored measurements."""
    from cable_attn.bench import records
    from cable_attn.report import training_figure

    if not results.is_file():
        raise CableError(f"no measurements in {str(results)!r}. Make them with cable bench train.")
    rows = records.latest_by_size(records.read(results))
    stem = _stem(out, "training")
    _draw(lambda: training_figure(rows, stem))


def _stem(out: Path | None, name: str) -> Path:
    from cable_attn.files import writable_folder

    stem = out or Path(name)
    writable_folder(stem.parent)
    return stem


def _draw(figure: Any) -> None:
    try:
        paths = figure()
    except ImportError as error:
        raise CableError("figures need matplotlib: pip install 'cable-attn[plot]'.") from error
    say("Written: " + ", ".join(str(path) for path in paths))
