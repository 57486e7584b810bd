"""``cable bench pruning``: what ``prune=ε`` saves on a trained model's own queries, keys, potentials and gains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cable_attn.attention import fused
from cable_attn.attention.call import Call
from cable_attn.bench.attention import Inputs, own_stream, sdpa
from cable_attn.bias import PotentialBias
from cable_attn.devices import require_gpu
from cable_attn.errors import CableError
from cable_attn.models.capture import layer_calls


def run(
    model: PreTrainedModel, tokens: np.ndarray, lengths: list[int], epsilon: float, tell: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """A row for each length and layer."""
    require_gpu("cable bench pruning")
    model = model.to("cuda").eval()  # type: ignore[arg-type]
    for length in lengths:
        if len(tokens) < length:
            raise CableError(
                f"the text has {len(tokens)} tokens, {length} are wanted. Give more text or less --lengths."
            )
        ids = torch.from_numpy(tokens[:length].astype(np.int64)).cuda()[None]
        tell(f"{length} tokens")
        for layer, call in enumerate(potential_calls(model, ids)):
            row = {"bench": "pruning", "tokens": length, "layer": layer, "epsilon": epsilon}
            yield row | measure(call, epsilon)


def potential_calls(model: PreTrainedModel, ids: Tensor) -> list[Call]:
    """What each layer of the model asks of attention on this text."""
    with torch.autocast("cuda", torch.bfloat16):
        found = layer_calls(model, ids)
    if not all(isinstance(call.bias, PotentialBias) for call in found):
        raise CableError("only models whose encoding is a potential (cable, cable-nw, fox, alibi) can be pruned.")
    return found


def measure(call: Call, epsilon: float) -> dict[str, float]:
    """The fused op with and without pruning beside cuDNN without a bias; the bounds' own cost is part of the time."""
    from triton.testing import do_bench_cudagraph

    assert isinstance(call.bias, PotentialBias)
    gain = torch.ones(call.q.shape[:3], device=call.q.device) if call.bias.g is None else call.bias.g
    leaves = [t.detach().clone().requires_grad_() for t in (call.q, call.k, call.v, call.bias.c, gain)]
    q, k, v, c, g = leaves
    whole = replace(call, q=q, k=k, v=v, bias=PotentialBias(c, g), together=None)
    pruned = replace(whole, prune=epsilon)
    plain, cudnn = Inputs(q, k, v, c, g), sdpa("CUDNN_ATTENTION")
    upstream = torch.randn_like(call.q)
    runs: dict[str, Callable[[], Tensor]] = {
        "pruned": lambda: fused.run(pruned),
        "whole": lambda: fused.run(whole),
        "cudnn": lambda: cudnn(plain),
    }
    row: dict[str, float] = {}
    with own_stream():
        for name, run in runs.items():
            timing: dict[str, Any] = {"rep": 50, "return_mode": "median"}
            with torch.no_grad():
                row[f"{name}_ms"] = do_bench_cudagraph(run, **timing)
            row[f"{name}_both_ms"] = do_bench_cudagraph(
                lambda run=run: run().backward(upstream), grad_to_none=leaves, **timing
            )
        with torch.no_grad():
            change = runs["pruned"]().float() - runs["whole"]().float()
            row["kept"] = float(fused.kept_share(pruned).mean())
            row["largest_change"] = float(change.abs().max())
            row["largest_value"] = float(v.float().abs().max())
    return row
