"""Building blocks for people's own models."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from cable_attn import ENCODINGS, CableBias, CableError, attention, score_mod
from cable_attn.bias import FunctionBias
from cable_attn.blocks import acts_by_bias

BY_BIAS = [name for name, encoding in ENCODINGS.items() if acts_by_bias(encoding)]
FLEX = [name for name in BY_BIAS if name != "fire"]


def stirred(encoding, causal=True):
    torch.manual_seed(0)
    module = CableBias(32, 4, encoding, causal=causal)
    for parameter in module.parameters():
        torch.nn.init.uniform_(parameter, 0.05, 0.5)
    return module.double()


def test_every_encoding_that_only_adds_a_bias_is_there():
    expected = {"cable", "cable-nw", "k-cable", "alibi", "t5", "kerple-log", "kerple-power", "fire", "fox"}
    assert set(BY_BIAS) >= expected and not {"rope", "nope", "cope", "learnable"} & set(BY_BIAS)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("encoding", FLEX)
def test_flex_attention_gives_the_same(encoding, causal):
    if not causal and ENCODINGS[encoding].causal_only:
        pytest.skip("causal only")
    module = stirred(encoding, causal)
    q, k, v = torch.randn(3, 2, 4, 19, 8).double()
    x = torch.randn(2, 19, 32).double().requires_grad_()
    bias = module(x)
    plain = score_mod(bias)

    def with_mask(score, b, h, i, j):
        score = plain(score, b, h, i, j)
        return torch.where(i >= j, score, -torch.inf) if causal else score

    wanted = attention(q, k, v, bias, causal=causal, backend="reference")
    got = flex_attention(q, k, v, score_mod=with_mask)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)
    leaves = [x, *module.parameters()]
    options = {"allow_unused": True, "retain_graph": True}
    grads = [torch.autograd.grad(out.square().sum(), leaves, **options) for out in (got, wanted) if out.requires_grad]
    assert len(grads) in (0, 2) and bool(grads) == (encoding != "alibi")
    for ours, theirs in zip(*grads):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("encoding", BY_BIAS)
def test_padding_and_packs_count_as_in_the_models(encoding):
    """A text alone, behind padding, and behind another text in a pack: the same rows."""
    module, x = stirred(encoding), torch.randn(1, 9, 32).double()
    q, k, v = torch.randn(3, 1, 4, 9, 8).double()
    alone = attention(q, k, v, module(x))
    before = [torch.randn(1, 4, 5, 8).double() for _ in range(3)]
    long = [torch.cat(pair, 2) for pair in zip(before, (q, k, v))]
    x = torch.cat([torch.randn(1, 5, 32).double(), x], 1)
    mask, documents = torch.arange(14)[None] >= 5, (torch.arange(14)[None] >= 5).long()
    padded = attention(*long, module(x, key_mask=mask), key_mask=mask)
    packed = attention(*long, module(x, document_ids=documents), document_ids=documents)
    for other in (padded, packed):
        torch.testing.assert_close(other[:, :, 5:], alone, atol=1e-6, rtol=1e-6)


def test_what_does_not_fit_is_named():
    with pytest.raises(CableError, match="dim=30 is not a multiple of heads=4"):
        CableBias(30, 4)
    with pytest.raises(CableError, match=r"'rope' does more than add a bias.*cable, cable-nw"):
        CableBias(32, 4, "rope")
    with pytest.raises(CableError, match=r"'gain_flor'.*Did you mean 'gain_floor'"):
        CableBias(32, 4, gain_flor=1.0)
    with pytest.raises(CableError, match="FunctionBias has no form"):
        score_mod(FunctionBias(lambda i, j, start: i))


def test_the_example_of_a_block_of_ones_own():
    example = runpy.run_path(str(Path(__file__).parent.parent / "examples/own_block.py"))
    assert example["main"]() > 0.9


def test_a_bias_serves_a_part_of_the_queries():
    """FIRE asks where in the text they stand."""
    torch.manual_seed(0)
    x, (q, k, v) = torch.randn(1, 32, 16), torch.randn(3, 1, 2, 32, 8)
    bias = CableBias(16, 2, "fire", threshold=4.0)(x)
    assert torch.allclose(attention(q[:, :, -3:], k, v, bias), attention(q, k, v, bias)[:, :, -3:], atol=1e-5)
