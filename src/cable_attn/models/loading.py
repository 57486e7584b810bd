"""Checkpoints from disk, checked: a broken one is an error, never a half-random model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cable_attn.errors import CableError, reason

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
"""By one of these files a tokenizer is known to be there."""


def checkpoint_folder(name: str) -> Path:
    """A folder on disk as it is; else a model of the hub, fetched or from the cache: its weights and texts only."""
    from huggingface_hub import snapshot_download

    folder = Path(name)
    if folder.exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return folder
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"]))
    except Exception as error:  # whatever the network or the hub did
        raise CableError(f"{name!r} is no folder here, and the hub cannot give it: {reason(error)}.") from error


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer that lies with a checkpoint, or ``None``."""
    if not any((folder / name).is_file() for name in TOKENIZERS):
        return None
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def load_causal_lm(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and the tokenizer of a checkpoint folder."""
    if load_config(folder).model_type == "cable_bert":
        raise CableError(f"{str(folder)!r} is an encoder, which does not write text. Give a GPT.")
    model = load_model(folder)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise CableError(f"{str(folder)!r} has no tokenizer. Copy the one that its tokens were made with into it.")
    try:
        return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise _broken(folder, error) from error


def load_gpt_or_bert(folder: Path) -> PreTrainedModel:
    """The model of a checkpoint folder, causal or masked, as its config says."""
    kind = load_config(folder).model_type
    return load_model(folder, AutoModelForMaskedLM if kind == "cable_bert" else AutoModelForCausalLM)


def load_config(folder: Path) -> Any:
    _require_config(folder)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise _broken(folder, error) from error


def load_model(folder: Path, kind: Any = AutoModelForCausalLM, **changes: Any) -> PreTrainedModel:
    """The model of a checkpoint folder, with ``changes`` to its config. Reads safetensors only and never runs code
    from it."""
    _require_config(folder)
    try:
        loaded: Any = kind.from_pretrained(
            folder,
            output_loading_info=True,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            **changes,
        )
    except CableError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _broken(folder, error) from error
    model, info = loaded
    absent = sorted(info["missing_keys"])
    if absent:
        raise CableError(
            f"checkpoint {str(folder)!r} is not complete: it lacks {', '.join(absent[:3])} ({len(absent)})."
        )
    return model


def _require_config(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        runs = [str(path.parent) for path in sorted(folder.glob("*/config.json"))]
        hint = f" These are in it: {', '.join(runs[:5])}." if runs else ""
        raise CableError(f"{str(folder)!r} is not a checkpoint: it has no config.json.{hint}")


def _broken(folder: Path, error: Exception) -> CableError:
    return CableError(f"checkpoint {str(folder)!r} cannot be loaded: {reason(error)}.")
