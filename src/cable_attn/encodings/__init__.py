"""Every position encoding behind one interface: one file per method, its maths in the docstring.

To add one: write the file, add its line to :data:`ENCODINGS` and its row to docs/encodings.md. The tests find it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cable_attn.encodings.alibi import Alibi
from cable_attn.encodings.base import Encoding, Geometry, PotentialEncoding, PotentialMemory, check_options
from cable_attn.encodings.cable import Cable, CableNW, KCable
from cable_attn.encodings.cope import Cope
from cable_attn.encodings.dapev2 import DapeV2Cable, DapeV2Kerple
from cable_attn.encodings.fire import Fire
from cable_attn.encodings.fox import Fox
from cable_attn.encodings.kerple import KerpleLog, KerplePower
from cable_attn.encodings.learnable import Learnable
from cable_attn.encodings.nope import Nope
from cable_attn.encodings.rope import Rope
from cable_attn.encodings.sinusoidal import Sinusoidal
from cable_attn.encodings.t5 import T5
from cable_attn.errors import CableError, require_known

ENCODINGS: dict[str, type[Encoding]] = {
    "cable": Cable,
    "cable-nw": CableNW,
    "k-cable": KCable,
    "alibi": Alibi,
    "t5": T5,
    "kerple-log": KerpleLog,
    "kerple-power": KerplePower,
    "fire": Fire,
    "fox": Fox,
    "rope": Rope,
    "learnable": Learnable,
    "sinusoidal": Sinusoidal,
    "nope": Nope,
    "cope": Cope,
    "dapev2-cable": DapeV2Cable,
    "dapev2-kerple": DapeV2Kerple,
}


def find_encoding(name: str, options: Mapping[str, Any], causal: bool = True) -> type[Encoding]:
    """The class of that name, if it exists, has these options and makes sense for this kind of attention."""
    require_known("encoding", name, ENCODINGS)
    encoding = ENCODINGS[name]
    check_options(name, encoding, options)
    if encoding.causal_only and not causal:
        serves = ", ".join(n for n, e in ENCODINGS.items() if not e.causal_only)
        raise CableError(
            f"encoding {name!r} is defined for causal attention only. Bidirectional models take: {serves}."
        )
    return encoding


__all__ = ["ENCODINGS", "Encoding", "Geometry", "PotentialEncoding", "PotentialMemory", "find_encoding"]
