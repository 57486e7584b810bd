"""cable-attn: train short, read long.

Position encodings that keep working past the training length, the attention that serves them, and GPT and BERT models
that carry them. Importing this registers the models with transformers' Auto classes.
"""

from cable_attn.attention import attention, explain
from cable_attn.bias import Bias, FunctionBias, PotentialBias, ToeplitzBias, prefix_sum
from cable_attn.blocks import CableBias, score_mod
from cable_attn.dropin import add_cable, remove_cable
from cable_attn.encodings import ENCODINGS, Encoding
from cable_attn.errors import CableError
from cable_attn.models import (
    CableBertConfig,
    CableBertForMaskedLM,
    CableBertModel,
    CableGPTConfig,
    CableGPTForCausalLM,
    CableGPTModel,
    ForgettingCache,
    from_bert,
    from_gpt2,
)

__version__ = "0.1.0"

__all__ = [
    "ENCODINGS",
    "Bias",
    "CableBertConfig",
    "CableBertForMaskedLM",
    "CableBertModel",
    "CableBias",
    "CableError",
    "CableGPTConfig",
    "CableGPTForCausalLM",
    "CableGPTModel",
    "Encoding",
    "ForgettingCache",
    "FunctionBias",
    "PotentialBias",
    "ToeplitzBias",
    "__version__",
    "add_cable",
    "attention",
    "explain",
    "from_bert",
    "from_gpt2",
    "prefix_sum",
    "remove_cable",
    "score_mod",
]
