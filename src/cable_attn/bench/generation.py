"""``cable bench decode`` and ``cable bench prefill``: how fast a model reads a long prompt and goes on with it.

Decoding is measured as it is fastest: a static cache, the step compiled and captured as a CUDA graph, the next token
chosen on the GPU and handed to the next step there. One cache with room for the longest prompt serves all lengths;
PyTorch's own kernels, which read all of it, get one for each length. What is said so must be what the model says
without a cache.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, StaticCache

from cable_attn import recipe as recipes
from cable_attn.attention import BACKENDS
from cable_attn.cells import training_record
from cable_attn.devices import best_device
from cable_attn.encodings import ENCODINGS as ENCODINGS_BY_NAME
from cable_attn.errors import CableError, reason, require_known
from cable_attn.evaluation import checkpoint_hash
from cable_attn.jobs import Process, in_turn
from cable_attn.models import CableGPTConfig, CableGPTForCausalLM
from cable_attn.models.forgetting import ForgettingCache
from cable_attn.models.loading import load_config, load_model

LENGTHS = (1024, 4096, 16384, 65536, 131072)
ENCODINGS = tuple(dict.fromkeys(["rope", "cable", *ENCODINGS_BY_NAME]))
CHUNK = 8192
WARM = 8
GATE = 512
"""Tokens of the text on which the steps must agree with a run without a cache."""
COMPARED = 16384
"""The longest prompt behind which texts are compared."""
PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}
PRUNED = ", pruned"
PYTORCH_KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
"""Those of the sdpa backend that can be asked for by name, as ``rope@cudnn``."""
LEARNED_POSITIONS = max(LENGTHS) + 4096
"""So that learned ones can be measured at all: a table of them says nothing past its end."""


class GateError(CableError):
    """What is fast is wrong."""


def choose(names: list[str], size: str, prune: float | None) -> dict[str, Callable[[], Any]]:
    """How to make each model: a folder's, or one with fresh weights, whose speed is that of trained ones but for what
    pruning keeps. ``rope@sdpa``: with that backend. prune: those that can be pruned come a second time, pruned;
    ``cable, pruned`` is the second alone."""
    if prune is not None and not 0 < prune < 1:
        raise CableError(f"prune must lie between 0 and 1 (the weight that a row may lose), got {prune}.")
    found: dict[str, Callable[[], Any]] = {}
    for name in names:
        model, backend = _parts(name)
        folder = Path(model)
        if (folder / "config.json").is_file():
            encoding = getattr(load_config(folder), "encoding", None)
            made = partial(load_model, folder)
        else:
            require_known("model (no such folder either)", model, ENCODINGS_BY_NAME)
            encoding = model
            made = partial(_fresh, size, model)
        if encoding is None:
            raise CableError(f"{model!r} holds no model of this package.")
        if backend:
            require_known("backend of a model", backend, [*BACKENDS, *PYTORCH_KERNELS])
            made = partial(_set, made, "attention_backend", "sdpa" if backend in PYTORCH_KERNELS else backend)
        if not name.endswith(PRUNED):
            found[name] = made
        elif not prune or not ENCODINGS_BY_NAME[encoding].prunable:
            able = ", ".join(known for known, one in ENCODINGS_BY_NAME.items() if one.prunable)
            raise CableError(f"{name!r} needs --prune, and one of {able}; got --prune {prune or 0} and {encoding}.")
        if prune and ENCODINGS_BY_NAME[encoding].prunable:
            found[name.removesuffix(PRUNED) + PRUNED] = partial(_set, made, "attention_prune", prune)
    return found


def _parts(name: str) -> tuple[str, str]:
    """An encoding or a folder, and the backend that is asked for, if any."""
    model, _, backend = name.removesuffix(PRUNED).partition("@")
    return model, backend


def shares(name: str, lengths: list[int], steps: int) -> list[list[int]]:
    """The lengths that are measured with one cache."""
    return [[length] for length in lengths] if steps and _reads_all(name) else [lengths]


def _reads_all(name: str) -> bool:
    return _parts(name)[1] in ("sdpa", *PYTORCH_KERNELS)


def _compared_at(name: str, lengths: list[int]) -> int | None:
    """The prompt behind which texts are compared: the longest that is not too long for it, or the first.

    None where a kernel reads all of the cache: the room for the text would be part of what is measured.
    """
    return None if _reads_all(name) else max([length for length in lengths if length <= COMPARED], default=lengths[0])


def _fresh(size: str, encoding: str) -> Any:
    own = {"max_position_embeddings": LEARNED_POSITIONS} if encoding == "learnable" else {}
    return CableGPTForCausalLM(CableGPTConfig.preset(size, encoding=encoding, **own))


def _set(made: Callable[[], Any], key: str, value: Any) -> Any:
    model = made()
    setattr(model.config, key, value)
    model.config.check()
    return model


def _pytorch_kernel(name: str) -> AbstractContextManager[Any]:
    backend = _parts(name)[1]
    return sdpa_kernel(PYTORCH_KERNELS[backend]) if backend in PYTORCH_KERNELS else nullcontext()


def origin(folder: Path) -> dict[str, Any]:
    """Where a trained model comes from: its recipe and its training record; nothing of what has no run behind it."""
    if not (folder / "recipe.toml").is_file():
        return {}
    record = {key: value for key, value in training_record(folder).items() if key != "curve"}
    recipe = asdict(recipes.load(str(folder / "recipe.toml")))
    return {"checkpoint_sha256": checkpoint_hash(folder), "trained": {"recipe": recipe, **record}}


def prepare(model: Any, precision: str) -> Any:
    return model.to(best_device(), PRECISIONS[precision]).eval()


@torch.inference_mode()
def prefill(model: Any, ids: Tensor, piece: int = 0, repeats: int = 3) -> dict[str, Any]:
    """Seconds until the first new token of prompts ids [B, T], and the peak memory; piece: tokens read at once."""
    times = []
    _reset_peak()
    for _ in range(repeats + 1):  # the first one warms up
        begun = _now()
        _read(model, ids, DynamicCache(config=model.config), piece or ids.shape[1])
        times.append(_now() - begun)
    return {"seconds_to_first_token": sorted(times[1:])[(repeats - 1) // 2], "piece": piece, "peak_mib": _peak()}


class Decoder:
    """A model that goes on with prompts of several lengths; compiled once, and on a GPU captured once.

    The captured graph takes the token that it made itself, so that nothing but its launch waits for Python.
    """

    def __init__(self, model: Any, batch: int, longest: int, steps: int, compile: bool = True):
        """longest: of the prompts; steps: behind it, at most."""
        self.model, self.batch = model, batch
        self.room = -(-(longest + steps + WARM + 1) // 64) * 64
        self.cache = StaticCache(config=model.config, max_cache_len=self.room)
        self.step: Callable[..., Any] = torch.compile(self._step, fullgraph=True) if compile else self._step
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
        self.captures = compile and model.device.type == "cuda"
        self.graph: Any = None
        self.places: list[int] = []

    def _step(self, token: Tensor) -> Tensor:
        return self.model(token, past_key_values=self.cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)

    def _begin(self, ids: Tensor) -> None:
        """Read prompts; the token behind them is there."""
        self._read(ids)
        if self.captures and self.places != self._places():
            self._capture()
            self._read(ids)

    def _read(self, ids: Tensor) -> None:
        self.cache.reset()
        self.token.copy_(_read(self.model, ids, self.cache))

    def _places(self) -> list[int]:
        """Where the cache lies, which a graph does not ask again."""
        layers: list[Any] = self.cache.layers
        return [held.data_ptr() for layer in layers for held in (layer.keys, layer.values) if held is not None]

    def _capture(self) -> None:
        self.graph = None
        for _ in range(3):  # compile, and let every library get ready
            self._next()
        self.places = self._places()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._next()
        self.graph = graph

    def _next(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            self.token.copy_(self.step(self.token))

    @torch.inference_mode()
    def text(self, ids: Tensor, steps: int) -> Tensor:
        """The likeliest continuation [B, steps]."""
        self._begin(ids)
        said = []
        for _ in range(steps):
            said.append(self.token.clone())
            self._next()
        return torch.cat(said, 1)

    @torch.inference_mode()
    def measure(self, ids: Tensor, steps: int) -> dict[str, Any]:
        """Tokens per second of all texts together, behind prompts ids [B, T]."""
        _reset_peak()
        self._begin(ids)
        for _ in range(WARM):
            self._next()
        begun = _now()
        for _ in range(steps):
            self._next()
        seconds = (_now() - begun) / steps
        return {"tokens_per_second": self.batch / seconds, "ms": seconds * 1e3, "peak_mib": _peak()}

    @torch.inference_mode()
    def dynamic_text(self, ids: Tensor, steps: int) -> Tensor:
        """The same with a cache that grows, and nothing compiled."""
        cache = DynamicCache(config=self.model.config)
        return _go_on(self.model, _read(self.model, ids, cache), cache, steps)

    def check(self, ids: Tensor, tokens: int = 8) -> None:
        """The steps say what the model says without a cache, but for near ties."""
        said = self.text(ids, tokens)
        whole = torch.cat([ids, said], 1)
        with torch.inference_mode():
            logits = self.model(whole, use_cache=False).logits[:, ids.shape[1] - 1 : -1].float()
        short = logits.amax(-1) - logits.gather(-1, said[..., None]).squeeze(-1)
        if float(short.max()) > 0.25:
            raise GateError(
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
    compare: int = 0,
    precision: str = "bf16",
    piece: int = 0,
) -> Iterator[dict[str, Any]]:
    """A row for each model and length: of decoding so many steps, or of reading the prompt alone, ``piece`` by piece.

    compare: behind one prompt, how many of the first so many tokens are those of a dynamic cache; the text goes into
    the row, for :func:`compare_pruned`.
    """
    if tokens is not None and len(tokens) < batch * max(lengths):
        raise CableError(f"the text has {len(tokens)} tokens, {batch} × {max(lengths)} are wanted.")
    for name, share in [(one, share) for one in models for share in shares(one, lengths, steps)]:
        model = prepare(models[name](), precision)
        config = model.config
        about = {"bench": "decode" if steps else "prefill", "model": name, "encoding": config.encoding, "batch": batch}
        about |= {"prune": config.attention_prune, "parameters": model.num_parameters(), "precision": precision}
        about |= origin(Path(_parts(name)[0]))
        try:
            with _pytorch_kernel(name):
                behind = steps if _reads_all(name) else max(steps, compare)
                decoder = Decoder(model, batch, max(share), behind, compile) if steps else None
                if decoder is not None:
                    about["room"] = decoder.room
                    decoder.check(_prompt(model, batch, min(GATE, *share), tokens))
                _wait_for_turn()
                for length in share:
                    ids = _prompt(model, batch, length, tokens)
                    row = about | {"length": length}
                    row |= decoder.measure(ids, steps) if decoder else prefill(model, ids, piece)
                    if decoder and compare and length == _compared_at(name, lengths):
                        row |= _compared(decoder, ids, compare)
                    yield row
        except GateError:
            raise
        except Exception as error:  # one that has no memory left does not stop the others
            yield about | {"error": reason(error)}
        decoder = model = None
        _forget_compiled()


def _forget_compiled() -> None:
    """A compiled step and its decoder hold each other; with them goes a cache that may fill the GPU."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


