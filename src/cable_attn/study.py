"""A study: one TOML that names a recipe, what varies, the seeds and the lengths; a cell is a variant and a seed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from cable_attn import findings, pretraining
from cable_attn import recipe as recipes
from cable_attn.errors import CableError, unknown
from cable_attn.files import packaged, read_toml
from cable_attn.recipe import Recipe
from cable_attn.retrieval.cell import Retrieval

H100 = 989e12 * 0.35
"""What one H100 makes of its peak in training, for estimates."""


@dataclass(frozen=True)
class Reading:
    """What trained models are read on."""

    path: str = ""
    """Token shards; default: those of the recipe. ``embedded``: the embedded test novel."""
    split: str = "validation"
    """Of the shards; the embedded corpus has its test novel only."""
    tokens: int = 0
    """At most about so many; 0: all."""
    beginnings: int = 0
    """Of each document only the first so many tokens, if it has them, so that no window holds two; 0: all of it."""
    same_tokens: bool = False
    stride: int = 0
    batch_tokens: int = 16384
    passkey: int = 0
    """Passkey texts for each length and depth."""
    tasks: list[str] = field(default_factory=list)
    """Of lm-evaluation-harness."""
    task_folder: str = ""
    """Where their files are, to work offline."""


@dataclass(frozen=True)
class Study:
    name: str
    title: str
    recipe: str
    variants: dict[str, list[str]]
    """Name → overrides of the recipe."""
    lengths: list[int]
    seeds: list[int] = field(default_factory=lambda: [0])
    seeds_of: dict[str, list[int]] = field(default_factory=dict)
    """Of variants that have others."""
    overrides: list[str] = field(default_factory=list)
    """Of the recipe, for every cell."""
    reading: Reading = Reading()
    paper: str = ""
    """The entry of paper.json that has the paper's numbers."""
    like: str = ""
    """The entry that asked the same of other data: not to be compared number by number."""
    again: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name → a variant (``of``) and fields of the config with which its trained models are read once more."""
    speeds: bool = False
    """Its cells have the machine to themselves: tell how fast each reads."""
    against: dict[str, str] = field(default_factory=dict)
    """Variant → the one that its perplexity is told over; default: of all over the first."""
    trained_by: str = ""
    """Another study whose models are read here, from the folder beside this one."""
    same_as: dict[str, str] = field(default_factory=dict)
    """Variant → ``STUDY/VARIANT`` of the same settings, in the folder beside this one: its results are taken."""
    retrieval: Retrieval | None = None
    """Encoders only: fine-tune them and search."""

    def cells(self) -> list[Cell]:
        seeds = {variant: self.seeds_of.get(variant, self.seeds) for variant in self.variants}
        return [Cell(self, variant, seed) for variant, own in seeds.items() for seed in own]


@dataclass(frozen=True)
class Cell:
    study: Study
    variant: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.seed}"

    @property
    def owner(self) -> str | None:
        """The ``STUDY/CELL`` that trains and reads it, if that is another one."""
        other = self.study.same_as.get(self.variant)
        return None if other is None else f"{other}-{self.seed}"

    def folder(self, out: Path) -> Path:
        """Where its results are. ``out``: the study's folder."""
        return out / self.name if self.owner is None else out.parent / self.owner

    def recipe(self) -> Recipe:
        overrides = [*self.study.overrides, *self.study.variants[self.variant], f"seed={self.seed}"]
        return recipes.load(self.study.recipe, overrides)

    def settings(self) -> dict[str, Any]:
        """All that its results depend on."""
        study = self.study
        known = {"recipe": asdict(self.recipe()), "reading": asdict(study.reading), "lengths": study.lengths}
        known |= {} if study.retrieval is None else {"retrieval": asdict(study.retrieval)}
        return {**known, "again": self.again} if self.again else known

    @property
    def again(self) -> dict[str, dict[str, Any]]:
        """What its model is read with once more."""
        own = {name: dict(changes) for name, changes in self.study.again.items()}
        return {name: changes for name, changes in own.items() if changes.pop("of", None) == self.variant}


