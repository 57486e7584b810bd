"""The fused kernels on a GPU: bf16, long texts, compiled models."""

from __future__ import annotations

import copy

import pytest
import torch

from cable_attn import CableGPTForCausalLM, PotentialBias, attention
from cable_attn.attention import decoding, fused, make_call
from cable_attn.attention.reference import weights
from cable_attn.bench import generation
from cable_attn.bias import FunctionBias, ToeplitzBias
from cable_attn.encodings import Geometry
from cable_attn.encodings.cable import Cable
from cable_attn.layout import Layout
from tests.conftest import small_gpt, stir

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CASES = [(1, 16), (111, 40), (1000, 64), (257, 128), (200, 256)]


def leaves(queries, keys, dim, dtype, heads=4, key_heads=2, batch=2):
    q = torch.randn(batch, heads, queries, dim, device="cuda")
    k, v = torch.randn(2, batch, key_heads, keys, dim, device="cuda")
    c = (torch.randn(batch, heads, keys, device="cuda").relu() * 0.5).double().cumsum(-1)
    g = torch.rand(batch, heads, queries, device="cuda")
    return [t.clone().requires_grad_() for t in (q.to(dtype), k.to(dtype), v.to(dtype), c, g)]


def bias_of(tensors, kernel):
    if kernel == "toeplitz":
        return ToeplitzBias(tensors[3], zero=100)
    if kernel == "function":
        return FunctionBias(lambda i, j, start: tensors[3][None, :, ((i + start)[:, None] * 3 + j * 5) % 200])
    return PotentialBias(tensors[3], tensors[4], kernel)


def run(tensors, kernel, backend, **options):
    out = attention(*tensors[:3], bias_of(tensors, kernel), backend=backend, **options)
    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.device, out.dtype)
    return [out, *torch.autograd.grad((out * noise).sum(), tensors)]


