"""GPT and BERT with any encoding, as native Hugging Face models."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from cable_attn.models.bert import CableBertConfig, CableBertForMaskedLM, CableBertModel
from cable_attn.models.convert import from_bert, from_gpt2
from cable_attn.models.forgetting import ForgettingCache
from cable_attn.models.gpt import CableGPTConfig, CableGPTForCausalLM, CableGPTModel

AutoConfig.register("cable_gpt", CableGPTConfig)
AutoConfig.register("cable_bert", CableBertConfig)
AutoModel.register(CableGPTConfig, CableGPTModel)
AutoModel.register(CableBertConfig, CableBertModel)
AutoModelForCausalLM.register(CableGPTConfig, CableGPTForCausalLM)
AutoModelForMaskedLM.register(CableBertConfig, CableBertForMaskedLM)

__all__ = [
    "CableBertConfig",
    "CableBertForMaskedLM",
    "CableBertModel",
    "CableGPTConfig",
    "CableGPTForCausalLM",
    "CableGPTModel",
    "ForgettingCache",
    "from_bert",
    "from_gpt2",
]
