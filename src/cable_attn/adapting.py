"""A model of transformers as a run begins with it and leaves it: its encoding, and which of its weights learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from cable_attn.dropin import add_cable
from cable_attn.errors import CableError, reason, unknown
from cable_attn.models.loading import checkpoint_folder, load_model
from cable_attn.recipe import ModelPart

AS_IT_IS = "none"
"""In place of an encoding: the model keeps what it has."""
RANK = 16
BOTH_WAYS = ("bert", "roberta", "modernbert", "cable_bert")
"""Types of models that see what they are to predict."""


def make(part: ModelPart) -> PreTrainedModel:
    """The checkpoint's model, or one with fresh weights where there is only a config, ready for training."""
    config = read_config(part)
    if is_fresh(part):
        return _prepared(AutoModelForCausalLM.from_config(config, dtype=torch.float32), part)
    folder = checkpoint_folder(part.checkpoint)
    return _prepared(load_model(folder, dtype=torch.float32, **part.overrides), part)  # autocast chooses the precision


def make_blank(part: ModelPart) -> PreTrainedModel:
    """The same without memory for its weights, to be counted."""
    config = read_config(part)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise _no_causal_model(part, config) from error
    with torch.device("meta"):
        return _prepared(model, part)


def is_fresh(part: ModelPart) -> bool:
    """A folder here with a config and no weights of any kind."""
    folder = Path(part.checkpoint)
    weights = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.index.json")
    return folder.is_dir() and not any(path for pattern in weights for path in folder.glob(pattern))


def read_config(part: ModelPart) -> Any:
    folder = checkpoint_folder(part.checkpoint)
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        known = AutoConfig.from_pretrained(folder, **options).to_dict()
        for key in part.overrides:
            if key not in known:
                raise unknown(f"field of the config of {part.checkpoint!r}", key, sorted(known))
        config = AutoConfig.from_pretrained(folder, **options, **part.overrides)
    except (OSError, ValueError, KeyError) as error:
        raise CableError(f"model.checkpoint={part.checkpoint!r} cannot be read: {reason(error)}.") from error
    if config.model_type in BOTH_WAYS or not hasattr(config, "vocab_size"):
        raise _no_causal_model(part, config)
    return config


def _no_causal_model(part: ModelPart, config: Any) -> CableError:
    return CableError(f"model.checkpoint={part.checkpoint!r} is no causal language model, but {config.model_type!r}.")


def finished(model: Any, part: ModelPart) -> PreTrainedModel:
    """Without adapters, whose learning is then in the weights, and in the precision of the checkpoint."""
    model = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    dtype = None if is_fresh(part) else getattr(read_config(part), "dtype", None)
    return model if dtype is None else model.to(dtype)


def _prepared(model: Any, part: ModelPart) -> PreTrainedModel:
    if part.encoding != AS_IT_IS:
        add_cable(model, part.encoding, keep_positions=part.keep_positions, **part.encoding_options)
    if part.weights == "new":
        for name, parameter in model.named_parameters():
            parameter.requires_grad = ".cable." in name
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise CableError(f"model.weights={part.weights} with encoding={part.encoding}: there is nothing to learn.")
    if part.weights == "lora":
        return _with_adapters(model, part.encoding != AS_IT_IS)
    return model


def _with_adapters(model: Any, has_encoding: bool) -> PreTrainedModel:
    try:
        import peft
    except ImportError as error:
        raise CableError("model.weights=lora needs peft: pip install 'cable-attn[lora]'.") from error
    own: dict[str, Any] = {}
    if has_encoding:
        own = {"modules_to_save": ["cable"], "exclude_modules": r".*\.cable\..*"}
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM", **own)
    return peft.get_peft_model(model, config)  # type: ignore[return-value]