def builtin() -> list[str]:
    return packaged("studies")


def load(name: str, overrides: Sequence[str] = (), *, checked: bool = True) -> Study:
    """A study by name or path; ``overrides`` of the recipe come on top of its own.

    checked: see :func:`check`; what is stored can be shown where its checkpoints are not.
    """
    tree = read_toml("study", name, "studies")
    beside = Path(name).parent / str(tree.get("recipe"))
    if beside.suffix == ".toml" and beside.is_file():
        tree["recipe"] = str(beside)
    study = from_tree(Path(name).stem, tree, list(overrides))
    if checked:
        check(study)
    return study


def check(study: Study) -> None:
    """A bad name or number must not come up hours later."""
    findings.paper(study.paper)
    findings.paper(study.like)
    for variant in study.seeds_of:
        if variant not in study.variants:
            raise unknown("variant in seeds_of", variant, list(study.variants))
    for name, changes in study.again.items():
        _check_again(study, name, changes)
    for variant in [*study.against, *study.against.values()]:
        if variant not in [*study.variants, *study.again]:
            raise unknown("variant in against", variant, [*study.variants, *study.again])
    for variant, other in study.same_as.items():
        if variant not in study.variants:
            raise unknown("variant in same_as", variant, list(study.variants))
        if not re.fullmatch(r"[^/\s.][^/]*/[^/]+", other):
            raise CableError(f"study {study.name!r}: same_as.{variant} must be like 'books/cable', got {other!r}.")
    for cell in study.cells():
        pretraining.plan(cell.recipe())
        family = cell.recipe().model.family
        if study.retrieval is not None and family != "bert":
            raise CableError(f"study {study.name!r}: [retrieval] is for encoders, and {cell.name} is a GPT.")
        if not study.lengths and (family == "gpt" or study.retrieval is not None):
            raise CableError(f"study {study.name!r}: lengths is empty, and {cell.name} is read at some.")


def _check_again(study: Study, name: str, changes: dict[str, Any]) -> None:
    of = changes.get("of")
    if of not in study.variants:
        raise unknown(f"variant (of) in [again.{name!r}]", str(of), list(study.variants))
    config = pretraining.make_config(Cell(study, of, 0).recipe())
    own, known = {key: value for key, value in changes.items() if key != "of"}, config.to_dict()
    for key in own:
        if key not in known:
            raise unknown(f"field of the config in [again.{name!r}]", key, sorted(known))
    type(config).from_dict({**known, **own})  # which says what is wrong with it
    if name in study.variants:
        raise CableError(f"[again.{name!r}] has the name of a variant. Give it one of its own.")


def from_tree(name: str, tree: dict[str, Any], overrides: list[str]) -> Study:
    tree = {"title": name, "encodings": [], "variants": {}, "overrides": [], **tree}
    reading, retrieval = tree.pop("reading", {}), tree.pop("retrieval", None)
    encodings = recipes.as_type(list[str], tree.pop("encodings"), f"study {name!r}: encodings")
    own = _values(Study, tree, "study", f"study {name!r}: ")
    variants = {encoding: [f"encoding={encoding}"] for encoding in encodings}
    for variant, more in own["variants"].items():
        variants[variant] = [*variants.get(variant, []), *more]
    missing = [key for key in ("recipe", "lengths") if key not in own] + ([] if variants else ["encodings"])
    if missing:
        raise CableError(f"study {name!r} lacks {', '.join(missing)}.")
    _require_free(name, variants, overrides)
    own |= {"variants": variants, "overrides": [*own["overrides"], *overrides]}
    found = Study(
        name=name,
        reading=Reading(**_values(Reading, reading, "[reading]", f"study {name!r}: reading.")),
        retrieval=None if retrieval is None else _retrieval(retrieval, name),
        **own,
    )
    _check_values(found)
    return found


