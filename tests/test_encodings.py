"""Properties that every encoding has, checked over the whole registry; a new one is picked up by itself."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from cable_attn import ENCODINGS, CableBertForMaskedLM, CableError, CableGPTForCausalLM, attention
from cable_attn.attention import attend, call, decoding, make_call
from cable_attn.bias import KERNELS, TokenBias
from cable_attn.encodings import Geometry, cable, find_encoding
from cable_attn.encodings.base import PotentialEncoding
from cable_attn.encodings.cable import Cable
from cable_attn.encodings.head_linear import project, read
from cable_attn.layout import Layout

from . import oracle
from .conftest import small_bert, small_gpt, stir

ALL = list(ENCODINGS)
BIDIRECTIONAL = [name for name in ALL if not ENCODINGS[name].causal_only]
TRAINED = 16
FOUR_HEADS = Geometry(hidden_size=32, num_heads=4, head_dim=8, max_length=16)
CAUSAL_AND_NOT = [(name, causal) for name in ALL for causal in (True, False) if causal or name in BIDIRECTIONAL]
KINDS = [(name, kind) for name in ALL for kind in ("gpt", "bert") if kind == "gpt" or name in BIDIRECTIONAL]


def gpt(name: str, **overrides) -> CableGPTForCausalLM:
    return stir(CableGPTForCausalLM(small_gpt(name, max_position_embeddings=TRAINED, **overrides))).eval()


def tokens(length: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(0, 97, (batch, length), generator=torch.Generator().manual_seed(1))


def readable(name: str, length: int) -> int:
    """A learnable table ends at the training length."""
    return min(length, TRAINED) if name == "learnable" else length


@pytest.mark.parametrize(("name", "causal"), CAUSAL_AND_NOT)
def test_equals_its_formula_in_fp64(name, causal):
    """The whole way through rotate, bias, mix and attention, against loops over the formulae."""
    heads, length, dim = 4, 19, 8
    geometry = Geometry(hidden_size=heads * dim, num_heads=heads, head_dim=dim, max_length=32, causal=causal)
    encoding = stir(ENCODINGS[name](geometry)).double()
    x = torch.randn(1, length, heads * dim, dtype=torch.float64)
    q, k, v = torch.randn(3, 1, heads, length, dim, dtype=torch.float64)
    layout = Layout(length, length, 0, x.device, causal=causal)
    turned = encoding.rotate(q, k, layout)
    out = attend(make_call(*turned, v, encoding.bias(x, layout), layout, mix=encoding.mix))
    if name == "rope":
        q, k = oracle.rope(q[0])[None], oracle.rope(k[0])[None]
    wanted = oracle.attention(oracle.logits(name, encoding, x[0], q[0], k[0], causal), v[0])
    assert (out[0] - wanted).abs().max() < (1e-6 if name == "alibi" else 1e-9)  # ALiBi's slopes are fp32


@pytest.mark.parametrize("name", ["learnable", "sinusoidal"])
def test_embedding_formulae(name):
    geometry = Geometry(hidden_size=10, num_heads=2, head_dim=5, max_length=8)
    encoding = ENCODINGS[name](geometry)
    layout = Layout(8, 8, 0, torch.device("cpu"))
    added = encoding.embed(torch.zeros(1, 8, 10), layout)[0]
    for t, channel in itertools.product(range(8), range(10)):
        wanted = float(encoding.table[t, channel]) if name == "learnable" else oracle.sinusoid(t, channel, 10)
        assert abs(float(added[t, channel]) - wanted) < 1e-6


@pytest.mark.parametrize("name", ALL)
def test_causality(name):
    """Changing a token changes no earlier output, and does change its own."""
    model, text = gpt(name), tokens(12)
    changed = text.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 97
    before, after = model(text).logits, model(changed).logits
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("length", [1, 2, 17, 16 * TRAINED])
def test_any_length_works(name, length):
    model = gpt(name)
    if length > readable(name, length):
        with pytest.raises(CableError, match=rf"table of {TRAINED} positions, but the text has {length} tokens"):
            model(tokens(length))
        return
    with torch.inference_mode():
        assert torch.isfinite(model(tokens(length)).logits).all()


@pytest.mark.parametrize("name", BIDIRECTIONAL)
@pytest.mark.parametrize("length", [1, 13])
def test_bidirectional_sees_both_sides(name, length):
    model = stir(CableBertForMaskedLM(small_bert(name))).eval()
    text = tokens(length)
    changed = text.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 97
    assert not torch.allclose(model(text).logits[:, 0], model(changed).logits[:, 0])


@pytest.mark.parametrize("name", [n for n in BIDIRECTIONAL if n != "nope"])
def test_bidirectional_knows_the_order(name):
    """Swapping two tokens must matter to a third: without positions it would not."""
    model = stir(CableBertForMaskedLM(small_bert(name))).eval()
    text = torch.tensor([[5, 6, 7, 8, 9, 10]])
    swapped = torch.tensor([[5, 6, 9, 8, 7, 10]])
    assert not torch.allclose(model(text).logits[0, 0], model(swapped).logits[0, 0], atol=1e-6)


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_gradients_reach_every_parameter(name, kind):
    model = gpt(name) if kind == "gpt" else stir(CableBertForMaskedLM(small_bert(name)))
    text = tokens(readable(name, 40))
    model(text, labels=text).loss.backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), parameter_name
        assert parameter.grad.abs().max() > 0, parameter_name


@pytest.mark.parametrize("name", ALL)
def test_decoding_step_by_step_equals_the_full_pass(name):
    model, text = gpt(name), tokens(readable(name, 21))
    with torch.inference_mode():
        full = model(text).logits
        cache, steps = None, []
        for piece in text.split([5, 1, 1, 4, 1, text.shape[1] - 12], dim=1):
            out = model(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
    assert torch.allclose(torch.cat(steps, 1), full, atol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_left_padding_changes_nothing(name):
    model, text = gpt(name), tokens(9)
    padded = torch.cat([torch.zeros(2, 4, dtype=torch.long), text], dim=1)
    mask = torch.cat([torch.zeros(2, 4, dtype=torch.long), torch.ones(2, 9, dtype=torch.long)], dim=1)
    with torch.inference_mode():
        assert torch.allclose(model(padded, attention_mask=mask).logits[:, 4:], model(text).logits, atol=1e-5)


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_packed_documents_do_not_see_each_other(name, kind):
    model = gpt(name) if kind == "gpt" else stir(CableBertForMaskedLM(small_bert(name))).eval()
    text = tokens(15)
    ids = torch.tensor([[0] * 6 + [1] * 9] * 2)
    with torch.inference_mode():
        packed = model(text, document_ids=ids).logits
        apart = torch.cat([model(text[:, :6]).logits, model(text[:, 6:]).logits], dim=1)
    assert torch.allclose(packed, apart, atol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_grouped_queries_and_windows(name):
    """GQA runs and decodes; a window of w hides what lies w or more tokens back (two layers see 2w − 2 back)."""
    model, text = gpt(name, num_key_value_heads=2, attention_window=3), tokens(12)
    changed = text.clone()
    changed[:, 2] = (changed[:, 2] + 1) % 97
    with torch.inference_mode():
        full = model(text).logits
        first = model(text[:, :8], use_cache=True)
        rest = model(text[:, 8:], past_key_values=first.past_key_values).logits
        other = model(changed).logits
    assert torch.allclose(torch.cat([first.logits, rest], 1), full, atol=1e-5)
    if not any(isinstance(part, PotentialEncoding) for part in model.modules()):  # a potential carries a step on
        assert torch.allclose(full[:, 7:], other[:, 7:], atol=1e-5)
    assert not torch.allclose(full[:, 3], other[:, 3])


def test_no_two_encodings_are_the_same():
    """Same seed, same text: every pair of encodings gives different logits."""
    text, outputs = tokens(16), {}
    for name in ALL:
        torch.manual_seed(3)
        model = CableGPTForCausalLM(small_gpt(name, max_position_embeddings=TRAINED)).eval()
        # The same weights in all; only what belongs to the encoding differs.
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if ".encoding." not in parameter_name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            for parameter_name, parameter in model.named_parameters():
                if ".encoding." in parameter_name:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
            outputs[name] = model(text).logits
    for a, b in itertools.combinations(ALL, 2):
        assert (outputs[a] - outputs[b]).abs().max() > 1e-3, f"{a} and {b}"


@pytest.mark.parametrize("name", ALL)
def test_bfloat16_keeps_positions_accurate(name):
    """Far into a text, bf16 positions would be off by whole tokens. The bias must be that of fp64 to fp32 rounding."""
    length, heads, dim = 3000, 4, 8
    geometry = Geometry(hidden_size=heads * dim, num_heads=heads, head_dim=dim, max_length=length)
    encoding = stir(ENCODINGS[name](geometry)).to(torch.bfloat16)
    exact = ENCODINGS[name](geometry).double()
    exact.load_state_dict(encoding.state_dict())
    layout = Layout(length, length, 0, torch.device("cpu"))
    x = torch.randn(1, length, heads * dim).bfloat16()
    heads_of_x = x.view(1, length, heads, dim).transpose(1, 2)
    i, j = torch.arange(length - 5, length), torch.arange(length)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        bias = encoding.bias(x, layout)
        rows = None if bias is None else bias.rows(i, j)
        turned, _ = encoding.rotate(heads_of_x, heads_of_x, layout)
        embedded = encoding.embed(torch.zeros_like(x), layout)
    wanted = exact.bias(x.double(), layout)
    if wanted is not None:
        wanted_rows = wanted.rows(i, j)
        assert ((rows.double() - wanted_rows).abs() / (1 + wanted_rows.abs())).max() < 1e-4
    wanted_turned, _ = exact.rotate(heads_of_x.double(), heads_of_x.double(), layout)
    assert (turned.double() - wanted_turned).abs().max() <= 2**-8 * wanted_turned.abs().max()
    assert (embedded.double() - exact.embed(torch.zeros_like(x).double(), layout)).abs().max() <= 2**-8


@pytest.mark.parametrize("name", ALL)
def test_blocks_of_rows_change_nothing(name, monkeypatch):
    """Those that look at the scores see the same ones, though a block leaves out the keys behind it."""
    model, text = gpt(name).double(), tokens(readable(name, 20))
    found = []
    for elements in (2**26, 300):
        monkeypatch.setattr(call, "BLOCK_ELEMENTS", elements)
        logits = model(text).logits
        weights = [value for value in model.parameters() if value.requires_grad]
        found.append([logits, *torch.autograd.grad(logits.square().sum(), weights)])
    for whole, blocks in zip(*found, strict=True):
        assert torch.allclose(whole, blocks, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ALL)
def test_whole_models_run_in_bfloat16_and_autocast(name):
    model, text = gpt(name), tokens(12)
    with torch.inference_mode():
        exact = model(text).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = model(text).logits
        half = model.to(torch.bfloat16)(text).logits
    scale = exact.abs().max()
    assert (mixed - exact).abs().max() < 0.05 * scale
    assert (half - exact).abs().max() < 0.05 * scale


def test_alibi_slopes_are_the_authors():
    from cable_attn.encodings.alibi import slopes

    for heads in (1, 2, 3, 8, 10, 12, 16, 20):
        assert torch.allclose(slopes(heads, torch.device("cpu")), torch.tensor(oracle.alibi_slopes(heads)), rtol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_t5_buckets_are_those_of_transformers(causal):
    geometry = Geometry(hidden_size=8, num_heads=1, head_dim=8, max_length=16, causal=causal)
    encoding = ENCODINGS["t5"](geometry)
    distance = torch.arange(0 if causal else -700, 700)
    theirs = T5Attention._relative_position_bucket(
        -distance, bidirectional=not causal, num_buckets=32, max_distance=128
    )
    assert torch.equal(encoding._bucket(distance.float()), theirs)


@pytest.mark.parametrize(("scaling", "rope_type"), [("none", "default"), ("linear", "linear"), ("yarn", "yarn")])
def test_rope_scalings_are_those_of_transformers(scaling, rope_type):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    factor = 1.0 if scaling == "none" else 4.0
    parameters = {"rope_type": rope_type, "rope_theta": 10000.0}
    if scaling != "none":
        parameters |= {"factor": factor, "original_max_position_embeddings": 1024}
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=1024 * int(factor), rope_parameters=parameters
    )
    length = 3000
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, length, 1), torch.arange(length)[None])
    geometry = Geometry(hidden_size=128, num_heads=2, head_dim=64, max_length=1024)
    rope = find_encoding("rope", {})(geometry, scaling=scaling, factor=factor)
    q = torch.randn(1, 2, length, 64)
    left, right = q.chunk(2, -1)
    theirs = q * cos[:, None] + torch.cat([-right, left], -1) * sin[:, None]
    ours, _ = rope.rotate(q, q, Layout(length, length, 0, q.device))
    assert (ours - theirs).abs().max() < 2e-3  # theirs has fp32 angles, good to 1e-7 × 3000


def test_rope_ntk_keeps_the_fast_waves_and_stretches_the_slow():
    geometry = Geometry(hidden_size=64, num_heads=1, head_dim=64, max_length=1024)
    device = torch.device("cpu")
    plain = ENCODINGS["rope"](geometry).frequencies(device)
    ntk = ENCODINGS["rope"](geometry, scaling="ntk", factor=8.0).frequencies(device)
    assert ntk[0] == plain[0]
    assert abs(float(plain[-1] / ntk[-1]) - 8) < 1e-9


@pytest.mark.parametrize("name", ["cable", "cable-nw", "k-cable"])
def test_cable_options(name):
    heads, dim = 4, 8
    geometry = Geometry(hidden_size=heads * dim, num_heads=heads, head_dim=dim, max_length=16)
    layout, x = Layout(6, 6, 0, torch.device("cpu")), torch.randn(1, 6, heads * dim)
    sliced = stir(ENCODINGS[name](geometry, per_head_input=True))
    h = 2
    only_h = torch.zeros_like(x)
    only_h[..., h * dim : (h + 1) * dim] = x[..., h * dim : (h + 1) * dim]
    assert torch.allclose(sliced.bias(x, layout).c[:, h], sliced.bias(only_h, layout).c[:, h])
    spread = ENCODINGS[name](geometry, init="spread")
    rows = spread.bias(torch.zeros_like(x), layout).rows(torch.tensor([5]), torch.tensor([4])).flatten()
    slope = torch.tensor(oracle.alibi_slopes(heads), dtype=torch.float64)
    assert torch.allclose(rows, -torch.log1p(slope**2) if name == "k-cable" else -slope, rtol=1e-5)


def _whole(encoding, x):
    place = torch.arange(x.shape[1])
    return encoding.bias(x, Layout(len(place), len(place), 0, x.device)).rows(place, place).detach()


@pytest.mark.parametrize("name", ["cable", "cable-nw", "k-cable", "alibi"])
def test_the_bias_of_cable_falls_with_distance_and_follows_the_text(name):
    geometry = Geometry(hidden_size=32, num_heads=4, head_dim=8, max_length=32)
    encoding = stir(ENCODINGS[name](geometry)).double()
    one, other = (_whole(encoding, torch.randn(1, 24, 32, dtype=torch.float64)) for _ in range(2))
    row = one[0, :, -1]
    assert (row.diff(dim=-1) >= 0).all() and (row[:, 0] < row[:, -1]).all()
    assert (row[0] - row[1]).abs().max() > 0.01
    assert torch.equal(one, other) == (name == "alibi")


def test_the_penalty_of_k_cable_is_the_gentler_one():
    geometry = Geometry(hidden_size=32, num_heads=4, head_dim=8, max_length=32)
    linear, gentle = (ENCODINGS[name](geometry).double() for name in ("cable", "k-cable"))
    gentle.load_state_dict(stir(linear).state_dict())
    x = torch.randn(1, 24, 32, dtype=torch.float64) * 3
    less = (_whole(gentle, x) - _whole(linear, x)).tril()
    assert less.min() >= 0 and less.max() > 1


def test_any_bend_of_the_bias_can_be_named(monkeypatch):
    """Exactly, with gradients, and in a forward pass of attention."""
    monkeypatch.setitem(KERNELS, "root", lambda b: 1 - torch.sqrt(1 - b))

    class RootCable(ENCODINGS["cable"]):
        kernel = "root"

    geometry = Geometry(hidden_size=32, num_heads=4, head_dim=8, max_length=32)
    linear, bent = ENCODINGS["cable"](geometry).double(), RootCable(geometry).double()
    bent.load_state_dict(stir(linear).state_dict())
    x = torch.randn(1, 24, 32, dtype=torch.float64) * 3
    torch.testing.assert_close(_whole(bent, x), 1 - torch.sqrt(1 - _whole(linear, x)))
    q = torch.randn(1, 4, 24, 8, dtype=torch.float64)
    bias = bent.bias(x, Layout(24, 24, 0, x.device))
    outputs = [attention(q, q, q, bias, backend=name) for name in ("reference", "sdpa")]
    torch.testing.assert_close(*outputs)
    outputs[0].square().sum().backward()
    assert all(value.grad.abs().max() > 0 for value in bent.parameters())


def test_gain_floor():
    geometry = Geometry(hidden_size=32, num_heads=4, head_dim=8, max_length=16)
    encoding = ENCODINGS["cable"](geometry, gain_floor=0.5)
    assert encoding.gain(torch.randn(1, 6, 32) * 100).min() >= 0.5


def test_kerple_parameters_can_come_back_from_below_the_clamp():
    geometry = Geometry(hidden_size=8, num_heads=1, head_dim=8, max_length=16)
    encoding = ENCODINGS["kerple-log"](geometry)
    with torch.no_grad():
        encoding.p.fill_(-1.0)
        encoding.a.fill_(-1.0)
    rows = encoding.bias(torch.zeros(1, 6, 8), Layout(6, 6, 0, torch.device("cpu"))).rows(
        torch.tensor([5]), torch.arange(6)
    )
    assert torch.allclose(rows[0, 0, 0, 0], -0.01 * torch.log1p(torch.tensor(0.05)))
    rows.sum().backward()
    assert encoding.p.grad.item() != 0 and encoding.a.grad.item() != 0


def test_t5_clip_is_one_number_per_distance():
    geometry = Geometry(hidden_size=8, num_heads=1, head_dim=8, max_length=16)
    encoding = stir(ENCODINGS["t5"](geometry, clip=3))
    rows = encoding.bias(torch.zeros(1, 6, 8), Layout(6, 6, 0, torch.device("cpu"))).rows(
        torch.tensor([5]), torch.arange(6)
    )
    assert rows.flatten().tolist() == [encoding.table[min(n, 3), 0].item() for n in (5, 4, 3, 2, 1, 0)]


def test_shared_t5_has_one_table():
    def tables(**options):
        model = CableGPTForCausalLM(small_gpt("t5", encoding_options=options))
        return [name for name, _ in model.named_parameters() if name.endswith("table")]

    assert len(tables()) == 2
    assert len(tables(shared=True)) == 1


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("cabel", {}, ["unknown encoding 'cabel'", "Did you mean 'cable'?", "alibi"]),
        ("cable", {"gain_flor": 1.0}, ["unknown option of encoding 'cable' 'gain_flor'", "Did you mean 'gain_floor'?"]),
        ("nope", {"base": 1}, ["unknown option of encoding 'nope' 'base'", "Allowed: none"]),
        ("cable", {"init": "wide"}, ["unknown init 'wide'", "paper, spread"]),
        ("cable", {"gain_floor": -1.0}, ["gain_floor must be a number of at least 0, got -1.0"]),
        ("rope", {"scaling": "yarm"}, ["Did you mean 'yarn'?"]),
        ("rope", {"factor": 4.0}, ["needs a scaling", "yarn"]),
        ("rope", {"scaling": "ntk", "factor": 0.5}, ["factor must be at least 1"]),
        ("t5", {"buckets": 30}, ["buckets must be a multiple of 4"]),
        ("t5", {"clip": 0}, ["clip must be at least 1"]),
        ("cope", {"n_pos": 1}, ["n_pos must be at least 2"]),
        ("dapev2-cable", {"inner_options": {"gain": 1}}, ["unknown option", "gain_floor"]),
    ],
)
def test_bad_names_and_options_are_named(name, options, words):
    with pytest.raises(CableError) as error:
        CableGPTForCausalLM(small_gpt(name, encoding_options=options))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_causal_only_encodings_say_so():
    with pytest.raises(CableError, match=r"'cope' is defined for causal attention only.*cable"):
        small_bert("cope")


def test_one_pass_for_step_and_gain_changes_nothing():
    torch.manual_seed(0)
    encoding = Cable(FOUR_HEADS).double()
    x = torch.randn(2, 7, 32, dtype=torch.float64, requires_grad=True)

    def gradients(steps, gain):
        return torch.autograd.grad((steps.sin() * gain.cos()).sum(), [x, *encoding.parameters()])

    apart = encoding.step(x).mT.relu(), torch.nn.functional.softplus(encoding.strength(x).mT)
    joint = encoding.steps_and_gain(x)
    for one, other in zip((*apart, *gradients(*apart)), (*joint, *gradients(*joint))):
        torch.testing.assert_close(one, other)


def test_an_adapter_on_the_gain_is_heard():
    encoding = Cable(FOUR_HEADS)
    x = torch.randn(1, 5, 32)
    _, before = encoding.steps_and_gain(x)

    class Adapted(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.weight, self.bias = inner, inner.weight, inner.bias

        def forward(self, x):
            return self.inner(x) + 1

    plain, encoding.strength = encoding.strength, Adapted(encoding.strength)
    assert (encoding.steps_and_gain(x)[1] > before).all()
    encoding.strength = plain
    handle = plain.register_forward_hook(lambda module, args, output: output + 1)
    assert (encoding.steps_and_gain(x)[1] > before).all()
    handle.remove()
    forward = plain.forward
    plain.forward = lambda x: forward(x) + 1  # as accelerate does when it offloads
    assert (encoding.steps_and_gain(x)[1] > before).all()


def test_a_subclass_may_change_the_step():
    class Counting(Cable):
        def steps(self, x):
            return super().steps(x) * 0 + 1

    layout = Layout(query_length=5, key_length=5, query_start=0, device=torch.device("cpu"))
    bias = Counting(FOUR_HEADS).bias(torch.randn(1, 5, 32), layout)
    assert torch.equal(bias.c, torch.arange(1, 6, dtype=torch.float64).expand_as(bias.c))


@pytest.mark.parametrize(("batch", "length", "features", "outputs"), [(2, 75, 96, 6), (3, 1, 64, 16), (1, 600, 40, 33)])
def test_products_of_pieces_are_those_of_fp32(batch, length, features, outputs):
    pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, length, features, generator=generator).half().requires_grad_()  # its interpreter has no bf16
    weight = torch.randn(outputs, features, generator=generator).requires_grad_()
    upstream = torch.randn(batch, outputs, length, generator=generator)
    exact = weight.double() @ x.double().mT
    got = project(x, weight)
    assert got.dtype == torch.float32
    assert_close(got, exact, 1e-6)
    of_x, of_weight = torch.autograd.grad(got, [x, weight], upstream)
    exact_of_x, exact_of_weight = torch.autograd.grad(exact, [x, weight], upstream.double())
    assert_close(of_x, exact_of_x, 2**-10)
    assert_close(of_weight, exact_of_weight, 1e-6)
    torch.library.opcheck(project, (x, weight))


def assert_close(got, exact, precision):
    torch.testing.assert_close(got.double(), exact.double(), rtol=0, atol=precision * float(exact.abs().max()))


def settled_by_a_kernel(bias, start):
    blank = torch.zeros(2, 5, 12, 8)
    with torch.no_grad():
        return decoding.settled(make_call(blank[:, :, :1], blank, blank, bias, Layout(1, 12, start, start.device))).bias


class _Held:
    """A cache of fixed size that holds this potential."""

    def __init__(self, c):
        self.c = c

    def last(self, layout):
        return self.c[..., int(layout.query_start) - 1] if layout.query_start else None

    def append(self, c, layout):
        return self.c.index_copy(-1, layout.at, c)

    def room(self, layout):
        return self.c if isinstance(layout.query_start, torch.Tensor) else None


@pytest.mark.parametrize(("name", "options"), [("cable", {"gain_floor": 0.1}), ("cable-nw", {}), ("k-cable", {})])
@pytest.mark.parametrize(("start", "padded", "features"), [(0, False, 40), (7, True, 40), (7, False, 1040)])
@pytest.mark.parametrize("settle", [TokenBias.settled, settled_by_a_kernel])
def test_the_bias_of_a_new_token_is_made_later(name, options, start, padded, features, settle):
    """In plain PyTorch, or by one kernel."""
    torch.manual_seed(0)
    encoding = ENCODINGS[name](Geometry(features, 5, 8, 32), **options)
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    x, c = torch.randn(2, 1, features), torch.rand(2, 5, 12).double().cumsum(-1)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, start] = False
    found = []
    for place in (start, torch.tensor(start)):
        layout = Layout(1, 12, place, x.device, key_mask=mask if padded else None)
        with torch.no_grad():
            found.append(encoding.bias(x, layout, _Held(c.clone())))
    wanted, got = found[0], settle(found[1], torch.tensor(start))
    torch.testing.assert_close(got.c, wanted.c, atol=1e-6, rtol=1e-6)
    assert torch.equal(got.c[..., start + 1 :], c[..., start + 1 :]) and got.kernel == wanted.kernel
    assert (got.g is None) == (wanted.g is None)
    if got.g is not None:
        torch.testing.assert_close(got.g, wanted.g, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("name", "options"), [("cable", {"gain_floor": 0.1}), ("cable-nw", {}), ("k-cable", {})])
@pytest.mark.parametrize("features", [40, 130])
def test_one_kernel_makes_the_steps_and_gains_of_a_text(name, options, features, monkeypatch):
    """While nothing learns; as exact as the numbers of half precision that it reads."""
    encoding = ENCODINGS[name](Geometry(features, 5, 8, 32), **options)
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    encoding, x = encoding.half(), torch.randn(2, 70, features).half()
    used = []
    monkeypatch.setattr(cable, "read", lambda *given: used.append(read(*given)) or used[-1])
    with torch.no_grad():
        steps, gain = encoding.steps_and_gain(x)
        wanted, gain_wanted = encoding.double().steps_and_gain(x.double())
    assert len(used) == 1
    torch.testing.assert_close(steps, wanted.float(), atol=1e-5, rtol=1e-5)
    assert (gain is None) == (gain_wanted is None)
    if gain is not None:
        torch.testing.assert_close(gain, gain_wanted.float(), atol=1e-5, rtol=1e-5)
    encoding.half().steps_and_gain(x)
    assert len(used) == 1, "what learns needs a backward pass"


def test_the_operators_that_make_them_are_well_behaved():
    x, weight, bias = torch.randn(2, 1, 16), torch.randn(3, 16), torch.randn(3)
    half = [value.half() for value in (x, weight, bias, weight, bias)]
    for given in (half, [*half[:3], None, None]):
        torch.library.opcheck(
            torch.ops.cable_attn.steps_and_gains.default, (*given, 0.0), test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("rope", {"base": -1.0}, "base must be above 1"),
        ("rope", {"scaling": "linear", "factor": float("nan")}, "factor must be at least 1"),
        ("fire", {"width": 0}, "width must be at least 1"),
        ("dapev2-cable", {"width": 0}, "width must be at least 1"),
        ("t5", {"clip": 2.5}, "option clip of encoding 't5' must be int or NoneType, got 2.5"),
        ("cable", {"gain_floor": "1"}, "option gain_floor of encoding 'cable' must be float, got '1'"),
        ("cable", {"per_head_input": 1}, "option per_head_input of encoding 'cable' must be bool, got 1"),
    ],
)
def test_options_that_cannot_work_are_named(name, options, words):
    with pytest.raises(CableError, match=re.escape(words)):
        CableGPTForCausalLM(small_gpt(name, encoding_options=options))
