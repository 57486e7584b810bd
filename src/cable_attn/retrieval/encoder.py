"""Texts as vectors: sentence-transformers' models, read in batches of equal length, with a cache on disk.

A text that has been encoded by the same model at the same length is never encoded again, also after a crash.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cable_attn.devices import has_bf16
from cable_attn.errors import CableError, reason
from cable_attn.evaluation import checkpoint_hash, learned_positions, require_positions
from cable_attn.files import read_json, write_atomically
from cable_attn.models.loading import checkpoint_folder

PART = 512
"""Texts in a part of the cache: what a crash loses at most."""


def load_encoder(name: str) -> Any:
    """A SentenceTransformer by folder or hub name; a bare encoder gets mean pooling."""
    transformers_models, modules = _sentence_transformers()
    folder = require_encoder(name)
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        if (folder / "modules.json").is_file():
            return transformers_models(str(folder), model_kwargs={"use_safetensors": True}, **options)
        body = modules.Transformer(str(folder), model_kwargs={"use_safetensors": True, **options})
    except (OSError, ValueError) as error:
        raise CableError(
            f"encoder {name!r} cannot be loaded (weights must be safetensors): {reason(error)}."
        ) from error
    size = (
        body.get_embedding_dimension()
        if hasattr(body, "get_embedding_dimension")
        else body.auto_model.config.hidden_size
    )
    return transformers_models(modules=[body, modules.Pooling(size, pooling_mode="mean")])


def require_encoder(name: str) -> Path:
    """Its folder."""
    folder = checkpoint_folder(name)
    if not (folder / "config.json").is_file() and not (folder / "modules.json").is_file():
        raise CableError(f"{name!r} is not an encoder: it has neither modules.json nor config.json.")
    return folder


def _sentence_transformers() -> tuple[Any, Any]:
    try:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer import modules
    except ImportError as error:
        raise CableError("retrieval needs sentence-transformers: pip install 'cable-attn[retrieval]'.") from error
    return SentenceTransformer, modules


def encode(
    model: Any,
    texts: Sequence[str],
    max_length: int,
    *,
    batch_tokens: int = 65536,
    cache: Path | None = None,
    watch: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Unit vectors, one for each text, float32; an empty text has the vector 0. ``watch(n)``: n more texts are done."""
    store = Cache(cache) if cache is not None else None
    keys = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
    known = store.load() if store is not None else {}
    todo = list(dict.fromkeys(n for n, key in enumerate(keys) if key not in known and texts[n].strip()))
    first = {keys[n]: n for n in reversed(todo)}  # equal texts are read once
    if watch is not None:
        watch(len(texts) - len(first))
    for part in _parts(model, [texts[n] for n in first.values()], list(first), max_length, batch_tokens, watch):
        known |= part
        if store is not None:
            store.add(part)
    width = model.get_embedding_dimension()
    return np.stack([known.get(key, np.zeros(width, np.float32)) for key in keys])


def _parts(
    model: Any,
    texts: list[str],
    keys: list[str],
    max_length: int,
    batch_tokens: int,
    watch: Callable[[int], None] | None,
) -> Iterator[dict[str, np.ndarray]]:
    """Vectors by key, PART texts and more at a time, the longest first."""
    ids = _tokenize(model, texts, max_length)
    require_positions(model, max(map(len, ids), default=0))
    order = sorted(range(len(texts)), key=lambda n: -len(ids[n]))
    found: dict[str, np.ndarray] = {}
    for batch in _batches(order, ids, batch_tokens):
        for n, vector in zip(batch, _vectors(model, [ids[n] for n in batch])):
            found[keys[n]] = vector
        if watch is not None:
            watch(len(batch))
        if len(found) >= PART:
            yield found
            found = {}
    if found:
        yield found


def _tokenize(model: Any, texts: list[str], max_length: int) -> list[list[int]]:
    if not texts:
        return []
    rows: Any = model.tokenizer(texts, truncation=True, max_length=max_length, verbose=False)["input_ids"]
    return list(rows)


def _batches(order: list[int], ids: list[list[int]], batch_tokens: int) -> Iterator[list[int]]:
    """Texts of about one length, as many as the budget has room for."""
    batch: list[int] = []
    for n in order:
        if batch and len(ids[batch[0]]) * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(n)
    if batch:
        yield batch


@torch.inference_mode()
def _vectors(model: Any, ids: list[list[int]]) -> np.ndarray:
    features = model.tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(model.device)
    cuda = model.device.type == "cuda"
    with torch.autocast(model.device.type, torch.bfloat16, enabled=cuda and has_bf16()):
        vectors = model.eval()(dict(features))["sentence_embedding"].float()
    found: np.ndarray = torch.nn.functional.normalize(vectors, dim=-1).cpu().numpy()
    return found


class Cache:
    """Vectors by the hash of their text, in parts that are written whole."""

    def __init__(self, folder: Path):
        self.folder = folder

    def load(self) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for path in sorted(self.folder.glob("*.npz")):
            with np.load(path, allow_pickle=False) as part:
                found |= dict(zip(part["keys"].tolist(), part["vectors"]))
        return found

    def add(self, part: dict[str, np.ndarray]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        np.savez(content, keys=np.array(list(part)), vectors=np.stack(list(part.values())))
        name = hashlib.sha256("".join(part).encode()).hexdigest()[:16]
        write_atomically(self.folder / f"{name}.npz", content.getvalue())


def cache_folder(root: Path, name: str, max_length: int) -> Path:
    """Of one encoder at one length; another state of its weights has another folder."""
    return root / f"{encoder_hash(name)[:16]}-{max_length}"


def encoder_hash(name: str) -> str:
    """Of the weights of all its modules and of its tokenizer, whatever else lies below its folder."""
    folder = checkpoint_folder(name)
    modules = folder / "modules.json"
    places = [folder / module["path"] for module in read_json(modules, list)] if modules.is_file() else [folder]
    weights = [place for place in places if (place / "config.json").is_file()] or [folder]
    known = "".join(checkpoint_hash(path) for path in weights).encode()
    known += b"".join(path.read_bytes() for place in places if (path := place / "tokenizer.json").is_file())
    return hashlib.sha256(known).hexdigest()


def readable(model: Any, tokens: int) -> int:
    """So many tokens, or what its table of learned positions holds."""
    return min([tokens, *learned_positions(model)])