def _retrieval(tree: Any, name: str) -> Retrieval:
    return Retrieval(**_values(Retrieval, tree, "[retrieval]", f"study {name!r}: retrieval."))


def _require_free(name: str, variants: dict[str, list[str]], overrides: list[str]) -> None:
    """What is given for all cells must not be lost in some of them."""
    taken = {recipes.key_of(text): variant for variant, own in variants.items() for text in own}
    for text in overrides:
        key = recipes.key_of(text)
        if key == "train.seed":
            raise CableError(f"{text!r}: a study has its own seeds. Write them into its file: seeds = [0, 1, 2].")
        if key in taken:
            raise CableError(
                f"{text!r}: the variant {taken[key]!r} of study {name!r} sets {key} itself. Choose variants with "
                "--only, or write a study of your own."
            )


ELSEWHERE = {"study": ("name", "reading", "retrieval"), "[retrieval]": ("seed",)}
"""Fields that no key of the table sets."""


def _values(cls: type, tree: Any, what: str, before: str) -> dict[str, Any]:
    """A table of the file as a dataclass takes it."""
    if not isinstance(tree, dict):
        raise CableError(f"{before.rstrip('.')} must be a table, got {tree!r}.")
    known = [field.name for field in fields(cls) if field.name not in ELSEWHERE.get(what, ())]
    for key in tree:
        if key not in known:
            raise unknown(f"key of {what}", key, known + (["encodings"] if cls is Study else []))
    return {key: recipes.typed(cls, key, value, before + key) for key, value in tree.items()}


def _check_values(study: Study) -> None:
    """What would otherwise come up after hours of training."""
    for variant in study.variants:
        if not re.fullmatch(r"[^\s./\\,\[\]][^/\\,\[\]]*", variant):
            raise CableError(
                f"study {study.name!r}: the variant {variant!r} must do as a folder's name, without , / and []."
            )
    numbers = {"lengths": (1, study.lengths), "seeds": (0, study.seeds)}
    numbers |= {f"seeds_of.{name}": (0, seeds) for name, seeds in study.seeds_of.items()}
    numbers |= {
        f"reading.{key}": (least, [getattr(study.reading, key)])
        for key, least in {"tokens": 0, "beginnings": 0, "stride": 0, "passkey": 0, "batch_tokens": 1}.items()
    }
    for key, (least, values) in numbers.items():
        if not values and key.startswith("seeds"):
            raise CableError(f"study {study.name!r}: {key} is empty. Give at least one, like [0].")
        if len(set(values)) < len(values):
            raise CableError(f"study {study.name!r}: {key} has the same number twice, got {values}.")
        for value in values:
            if value < least:
                raise CableError(f"study {study.name!r}: {key} must be at least {least}, got {value}.")
    if study.lengths and study.reading.stride > min(study.lengths):
        raise CableError(
            f"study {study.name!r}: reading.stride={study.reading.stride} is longer than the shortest length, "
            f"{min(study.lengths)}."
        )


def plan(study: Study) -> list[dict[str, Any]]:
    """What each cell would cost to train."""
    rows = []
    for cell in study.cells():
        planned = pretraining.plan(cell.recipe())
        tokens = 0 if study.trained_by or cell.owner else planned["tokens in all"]
        hours = 6 * planned["parameters"] * tokens / H100 / 3600
        rows.append({"cell": cell.name, "parameters": planned["parameters"], "tokens": tokens, "hours": hours})
    return rows


def choose(study: Study, only: Sequence[str]) -> list[Cell]:
    """The cells whose name or variant is in ``only``; all if it is empty."""
    cells = study.cells()
    known = [*study.variants, *(cell.name for cell in cells)]
    for name in only:
        if name not in known:
            raise unknown("cell", name, known)
    return [cell for cell in cells if not only or cell.name in only or cell.variant in only]
