"""``cable bench decode`` and ``cable bench prefill``: how fast a model reads a long prompt and goes on with it.

Decoding is measured as it is fastest: a static cache of one size for all lengths, the step compiled and replayed as a
CUDA graph, the next token chosen on the GPU. What is said so must be what the model says without a cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, DynamicCache, StaticCache

from cable_attn.encodings import ENCODINGS as ENCODINGS_BY_NAME
from cable_attn.errors import CableError, require_known
from cable_attn.models import CableGPTConfig, CableGPTForCausalLM
from cable_attn.models.loading import load_model

LENGTHS = (1024, 4096, 16384, 65536, 131072)
ENCODINGS = ("rope", "cable", "cable-nw", "alibi", "kerple-log", "t5", "fire", "fox", "nope", "sinusoidal")
CHUNK = 8192
WARM = 8
GATE = 512
"""Tokens of the text on which the steps must agree with a run without a cache."""


def choose(names: list[str], size: str, prune: float | None) -> dict[str, Callable[[], Any]]:
    """How to make each model: a folder's, or one with fresh weights, whose speed is that of trained ones but for what
    pruning keeps. prune: those that can be pruned come a second time, pruned."""
    found: dict[str, Callable[[], Any]] = {}
    for name in names:
        folder = Path(name)
        if (folder / "config.json").is_file():
            encoding = getattr(AutoConfig.from_pretrained(folder), "encoding", None)
            made = partial(load_model, folder)
        else:
            require_known("model (no such folder either)", name, ENCODINGS_BY_NAME)
            encoding = name
            made = partial(_fresh, size, name)
        if encoding is None:
            raise CableError(f"{name!r} holds no model of this package.")
        found[name] = made
        if prune and ENCODINGS_BY_NAME[encoding].prunable:
            found[f"{name}, pruned"] = partial(_pruned, made, prune)
    return found


def _fresh(size: str, encoding: str) -> Any:
    return CableGPTForCausalLM(CableGPTConfig.preset(size, encoding=encoding))


def _pruned(made: Callable[[], Any], epsilon: float) -> Any:
    model = made()
    model.config.attention_prune = epsilon
    return model


def prepare(model: Any) -> Any:
    cuda = torch.cuda.is_available()
    return model.to("cuda" if cuda else "cpu", torch.bfloat16 if cuda else torch.float32).eval()


@torch.inference_mode()
def prefill(model: Any, ids: Tensor, repeats: int = 3) -> dict[str, Any]:
    """Seconds until the first new token of prompts ids [B, T], and the peak memory."""
    times = []
    _reset_peak()
    for _ in range(repeats + 1):  # the first one warms up
        begun = _now()
        _read(model, ids, DynamicCache(config=model.config))
        times.append(_now() - begun)
    return {"seconds_to_first_token": sorted(times[1:])[(repeats - 1) // 2], "peak_mib": _peak()}


class Decoder:
    """A model that goes on with prompts of several lengths; compiled once."""

    def __init__(self, model: Any, batch: int, longest: int, steps: int, compile: bool = True):
        self.model, self.batch, self.steps = model, batch, steps
        room = -(-(longest + steps + WARM + 1) // 64) * 64
        self.cache = StaticCache(config=model.config, max_cache_len=room)
        self.step: Callable[..., Any] = self._step
        if compile:
            self.step = torch.compile(self._step, mode="reduce-overhead", fullgraph=True)

    def _step(self, token: Tensor) -> Tensor:
        return self.model(token, past_key_values=self.cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)

    @torch.inference_mode()
    def text(self, ids: Tensor, steps: int) -> Tensor:
        """The likeliest continuation [B, steps]."""
        self.cache.reset()
        token, said = _read(self.model, ids, self.cache), []
        for _ in range(steps):
            said.append(token.clone())
            token = self.step(token)
        return torch.cat(said, 1)

    @torch.inference_mode()
    def measure(self, ids: Tensor) -> dict[str, Any]:
        """Tokens per second of all texts together, behind prompts ids [B, T]."""
        self.cache.reset()
        _reset_peak()
        token = _read(self.model, ids, self.cache)
        for _ in range(WARM):
            token = self.step(token).clone()
        begun = _now()
        for _ in range(self.steps):
            token = self.step(token).clone()
        seconds = (_now() - begun) / self.steps
        return {"tokens_per_second": self.batch / seconds, "ms": seconds * 1e3, "peak_mib": _peak()}

    def check(self, ids: Tensor, tokens: int = 8) -> None:
        """The steps say what the model says without a cache, but for near ties."""
        said = self.text(ids, tokens)
        whole = torch.cat([ids, said], 1)
        with torch.inference_mode():
            logits = self.model(whole, use_cache=False).logits[:, ids.shape[1] - 1 : -1].float()
        short = logits.amax(-1) - logits.gather(-1, said[..., None]).squeeze(-1)
        if float(short.max()) > 0.25:
            raise CableError(
                f"a step with {self.model.config.encoding} chose a token {float(short.max()):.2f} below the best one "
                "of a run without a cache: nothing is measured."
            )


def run(
    models: dict[str, Callable[[], Any]],
    lengths: list[int],
    batch: int,
    tokens: Tensor | None = None,
    steps: int = 0,
    compile: bool = True,
) -> Iterator[dict[str, Any]]:
    """A row for each model and length: of decoding so many steps, or of reading the prompt alone."""
    for name, made in models.items():
        model = prepare(made())
        config = model.config
        about = {"bench": "decode" if steps else "prefill", "model": name, "encoding": config.encoding, "batch": batch}
        about |= {"prune": config.attention_prune, "parameters": model.num_parameters()}
        measure: Callable[[Tensor], dict[str, Any]] = partial(prefill, model)
        if steps:
            decoder = Decoder(model, batch, max(lengths), steps, compile)
            decoder.check(_prompt(model, batch, min(GATE, *lengths), tokens))
            measure = decoder.measure
        for length in lengths:
            try:
                yield about | {"length": length} | measure(_prompt(model, batch, length, tokens))
            except torch.cuda.OutOfMemoryError:
                yield about | {"length": length, "error": "out of memory"}
        del model, measure
        torch.compiler.reset()


def _read(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """The prompt, piece by piece; the likeliest token behind it [B, 1]."""
    for piece in ids.split(CHUNK, 1):
        out = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return out.logits[:, -1].argmax(-1, keepdim=True)


def _prompt(model: Any, batch: int, length: int, tokens: Tensor | None) -> Tensor:
    if tokens is None:
        made = torch.Generator().manual_seed(0)
        ids = torch.randint(model.config.vocab_size - 64, (batch, length), generator=made)
    elif len(tokens) < batch * length:
        raise CableError(f"the text has {len(tokens)} tokens, {batch} × {length} are wanted. Give more, or --lengths.")
    else:
        ids = tokens[: batch * length].reshape(batch, length)
    return ids.to(model.device)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _peak() -> int | None:
    return round(torch.cuda.max_memory_allocated() / 2**20) if torch.cuda.is_available() else None
