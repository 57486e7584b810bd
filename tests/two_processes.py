"""A model on the fused backend on two gloo processes. Run by torchrun:

two_processes.py ddp|fsdp: the gradients of one process with both rows.
two_processes.py save FOLDER: every parameter one larger, as a sharded checkpoint.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from cable_attn import CableGPTConfig, CableGPTForCausalLM


def make() -> CableGPTForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return CableGPTForCausalLM(CableGPTConfig.preset("tiny", attention_backend="triton", **sizes))


def sharded() -> CableGPTForCausalLM:
    mesh, model = init_device_mesh("cpu", (2,)), make()
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def compare(how: str) -> None:
    text = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(1))
    alone = make()
    alone(text, labels=text, use_cache=False).loss.backward()
    model = sharded() if how == "fsdp" else DistributedDataParallel(make())
    mine = text[dist.get_rank()][None]
    model(mine, labels=mine, use_cache=False).loss.backward()
    for ours, (name, theirs) in zip(model.parameters(), alone.named_parameters()):
        gradient = ours.grad.full_tensor() if how == "fsdp" else ours.grad
        assert torch.allclose(gradient, theirs.grad, atol=1e-5), name
    print("the same gradients", flush=True)


def save(folder: str) -> None:
    model = sharded()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    checkpoint.save(model.state_dict(), checkpoint_id=folder)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    save(sys.argv[2]) if sys.argv[1] == "save" else compare(sys.argv[1])
    dist.destroy_process_group()
