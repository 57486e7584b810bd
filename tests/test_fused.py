"""The fused kernels, through Triton's interpreter: the same code that a GPU runs, on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cable_attn import CableError, CableGPTForCausalLM, PotentialBias, attention
from cable_attn.attention import fused, make_call, pruning
from cable_attn.attention.reference import weights
from cable_attn.attention.tiles import Tile, Tiles
from cable_attn.bias import KERNELS, Bias, FunctionBias, ToeplitzBias
from cable_attn.layout import Layout

from .conftest import small_gpt, stir
from .test_attention import make_bias, make_inputs

WRITTEN = FunctionBias(lambda i, j, start: (i[:, None] - j).float()[None, None])


class NoBias(Bias):
    def rows(self, i, j, query_start=0):
        return torch.zeros(1, 1, len(i), len(j))


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels for real")


@pytest.fixture(autouse=True, scope="module")
def _poison():
    """``torch.empty`` holds NaN, so that whatever a kernel forgets to write is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def leaves(queries, keys, kind, heads=2, key_heads=1, dim=16, dtype=torch.float32, batch=1):
    """q, k, v and, as the kind has them, c and g or a table, ready for gradients."""
    tensors = list(make_inputs(batch, heads, key_heads, queries, keys, dim, dtype))
    if kind in TABLES:
        return [tensor.requires_grad_() for tensor in (*tensors, torch.randn(heads, 20))]
    bias = make_bias(kind, batch, heads, queries, keys)
    if bias is not None:
        tensors += [bias.c] + ([] if bias.g is None else [bias.g])
    return [tensor.requires_grad_() for tensor in tensors]


def bias_of(tensors, kind):
    """Made of what follows q, k and v."""
    if len(tensors) == 3:
        return None
    if kind == "toeplitz":  # shorter than the text: the far distances take its ends
        return ToeplitzBias(tensors[3], zero=8)
    if kind == "function":
        return FunctionBias(lambda i, j, start: tensors[3][None, :, ((i + start)[:, None] * 3 + j * 5) % 20])
    return PotentialBias(tensors[3], tensors[4] if len(tensors) > 4 else None, "log" if "log" in kind else None)


def run(tensors, kind, backend, noise=None, **options):
    """Output and gradients."""
    out = attention(*tensors[:3], bias_of(tensors, kind), backend=backend, **options)
    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype)
    return [out, *torch.autograd.grad((out * noise).sum(), tensors)]


def assert_equal_to_reference(tensors, kind, tolerance=2e-5, **options):
    got = run(tensors, kind, "triton", **options)
    exact = run([t.detach().double().requires_grad_() for t in tensors], kind, "reference", **options)
    for name, a, b in zip(("out", "q", "k", "v", "c", "g"), got, exact):
        assert torch.isfinite(a).all(), name
        assert (a - b).abs().max() <= tolerance * (1 + b.abs().max()), name


TABLES = ["toeplitz", "function"]
KINDS = ["none", "plain", "gain", "gain log", *TABLES]


