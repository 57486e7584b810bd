"""Every backend computes what the definition says, for every kind of request."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cable_attn import CableError, PotentialBias, attention
from cable_attn.attention import call, explain, sdpa
from cable_attn.bias import ToeplitzBias
from cable_attn.layout import Layout

from . import oracle

BACKENDS = ("reference", "sdpa", "materialised")  # test_fused.py has the other


def brute_force(q, k, v, bias, *, causal=True, scale=None, window=None, key_mask=None, document_ids=None, start=None):
    """The definition as loops over one number at a time, in fp64."""
    batch, heads, queries, dim = q.shape
    keys, group = k.shape[2], heads // k.shape[1]
    start = keys - queries if start is None else start
    scale = dim**-0.5 if scale is None else scale
    rows = None if bias is None else bias.rows(torch.arange(queries), torch.arange(keys), start).double()
    out = []
    for n in range(batch):
        logits = [[[None] * keys for _ in range(queries)] for _ in range(heads)]
        for h in range(heads):
            for i in range(queries):
                for j in range(keys):
                    at = i + start
                    hidden = (causal and j > at) or (window is not None and abs(at - j) >= window)
                    hidden = hidden or (key_mask is not None and not key_mask[n, j])
                    hidden = hidden or (document_ids is not None and document_ids[n, j] != document_ids[n, at])
                    if hidden:
                        continue
                    b = 0.0 if rows is None else float(rows.expand(batch, heads, -1, -1)[n, h, i, j])
                    logits[h][i][j] = float(q[n, h, i].double() @ k[n, h // group, j].double()) * scale + b
        out.append(oracle.attention(logits, v[n].double().repeat_interleave(group, 0)))
    return torch.stack(out)


def make_inputs(batch, heads, key_heads, queries, keys, dim, dtype=torch.float32):
    q = torch.randn(batch, heads, queries, dim, dtype=dtype)
    k, v = torch.randn(2, batch, key_heads, keys, dim, dtype=dtype)
    return q, k, v


def make_bias(kind, batch, heads, queries, keys):
    if kind == "none":
        return None
    if kind == "toeplitz":
        return ToeplitzBias(torch.randn(heads, 2 * keys), zero=keys)
    # Steps of exactly 0 make ties, as ReLU does.
    c = (torch.randn(batch, heads, keys).relu() * 0.5).double().cumsum(-1)
    g = torch.rand(batch, heads, queries) if "gain" in kind else None
    return PotentialBias(c, g, "log" if "log" in kind else None)


@st.composite
def requests(draw):
    keys = draw(st.integers(1, 9))
    queries = draw(st.integers(1, keys))
    batch, key_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    kind = draw(st.sampled_from(["none", "toeplitz", "plain", "gain", "gain log"]))
    options = {
        "causal": draw(st.booleans()),
        "window": draw(st.sampled_from([None, 1, 3])),
        "scale": draw(st.sampled_from([None, 0.7])),
    }
    if draw(st.booleans()):
        options["key_mask"] = torch.tensor(draw(st.lists(st.booleans(), min_size=keys, max_size=keys))).expand(
            batch, -1
        )
    if draw(st.booleans()):
        changes = torch.tensor(draw(st.lists(st.booleans(), min_size=keys, max_size=keys)))
        options["document_ids"] = changes.cumsum(0).expand(batch, -1)
    start = draw(st.integers(0, keys - queries))
    return batch, key_heads * group, key_heads, queries, keys, kind, options, start


@pytest.mark.parametrize("backend", BACKENDS)
@given(request=requests())
def test_every_backend_equals_brute_force(backend, request):
    batch, heads, key_heads, queries, keys, kind, options, start = request
    q, k, v = make_inputs(batch, heads, key_heads, queries, keys, dim=8)
    bias = make_bias(kind, batch, heads, queries, keys)
    out = attention(q, k, v, bias, query_start=start, backend=backend, **options)
    assert torch.isfinite(out).all()
    assert (out - brute_force(q, k, v, bias, start=start, **options)).abs().max() < 2e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["none", "toeplitz", "plain", "gain", "gain log"])
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_equal_the_definition_in_fp64(backend, kind, causal):
    """q, k, v, c and g, against autograd through the definition; padding and documents too."""
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, :2] = False
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 2, 2]])
    for extra in ({}, {"key_mask": mask}, {"document_ids": documents}):
        tensors = [t.double().requires_grad_() for t in make_inputs(2, 4, 2, 7, 7, dim=8)]
        bias = make_bias(kind, 2, 4, 7, 7)
        if isinstance(bias, PotentialBias):
            tensors += [bias.c.requires_grad_()] + ([] if bias.g is None else [bias.g.double().requires_grad_()])
            bias = PotentialBias(tensors[3], tensors[4] if bias.g is not None else None, bias.kernel)
        elif bias is not None:
            tensors.append(bias.table.double().requires_grad_())
            bias = ToeplitzBias(tensors[3], bias.zero)
        noise = torch.randn(2, 4, 7, 8, dtype=torch.float64)
        out = attention(*tensors[:3], bias, causal=causal, backend=backend, **extra)
        got = torch.autograd.grad((out * noise).sum(), tensors, allow_unused=True)
        wanted = torch.autograd.grad((differentiable(tensors, bias, causal, **extra) * noise).sum(), tensors)
        for a, b in zip(got, wanted):
            assert (a - b).abs().max() < 1e-9


def differentiable(tensors, bias, causal, key_mask=None, document_ids=None):
    """The definition in one expression, with what is hidden removed by exact zeros."""
    q, k, v = tensors[0], *(t.repeat_interleave(2, 1) for t in tensors[1:3])
    length = q.shape[2]
    index = torch.arange(length)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias.rows(index, index)
    seen = (index[:, None] >= index) if causal else torch.ones(length, length, dtype=torch.bool)
    seen = seen.expand(2, 1, length, length)
    if key_mask is not None:
        seen = seen & key_mask[:, None, None, :]
    if document_ids is not None:
        seen = seen & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    weights = scores.exp() * seen
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300) @ v


@pytest.mark.parametrize("backend", ["reference", "sdpa"])  # the other rounds its scores
def test_half_precision_is_as_good_as_its_inputs(backend):
    """A potential of 1e4 must not be rounded to bf16 anywhere: the error stays that of bf16 inputs and outputs."""
    q, k, v = (t.bfloat16() for t in make_inputs(1, 2, 2, 64, 64, dim=16))
    c = 1e4 + torch.rand(1, 2, 64, dtype=torch.float64).cumsum(-1)
    bias = PotentialBias(c, torch.rand(1, 2, 64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(q, k, v, bias, backend=backend)
    assert out.dtype == torch.bfloat16
    exact = attention(q.double(), k.double(), v.double(), bias, backend="reference")
    assert (out.double() - exact).abs().max() <= 2 * (exact.bfloat16().double() - exact).abs().max()


def test_long_texts_stay_accurate_in_the_column_route(monkeypatch):
    """Blocks of rows are centred on themselves, so the error does not grow with the potential."""
    monkeypatch.setattr(sdpa, "COLUMN_ROWS", 64)
    q, k, v = make_inputs(1, 1, 1, 512, 512, dim=8)
    bias = PotentialBias(torch.rand(1, 1, 512, dtype=torch.float64).cumsum(-1) * 30, torch.ones(1, 1, 512))
    exact = attention(q.double(), k.double(), v.double(), bias, backend="reference")
    assert (attention(q, k, v, bias, backend="sdpa") - exact).abs().max() < 2e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_of_rows_change_nothing(backend, monkeypatch):
    q, k, v = (t.double().requires_grad_() for t in make_inputs(2, 2, 2, 20, 20, dim=8))
    bias = make_bias("toeplitz", 2, 2, 20, 20)
    results = []
    for elements in (2**26, 200):
        monkeypatch.setattr(call, "BLOCK_ELEMENTS", elements)
        out = attention(q, k, v, bias, backend=backend)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for whole, blocks in zip(*results):
        assert torch.allclose(whole, blocks, atol=1e-12)


def test_the_column_route_never_builds_a_square(monkeypatch):
    """4096 tokens, forward and backward: no tensor of T×T elements is ever made."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    self.elements = max(self.elements, tensor.numel())
            return out

    length = 4096
    q, k, v = (t.requires_grad_() for t in make_inputs(1, 1, 1, length, length, dim=8))
    c = torch.rand(1, 1, length, dtype=torch.float64).cumsum(-1).requires_grad_()
    mask = torch.ones(1, length, dtype=torch.bool)
    mask[:, :5] = False
    with Largest() as seen:
        out = attention(q, k, v, PotentialBias(c, torch.rand(1, 1, length)), key_mask=mask, backend="sdpa")
        out.sum().backward()
    assert seen.elements < length * 64