TURN = "CABLE_TURN"
"""Names the folder in which a process says that it is ready to be measured, and is told to begin."""


def _wait_for_turn() -> None:
    if TURN not in os.environ:
        return
    folder = Path(os.environ[TURN])
    (folder / "ready").touch()
    while not (folder / "go").exists():
        time.sleep(0.05)


class Measured(Process):
    """``cable bench decode`` or ``prefill`` of one model: it compiles beside others and waits for its turn."""

    def __init__(self, name: str, command: list[str], folder: Path):
        self.name, self.folder = name, Path(tempfile.mkdtemp(dir=folder))
        self.results = self.folder / "rows.jsonl"
        self.command = [sys.executable, "-m", "cable_attn", "bench", *command, name, "--results", str(self.results)]
        self.begun = False

    def start(self, alone: bool) -> None:
        if alone:
            self.begin()
        self.open(self.command, self.folder / "log", **{TURN: str(self.folder)})

    @property
    def warm(self) -> bool:
        return not self.begun and (self.folder / "ready").exists()

    def begin(self) -> None:
        self.begun = True
        (self.folder / "go").touch()

    @property
    def measured(self) -> bool:
        return self.ended

    def rows(self) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self.results.read_text().splitlines()] if self.results.exists() else []
        told = not self.process.returncode or any("error" in row for row in found)
        return found if told else [*found, {"model": self.name, "error": self.failure}]


