"""Compile the shipped tiles of the fused kernels for a GPU generation, without a GPU, and print what does not fit.

Run in a process of its own (the kernels must be imported without the interpreter): python compile_kernels.py 90 builds
the first and the last version of each kernel, --all every one of them, in minutes: ``make kernels``.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from cable_attn.attention import backward, decode_kernels, decoding, kernels, pruning
from cable_attn.attention.tiles import HALF, LOG_KERNEL, SINGLE, Tile, tiles_for
from cable_attn.encodings import head_kernels

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
CABLE = {"CAUSAL": True, "POTENTIAL": True, "GAIN": True, "KERNEL": 0}
PLAIN = {"WINDOW": False, "PADDED": False, "PACKED": False, "BOUNDED": False, "EVEN": True}
VARIANTS = {
    "cable": {},
    "none": {"POTENTIAL": False, "GAIN": False},
    "k-cable": {"KERNEL": 1},
    "bidirectional, padded, odd lengths": {"CAUSAL": False, "PADDED": True, "EVEN": False},
    "packed, windowed": {"PACKED": True, "WINDOW": True, "EVEN": False},
    "pruned": {"BOUNDED": True},
    "toeplitz": {"POTENTIAL": False, "GAIN": False, "KERNEL": 2},
    "dense": {"POTENTIAL": False, "GAIN": False, "KERNEL": 3},
}


def pointer(name: str, data: str, packed: bool) -> str:
    if name in ("Q", "K", "V", "O", "DO", "DK", "DV", "DQ", "X", "DX", "COLS", "ROWS", "MEANS", "LARGE_MEANS"):
        return f"*{data}"
    if name == "OFF":
        return "*fp64" if packed else "*fp32"
    if name == "KMASK":
        return "*i1"
    if name == "START":
        return "*i64"
    if name in ("DOCS", "LO", "HI", "FIRST", "BEGIN", "END"):
        return "*i32"
    return "*fp64" if name in ("BASE", "C") else "*fp32"


def signature(kernel: Any, constants: dict[str, Any], data: str) -> dict[str, str]:
    """The type of each argument: capitals are pointers, scales are floats, all else counts something."""
    types = {}
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name.isupper() and name not in ("H", "GROUP"):
            types[name] = pointer(name, data, constants.get("PACKED", False))
        else:
            types[name] = "fp32" if name.startswith("scale") or name in ("epsilon", "floor") else "i32"
    return types


def build(kernel: Any, tile: Tile, flags: dict[str, Any], data: str, generation: int) -> str | None:
    """What is wrong with this version, if anything."""
    constants = {name: value for name, value in flags.items() if name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature(kernel, constants, data), constexprs=constants)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    try:
        built = compile(source, target=GPUTarget("cuda", generation, 32), options=options)
    except Exception as error:
        return f"{kernel.fn.__name__} {tile} {flags}: {type(error).__name__}: {str(error).strip()[-400:]}"
    used = built.metadata.shared
    if used > SHARED_MEMORY[generation]:
        return f"{kernel.fn.__name__} {tile} {flags}: needs {used} bytes of shared memory"
    return None


def jobs(generation: int) -> list[tuple]:
    """The plain CABLE flags at every tile that differs; on Hopper also fp32, every variant, and the small kernels."""
    hopper = generation == 90
    dims = (64, 128) if generation == 100 else (64, 128, 256)
    wanted = [("cable", dim, "bf16", HALF[f"sm_{generation}"][dim]) for dim in dims]
    if hopper:
        wanted += [("cable", dim, "fp32", SINGLE[dim]) for dim in (128, 256)]
        wanted += [("k-cable", dim, "bf16", tiles) for (_, dim), tiles in LOG_KERNEL.items()]
        wanted += [(name, 64, "bf16", HALF["sm_90"][64]) for name in VARIANTS if "cable" not in name]
        wanted += [("toeplitz", dim, "bf16", tiles_for(dim, torch.bfloat16, 2, (9, 0))) for dim in (128, 256)]
    todo = []
    for name, dim, data, tiles in wanted:
        flags = {**CABLE, **PLAIN, **VARIANTS[name], "D": dim, "BD": dim}
        columns = flags["POTENTIAL"] and not flags["PACKED"] and data == "bf16" and hopper
        fold = columns and flags["CAUSAL"] and not flags["KERNEL"]
        flags |= {
            "NEED_C": flags["POTENTIAL"],
            "SUMS": columns,
            "FOLD": fold,
            "GROUP": 1,
            "PRECISION": "ieee" if data == "fp32" else "tf32",
        }
        for kernel, tile in zip((kernels.forward, backward.backward_keys, backward.backward_queries), tiles):
            shape = {"BM": tile.queries, "BN": tile.keys, "LATE": tile.late and flags["KERNEL"] < 2}
            todo.append((kernel, tile, {**flags, **shape}, data, generation))
        if flags["KERNEL"] >= 2:
            todo.append((backward.backward_table, Tile(64, 64, 4, 2), {**flags, "BLOCK": 64}, data, generation))
    widest = [(dim, "fp32") for dim in (128, 256)] if generation < 100 else []
    for dim, data in [(dim, "bf16") for dim in (64, 128, 256) if generation < 100 or dim == 128] + widest:
        flags = {**CABLE, **PLAIN, "PADDED": True, "D": dim, "BD": dim, "PRECISION": "tf32", "BM": 64, "BN": 64}
        flags |= {"GROUP": 4, "SPLITS": 32, "WIDTH": decoding.WIDTH, "SHORT": decoding.SHORT, "NEAR_KEYS": pruning.NEAR}
        flags |= {"SLACK_FACTOR": 1.001}
        for one, potential, pruned in product((False, True), (False, True), (False, True)):
            if pruned and not potential:
                continue
            stages = decoding._stages(dim * (2 if data == "bf16" else 4), potential)
            variant = {**flags, "ONE": one, "KNOWN": pruned, "PRUNED": pruned, "BM": 1 if one else 32, "STAGES": stages}
            variant |= {"POTENTIAL": potential, "GAIN": potential, "TOKEN": one and potential, "BC": decoding.FEATURES}
            todo.append((decode_kernels.part, Tile(64, 64, 4, stages), variant, data, generation))
        todo.append((decode_kernels.together, Tile(64, 64, 4, 1), flags, data, generation))
    flags = {**CABLE, **PLAIN, "D": 64, "BD": 64, "PRECISION": "tf32", "BM": 64, "BN": 64}
    flags |= {
        "SUMS": True,
        "NEAR_KEYS": 128,
        "WIDTH": pruning.WIDE,
        "SLACK_FACTOR": 1.001,
        "BLOCK": 128,
        "BK": 64,
        "LARGE": 512,
    }
    flags |= {"CHUNK_TOKENS": 512, "BT": 64, "BC": 64}
    small = [kernels.split_potential, backward.potential_columns, backward.row_dots] if hopper else []
    small += [pruning._summarise, pruning.summarise_new, pruning._bounds, pruning._rows] if hopper else []
    flags |= {"KNOWN": False, "ALL": False}
    small += [decode_kernels.advance] if hopper else []
    small += [head_kernels._steps_and_gains] if hopper else []
    small += [head_kernels._product, head_kernels._gradient_of_x, head_kernels._gradient_of_weight] if hopper else []
    return todo + [(kernel, Tile(64, 64, 4, 1), flags, "bf16", generation) for kernel in small]


def first_and_last(generation: int) -> list[int]:
    """Of the versions of each kernel: the plainest and the largest."""
    places: dict[str, list[int]] = {}
    for index, (kernel, *_) in enumerate(jobs(generation)):
        places.setdefault(kernel.fn.__name__, []).append(index)
    return sorted({place for all_ in places.values() for place in (all_[0], all_[-1])})


def problem(generation: int, index: int) -> str | None:
    return build(*jobs(generation)[index])


if __name__ == "__main__":
    generation = int(sys.argv[1])
    chosen = list(range(len(jobs(generation)))) if "--all" in sys.argv else first_and_last(generation)
    with ProcessPoolExecutor(2) as pool:  # Triton's compiler does not like threads
        found = list(pool.map(partial(problem, generation), chosen))
    wrong = [told for told in found if told]
    print(f"{len(chosen)} kernels, {len(wrong)} wrong")
    print("\n".join(wrong))
    sys.exit(bool(wrong))