@st.composite
def requests(draw):
    keys = draw(st.sampled_from([1, 7, 16, 33, 45]))
    queries = draw(st.sampled_from([n for n in (1, 5, 16, 33, 45) if n <= keys]))
    options = {"causal": draw(st.booleans()), "query_start": draw(st.sampled_from(sorted({0, keys - queries})))}
    kind = draw(st.sampled_from(KINDS))
    what = draw(st.sampled_from(["plain", "padded", "windowed"] + (["packed", "all"] if kind != "function" else [])))
    if what in ("windowed", "all"):
        options["window"] = draw(st.sampled_from([1, 9]))
    if what in ("padded", "all"):
        options["key_mask"] = torch.rand(1, keys, generator=torch.Generator().manual_seed(keys)) > 0.3
    if what in ("packed", "all"):
        options["document_ids"] = (torch.arange(keys) // 11)[None]
    return queries, keys, kind, draw(st.sampled_from([16, 24])), options


@given(request=requests())
@settings(max_examples=30)
def test_every_request_equals_the_reference_with_all_gradients(request):
    queries, keys, kind, dim, options = request
    assert_equal_to_reference(leaves(queries, keys, kind, dim=dim), kind, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [True, False])
def test_even_tiles_and_batches(kind, causal):
    """Lengths that fill the tiles take the paths without bounds checks; several batches and groups."""
    assert_equal_to_reference(leaves(64, 64, kind, heads=4, key_heads=2, batch=2), kind, causal=causal)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_errs_no_more_than_a_half_precision_reference(kind):
    """error(kernel) ≤ 2 × (gradients 3 ×) that of plain fp16 arithmetic, both against fp64."""
    tensors = leaves(48, 48, kind, dtype=torch.float16)
    got = run(tensors, kind, "triton")
    exact = run([t.detach().double().requires_grad_() for t in tensors], kind, "reference")
    plain = naive_half(tensors, kind)
    for n, (a, b, c) in enumerate(zip(got, exact, plain)):
        allowed = (2 if n == 0 else 3) * (c.double() - b).abs().max() + 1e-4 * b.abs().max()
        assert (a.double() - b).abs().max() <= allowed, n


def naive_half(tensors, kind):
    """Attention with every step rounded to fp16, the bias in fp32."""
    q, k, v = tensors[0], *(t.repeat_interleave(2, 1) for t in tensors[1:3])
    index = torch.arange(q.shape[2])
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    if len(tensors) > 3:
        scores = scores + bias_of(tensors, kind).rows(index, index).float()
    scores = scores.masked_fill(index[:, None] < index, -torch.inf)
    out = scores.softmax(-1).half() @ v
    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype)
    return [out, *torch.autograd.grad((out * noise).sum(), tensors)]


def test_distances_are_accurate_far_into_a_text():
    """fp32 alone would be off by 3e-2 there; a gain of 1 and keys of 0 make the output show the bias itself."""
    keys, near = 200_000, 64
    c = torch.rand(1, 1, keys).double().cumsum(-1) * 1.5
    q, k, v = torch.zeros(1, 1, 2, 16), torch.zeros(1, 1, keys, 16), torch.zeros(1, 1, keys, 16)
    v[..., -near:, :] = torch.randn(1, 1, near, 16)
    out = attention(q, k, v, PotentialBias(c), window=near - 1, backend="triton")
    short = PotentialBias(c[..., -near:])
    exact = attention(
        q.double(), k[..., -near:, :].double(), v[..., -near:, :].double(), short, window=near - 1, backend="reference"
    )
    assert (out - exact).abs().max() < 3e-5


