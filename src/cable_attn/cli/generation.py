"""``cable generate`` and ``cable serve``: text from a checkpoint, as it comes."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cable_attn.errors import CableError, require_known
from cable_attn.recipe import MOST_SEED

CACHES = ("dynamic", "static")
LONG = 4096
"""Tokens of a prompt from which on it is told that they are read."""


def generate(
    checkpoint: Annotated[str, typer.Argument(help="A run folder, or any Hugging Face causal LM on disk or hub.")],
    prompt: Annotated[str, typer.Option(help="The beginning of the text; - reads it from standard input.")] = "",
    file: Annotated[Path | None, typer.Option(help="A text file as the prompt, of any length.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=1, help="How many to add at most.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token each time.")] = 0.8,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Draw from the likeliest tokens of this share.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="The same seed gives the same text.")] = 0,
    cache: Annotated[str, typer.Option(help="dynamic, or static: of fixed size, so that a GPU compiles once.")] = (
        "dynamic"
    ),
    prefill: Annotated[
        int, typer.Option(min=0, help="Read the prompt so many tokens at a time, to spare memory; 0: at once.")
    ] = 8192,
    prune: Annotated[
        float, typer.Option(min=0, max=0.5, help="Skip keys that provably weigh less than this in all; 0: none.")
    ] = 0.0,
    evict: Annotated[
        float,
        typer.Option(min=0, max=0.5, help="Forget keys that no later token can feel, up to this weight; 0: none."),
    ] = 0.0,
) -> None:
    """Go on with a text. It streams to standard output; its speed goes to standard error.

    ```
    cable generate runs/demo/cable-0 --prompt "It is a truth universally acknowledged"
    cable generate runs/demo/cable-0 --file novel.txt -n 50 --temperature 0
    ```
    """
    import torch
    from transformers import set_seed

    from cable_attn.devices import best_device
    from cable_attn.models.loading import checkpoint_folder, load_causal_lm

    require_known("cache", cache, CACHES)
    text = _prompt(prompt, file)
    model, tokenizer = load_causal_lm(checkpoint_folder(checkpoint))
    model = model.to(best_device()).eval()
    if prune:
        _set_pruning(model, prune)
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"].to(model.device)
    if not ids.shape[1]:
        raise CableError("the prompt has no token. Give --prompt or --file with some text.")
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p}
    set_seed(seed)
    stream = _stream(tokenizer)
    held: dict[str, Any] = {"cache_implementation": cache}
    if evict:
        held = {"past_key_values": _forgetting(model, evict, cache, ids.shape[1] + tokens)}
    chunk = {"prefill_chunk_size": prefill} if 0 < prefill < ids.shape[1] else {}
    if ids.shape[1] >= LONG:
        Console(stderr=True).print(f"Reading {ids.shape[1]:,} tokens first.", highlight=False)
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, streamer=stream,
        pad_token_id=tokenizer.pad_token_id or 0, **held, **sampling, **chunk,
    )  # fmt: skip
    Console(stderr=True).print(stream.told(ids.shape[1]), highlight=False, soft_wrap=True)


def serve(
    checkpoint: Annotated[str, typer.Argument(help="A run folder, or any Hugging Face causal LM on disk or hub.")],
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 for the whole network.")] = "localhost",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen at.")] = 8000,
) -> None:
    """Serve a model to OpenAI's clients, with the server of transformers. Ctrl-C ends it.

    ```
    cable serve runs/demo/cable-0
    curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"model": "runs/demo/cable-0", "prompt": "It is a truth", "max_tokens": 50}'
    ```
    """
    import transformers
    from transformers.utils.import_utils import is_serve_available

    from cable_attn.models import CableGPTForCausalLM
    from cable_attn.models.loading import checkpoint_folder, load_config

    if not is_serve_available():
        raise CableError("cable serve needs a few more packages: pip install 'cable-attn[serve]'.")
    from transformers.cli.serve import Serve

    folder = checkpoint_folder(checkpoint)
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise CableError(f"{checkpoint!r} has no {name}: give the folder of a finished run, or a model of the hub.")
    if load_config(folder).model_type == "cable_bert":
        raise CableError(f"{checkpoint!r} is an encoder, which does not write text. cable retrieve search uses it.")
    _require_free(host, port)
    # The server looks for a model's class among those of transformers; no code comes from the checkpoint.
    setattr(transformers, CableGPTForCausalLM.__name__, CableGPTForCausalLM)
    Console(stderr=True).print(f"{checkpoint} at http://{host}:{port}/v1/completions", highlight=False)
    Serve(force_model=str(folder), host=host, port=port, log_level="error")


def _require_free(host: str, port: int) -> None:
    """Before a model is loaded for nothing."""
    import socket

    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as found:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
    except OSError as error:
        raise CableError(
            f"cannot listen at {host}:{port}: {error.strerror}. Choose another --port or --host."
        ) from error


def _set_pruning(model: Any, epsilon: float) -> None:
    from cable_attn.models.layers import EncodedConfig

    if not isinstance(model.config, EncodedConfig):
        raise CableError(f"--prune works on models of this package, and this is a {type(model).__name__}.")
    model.config.attention_prune = epsilon
    model.config.check()


def _forgetting(model: Any, epsilon: float, cache: str, most_tokens: int) -> Any:
    from cable_attn.models.forgetting import ForgettingCache

    if cache == "static":
        raise CableError("--evict needs a dynamic cache: one of fixed size would not shrink.")
    return ForgettingCache(model, epsilon, most_tokens + 1)


def _prompt(prompt: str, file: Path | None) -> str:
    if bool(prompt) == (file is not None):
        raise CableError("give the prompt with --prompt or with --file, one of them.")
    if file is None:
        return sys.stdin.read() if prompt == "-" else prompt
    from cable_attn.data.corpus import read_text

    return read_text(file)


def _stream(tokenizer: Any) -> Any:
    from transformers import TextStreamer

    class Stream(TextStreamer):
        """Writes words as they are whole, and notes when tokens come."""

        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.begun, self.first, self.count = time.monotonic(), 0.0, -1  # the prompt comes first

        def put(self, value: Any) -> None:
            self.count += 1
            if self.count == 1:
                self.first = time.monotonic()
            super().put(value)

        def told(self, prompt: int) -> str:
            wait = self.first - self.begun
            rate = (self.count - 1) / max(time.monotonic() - self.first, 1e-9)
            after = f", then {rate:,.1f} tokens/s" if self.count > 1 else ""
            return f"{prompt:,} tokens read, the first new one after {wait:.2f} s{after} ({self.count} in all)."

    return Stream()
