"""``python -m cable_attn``, for torchrun."""

from cable_attn.cli import main

main()