def run_in_turn(
    names: Collection[str],
    lengths: list[int],
    command: list[str],
    jobs: int,
    prune: float,
    repeats: int,
    steps: int = 0,
    compare: int = 0,
) -> Iterator[dict[str, Any]]:
    """The rows of ``cable bench COMMAND NAME`` for each name, several of which get ready at the same time."""

    def told(name: str, share: list[int], again: int) -> list[str]:
        options = ["--lengths", ",".join(map(str, share))]
        options += ["--prune", str(prune)] if name.endswith(PRUNED) else []
        return options + (["--compare", str(compare)] if compare and not again else [])

    with tempfile.TemporaryDirectory() as folder:
        made = [
            Measured(name, [*command, *told(name, share, again)], Path(folder))
            for again in range(repeats)
            for name in names
            for share in shares(name, lengths, steps)
        ]
        for process in in_turn(made, jobs):
            yield from process.rows()


@torch.inference_mode()
def forget(model: Any, ids: Tensor, epsilon: float, piece: int, compare: int) -> Iterator[dict[str, Any]]:
    """A row for every piece of a text ids [1, T] that a forgetting cache has read: the keys that each layer holds.

    The last one tells how many of the first tokens of its continuation are those of a cache that keeps everything.
    """
    most = ids.shape[1] + compare + 1
    cache, whole = ForgettingCache(model, epsilon, most), DynamicCache(config=model.config)
    layers: list[Any] = list(cache.layers)  # of keys; the potentials' come later
    about = {"bench": "forget", "encoding": model.config.encoding, "epsilon": epsilon, "most_tokens": most}
    reach = [[round(float(head), 2) for head in layer] for layer in cache.reach]
    for at in range(0, ids.shape[1], piece):
        part = ids[:, at : at + piece]
        token, wanted = _read(model, part, cache), _read(model, part, whole)
        row = about | {"tokens": at + part.shape[1], "kept": [layer.keys.shape[2] for layer in layers]}
        row |= {"mib": _size(cache), "full_mib": _size(whole)}
        if at + piece >= ids.shape[1]:
            row |= {"reach": reach, "compared": compare}
            row["as_full"] = _agreement(
                *(_go_on(model, first, held, compare) for first, held in ((token, cache), (wanted, whole)))
            )
        yield row


