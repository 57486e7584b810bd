"""Weights of GPT-2 and BERT models, OpenAI's and Google's included, in ours."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertForMaskedLM, GPT2LMHeadModel, PreTrainedModel

from cable_attn.errors import CableError
from cable_attn.models.bert import CableBertConfig, CableBertForMaskedLM
from cable_attn.models.gpt import CableGPTConfig, CableGPTForCausalLM


def from_gpt2(source: str | GPT2LMHeadModel, encoding: str = "learnable", **fields: Any) -> CableGPTForCausalLM:
    """A GPT-2 (or its name or folder) as ours. Any encoding but ``learnable`` starts new, without its positions."""
    gpt2 = AutoModelForCausalLM.from_pretrained(source) if isinstance(source, str) else source
    if not isinstance(gpt2, GPT2LMHeadModel):
        raise CableError(f"from_gpt2 takes a GPT2LMHeadModel, got {type(gpt2).__name__}.")
    config = gpt2.config
    if config.add_cross_attention:
        raise CableError("from_gpt2 takes models without cross-attention.")
    own = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.n_embd,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "intermediate_size": config.n_inner,
        "max_position_embeddings": config.n_positions,
        "layer_norm_eps": config.layer_norm_epsilon,
        "hidden_act": config.activation_function,
    }
    ours = CableGPTForCausalLM(CableGPTConfig(**own | _shared(config) | {"encoding": encoding} | fields))
    weights = {}
    for name, value in gpt2.state_dict().items():
        if re.search(r"(c_attn|c_proj|c_fc)\.weight$", name):
            value = value.T  # Conv1D keeps its matrices transposed
        if "c_attn" in name:
            value = torch.cat([value[: config.n_embd] * _query_scale(config, name), value[config.n_embd :]])
        weights[_rename(name, _GPT2_NAMES)] = value
    if encoding != "learnable":
        weights.pop("transformer.encoding.table")
    return _load(ours, weights)


def _query_scale(config: Any, name: str) -> float:
    """What GPT-2 may do to its scores besides dividing by √D, as a factor of the queries."""
    scale = 1.0 if config.scale_attn_weights else (config.n_embd // config.n_head) ** 0.5
    layer = int(name.split(".h.")[1].split(".")[0])
    return scale / (layer + 1) if config.scale_attn_by_inverse_layer_idx else scale


def _shared(config: Any) -> dict[str, Any]:
    """Fields that mean the same in theirs and ours."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
    return {name: getattr(config, name, None) for name in names}


def from_bert(source: str | BertForMaskedLM, encoding: str = "learnable", **fields: Any) -> CableBertForMaskedLM:
    """A BERT (or its name or folder) as ours. Any encoding but ``learnable`` starts new, without its positions."""
    bert = AutoModelForMaskedLM.from_pretrained(source) if isinstance(source, str) else source
    if not isinstance(bert, BertForMaskedLM):
        raise CableError(f"from_bert takes a BertForMaskedLM, got {type(bert).__name__}.")
    config = bert.config
    if config.is_decoder:
        raise CableError("from_bert takes encoders, and this BERT is a decoder (is_decoder=True).")
    same = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
        "max_position_embeddings", "type_vocab_size", "hidden_act", "layer_norm_eps",
    )  # fmt: skip
    own = {name: getattr(config, name) for name in same}
    ours = CableBertForMaskedLM(CableBertConfig(**own | _shared(config) | {"encoding": encoding} | fields))
    old = bert.state_dict()
    weights = {_rename(name, _BERT_NAMES): value for name, value in old.items() if ".attention.self." not in name}
    for layer in range(config.num_hidden_layers):
        for kind in ("weight", "bias"):
            prefix = f"bert.encoder.layer.{layer}.attention.self."
            parts = [old[f"{prefix}{part}.{kind}"] for part in ("query", "key", "value")]
            weights[f"bert.layers.{layer}.attn.qkv.{kind}"] = torch.cat(parts)
    if encoding != "learnable":
        weights.pop("bert.encoding.table")
    return _load(ours, weights)


M = TypeVar("M", bound=PreTrainedModel)

_GPT2_NAMES = {
    r"transformer\.wpe\.weight": "transformer.encoding.table",
    r"attn\.c_attn": "attn.qkv",
    r"attn\.c_proj": "attn.out",
    r"mlp\.c_fc": "mlp.up",
    r"mlp\.c_proj": "mlp.down",
}

_BERT_NAMES = {
    r"bert\.embeddings\.position_embeddings\.weight": "bert.encoding.table",
    r"bert\.embeddings\.token_type_embeddings": "bert.type_embeddings",
    r"bert\.embeddings\.word_embeddings": "bert.word_embeddings",
    r"bert\.embeddings\.LayerNorm": "bert.ln",
    r"bert\.encoder\.layer": "bert.layers",
    r"attention\.output\.dense": "attn.out",
    r"attention\.output\.LayerNorm": "ln_1",
    r"intermediate\.dense": "mlp.up",
    r"(?<!attention\.)output\.dense": "mlp.down",
    r"(?<!attention\.)output\.LayerNorm": "ln_2",
    r"cls\.predictions\.transform\.LayerNorm": "head.ln",
    r"cls\.predictions\.transform\.dense": "head.dense",
    r"cls\.predictions\.decoder": "head.decoder",
    r"cls\.predictions\.bias": "head.decoder.bias",
}


def _rename(name: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        name = re.sub(old, new, name)
    return name


def _load(model: M, weights: dict[str, Tensor]) -> M:
    """Every weight must find its place; only an encoding may keep what it started with."""
    missing, unexpected = model.load_state_dict(weights, strict=False)
    missing = [name for name in missing if ".encoding." not in name]
    unexpected = [name for name in unexpected if not name.endswith("position_ids")]
    if missing or unexpected:
        raise CableError(f"the checkpoint does not fit: missing {missing}, unexpected {unexpected}.")
    model.tie_weights()
    return model.eval()
