"""The contract between encodings and attention: accurate sums, exact rows, clear errors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cable_attn import CableError, PotentialBias, prefix_sum
from cable_attn.bias import ToeplitzBias


def test_prefix_sum_is_accurate_at_a_million_tokens():
    steps = torch.rand(1, 1, 1_000_000) * 0.3
    c = prefix_sum(steps)
    exact = math.fsum(steps.flatten().tolist())
    assert abs(float(c[0, 0, -1]) - exact) < 1e-6
    # What counts are differences of neighbours: they must still be the steps.
    assert (c.diff() - steps[..., 1:]).abs().max() < 1e-6


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 4))
def test_prefix_sum_restarts_at_each_document(lengths, split):
    """However the text is cut into calls, each document counts from its own first token."""
    steps = torch.rand(2, 3, sum(lengths))
    starts = torch.zeros(2, sum(lengths), dtype=torch.bool)
    place = 0
    expected = []
    for length in lengths:
        starts[:, place] = True
        expected.append(steps[..., place : place + length].double().cumsum(-1))
        place += length
    expected = torch.cat(expected, -1)
    assert torch.allclose(prefix_sum(steps, starts=starts), expected)
    split = min(split, place)
    first = prefix_sum(steps[..., :split], starts=starts[:, :split])
    last = first[..., -1] if split else None
    second = prefix_sum(steps[..., split:], starts=starts[:, split:], initial=last)
    assert torch.allclose(torch.cat([first, second], -1), expected)


def test_prefix_sum_gradient():
    steps = torch.rand(1, 2, 6, dtype=torch.float64, requires_grad=True)
    starts = torch.tensor([[True, False, False, True, False, False]])
    initial = torch.rand(1, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s, a: prefix_sum(s, starts=starts, initial=a), (steps, initial))


def test_rows_of_a_potential():
    c = torch.tensor([[[0.5, 0.5, 2.0, 4.0]]], dtype=torch.float64)
    g = torch.tensor([[[2.0, 3.0]]])
    i, j = torch.arange(2), torch.arange(4)
    rows = PotentialBias(c, g).rows(i, j, query_start=2)
    assert rows.tolist() == [[[[-3.0, -3.0, 0.0, -4.0], [-10.5, -10.5, -6.0, 0.0]]]]
    kernel = PotentialBias(c, g, kernel="log").rows(i, j, query_start=2)
    assert torch.allclose(kernel, -torch.log(1 + rows**2))


def test_ties_take_their_gradient_from_the_order_of_tokens():
    """Two tokens at the same place: the earlier one is pushed away from the later, never 0/0 or a coin toss."""
    c = torch.zeros(1, 1, 2, dtype=torch.float64, requires_grad=True)
    PotentialBias(c).rows(torch.tensor([1]), torch.tensor([0])).sum().backward()
    assert c.grad.tolist() == [[[1.0, -1.0]]]
    c.grad = None
    PotentialBias(c).rows(torch.tensor([0]), torch.tensor([1])).sum().backward()
    assert c.grad.tolist() == [[[1.0, -1.0]]]


def test_toeplitz_rows():
    table = torch.tensor([[10.0, 11.0, 12.0]])
    rows = ToeplitzBias(table, zero=1).rows(torch.arange(2), torch.arange(3), query_start=1)
    assert rows.tolist() == [[[[12.0, 11.0, 10.0], [12.0, 12.0, 11.0]]]]


@pytest.mark.parametrize(
    ("c", "g", "kernel", "words"),
    [
        (torch.zeros(1, 1, 4, dtype=torch.bfloat16), None, None, ["c must be float64 or float32", "bfloat16"]),
        (torch.zeros(1, 1, 4, dtype=torch.int64), None, None, ["c must be float64 or float32", "int64"]),
        (torch.zeros(1, 1, 4), torch.zeros(1, 1, 4, dtype=torch.float16), None, ["g must be", "float16"]),
        (torch.zeros(4), None, None, ["c must be a tensor [batch, heads, tokens]", "(4,)"]),
        ([1.0], None, None, ["c must be a tensor", "list"]),
        (torch.zeros(1, 1, 4), None, "lgo", ["unknown bias kernel 'lgo'", "Did you mean 'log'?"]),
    ],
)
def test_bad_potentials_are_named(c, g, kernel, words):
    with pytest.raises(CableError) as error:
        PotentialBias(c, g, kernel)
    assert all(word in str(error.value) for word in words), str(error.value)
