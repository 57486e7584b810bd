"""Recipes: everything that a training run needs to know, as a TOML file with overrides."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, get_args, get_origin, get_type_hints

from cable_attn.errors import CableError, require_known
from cable_attn.files import packaged, read_toml

FAMILIES = ("gpt", "bert")
WEIGHTS = ("all", "new", "lora")
TABLES = ("encoding_options", "overrides")
"""Of which an override may set one entry."""
MOST_SEED = 2**32 - 1
"""NumPy takes no larger one."""
KINDS = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "a table",
}
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class ModelPart:
    family: str = "gpt"
    """gpt: next token; bert: masked tokens."""
    preset: str = "tiny"
    encoding: str = "cable"
    encoding_options: dict[str, Any] = field(default_factory=dict)
    vocab_size: int = 50304
    overrides: dict[str, Any] = field(default_factory=dict)
    """Any other field of the model's config."""
    checkpoint: str = ""
    """Begin with this causal language model of transformers (a folder, or a name of the hub), to which add_cable gives
    the encoding; encoding ``none``: as it is. A folder with a config alone: with fresh weights."""
    keep_positions: bool = False
    """With a checkpoint: its own positions stay beside the encoding."""
    weights: str = "all"
    """With a checkpoint: which learn. all; new: the encoding's only; lora: those, and adapters for the rest."""


@dataclass(frozen=True)
class DataPart:
    path: str = "embedded"
    """A folder of ``cable data prepare``, or ``embedded``."""
    length: int = 1024
    separate_documents: bool = False
    """Tokens see only their own document."""
    passkey: float = 0.0
    """The share of windows that become passkey texts, to teach the task at the training length."""


@dataclass(frozen=True)
class TrainPart:
    steps: int = 1000
    tokens_per_update: int = 524_288
    micro_batch: int = 64
    """Windows on each device at a time, at most; the rest of the update is accumulated."""
    learning_rate: float = 6e-4
    lowest_learning_rate: float = 6e-5
    encoding_learning_rate: float = 0.0
    """Of the encoding's own parameters, such as T5's table, which falls as the other does; 0: the same."""
    warmup_steps: int = 750
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    masked: float = 0.15
    """bert: the share of tokens to predict."""
    seed: int = 0
    precision: str = "auto"
    """auto: bf16 where the GPU has it, else fp32; or bf16, fp16, fp32."""
    compile: str = "no"
    """torch.compile, on a GPU: of the layers, which share one graph and so compile fast, or of the whole model."""
    fsdp: bool = False
    """Shard weights, gradients and optimizer over the GPUs (FSDP2) instead of copying them (DDP)."""
    log_every: int = 10
    eval_every: int = 500
    eval_windows: int = 128
    save_every: int = 500
    keep: int = 2
    report_to: list[str] = field(default_factory=list)
    """tensorboard, wandb, … as the Trainer knows them."""
    workers: int = 2


