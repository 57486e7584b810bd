"""``cable convert``: another encoding for a checkpoint, by continued pre-training, with perplexities before and after.

The folder it makes is a run folder of ``cable train`` and a checkpoint like any other; ``conversion.json`` has the
perplexities. What is done is not done again: after a crash or a stop the same call goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from cable_attn import adapting, pretraining
from cable_attn import recipe as recipes
from cable_attn.data import hold_out, read_texts
from cable_attn.data.shards import MANIFEST, OnTokens, Request, prepare, read_manifest
from cable_attn.data.sources import open_source
from cable_attn.data.tokenizers import find_tokenizer
from cable_attn.devices import best_device
from cable_attn.environment import environment
from cable_attn.errors import CableError, require_known
from cable_attn.evaluation import HeldOut, evaluate, find_held_out, require_own_tokens, share_of
from cable_attn.files import as_json, read_json, writable_folder, write_json
from cable_attn.models.loading import checkpoint_folder, load_model, tokenizer_of
from cable_attn.recipe import WEIGHTS, DataPart, ModelPart, Recipe, TrainPart
from cable_attn.training import last_complete_checkpoint

FILE = "conversion.json"
LENGTH = 1024
UPDATE = 65_536
"""Tokens."""
MICRO_BATCH = 8192
"""Tokens."""
LEARNING_RATES = {"all": 2e-4, "new": 3e-3, "lora": 5e-4}
MULTIPLES = (0.5, 1, 2, 4, 8)
LEAST_HELD_OUT = 262_144
"""Tokens."""
SPLITS = ("validation", "test")
Watcher = Callable[[str, float], None]
"""``watch(what, share)``."""


def plan(model: ModelPart, tokens: int, length: int = 0, overrides: Sequence[str] = ()) -> Recipe:
    """The run that converts a checkpoint with about so many tokens; ``overrides`` come last. length: 0 chooses one."""
    require_known("model.weights", model.weights, WEIGHTS)
    config = adapting.read_config(model)
    length = length or min(LENGTH, getattr(config, "max_position_embeddings", None) or LENGTH)
    micro = max(min(MICRO_BATCH, tokens) // length, 1)
    update = max(min(UPDATE, tokens) // (micro * length), 1) * micro * length
    rate = LEARNING_RATES[model.weights]
    train = TrainPart(tokens_per_update=update, micro_batch=micro, learning_rate=rate, lowest_learning_rate=rate / 10)
    train = replace(train, compile="layers")
    recipe = Recipe(replace(model, vocab_size=config.vocab_size), DataPart(length=length), train)
    steps = max(round(tokens / _overridden(recipe, overrides).train.tokens_per_update), 1)
    return _overridden(replace(recipe, train=replace(train, steps=steps, warmup_steps=steps // 20)), overrides)


def _overridden(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """What has an option of its own is not to be said twice."""
    changed = recipes.with_overrides(recipe, overrides)
    own = ("checkpoint", "encoding", "keep_positions", "weights")
    for key, before, now in (
        *((key, getattr(recipe.model, key), getattr(changed.model, key)) for key in own),
        ("path", recipe.data.path, changed.data.path),
        ("length", recipe.data.length, changed.data.length),
    ):
        if before != now:
            raise CableError(f"{key}={now} is an option or argument of its own: see cable convert --help.")
    return changed


def prepare_data(
    source: str, recipe: Recipe, out: Path, eval_tokens: int = 0, tell: OnTokens | None = None
) -> tuple[Recipe, HeldOut]:
    """The recipe with its tokens, and text to read: shards as they are, or any source of text through the checkpoint's
    own tokenizer, as much of it as the run needs."""
    own = checkpoint_folder(recipe.model.checkpoint)
    _refuse_foreign(out, own)
    path = Path(source)
    if not (path / MANIFEST).is_file():
        path = writable_folder(out) / "data"
        needed = max(recipe.train.steps * recipe.train.tokens_per_update, eval_tokens or LEAST_HELD_OUT)
        request = Request(source, recipe.model.checkpoint, needed)
        prepare(path, request, _streams(source), find_tokenizer(str(own), ()), tell)
    tokenizer = tokenizer_of(own)
    if tokenizer is not None:
        require_own_tokens(tokenizer, path, recipe.model.checkpoint)
    splits = read_manifest(path)["splits"]
    split = next((name for name in SPLITS if splits.get(name, {}).get("tokens", 0) > 1), None)
    if split is None:
        raise CableError(
            f"{source!r} has no text to read before and after: none in {' or '.join(SPLITS)}. Hold some out with "
            "cable data prepare --held-out 0.1, and give that folder."
        )
    text = find_held_out(str(path), split, eval_tokens, tokenizer)
    return replace(recipe, data=replace(recipe.data, path=str(path))), text


def _streams(source: str) -> dict[str, Any]:
    """Of one text the end is held out."""
    path = Path(source)
    if not path.is_file() or path.suffix not in (".txt", ".md"):
        return open_source(source)
    train, held_out = hold_out(read_texts(path))
    return {"train": lambda skip: iter(train[skip:]), "validation": lambda skip: iter(held_out[skip:])}


def convert(
    recipe: Recipe, text: HeldOut, out: Path, lengths: Sequence[int] = (), watch: Watcher | None = None
) -> dict[str, Any]:
    """Read, train, read; all that was found, which is also in ``conversion.json``."""
    tell: Watcher = watch or (lambda what, share: None)
    source = checkpoint_folder(recipe.model.checkpoint)
    lengths = list(lengths) or _lengths(recipe.data.length, len(text.tokens))
    found = _begun(recipe, text, out, lengths)
    if "before" not in found:
        found["before"] = _read(source, text, lengths, "before", tell)
        write_json(out / FILE, found)
    if not (out / "config.json").exists():
        _train(recipe, out, tell)
    if "after" not in found:
        found["after"] = _read(out, text, lengths, "after", tell)
        write_json(out / FILE, {**found, **environment()})
    return found


def _lengths(trained_at: int, tokens: int) -> list[int]:
    return [length for multiple in MULTIPLES if (length := int(trained_at * multiple)) < tokens] or [tokens - 1]


def _begun(recipe: Recipe, text: HeldOut, out: Path, lengths: list[int]) -> dict[str, Any]:
    """What an earlier call has found; a folder of something else is an error."""
    source = checkpoint_folder(recipe.model.checkpoint)
    writable_folder(out)
    wanted = {"recipe": asdict(recipe), "lengths": lengths, "text": text.sha256, "tokens": len(text.tokens)}
    wanted |= pretraining.origin(recipe)
    _refuse_foreign(out, source)
    if not (out / FILE).exists():
        return {"settings": wanted}
    found: dict[str, Any] = read_json(out / FILE)
    before = found["settings"]
    changed = [key for key, value in wanted.items() if key != "recipe" and before.get(key) != as_json(value)]
    if (out / "recipe.toml").exists():
        changed += pretraining.changes(out / "recipe.toml", recipe)
    elif before["recipe"] != as_json(asdict(recipe)):
        changed.append("recipe")
    if changed:
        raise CableError(
            f"{str(out)!r} holds a conversion of other settings ({'; '.join(changed)}). Give the same ones, or another "
            "folder."
        )
    return found


def _refuse_foreign(out: Path, source: Path) -> None:
    if out.resolve() == source.resolve():
        raise CableError(f"{str(out)!r} is the checkpoint itself. Give another folder for the converted one.")
    if not (out / FILE).exists() and any((out / name).exists() for name in ("config.json", "recipe.toml")):
        raise CableError(f"{str(out)!r} holds another model or run. Give another folder.")


def _read(folder: Path, text: HeldOut, lengths: Sequence[int], when: str, tell: Watcher) -> Any:
    model = load_model(folder, dtype=torch.float32).to(best_device())
    total = len(text.tokens) * len(lengths)
    watch = share_of(total, lambda length, share: tell(f"reading {when}, {length} tokens at once", share))
    return evaluate(model, text, lengths, watch=watch, batch_tokens=16384)


def _train(recipe: Recipe, out: Path, tell: Watcher) -> None:
    shown = "training"

    def on_step(step: int, loss: float | None) -> None:
        nonlocal shown
        shown = shown if loss is None else f"training, loss {loss:.3f}"
        tell(shown, step / recipe.train.steps)

    pretraining.run(recipe, out, last_complete_checkpoint(out / "checkpoints") is not None, on_step)