def naive(tensors, kernel, causal):
    """Every product and the weights rounded to the low precision, the bias in fp32."""
    q = tensors[0]
    k, v = (t.repeat_interleave(2, 1) for t in tensors[1:3])
    index = torch.arange(q.shape[2], device=q.device)
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    scores = scores + bias_of(tensors, kernel).rows(index, index).float()
    if causal:
        scores = scores.masked_fill(index[:, None] < index, -torch.inf)
    out = scores.softmax(-1).to(q.dtype) @ v
    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.device, out.dtype)
    return [out, *torch.autograd.grad((out * noise).sum(), tensors)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kernel", [None, "log"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("length", "dim"), CASES)
def test_errors_are_those_of_the_precision(length, dim, causal, kernel, dtype):
    assert_errors_are_those_of_the_precision(leaves(length, length, dim, dtype), kernel, causal, dtype)


def assert_errors_are_those_of_the_precision(tensors, kernel, causal, dtype):
    """error(kernel) ≤ 2 × (gradients 3 ×) that of the same arithmetic in plain PyTorch, both against fp64."""
    got = run(tensors, kernel, "triton", causal=causal)
    exact = run([t.detach().double().requires_grad_() for t in tensors], kernel, "reference", causal=causal)
    plain = naive(tensors, kernel, causal)
    slack = 1e-5 if dtype == torch.float32 else 1e-3
    for n, (a, b, c) in enumerate(zip(got, exact, plain)):
        allowed = (2 if n == 0 else 3) * (c.double() - b).abs().max() + slack * (1 + b.abs().max())
        assert torch.isfinite(a).all()
        assert (a.double() - b).abs().max() <= allowed, n


@pytest.mark.parametrize("kernel", ["toeplitz", "function"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("length", "dim", "dtype"), [(1000, 64, torch.bfloat16), (257, 128, torch.bfloat16), (111, 40, torch.float32)]
)
def test_tables_err_no_more_than_the_precision(length, dim, dtype, causal, kernel):
    tensors = [*leaves(length, length, dim, dtype)[:3], torch.randn(4, 200, device="cuda", requires_grad=True)]
    assert_errors_are_those_of_the_precision(tensors, kernel, causal, dtype)


def test_bit_identical_from_run_to_run():
    tensors = leaves(1000, 1000, 64, torch.bfloat16)
    for a, b in zip(run(tensors, None, "triton"), run(tensors, None, "triton")):
        assert torch.equal(a, b)


def test_rows_of_a_text_of_131072_tokens():
    """Exact rows in fp64 for a few queries far into the text."""
    length = 131072
    q, k, v = torch.randn(3, 1, 2, length, 64, device="cuda", dtype=torch.bfloat16)
    c = (torch.rand(1, 2, length, device="cuda") * 0.3).double().cumsum(-1)
    g = torch.rand(1, 2, length, device="cuda") * 0.01
    out = attention(q, k, v, PotentialBias(c, g), backend="triton")
    for at in (0, 70_001, length - 1):
        scores = q[:, :, at : at + 1].double() @ k[:, :, : at + 1].double().mT / 8
        scores = scores - g[:, :, at, None, None].double() * (c[:, :, at, None] - c[:, :, : at + 1])[:, :, None]
        exact = scores.softmax(-1) @ v[:, :, : at + 1].double()
        assert (out[:, :, at : at + 1].double() - exact).abs().max() < 2e-2 * max(1, float(exact.abs().max()))


@pytest.mark.parametrize("causal", [True, False])
def test_pruning_keeps_its_promise(causal):
    length = 4096
    q, k, v = torch.randn(3, 1, 2, length, 64, device="cuda", dtype=torch.bfloat16) * 0.5
    bias = PotentialBias(
        (torch.rand(1, 2, length, device="cuda") * 0.3).double().cumsum(-1),
        torch.rand(1, 2, length, device="cuda") + 0.2,
    )
    call = make_call(q, k, v, bias, Layout(length, length, 0, q.device, causal=causal), prune=1e-4)
    *_, lo, hi = fused._fused(call)
    assert fused.kept_share(call).max() < 0.9
    j = torch.arange(length, device="cuda")
    for block in range(0, length // 64, 7):
        exact = weights(call, range(block * 64, block * 64 + 64))
        dropped = (j < lo[:, :, block, None]) | (j >= hi[:, :, block, None])
        assert (exact * dropped[:, :, None]).sum(-1).max() < 1e-4


@pytest.mark.parametrize("encoding", ["cable", "k-cable", "alibi", "fox", "kerple-log", "fire"])
def test_models_train_in_bf16_compiled_and_checkpointed(encoding):
    """Autocast, torch.compile of the whole model without a graph break, gradient checkpointing: the same loss."""
    torch.manual_seed(0)
    model = stir(CableGPTForCausalLM(small_gpt(encoding, hidden_size=64, attention_backend="triton"))).cuda()
    text = torch.randint(0, 97, (2, 200), device="cuda")
    torch.compiler.reset()
    results = {}
    for how in ("eager", "compiled", "checkpointed"):
        if how == "checkpointed":
            model.gradient_checkpointing_enable()
        call = torch.compile(model, fullgraph=True) if how == "compiled" else model
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = call(text, labels=text, use_cache=False).loss
        loss.backward()
        results[how] = (loss.item(), [p.grad.float() for p in model.parameters()])
    for how in ("compiled", "checkpointed"):
        assert abs(results[how][0] - results["eager"][0]) < 2e-2
        for a, b in zip(results[how][1], results["eager"][1]):
            assert (a - b).norm() <= 0.1 * b.norm() + 1e-4


def test_training_follows_the_reference():
    losses = {}
    for backend in ("reference", "triton"):
        torch.manual_seed(1)
        model = CableGPTForCausalLM(small_gpt(hidden_size=64, attention_backend=backend)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        text = torch.randint(0, 97, (4, 128), generator=torch.Generator().manual_seed(2)).cuda()
        losses[backend] = []
        for _ in range(60):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(text, labels=text, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[backend].append(loss.item())
    assert losses["triton"][-1] < 0.5 * losses["triton"][0]
    assert max(abs(a - b) for a, b in zip(losses["triton"], losses["reference"])) < 0.1


@pytest.mark.parametrize("length", [1, 1000])
def test_training_in_bfloat16_keeps_steps_and_gains_exact(length):
    encoding = Cable(Geometry(hidden_size=768, num_heads=12, head_dim=64, max_length=1024)).cuda()
    x = torch.randn(2, length, 768, device="cuda").bfloat16().float().requires_grad_()
    noise = torch.randn(2, 2, 12, length, device="cuda")

    def run(encoding, x):
        steps, gain = encoding.steps_and_gain(x)
        loss = (steps * noise[0] + gain * noise[1]).sum()
        return [steps, gain, *torch.autograd.grad(loss, [x, *encoding.parameters()])]

    exact = run(copy.deepcopy(encoding).double(), x.detach().double().requires_grad_())
    with torch.autocast("cuda", torch.bfloat16):
        got = run(encoding, x)
    for index, (one, other) in enumerate(zip(got, exact)):
        precision = 2**-8 if index == 2 else 1e-5  # the gradient of x is as exact as x
        torch.testing.assert_close(one.double(), other, rtol=0, atol=precision * float(other.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("queries", "keys", "dim"), [(1, 5000, 64), (4, 1000, 128), (1, 70, 256), (16, 300, 40)])
def test_a_few_queries_against_a_cache(queries, keys, dim, dtype):
    q, k, v, c, g = (t.detach() for t in leaves(queries, keys, dim, dtype))
    for kernel in (None, "log"):
        bias = PotentialBias(c, g, kernel)
        for start in (keys - queries, torch.tensor(keys // 2, device="cuda")):
            exact = attention(q.double(), k.double(), v.double(), bias, query_start=start, backend="reference")
            with torch.no_grad():
                got = attention(q, k, v, bias, query_start=start, backend="triton")
            torch.testing.assert_close(got.double(), exact, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=0)


@pytest.mark.parametrize(("group", "queries"), [(1, 1), (4, 1), (2, 3)])
@pytest.mark.parametrize("known", [True, False])
def test_pruned_decoding_skips_blocks_and_keeps_its_promise(group, queries, known, monkeypatch):
    """Far blocks are not read at all: what they hold may be anything."""
    monkeypatch.setattr(decoding, "SHORT", 0)  # blocks are judged in a text as short as this one, too
    epsilon, keys, far = 1e-3, 8192 + 37, 4096
    start = keys - queries
    q, k, v, c, g = (t.detach() for t in leaves(queries, keys, 64, torch.bfloat16, heads=4 * group, key_heads=4))
    bias = PotentialBias(c, g + 0.5)
    place = start if known else torch.tensor(start, device="cuda")
    summaries = decoding.blank_summaries(k, keys)
    decoding.summarise(k, *summaries, None if known else place, start if known else 0, queries, True)
    exact = attention(q.double(), k.double(), v.double(), bias, query_start=start, backend="reference")
    k[:, :, :far], v[:, :, :far] = torch.nan, torch.nan
    layout = Layout(queries, keys, place, q.device)
    with torch.no_grad():
        got = fused.run(make_call(q, k, v, bias, layout, prune=epsilon, summaries=summaries))
    torch.testing.assert_close(got.double(), exact, atol=2e-2, rtol=0)


@pytest.mark.parametrize(
    ("encoding", "prune"),
    [("cable", None), ("cable", 1e-4), ("cable-nw", 1e-4), *((name, None) for name in ("rope", "kerple-log", "fire"))],
)
def test_a_compiled_static_step_says_what_the_model_says(encoding, prune, monkeypatch):
    """CUDA graphs and all, past the ends of blocks, in bf16: a near tie may be decided either way."""
    monkeypatch.setattr(decoding, "SHORT", 0)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "attention_backend": "triton", "attention_prune": prune}
    model = stir(CableGPTForCausalLM(small_gpt(encoding, **sizes))).cuda().bfloat16().eval()
    text = torch.randint(0, 97, (2, 300), device="cuda")
    torch.compiler.reset()
    decoder = generation.Decoder(model, batch=2, longest=300, steps=100)
    decoder.check(text, tokens=100)


@pytest.mark.parametrize("prune", [None, 1e-4])
def test_generate_compiles_the_step_behind_a_static_cache(prune, monkeypatch):
    """As transformers does it by itself, replayed as CUDA graphs; in fp32, so that the text is the same."""
    monkeypatch.setattr(decoding, "SHORT", 0)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "attention_backend": "triton", "attention_prune": prune}
    model = stir(CableGPTForCausalLM(small_gpt("cable", **sizes))).cuda().eval()
    text = torch.randint(1, 97, (2, 300), device="cuda")
    options = {"max_new_tokens": 100, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    torch.compiler.reset()
    said = [model.generate(text, cache_implementation=kind, **options) for kind in ("dynamic", "static")]
    assert torch.equal(*said)


@pytest.mark.parametrize("tokens", [1, 777])
def test_one_kernel_makes_the_steps_and_gains_of_a_text(tokens):
    """While nothing learns, from weights and texts in bf16, as exact as these numbers are."""
    encoding = Cable(Geometry(1024, 16, 64, 1024), gain_floor=0.1).cuda().bfloat16()
    x = torch.randn(2, tokens, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        got = encoding.steps_and_gain(x)
        wanted = encoding.double().steps_and_gain(x.double())
    for ours, exact in zip(got, wanted):
        torch.testing.assert_close(ours.double(), exact, atol=2e-5, rtol=2e-5)