def test_a_padded_query_far_from_all_it_sees_sees_only_that():
    """Its own key and its neighbours are padding too."""
    q, k, v = make_inputs(1, 1, 1, 300, 300, dim=8)
    bias = PotentialBias(torch.full((1, 1, 300), 60.0).double().cumsum(-1))
    mask = (torch.arange(300) < 20)[None]
    outs = [attention(q, k, v, bias, key_mask=mask, backend=backend) for backend in ("sdpa", "reference")]
    torch.testing.assert_close(*outs, atol=1e-4, rtol=0)


def test_alibi_from_a_step_of_one():
    """f ≡ 1 and g_h = slope is ALiBi exactly."""
    heads, length = 12, 33
    slopes = torch.tensor(oracle.alibi_slopes(heads))
    assert slopes[:8].tolist() == [2.0**-n for n in range(1, 9)]
    c = torch.arange(length).double().expand(1, heads, -1)
    rows = PotentialBias(c, slopes[None, :, None].expand(1, heads, length)).rows(
        torch.arange(length), torch.arange(length)
    )
    index = torch.arange(length)
    assert torch.equal(rows[0].float(), -slopes[:, None, None] * (index[:, None] - index).abs())


def test_soft_capping_is_only_in_the_reference():
    q, k, v = make_inputs(1, 1, 1, 4, 4, dim=8)
    plain = attention(q * 50, k, v, softcap=None, backend="reference")
    capped = attention(q * 50, k, v, softcap=1.0)
    assert not torch.allclose(plain, capped)
    with pytest.raises(CableError, match=r"sdpa: .*soft-capping.*can serve the call: reference"):
        attention(q, k, v, softcap=1.0, backend="sdpa")