def _size(cache: Any) -> float:
    held = [x for layer in cache.layers for x in (layer.keys, layer.values) if x is not None]
    return sum(x.numel() * x.element_size() for x in held) / 2**20


def _go_on(model: Any, token: Tensor, cache: Any, steps: int) -> Tensor:
    """The likeliest text from ``token`` on [B, steps]."""
    said = [token[:, :0]]
    for _ in range(steps):
        said.append(token)
        token = _read(model, token, cache)
    return torch.cat(said, 1)


SAID = "said"
"""What a model has said, in its row until texts have been compared."""


def _compared(decoder: Decoder, ids: Tensor, tokens: int) -> dict[str, Any]:
    said = decoder.text(ids, tokens)
    return {
        "compared": tokens,
        "as_dynamic": _agreement(said, decoder.dynamic_text(ids, tokens)),
        SAID: said.tolist(),
    }


def compare_pruned(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows without their texts; those of pruned models tell how much they say as without pruning."""
    plain: dict[str, Tensor] = {}
    waiting: list[tuple[dict[str, Any], Tensor]] = []
    try:
        for row in rows:
            if SAID not in row:
                yield row
                continue
            name, said = row["model"].removesuffix(PRUNED), torch.tensor(row.pop(SAID))
            if row["model"] == name:
                plain[name] = said
                yield row
            else:
                waiting.append((row, said))
            if name in plain:
                both = [one for one in waiting if one[0]["model"] == name + PRUNED]
                waiting = [one for one in waiting if one[0]["model"] != name + PRUNED]
                yield from (row | {"as_unpruned": _agreement(said, plain[name])} for row, said in both)
    except (Exception, KeyboardInterrupt, SystemExit):  # what has been measured is not lost
        yield from (row for row, _ in waiting)
        raise
    yield from (row for row, _ in waiting)


def _agreement(said: Tensor, other: Tensor) -> int:
    """How many tokens are the same before the first that is not, in the text where that comes first."""
    same = (said == other).all(0)
    return int(same.long().cumprod(0).sum())


def _read(model: Any, ids: Tensor, cache: Any, piece: int = CHUNK) -> Tensor:
    """The prompt, piece by piece; the likeliest token behind it [B, 1]."""
    for part in ids.split(piece, 1):
        out = model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return out.logits[:, -1].argmax(-1, keepdim=True)


def _prompt(model: Any, batch: int, length: int, tokens: Tensor | None) -> Tensor:
    if tokens is None:
        made = torch.Generator().manual_seed(0)
        ids = torch.randint(model.config.vocab_size - 64, (batch, length), generator=made)
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
