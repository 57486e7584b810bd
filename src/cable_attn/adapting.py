"""A model of transformers as a run begins with it and leaves it: its encoding, and which of its weights learn."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from cable_attn.dropin import add_cable
from cable_attn.errors import CableError, reason
from cable_attn.models.loading import checkpoint_folder, load_model
from cable_attn.recipe import ModelPart

AS_IT_IS = "none"
"""In place of an encoding: the model keeps what it has."""
RANK = 16
BOTH_WAYS = ("bert", "roberta", "modernbert", "cable_bert")
"""Types of models that see what they are to predict."""


def make(part: ModelPart) -> PreTrainedModel:
    """The checkpoint's model, or one with fresh weights where there is only a config, ready for training."""
    folder, config = checkpoint_folder(part.checkpoint), read_config(part)
    if any(folder.glob("*.safetensors")):
        model = load_model(folder, dtype=torch.float32, **part.overrides)  # autocast chooses the precision
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return _prepared(model, part)


def make_blank(part: ModelPart) -> PreTrainedModel:
    """The same without memory for its weights, to be counted."""
    with torch.device("meta"):
        return _prepared(AutoModelForCausalLM.from_config(read_config(part)), part)


def read_config(part: ModelPart) -> Any:
    folder = checkpoint_folder(part.checkpoint)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **part.overrides)
    except (OSError, ValueError, KeyError) as error:
        raise CableError(f"model.checkpoint={part.checkpoint!r} cannot be read: {reason(error)}.") from error
    if config.model_type in BOTH_WAYS:
        raise CableError(
            f"model.checkpoint={part.checkpoint!r} is no causal language model, but {config.model_type!r}."
        )
    return config


def merged(model: Any) -> PreTrainedModel:
    """Without adapters: what they have learned is in the weights."""
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model


def _prepared(model: Any, part: ModelPart) -> PreTrainedModel:
    if part.encoding != AS_IT_IS:
        add_cable(model, part.encoding, keep_positions=part.keep_positions, **part.encoding_options)
    if part.weights == "new":
        for name, parameter in model.named_parameters():
            parameter.requires_grad = ".cable." in name
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