@pytest.mark.parametrize("kind", ["gain", "gain log"])
@pytest.mark.parametrize("causal", [True, False])
def test_awkward_potentials(kind, causal):
    """All steps 0 (ties everywhere), gains of 0, a potential of 1e4."""
    for c, g in [
        (torch.zeros(1, 2, 33), torch.rand(1, 2, 33)),
        (torch.rand(1, 2, 33).cumsum(-1), torch.zeros(1, 2, 33)),
        (torch.rand(1, 2, 33).cumsum(-1) * 20 + 1e4, torch.rand(1, 2, 33)),
    ]:
        tensors = [*leaves(33, 33, "none"), c.double().requires_grad_(), g.clone().requires_grad_()]
        assert_equal_to_reference(tensors, kind, causal=causal, tolerance=5e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_rows_that_see_nothing_are_zero(causal):
    tensors = leaves(33, 33, "gain")
    hidden = torch.zeros(1, 33, dtype=torch.bool)
    out, *grads = run(tensors, "gain", "triton", key_mask=hidden, causal=causal)
    assert out.abs().max() == 0 and all(grad.abs().max() == 0 for grad in grads)


def test_the_same_input_gives_the_same_bits():
    tensors = leaves(45, 45, "gain log")
    for a, b in zip(run(tensors, "gain log", "triton"), run(tensors, "gain log", "triton")):
        assert torch.equal(a, b)


def test_log_sum_exp():
    q, k, v = make_inputs(1, 2, 2, 20, 20, 16)
    bias = make_bias("gain", 1, 2, 20, 20)
    mask = torch.ones(1, 20, dtype=torch.bool)
    mask[:, :3] = False
    call = make_call(q, k, v, bias, Layout(20, 20, 0, q.device, key_mask=mask))
    index = torch.arange(20)
    scores = q @ k.mT / 4 + bias.rows(index, index)
    scores = scores.masked_fill(~call.layout.visible(index, index), -torch.inf)
    assert torch.allclose(fused.log_sum_exp(call), scores.logsumexp(-1).float(), atol=1e-5)


def steep(queries, keys, causal, **extra):
    """A bias that falls fast, so that far keys can go: about one unit a token, gain 1."""
    q, k, v = make_inputs(1, 1, 1, queries, keys, 16)
    bias = PotentialBias(torch.rand(1, 1, keys).double().cumsum(-1) * 2, torch.rand(1, 1, queries) + 0.5)
    layout = Layout(queries, keys, keys - queries, q.device, causal=causal, **extra)
    return make_call(q * 0.3, k * 0.3, v, bias, layout, prune=1e-3)


def test_gradients_of_gradients_are_refused():
    """Rather than left out."""
    q = make_inputs(1, 1, 1, 8, 8, 16)[0].requires_grad_()
    bias = PotentialBias(torch.rand(1, 1, 8).double().cumsum(-1))
    out = attention(q, q, q, bias, backend="triton").sum()
    with pytest.raises(CableError, match="no second derivatives"):
        torch.autograd.grad(out, q, create_graph=True)


def test_short_texts_are_not_pruned(monkeypatch):
    """To find out what can be left out would take longer than to read it."""
    call = steep(320, 320, True)
    monkeypatch.setattr(fused, "FEW_SCORES", 320**2)
    assert fused.kept_share(call) < 1
    monkeypatch.setattr(fused, "FEW_SCORES", 320**2 + 1)
    assert fused.kept_share(call) == 1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("extra", ["nothing", "documents", "padding", "outliers"])
def test_pruning_drops_blocks_and_never_more_than_promised(causal, extra, monkeypatch):
    keys = 640
    options = {}
    monkeypatch.setattr(pruning, "LARGE_BLOCK", 128)
    if extra == "documents":
        options["document_ids"] = (torch.arange(keys) // 300)[None]
    if extra == "padding":
        options["key_mask"] = (torch.arange(keys) > 40)[None]
    call = steep(keys, keys, causal, **options)
    if extra == "outliers":  # one key of each block lies far from the others, where the mean does not show it
        call.k[:, :, 5::64] *= 12
    out, *_, lo, hi = fused._fused(call)
    assert fused.kept_share(call).max() < 0.8
    exact = weights(call, range(keys)).double()
    j = torch.arange(keys)
    for block in range(lo.shape[-1]):
        rows = slice(block * 64, (block + 1) * 64)
        dropped = (j < lo[0, 0, block]) | (j >= hi[0, 0, block])
        assert (exact[0, 0, rows] * dropped).sum(-1).max() < 1e-3
    whole = attention(call.q, call.k, call.v, call.bias, causal=causal, backend="reference", **options)
    assert (out - whole).abs().max() < 2e-3 * call.v.abs().max()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("extra", ["nothing", "documents", "groups", "short queries"])
def test_pruning_bounds_are_close_when_they_can_be(causal, extra, monkeypatch):
    """Equal keys leave no slack in the scores: a wrong bound would drop too much, and a loose one far too little."""
    keys, epsilon = 640, 0.05
    monkeypatch.setattr(pruning, "LARGE_BLOCK", 128)
    queries = 200 if extra == "short queries" else keys
    heads, key_heads = (2, 1) if extra == "groups" else (1, 1)
    q, _, v = make_inputs(1, heads, key_heads, queries, keys, 16)
    k = torch.randn(1, key_heads, 1, 16).expand(1, key_heads, keys, 16).contiguous()
    options = {"document_ids": (torch.arange(keys) // 500)[None]} if extra == "documents" else {}
    bias = PotentialBias(torch.rand(1, heads, keys).double().cumsum(-1) * 0.02, torch.rand(1, heads, queries) + 0.7)
    layout = Layout(queries, keys, keys - queries, q.device, causal=causal, **options)
    call = make_call(q, k, v[:, :key_heads], bias, layout, prune=epsilon)
    *_, lo, hi = fused._fused(call)
    j, worst = torch.arange(keys), 0.0
    exact = weights(call, range(queries)).double()
    for block in range(lo.shape[-1]):
        for h in range(heads):
            dropped = (j < lo[0, h, block]) | (j >= hi[0, h, block])
            worst = max(worst, float((exact[0, h, block * 64 : (block + 1) * 64] * dropped).sum(-1).max()))
    assert epsilon / 20 < worst < epsilon


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_a_pruned_call_with_large_tiles(causal, monkeypatch):
    """Tiles of two key blocks of which no row needs the first, and of two row blocks; fewer queries than keys."""
    tall = Tile(128, 16, 4, 1)
    monkeypatch.setattr(fused, "INTERPRETED", Tiles(tall, Tile(32, 128, 4, 1), tall))
    queries, keys = 128, 512
    q, k, v = make_inputs(1, 1, 1, queries, keys, 16)
    c = torch.where(torch.arange(keys) < 320, 0.0, 1000.0).double()[None, None] + torch.arange(keys).double() * 0.01
    tensors = [t.clone().requires_grad_() for t in (q, k, v, c, torch.rand(1, 1, queries) + 0.5)]
    pruned, whole = (run(tensors, "gain", name, causal=causal, prune=1e-5) for name in ("triton", "reference"))
    for a, b in zip(pruned, whole):
        assert (a - b).abs().max() < 1e-4 * (1 + b.abs().max())


def test_gradients_of_a_pruned_call():
    call = steep(300, 300, True)
    tensors = [t.clone().requires_grad_() for t in (call.q, call.k, call.v, call.bias.c, call.bias.g)]
    assert fused.kept_share(call).max() < 1
    pruned, whole = (run(tensors, "gain", backend, prune=1e-5) for backend in ("triton", "reference"))
    for a, b in zip(pruned, whole):
        assert (a - b).abs().max() < 1e-4 * (1 + b.abs().max())


@pytest.mark.parametrize(
    ("bias", "prune", "words"),
    [
        (PotentialBias(torch.zeros(1, 1, 4), None, "log"), 1e-4, "does not work with the kernel 'log' (K-CABLE)"),
        (None, 1e-4, "prune needs a potential bias"),
        (PotentialBias(torch.zeros(1, 1, 4)), 0.0, "prune must lie between 0 and 1"),
        (PotentialBias(torch.zeros(1, 1, 4)), 2.0, "prune must lie between 0 and 1"),
    ],
)
def test_pruning_is_refused_with_a_reason(bias, prune, words):
    with pytest.raises(CableError) as error:
        attention(*make_inputs(1, 1, 1, 4, 4, 16), bias, prune=prune)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": torch.bfloat16}, "interpreter computes bfloat16 products wrongly"),
        ({"dtype": torch.float64}, "not torch.float64"),
        ({"dim": 20}, "multiples of 8 from 16 to 256"),
        ({"dim": 8}, "multiples of 8 from 16 to 256"),
        ({"dropout": 0.5}, "no attention dropout"),
        ({"softcap": 5.0}, "no soft-capping"),
        ({"mix": lambda s, b, q, seen: s}, "(mix)"),
        ({"bias": NoBias()}, "take no NoBias"),
        ({"bias": FunctionBias(lambda i, j, start: torch.zeros(2, 1, len(i), len(j)))}, "differs from text to text"),
        ({"scale": -1.0}, "need a positive scale"),
        ({"query_start": torch.tensor(0)}, "known only on the device"),
        ({"dim": 136, "prune": 1e-3, "kind": "gain"}, "pruning in float32 takes head dimensions up to 128"),
    ],
)
def test_what_the_kernels_cannot_do_is_said_by_name(change, words):
    change = dict(change)
    q, k, v = make_inputs(1, 1, 1, 4, 4, change.pop("dim", 16), change.pop("dtype", torch.float32))
    bias = change.pop("bias", None) or make_bias(change.pop("kind", "plain"), 1, 1, 4, 4)
    with pytest.raises(CableError) as error:
        attention(q, k, v, bias, backend="triton", **change)
    assert "attention backend triton: " in str(error.value) and words in str(error.value)
    assert "can serve the call: " in str(error.value)


def test_a_bend_that_the_kernels_do_not_know_is_left_to_others(monkeypatch):
    monkeypatch.setitem(KERNELS, "root", lambda b: 1 - torch.sqrt(1 - b))
    q, k, v = make_inputs(1, 1, 1, 4, 4, 16)
    plain = make_bias("gain", 1, 1, 4, 4)
    bent = PotentialBias(plain.c, plain.g, "root")
    with pytest.raises(CableError, match="do not bend a bias with 'root', only with 'log'"):
        attention(q, k, v, bent, backend="triton")
    assert not torch.allclose(attention(q, k, v, bent), attention(q, k, v, plain))


def test_a_bias_too_large_to_write_out_is_left_to_others(monkeypatch):
    monkeypatch.setattr(fused, "BLOCK_ELEMENTS", 15)
    q, k, v = make_inputs(1, 1, 1, 4, 4, 16)
    with pytest.raises(CableError, match="written out, and only up to 15 numbers"):
        attention(q, k, v, WRITTEN, backend="triton")


@pytest.mark.parametrize("encoding", ["cable", "kerple-log", "fire"])
def test_a_model_runs_and_compiles_on_the_fused_operator(encoding):
    """Same loss and gradients as the reference, in eager mode and as one graph."""
    text = torch.randint(0, 97, (1, 20))
    model = stir(
        CableGPTForCausalLM(small_gpt(encoding, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1))
    )
    results = {}
    for how in ("reference", "triton", "compiled"):
        model.config.attention_backend = "triton" if how == "compiled" else how
        torch.compiler.reset()
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if how == "compiled" else model
        model.zero_grad()
        out = call(text, labels=text, use_cache=False)
        out.loss.backward()
        results[how] = [out.logits.detach(), *(p.grad.clone() for p in model.parameters())]
    for how in ("triton", "compiled"):
        for a, b in zip(results[how], results["reference"]):
            assert torch.allclose(a, b, atol=2e-5), how


def test_a_compiled_call_takes_packed_documents():
    q, k, v = make_inputs(1, 1, 1, 20, 20, 16)
    bias = PotentialBias(torch.rand(1, 1, 20).double().cumsum(-1), torch.rand(1, 1, 20))
    documents = (torch.arange(20) // 8)[None]

    def call(q, backend):
        return attention(q, k, v, bias, document_ids=documents, backend=backend)

    torch.compiler.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(q, "triton"), call(q, "reference"), atol=1e-5)


def test_a_short_training_run_follows_the_reference():
    """The same losses step by step, within rounding."""
    losses = {}
    for backend in ("reference", "triton"):
        torch.manual_seed(1)
        config = small_gpt(num_attention_heads=2, num_hidden_layers=1, attention_backend=backend)
        model = CableGPTForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        text = torch.randint(0, 97, (1, 17), generator=torch.Generator().manual_seed(2))
        losses[backend] = []
        for _ in range(8):
            loss = model(text, labels=text, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[backend].append(loss.item())
    assert losses["triton"][-1] < losses["triton"][0] - 0.5
    assert torch.allclose(torch.tensor(losses["triton"]), torch.tensor(losses["reference"]), atol=1e-3)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_processes_get_the_gradients_of_one(how):
    script = Path(__file__).parent / "two_processes.py"
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), how]
    done = subprocess.run([sys.executable, "-m", *launch], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the same gradients") == 2


@pytest.mark.parametrize("generation", [80, 90, 100])
def test_shipped_tiles_compile_and_fit(generation):
    """For GPUs that are not here: compiled to machine code, shared memory counted."""
    script = Path(__file__).parent / "compile_kernels.py"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script, str(generation)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) >= 6


def test_the_search_for_tiles_calls_the_kernels_as_they_are(monkeypatch):
    from cable_attn.bench import tiles as search
    from cable_attn.bench.attention import Shape

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    bias = torch.rand(1, 1, 64).double().cumsum(-1), torch.rand(1, 1, 64)
    on_cpu = SimpleNamespace(leaves=(*make_inputs(1, 1, 1, 64, 64, 16), *bias))
    monkeypatch.setattr(search.Inputs, "random", lambda shape: on_cpu)
    problem = search.Problem(Shape(1, 1, 64, 16), "cable")
    for kernel in ("forward", "keys", "queries"):
        problem.call(kernel, Tile(32, 32, 4, 1))