@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
@pytest.mark.parametrize("causal", [True, False])
def test_nothing_in_nothing_out(backend, causal):
    full = torch.zeros(2, 4, 5, 8)
    assert attention(full[:0], full[:0], full[:0], causal=causal, backend=backend).shape == (0, 4, 5, 8)
    assert attention(full[:, :, :0], full, full, causal=causal, backend=backend).shape == (2, 4, 0, 8)


def test_mix_is_only_in_the_reference_and_explained():
    q, k, v = make_inputs(1, 1, 1, 4, 4, dim=8)
    with pytest.raises(CableError, match=r"sdpa: .*\(mix\)"):
        attention(q, k, v, mix=lambda s, b, q, seen: s, backend="sdpa")
    assert explain(q, k, v).startswith("sdpa serves")
    told = explain(q, k, v, mix=lambda s, b, q, seen: s)
    assert told.startswith("reference serves") and "Not sdpa" in told and "Not triton" in told


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_drops_and_keeps_the_mean(backend):
    q, k, v = make_inputs(1, 1, 1, 64, 64, dim=8)
    v = torch.ones_like(v)
    out = attention(q, k, v, dropout=0.5, causal=False, backend=backend)
    assert out.std() > 0.01
    assert abs(out.mean() - 1) < 0.1


def bad_requests():
    q, k, v = make_inputs(1, 4, 2, 5, 5, dim=8)
    fine = torch.zeros(1, 4, 5)
    yield (q, k, v, PotentialBias(torch.zeros(1, 2, 5))), {}, "c must be [1, 4, 5]"
    yield (q, k, v, PotentialBias(torch.zeros(1, 4, 1))), {}, "c must be [1, 4, 5]"
    yield (q, k, v, PotentialBias(fine, torch.zeros(1, 4, 4))), {}, "g must be [1, 4, 5]"
    yield (q[0], k, v), {}, "[batch, heads, tokens, dim]"
    yield (q, k, v[:, :, :4]), {}, "do not fit together"
    yield (q, k.double(), v), {}, "one floating dtype"
    yield (q[:, :3], k, v), {}, "3 query heads are not a multiple of 2"
    yield (q, k[:, :, :3], v[:, :, :3]), {}, "5 queries from key -2"
    yield (q, k, v), {"query_start": 1}, "do not lie within 5 keys"
    yield (q, k, v), {"window": 0}, "window must be a whole number of at least 1"
    yield (q, k, v), {"key_mask": torch.ones(1, 4, dtype=torch.bool)}, "key_mask must be [1, 5]"
    yield (q, k, v), {"key_mask": torch.ones(1, 5)}, "key_mask must be bool"
    yield (q, k, v), {"document_ids": torch.ones(5)}, "document_ids must be [1, 5]"
    yield (q, k, v), {"dropout": 1.0}, "dropout must lie in [0, 1)"
    yield (q, k, v), {"softcap": 0.0}, "softcap must be positive"
    yield (q, k, v), {"scale": 0.0}, "scale must be finite and not 0"
    yield (q, k, v, ToeplitzBias(torch.zeros(4, 5))), {"causal": False}, "knows distances to earlier keys only"
    yield (q, k, v), {"backend": "spda"}, "Did you mean 'sdpa'?"


