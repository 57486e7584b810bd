"""``cable retrieve``: encoders for long documents, trained on short ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress, TaskID
from rich.table import Table

from cable_attn.cli.common import console, numbers, say, working
from cable_attn.errors import CableError
from cable_attn.recipe import MOST_SEED

app = typer.Typer(
    help="Fine-tune encoders, and measure how well they find long documents.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.command(name="train")
def train(
    encoder: Annotated[str, typer.Argument(help="A run folder of cable train (bert), or any encoder on disk or hub.")],
    triplets: Annotated[str, typer.Argument(help="JSONL of query, positive, negative(s); or msmarco, from the hub.")],
    out: Annotated[Path, typer.Option(help="Folder for the trained SentenceTransformer.")],
    batch_size: Annotated[int, typer.Option(min=2, help="Queries in a batch; all their passages are negatives.")] = 128,
    learning_rate: Annotated[float, typer.Option(help="Falls linearly after a warm-up of 5 %.")] = 8e-5,
    epochs: Annotated[float, typer.Option(min=0, help="Passes over the triplets.")] = 1.0,
    max_length: Annotated[int, typer.Option(min=8, help="Tokens of a text; the rest is cut off.")] = 512,
    negatives: Annotated[int, typer.Option(min=0, help="Hard negatives of each query.")] = 1,
    cached_batch: Annotated[
        int, typer.Option(min=0, help="Above 0: large batches from parts of so many texts (GradCache).")
    ] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many triplets.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Order and dropout.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was cut off.")] = False,
) -> None:
    """Fine-tune an encoder so that queries lie near their passages.

    ```
    As in the paper:   cable retrieve train runs/bert msmarco --limit 1250000 --out runs/retriever
    Your own pairs:    cable retrieve train runs/bert pairs.jsonl --out runs/retriever
    ```

    The result loads anywhere:  SentenceTransformer("runs/retriever"), after `import cable_attn`.
    """
    from cable_attn.retrieval.training import Settings, describe, read_triplets
    from cable_attn.retrieval.training import train as run
    from cable_attn.training import Stopped

    found = read_triplets(triplets, limit)
    say(describe(found))
    settings = Settings(
        batch_size, learning_rate, epochs=epochs, max_length=max_length, negatives=negatives, cached_batch=cached_batch,
        seed=seed,
    )  # fmt: skip
    with working() as progress:
        bar = progress.add_task("fine-tuning", total=settings.steps(len(found)), what="")

        def watch(step: int, loss: float | None) -> None:
            progress.update(bar, completed=step)
            if loss is not None:
                progress.update(bar, what=f"loss {loss:.3f}")

        try:
            run(encoder, found, out, settings, resume, watch)
        except Stopped as stopped:
            say(f"{stopped} Go on with the same command and --resume.")
            raise typer.Exit(stopped.exit_code) from None
    say(f"Done. The encoder is in {out}")


@app.command(name="eval")
def evaluate(
    collection: Annotated[
        str, typer.Argument(help="A folder in the layout of BEIR or MLDR; mldr, from the hub; or embedded.")
    ],
    encoders: Annotated[list[str], typer.Argument(help="Encoders on disk or hub, and bm25 for the baseline of words.")],
    lengths: Annotated[str, typer.Option(help="Tokens of a document to read, with commas between.")] = (
        "512,1024,2048,4096,8192,16384"
    ),
    split: Annotated[str, typer.Option(help="Of the judgements.")] = "test",
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a batch, padding included.")] = 65536,
    cache: Annotated[Path, typer.Option(help="Folder for embeddings: nothing is encoded twice.")] = Path(
        "runs/embeddings"
    ),
    search: Annotated[
        str, typer.Option(help="Exact search by product (torch) or faiss; auto takes what is there.")
    ] = "auto",
    out: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
) -> None:
    """nDCG@10, recall@100 and reciprocal rank for documents cut at several lengths.

    Example: `cable retrieve eval embedded runs/retriever bm25 --lengths 128,1024`
    """
    from cable_attn.environment import environment
    from cable_attn.files import writable_file, writable_folder, write_json
    from cable_attn.retrieval import evaluation
    from cable_attn.retrieval.collection import find_collection

    if out is not None:
        writable_file(out)
    if set(encoders) != {evaluation.BM25}:
        writable_folder(cache)
    found = find_collection(collection, split)
    for note in found.notes:
        say(f"Note: {note}")
    wanted, rows = numbers(lengths), []
    evaluation.check(encoders, search)
    about = {"collection": found.name, "collection_sha256": found.sha256, **environment()}
    table = Table("encoder", "tokens", "nDCG@10", "recall@100", "MRR", "documents/s", title=_title(found))
    with working() as progress:
        for encoder in encoders:
            bars = {}
            if encoder != evaluation.BM25:
                bars = {n: progress.add_task(str(n), total=len(found.documents), what=encoder) for n in wanted}
            options: dict[str, Any] = {"batch_tokens": batch_tokens, "cache": cache, "search": search}
            rows += evaluation.evaluate(found, encoder, wanted, watch=_advance(progress, bars), **options)
            if out is not None:
                write_json(out, {**about, "results": rows})
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)
    if out is not None:
        say(f"Results: {out}")


def _advance(progress: Progress, bars: dict[int, TaskID]) -> Callable[[int, int], None]:
    return lambda length, count: progress.advance(bars[length], count)


@app.command(name="search")
def search(
    folder: Annotated[Path, typer.Argument(help="Texts to search: .txt, .md and .jsonl files, also in folders below.")],
    query: Annotated[str, typer.Argument(help="What to look for.")],
    encoder: Annotated[str, typer.Option(help="A trained encoder on disk or hub.")],
    max_length: Annotated[int, typer.Option(min=8, help="Tokens of a document to read.")] = 8192,
    count: Annotated[int, typer.Option("--count", "-k", min=1, help="How many documents to show.")] = 5,
    cache: Annotated[Path, typer.Option(help="Folder for embeddings: only what changed is encoded again.")] = Path(
        "runs/embeddings"
    ),
) -> None:
    """Find the documents of a folder that are nearest to a query, and show the best passage of each.

    Example: `cable retrieve search notes/ "why did we change the learning rate" --encoder runs/retriever`
    """
    from cable_attn.files import writable_folder
    from cable_attn.retrieval.search import read_library
    from cable_attn.retrieval.search import search as run

    writable_folder(cache)
    library = read_library(folder)
    for note in library.notes:
        say(f"Note: {note}")
    with working() as progress:
        bar = progress.add_task("reading", total=len(library.texts), what=str(folder))
        options: dict[str, Any] = {"max_length": max_length, "count": count, "cache": cache}
        hits = run(library, query, encoder, watch=lambda n: progress.advance(bar, n), **options)
    for number, hit in enumerate(hits, 1):
        console.print(f"[bold]{number}. {escape(hit.where)}[/]  {hit.score:.3f}", highlight=False)
        console.print(f"   {escape(hit.passage)}\n", highlight=False)


@app.command(name="embedded")
def embedded(folder: Annotated[Path, typer.Argument(help="Folder for the set.")]) -> None:
    """Write the embedded retrieval set: chapters of novels, sentences taken out of them, and triplets to train on."""
    from cable_attn.files import writable_folder
    from cable_attn.retrieval.embedded import write_embedded

    if any(writable_folder(folder).iterdir()):
        raise CableError(f"{str(folder)!r} is not empty. Choose another folder.")
    write_embedded(folder)
    say(f"Written: {folder}")


def _title(collection: Any) -> str:
    return f"{collection.name}: {len(collection.documents):,} documents, {len(collection.queries):,} queries"


def _cells(row: dict[str, Any]) -> list[str]:
    length = "–" if row["max_length"] is None else str(row["max_length"])
    if "error" in row:
        return [row["encoder"], length, row["error"]]
    speed = f"{row['documents_per_second']:.1f}" if "documents_per_second" in row else "–"
    return [row["encoder"], length, *(f"{row[key]:.4f}" for key in ("ndcg@10", "recall@100", "mrr")), speed]
