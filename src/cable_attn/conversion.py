"""``cable convert``: another encoding for a checkpoint, by continued pre-training, with perplexities before and after.

The folder it makes is a run folder of ``cable train`` and a checkpoint like any other; ``conversion.json`` has the
perplexities. What is done is not done again: after a crash or a stop the same call goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from cable_attn import adapting, pretraining
from cable_attn import recipe as recipes
from cable_attn.data.shards import MANIFEST, Request, prepare, read_manifest
from cable_attn.data.sources import open_source
from cable_attn.data.tokenizers import find_tokenizer
from cable_attn.environment import environment
from cable_attn.errors import CableError, require_known
from cable_attn.evaluation import HeldOut, checkpoint_hash, evaluate, find_held_out
from cable_attn.files import as_json, read_json, write_json
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
SPLITS = ("validation", "test")
Watcher = Callable[[str, float], None]
"""``watch(what, share)``."""


def plan(model: ModelPart, data: str, tokens: int, length: int = 0, overrides: Sequence[str] = ()) -> Recipe:
    """The run that converts a checkpoint with about so many tokens; ``overrides`` come last. length: 0 chooses one."""
    require_known("model.weights", model.weights, WEIGHTS)
    config = adapting.read_config(model)
    length = length or min(LENGTH, getattr(config, "max_position_embeddings", None) or LENGTH)
    micro = max(min(MICRO_BATCH, tokens) // length, 1)
    update = max(min(UPDATE, tokens) // (micro * length), 1) * micro * length
    rate = LEARNING_RATES[model.weights]
    train = TrainPart(
        tokens_per_update=update,
        micro_batch=micro,
        learning_rate=rate,
        lowest_learning_rate=rate / 10,
        compile="layers",
    )
    recipe = Recipe(replace(model, vocab_size=config.vocab_size), DataPart(data, length), train)
    steps = math.ceil(tokens / recipes.with_overrides(recipe, overrides).train.tokens_per_update)
    recipe = replace(recipe, train=replace(train, steps=steps, warmup_steps=steps // 20))
    return recipes.with_overrides(recipe, overrides)


def prepare_data(source: str, checkpoint: str, out: Path) -> str:
    """A folder of token shards as it is; any other source of text through the checkpoint's own tokenizer."""
    if (Path(source) / MANIFEST).is_file():
        return source
    tokenizer = find_tokenizer(str(checkpoint_folder(checkpoint)), ())
    prepare(out / "data", Request(source, checkpoint), open_source(source), tokenizer)
    return str(out / "data")


def convert(
    recipe: Recipe, out: Path, lengths: Sequence[int] = (), eval_tokens: int = 0, watch: Watcher | None = None
) -> dict[str, Any]:
    """Read, train, read; all that was found, which is also in ``conversion.json``."""
    tell: Watcher = watch or (lambda what, share: None)
    source = checkpoint_folder(recipe.model.checkpoint)
    text = _held_out(recipe.data.path, eval_tokens, tokenizer_of(source))
    lengths = list(lengths) or _lengths(recipe.data.length, len(text.tokens))
    wanted = {"recipe": asdict(recipe), "lengths": lengths, "data": text.sha256, "source": checkpoint_hash(source)}
    found = _begun(out, wanted)
    if "before" not in found:
        found["before"] = _read(source, text, lengths, "before", tell)
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / FILE, found)
    if not (out / "config.json").exists():
        _train(recipe, out, tell)
    if "after" not in found:
        found["after"] = _read(out, text, lengths, "after", tell)
        write_json(out / FILE, {**found, **environment()})
    return found


def _held_out(path: str, tokens: int, tokenizer: Any) -> HeldOut:
    splits = read_manifest(Path(path))["splits"]
    split = next((name for name in SPLITS if name in splits), None)
    if split is None:
        raise CableError(f"{path!r} has no text to read before and after: none of {', '.join(SPLITS)}.")
    return find_held_out(path, split, tokens, tokenizer)


def _lengths(trained_at: int, tokens: int) -> list[int]:
    return [length for multiple in MULTIPLES if (length := int(trained_at * multiple)) < tokens] or [tokens - 1]


def _begun(out: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    if not (out / FILE).exists():
        return {"settings": wanted}
    found: dict[str, Any] = read_json(out / FILE)
    changed = [key for key, value in wanted.items() if found["settings"].get(key) != as_json(value)]
    if changed:
        raise CableError(
            f"{str(out)!r} holds a conversion of other settings ({', '.join(changed)}). Give the same ones, or another "
            "folder."
        )
    return found


def _read(folder: Path, text: HeldOut, lengths: Sequence[int], when: str, tell: Watcher) -> Any:
    model = load_model(folder).to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
    done, total = 0, len(text.tokens) * len(lengths)

    def on_tokens(length: int, count: int) -> None:
        nonlocal done
        done += count
        tell(f"reading {when}, {length} tokens at once", done / total)

    return evaluate(model, text, lengths, watch=on_tokens, batch_tokens=16384)


def _train(recipe: Recipe, out: Path, tell: Watcher) -> None:
    shown = "training"

    def on_step(step: int, loss: float | None) -> None:
        nonlocal shown
        shown = shown if loss is None else f"training, loss {loss:.3f}"
        tell(shown, step / recipe.train.steps)

    pretraining.run(recipe, out, last_complete_checkpoint(out / "checkpoints") is not None, on_step)
