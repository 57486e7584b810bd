"""A transformer block like nn.MultiheadAttention's, with CABLE in it, in plain PyTorch: python examples/own_block.py"""

import torch
from torch import nn

from cable_attn import CableBias, attention


class Block(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.bias = CableBias(dim, heads)  # the one new line here …

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        z = attention(q, k, v, self.bias(y))  # … and here
        return x + self.out(z.transpose(1, 2).flatten(2))


def main() -> float:
    """Learn to repeat the token before the last; read 8 times as far as was ever trained."""
    torch.manual_seed(0)
    embed, block, head = nn.Embedding(32, 64), Block(64, 4), nn.Linear(64, 32)
    model = nn.Sequential(embed, block, head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(200):
        text = torch.randint(0, 32, (16, 32))
        loss = nn.functional.cross_entropy(model(text)[:, 1:].flatten(0, 1), text[:, :-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: {loss.item():.2f}")
    with torch.no_grad():
        text = torch.randint(0, 32, (4, 256))
        right = (model(text)[:, 1:].argmax(-1) == text[:, :-1]).float().mean().item()
    print(f"right at 8 × the length: {right:.0%}")
    return right


if __name__ == "__main__":
    main()
