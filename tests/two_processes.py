"""A model on the fused backend under DDP or FSDP2 on two gloo processes: the gradients of one process with both rows.

Run by torchrun: two_processes.py ddp|fsdp
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from cable_attn import CableGPTConfig, CableGPTForCausalLM


def make() -> CableGPTForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return CableGPTForCausalLM(CableGPTConfig.preset("tiny", attention_backend="triton", **sizes))


dist.init_process_group("gloo")
text = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(1))
alone = make()
alone(text, labels=text, use_cache=False).loss.backward()

model = make()
if sys.argv[1] == "ddp":
    wrapped = DistributedDataParallel(model)
else:
    mesh = init_device_mesh("cpu", (2,))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    wrapped = fully_shard(model, mesh=mesh)
mine = text[dist.get_rank()][None]
wrapped(mine, labels=mine, use_cache=False).loss.backward()
for (name, ours), theirs in zip(model.named_parameters(), alone.parameters()):
    gradient = ours.grad if sys.argv[1] == "ddp" else ours.grad.full_tensor()
    assert torch.allclose(gradient, theirs.grad, atol=1e-5), name
print("the same gradients", flush=True)
dist.destroy_process_group()