@dataclass(frozen=True)
class Recipe:
    model: ModelPart = ModelPart()
    data: DataPart = DataPart()
    train: TrainPart = TrainPart()

    def __post_init__(self) -> None:
        require_known("model.family", self.model.family, FAMILIES)
        require_known("train.compile", self.train.compile, ["no", "layers", "model"])
        require_known("train.precision", self.train.precision, ["auto", "bf16", "fp16", "fp32"])
        for name in ("steps", "tokens_per_update", "micro_batch", "log_every", "eval_every", "save_every", "keep"):
            if getattr(self.train, name) < 1:
                raise CableError(f"train.{name} must be at least 1, got {getattr(self.train, name)}.")
        rates = ("lowest_learning_rate", "encoding_learning_rate", "weight_decay", "clip")
        for name in (*rates, "warmup_steps", "seed", "workers"):
            if not getattr(self.train, name) >= 0:
                raise CableError(f"train.{name} must be at least 0, got {getattr(self.train, name)}.")
        if self.train.seed > MOST_SEED:
            raise CableError(f"train.seed must be at most {MOST_SEED}, got {self.train.seed}.")
        if not self.train.learning_rate > 0:
            raise CableError(f"train.learning_rate must be above 0, got {self.train.learning_rate}.")
        if not all(0 <= beta < 1 for beta in self.train.betas):
            raise CableError(f"train.betas must lie between 0 and 1, got {list(self.train.betas)}.")
        if self.data.length < 2:
            raise CableError(f"data.length must be at least 2, got {self.data.length}.")
        if not 0 <= self.data.passkey <= 1:
            raise CableError(f"data.passkey must lie between 0 and 1, got {self.data.passkey}.")
        if self.data.passkey and (self.data.separate_documents or self.model.family != "gpt"):
            raise CableError(
                "data.passkey is for gpt without separate_documents: fact and question must see each other."
            )
        require_known("model.weights", self.model.weights, WEIGHTS)
        self._check_checkpoint()
        if self.model.weights == "new" and self.model.encoding == "none":
            raise CableError("model.weights=new trains the encoding alone, and with encoding=none there is none.")
        if not 0 < self.train.masked < 1:
            raise CableError(f"train.masked must lie between 0 and 1, got {self.train.masked}.")

    def _check_checkpoint(self) -> None:
        part = self.model
        if not part.checkpoint and (part.keep_positions or part.weights != "all"):
            raise CableError("model.keep_positions and model.weights are for a model.checkpoint, and there is none.")
        if part.checkpoint and (part.family != "gpt" or self.data.separate_documents):
            raise CableError("model.checkpoint is for the family gpt (next tokens), without separate_documents.")
        sizes = [key for key in part.overrides if key in SIZES]
        if part.checkpoint and sizes:
            raise CableError(
                f"model.overrides has {', '.join(sizes)}, and a checkpoint has sizes of its own. Add overrides={{}}."
            )

    def batches(self, devices: int) -> tuple[int, int]:
        """Windows on each device at a time, and how many such micro batches make an update."""
        micro = min(self.train.micro_batch, max(self.windows_per_update // devices, 1))
        one = micro * self.data.length * devices
        if self.train.tokens_per_update % one:
            below = max(self.train.tokens_per_update // one, 1) * one
            raise CableError(
                f"train.tokens_per_update={self.train.tokens_per_update} is not a multiple of micro_batch × length × "
                f"devices = {micro} × {self.data.length} × {devices} = {one}. Nearest: {below}."
            )
        return micro, self.train.tokens_per_update // one

    @property
    def windows_per_update(self) -> int:
        return self.train.tokens_per_update // self.data.length


def builtin() -> list[str]:
    return packaged("recipes")


def load(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe by name or path, with ``key=value`` on top of it."""
    parts: Parts = {"model": ModelPart(), "data": DataPart(), "train": TrainPart()}
    for part, values in read_toml("recipe", name, "recipes").items():
        if part not in parts or not isinstance(values, dict):
            raise _unknown_key(part, list(parts))
        for key, value in values.items():
            _set(parts, part, key, value)
    return _made(parts, overrides)


def with_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    return _made({"model": recipe.model, "data": recipe.data, "train": recipe.train}, overrides)


Parts = dict[str, Any]
"""Section → its values, which are judged together when all have been set."""


def _made(parts: Parts, overrides: Sequence[str]) -> Recipe:
    for override in overrides:
        _override(parts, override)
    return Recipe(**parts)


def _override(parts: Parts, text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals:
        raise CableError(f"an override is key=value, got {text!r}. Example: train.steps=100")
    part, name, entry = _find(key.strip())
    try:
        parsed = tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        parsed = value  # a string without quotes
    _set(parts, part, name, {**getattr(parts[part], name), entry: parsed} if entry else parsed)


def key_of(override: str) -> str:
    """Section and key that an override sets, and the entry if it sets one of a table."""
    return ".".join(filter(None, _find(override.partition("=")[0].strip())))


def _keys() -> dict[str, list[str]]:
    parts = {"model": ModelPart, "data": DataPart, "train": TrainPart}
    return {part: [f.name for f in fields(cls)] for part, cls in parts.items()}


def _find(key: str) -> tuple[str, str, str]:
    """Section, key, and an entry if that is a table: ``steps`` is ``train.steps``, ``overrides.x`` an entry of it."""
    keys = _keys()
    first, dot, rest = key.partition(".")
    sections, path = ([first], rest) if dot and first in keys else (list(keys), key)
    name, _, entry = path.partition(".")
    found = [section for section in sections if name in keys[section]]
    if len(found) == 1 and (not entry or name in TABLES):
        return found[0], name, entry
    raise _unknown_key(key, [f"{part}.{name}" for part, names in keys.items() for name in names])


def _unknown_key(key: str, known: list[str]) -> CableError:
    last = key.rsplit(".", 1)[-1]
    scores = {name: difflib.SequenceMatcher(None, last, name.rsplit(".", 1)[-1]).ratio() for name in known}
    nearest = max(scores, key=lambda name: scores[name])
    return CableError(f"recipe key {key!r} is not known; the nearest is {nearest!r}. Known: {', '.join(known)}.")


def _set(parts: Parts, part: str, key: str, value: Any) -> None:
    if key not in _keys()[part]:
        raise _unknown_key(f"{part}.{key}", [f"{part}.{name}" for name in _keys()[part]])
    if part == "train" and key == "report_to" and isinstance(value, str):
        value = [item for item in value.split(",") if item and item != "none"]
    parts[part] = replace(parts[part], **{key: typed(type(parts[part]), key, value, f"{part}.{key}")})


def typed(cls: type, key: str, value: Any, name: str) -> Any:
    """A value from a TOML file as the dataclass ``cls`` wants it for its field ``key``; errors call it ``name``."""
    return as_type(get_type_hints(cls)[key], value, name)


def as_type(wanted: Any, value: Any, name: str) -> Any:
    """The same for a type as it is written in hints."""
    kind, of = get_origin(wanted) or wanted, get_args(wanted)
    if kind is Any:
        return value
    if kind is float and type(value) is int:
        return float(value)
    if kind is tuple:
        if not isinstance(value, list) or [type(item) in (int, float) for item in value] != [True, True]:
            raise CableError(f"{name} must be two numbers, got {value!r}.")
        return tuple(float(item) for item in value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise CableError(f"{name} must be {KINDS.get(kind, kind.__name__)}, got {value!r}.")
    if kind is list:
        return [as_type(of[0], item, f"{name}[{n}]") for n, item in enumerate(value)]
    if kind is dict:
        return {own: as_type(of[1], item, f"{name}.{own}") for own, item in value.items()}
    return value


def to_toml(recipe: Recipe) -> str:
    """The resolved recipe as a file."""
    lines = []
    for part, values in asdict(recipe).items():
        lines.append(f"[{part}]")
        lines += [f"{key} = {_as_toml(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def _as_toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML's escapes are JSON's
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_as_toml, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_as_toml(item)}" for key, item in value.items()) + "}"
    return repr(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _as_toml(name)
