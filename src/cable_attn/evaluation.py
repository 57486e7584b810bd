"""How well a model predicts text that is longer than what it was trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from cable_attn.data.tokens import require_window

LOGIT_ELEMENTS = 2**26
"""How many logits may exist at once (256 MiB in fp32)."""


def comparable(tokens: np.ndarray, lengths: Sequence[int], limit: int | None = None) -> np.ndarray:
    """As much of ``tokens`` as every length cuts into whole windows, so that all predict the very same tokens.

    One more token than that, the last target; ``limit``: at most about so many tokens.
    """
    unit = math.lcm(*lengths)
    require_window(tokens, unit + 1, "the held-out text")
    targets = min(len(tokens) - 1, max(limit or len(tokens), unit)) // unit * unit
    return tokens[: targets + 1]


@torch.inference_mode()
def perplexity(
    model: PreTrainedModel,
    tokens: np.ndarray,
    length: int,
    *,
    batch_tokens: int = 4096,
    on_tokens: Callable[[int], None] | None = None,
) -> float:
    """``exp`` of the mean loss over non-overlapping windows of ``length`` tokens; each predicts its next token.

    ``on_tokens(n)`` is called with the number of tokens done since the last call.
    """
    require_window(tokens, length + 1, "the held-out text")
    count = (len(tokens) - 1) // length
    inputs = torch.from_numpy(tokens[: count * length]).view(count, length)
    targets = torch.from_numpy(tokens[1 : count * length + 1]).view(count, length)
    batch = max(batch_tokens // length, 1)
    model.eval()
    total = 0.0
    for x, y in zip(inputs.split(batch), targets.split(batch)):
        total += _summed_loss(model, x.to(model.device), y.to(model.device))
        if on_tokens is not None:
            on_tokens(x.numel())
    return math.exp(total / (count * length))


def _summed_loss(model: PreTrainedModel, x: torch.Tensor, y: torch.Tensor) -> float:
    """The loss summed over a batch, with no more than LOGIT_ELEMENTS logits at a time."""
    hidden = model.base_model(input_ids=x, use_cache=False).last_hidden_state.flatten(0, 1)
    head = model.get_output_embeddings()
    rows = max(LOGIT_ELEMENTS // model.config.vocab_size, 1)
    parts = zip(hidden.split(rows), y.flatten().split(rows))
    return sum(
        float(torch.nn.functional.cross_entropy(head(part).float(), target, reduction="sum")) for part, target in parts
    )
