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
    from cable_attn.files import write_atomically

    if len(checkpoints) > 2:
        raise CableError(f"explore shows one checkpoint or two side by side, got {len(checkpoints)}.")
    _require_folder(out)
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
    import torch

    from cable_attn.data.corpus import embedded_corpus, read_texts
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
    model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
    return model, tokenise(tokenizer, documents[0].text, tokens)


def _layers(text: str, layers: int) -> list[int]:
    if text == "all":
        return list(range(layers))
    try:
        return [int(part.replace("−", "-")) for part in text.split(",")]
    except ValueError as error:
        raise CableError(f"--attention wants layers like 0,5 or −1, or all; got {text!r}.") from error


def _require_folder(path: Path) -> None:
    from cable_attn.files import writable_folder

    if path.is_dir():
        raise CableError(f"--out {str(path)!r} is a folder. Name a file in it.")
    writable_folder(path.parent)
