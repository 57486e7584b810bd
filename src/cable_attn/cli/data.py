"""``cable data``: token shards."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from cable_attn.cli.common import console, working
from cable_attn.errors import CableError

data_app = typer.Typer(
    help="Turn texts into token shards, and check them.", no_args_is_help=True, rich_markup_mode="markdown"
)


@data_app.command(name="prepare")
def data_prepare(
    source: Annotated[
        str,
        typer.Argument(
            help="embedded, fineweb-edu, fineweb-1b, wikitext-103, a file or folder (.txt .md .jsonl .parquet), "
            "or a dataset id owner/name."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Folder for the shards.")],
    tokenizer: Annotated[
        str, typer.Option(help="gpt2 or any Hugging Face name or folder, tiktoken, or bpe:SIZE to learn one.")
    ] = "gpt2",
    column: Annotated[str, typer.Option(help="Where the text is in JSONL, parquet or a dataset.")] = "text",
    held_out: Annotated[
        float | None, typer.Option(help="Share of documents for validation, if the source has no such split.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Stop after so many tokens of each split.")] = None,
    shard_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a shard.")] = 100_000_000,
) -> None:
    """Tokenize a source into memory-mapped shards with a manifest. Stop it at any time: the same command goes on.

    Example: `cable data prepare wikitext-103 data/wikitext-103`, or `cable data prepare my-texts/ data/mine
    --tokenizer bpe:8192`.
    """
    from cable_attn.data.shards import Request, prepare
    from cable_attn.data.sources import open_source
    from cable_attn.data.tokenizers import find_tokenizer

    streams = open_source(source, column, held_out)
    chosen = find_tokenizer(tokenizer, next(iter(streams.values()))(0))
    begun, written = time.monotonic(), 0
    with working() as progress:
        tasks = {split: progress.add_task(split, total=tokens, start=False, what="waiting") for split in streams}

        def tell(split: str, count: int) -> None:
            nonlocal written
            written += count
            progress.start_task(tasks[split])
            rate = written / max(time.monotonic() - begun, 1e-9) / 1e6
            progress.update(tasks[split], advance=count, what=f"{rate:.2f}M tokens/s")

        manifest = prepare(
            out, Request(source, tokenizer, tokens, shard_tokens, column, held_out), streams, chosen, tell
        )
    console.print(_splits_table(manifest, out))
    for split in [split for split, entry in manifest["splits"].items() if entry["tokens"] < 2]:
        console.print(f"Nothing is in {split}: too few documents for its share. --held-out 0.5 takes every second one.")


@data_app.command(name="import")
def data_import(
    files: Annotated[list[str], typer.Argument(help="SPLIT=FILE, like train=books.bin: uint16 tokens, also .xz.")],
    out: Annotated[Path, typer.Option(help="Folder for the shards.")],
    vocab_size: Annotated[int, typer.Option(min=2, help="Of the tokenizer that made the tokens.")] = 50257,
    separator: Annotated[int, typer.Option(min=0, help="The token before each document.")] = 50256,
    tokenizer: Annotated[str, typer.Option(help="The tokenizer's name or folder, to keep it with the tokens.")] = "",
) -> None:
    """Take over tokens that were made elsewhere, GPT-2's by default.

    Example: `cable data import train=books.bin validation=more.bin --out data/books`
    """
    from cable_attn.data.shards import import_tokens
    from cable_attn.data.tokenizers import find_tokenizer

    pairs = [file.partition("=") for file in files]
    wrong = [split for split, equals, _ in pairs if not equals]
    if wrong:
        raise CableError(f"each file is SPLIT=FILE, like train=books.bin; got {wrong[0]!r}.")
    splits = [split for split, _, _ in pairs]
    odd = [split for split in splits if not re.fullmatch(r"[\w-]+", split)]
    if odd:
        raise CableError(f"the name of a split has letters, digits, - and _ only; got {odd[0]!r}.")
    twice = [split for split in splits if splits.count(split) > 1]
    if twice:
        raise CableError(f"split {twice[0]!r} is given twice. Join its files first: cat a.bin b.bin > all.bin")
    keep = find_tokenizer(tokenizer, iter(())) if tokenizer else None
    manifest = import_tokens(out, {split: Path(path) for split, _, path in pairs}, vocab_size, separator, keep)
    console.print(_splits_table(manifest, out))


def _splits_table(manifest: dict[str, Any], out: Path) -> Table:
    table = Table("split", "tokens", "documents", "shards", title=str(out))
    for split, entry in manifest["splits"].items():
        table.add_row(split, f"{entry['tokens']:,}", f"{entry['documents']:,}", str(len(entry["shards"])))
    return table


@data_app.command(name="verify")
def data_verify(folder: Annotated[Path, typer.Argument(help="A folder of cable data prepare.")]) -> None:
    """Check every shard's size and hash against the manifest."""
    from cable_attn.data.shards import verify

    wrong = verify(folder, lambda name: console.print(name, highlight=False))
    if wrong:
        raise CableError("; ".join(wrong) + ".")
    console.print("All shards are whole.")