@pytest.mark.parametrize(("args", "kwargs", "words"), list(bad_requests()))
def test_bad_requests_are_named(args, kwargs, words):
    with pytest.raises(CableError) as error:
        attention(*args, **kwargs)
    assert words in str(error.value)


@pytest.mark.parametrize("window", [None, 5])
def test_values_may_be_wider_than_keys(window):
    q, k, _ = make_inputs(1, 2, 1, 9, 9, 8)
    v, bias = torch.randn(1, 1, 9, 24), PotentialBias(torch.rand(1, 2, 9).double().cumsum(-1), torch.rand(1, 2, 9))
    outs = [attention(q, k, v, bias, window=window, backend=name) for name in ("sdpa", "reference")]
    assert outs[0].shape == (1, 2, 9, 24) and torch.allclose(*outs, atol=1e-5)


@pytest.mark.parametrize("ids", [[0] * 4 + [2**32] * 4, [0.1] * 4 + [0.9] * 4, [3] * 2 + [5] * 4 + [3] * 2])
@pytest.mark.parametrize("backend", ["reference", "sdpa", "triton"])
def test_documents_are_told_apart_whatever_their_ids_are(ids, backend):
    """One that comes back is another document: its potential has begun anew."""
    q, k, v = make_inputs(1, 1, 1, 8, 8, 16)
    bias = PotentialBias(torch.rand(1, 1, 8).double().cumsum(-1))
    numbers = [0, 0, 0, 0, 1, 1, 1, 1] if len(set(ids[:4])) == 1 else [0, 0, 1, 1, 1, 1, 2, 2]
    got = attention(q, k, v, bias, document_ids=torch.tensor([ids]), backend=backend)
    wanted = attention(q, k, v, bias, document_ids=torch.tensor([numbers]), backend="reference")
    assert torch.allclose(got, wanted, atol=1e-5)


def test_more_queries_than_keys_need_no_places_without_order():
    q, k, v = make_inputs(1, 1, 1, 40, 7, 16)
    mask = torch.arange(7)[None] < 5
    wanted = attention(q, k, v, causal=False, key_mask=mask, query_start=0, backend="reference")
    assert torch.allclose(attention(q, k, v, causal=False, key_mask=mask, query_start=0), wanted, atol=1e-5)
    with pytest.raises(CableError, match="want every query to stand at a key"):
        attention(q, k, v, causal=False, key_mask=mask, query_start=0, backend="triton")
    with pytest.raises(CableError, match="each query must stand at a key"):
        attention(q, k, v, causal=False, document_ids=torch.zeros(1, 7))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": torch.zeros(3, 4)}, r"must be \[batch, heads, tokens, dim\]"),
        ({"bias": torch.zeros(4, 4)}, "bias must be a Bias, like PotentialBias"),
        ({"window": 2.5}, "window must be a whole number of at least 1, got 2.5"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, words):
    q, k, v = make_inputs(1, 1, 1, 4, 4, 16)
    with pytest.raises(CableError, match=words):
        attention(**{"q": q, "k": k, "v": v, **change})


def test_a_layout_follows_its_layer_to_another_device():
    layout = Layout(2, 3, 1, torch.device("cpu"), key_mask=torch.ones(1, 3, dtype=torch.bool))
    layout.known_positions, layout.known_waves = layout.positions, (torch.ones(1), torch.ones(1))
    moved = layout.to(torch.device("meta"))
    tensors = (moved.key_mask, moved.known_positions, *moved.known_waves)
    assert moved.device.type == "meta" and all(tensor.device.type == "meta" for tensor in tensors)
    assert layout.to(torch.device("cpu")) is layout
