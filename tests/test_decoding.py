"""Decoding on the fused kernels, through Triton's interpreter: a few queries against a cache, pruned and not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache

from cable_attn import CableError, CableGPTForCausalLM, PotentialBias, attention
from cable_attn.attention import decoding, fused, make_call
from cable_attn.bias import FunctionBias, NewToken, ToeplitzBias, TokenBias
from cable_attn.layout import Layout

from .conftest import small_gpt, stir
from .test_attention import make_inputs
from .test_fused import _poison, pytestmark  # noqa: F401


@pytest.fixture(autouse=True)
def _judged(monkeypatch):
    """Blocks are judged also in texts so short that all of them would be read."""
    monkeypatch.setattr(decoding, "SHORT", 0)


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_a_few_queries_against_a_cache_equal_the_reference(data):
    """Any place of the queries, known to the host or to the device only; keys beyond it are not there yet."""
    pick = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    batch, key_heads, group, queries, dim = pick(1, 2), pick(1, 2), pick(1, 3), pick(1, 2, 5), pick(16, 24)
    keys, kind = data.draw(st.integers(queries + 1, 200)), pick(None, "cable", "cable-log", "alibi")
    start = data.draw(st.integers(0, keys - queries))
    q, k, v = make_inputs(batch, key_heads * group, key_heads, queries, keys, dim)
    bias = None
    if kind is not None:
        heads = 1 if kind == "alibi" else key_heads * group
        c = torch.rand(1 if kind == "alibi" else batch, heads, keys).double().cumsum(-1)
        g = torch.rand(1, key_heads * group, 1) if kind == "alibi" else torch.rand(batch, heads, queries)
        bias = PotentialBias(c, g, "log" if kind == "cable-log" else None)
    options = {"window": pick(None, 7), "key_mask": pick(None, torch.rand(batch, keys) > 0.3)}
    options["document_ids"] = pick(None, (torch.arange(keys) // 40).expand(batch, -1))
    place = pick(start, torch.tensor(start))
    with torch.no_grad():
        wanted = attention(q, k, v, bias, query_start=start, backend="reference", **options)
        got = attention(q, k, v, bias, query_start=place, backend="triton", **options)
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("batch", [1, 2], ids=["shared", "own"])
def test_one_query_takes_the_kernel_with_any_bias(batch, known):
    """Also one that differs from text to text."""
    values = torch.randn(batch, 4, 1, 150)
    table = ToeplitzBias(torch.randn(4, 150))
    written_out = FunctionBias(lambda i, j, start: values[..., j])
    q, k, v = make_inputs(2, 4, 2, 1, 150, 16)
    for bias in (table, written_out):
        with torch.no_grad():
            wanted = attention(q, k, v, bias, query_start=120, backend="reference")
            got = attention(q, k, v, bias, query_start=120 if known else torch.tensor(120), backend="triton")
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("group", "queries"), [(1, 1), (2, 1), (2, 3)])
@pytest.mark.parametrize("known", [True, False])
def test_pruned_decoding_skips_blocks_and_keeps_its_promise(group, queries, known):
    """Far blocks are not read at all: what they hold may be anything."""
    epsilon, keys, key_heads = 1e-3, 64 * 20 + 5, 2
    start = keys - queries - 3
    q, k, v = make_inputs(2, key_heads * group, key_heads, queries, keys, 16)
    c = torch.rand(2, key_heads * group, keys).double().cumsum(-1)
    bias = PotentialBias(c, torch.rand(2, key_heads * group, queries) * 0.1 + 0.1)
    summaries = decoding.blank_summaries(k, keys)
    for at, new in ((0, 700), (700, 510), *((n, 1) for n in range(1210, 1220)), (1220, start - 1220), (start, queries)):
        decoding.summarise(k, *summaries, None if known else torch.tensor(at), at if known else 0, new, at == 0)
    exact = attention(q, k, v, bias, query_start=start, backend="reference")
    layout = Layout(queries, keys, start if known else torch.tensor(start), q.device)
    k[:, :, : 64 * 12], v[:, :, : 64 * 12] = torch.nan, torch.nan
    with torch.no_grad():
        got = fused.run(make_call(q, k, v, bias, layout, prune=epsilon, summaries=summaries))
    assert (got - exact).abs().max() <= 2 * epsilon * v[:, :, 64 * 12 :].abs().max() + 1e-5


def test_pruned_decoding_reads_what_may_matter():
    """A key of the right direction counts however far it lies; nothing is skipped where distance is not felt."""
    q, k, v = make_inputs(1, 1, 1, 1, 64 * 20, 16)
    k[:, :, 100] = q[:, :, 0] * 40
    bias = PotentialBias(torch.arange(64 * 20)[None, None].double(), torch.tensor([[[1e-3]]]))
    summaries = decoding.blank_summaries(k, 64 * 20)
    decoding.summarise(k, *summaries, None, 0, 64 * 20, True)
    layout = Layout(1, 64 * 20, 64 * 20 - 1, q.device)
    with torch.no_grad():
        got = fused.run(make_call(q, k, v, bias, layout, prune=1e-4, summaries=summaries))
    torch.testing.assert_close(got, attention(q, k, v, bias, backend="reference"), atol=1e-3, rtol=0)


def test_a_short_text_is_read_whole(monkeypatch):
    monkeypatch.setattr(decoding, "SHORT", 2)
    q, k, v = make_inputs(1, 1, 1, 1, 640, 16)
    bias = PotentialBias(torch.arange(640)[None, None].double() / 50)
    summaries = decoding.blank_summaries(k, 640)  # of nothing: whoever judged by them would find it weightless
    layout = Layout(1, 640, 639, q.device)
    with torch.no_grad():
        pruned, whole = (
            fused.run(make_call(q, k, v, bias, layout, prune=prune, summaries=summaries)) for prune in (0.5, None)
        )
    assert torch.equal(pruned, whole)


def test_decoding_is_accurate_far_into_a_text():
    q, k, v = make_inputs(1, 1, 1, 1, 300, 16)
    c = torch.rand(1, 1, 300).double().cumsum(-1) + 1e6
    with torch.no_grad():
        far, near = (attention(q, k, v, PotentialBias(x), backend="triton") for x in (c, c - 1e6))
    torch.testing.assert_close(far, near, atol=1e-5, rtol=0)


def test_the_decoding_operator_has_a_true_shape():
    q, k, v = make_inputs(2, 4, 2, 1, 70, 16)
    c = torch.rand(2, 4, 70).double().cumsum(-1)
    operands = (q, k, v, c, torch.rand(2, 4, 1), torch.tensor(60), 0, *[None] * 4, 0.25, 0, 0, 0.0)
    torch.library.opcheck(torch.ops.cable_attn.decode.default, operands, test_utils=("test_schema", "test_faketensor"))


def _new_token(batch, heads, features, gain=True):
    weight, bias = torch.randn(2, heads, features) / 4, torch.randn(2, heads)
    strength = (weight[1], bias[1]) if gain else (None, None)
    return NewToken(torch.randn(batch, 1, features), weight[0], bias[0], *strength, 0.1)


@pytest.mark.parametrize(
    ("key_heads", "kernel", "gain", "masked", "start", "window"),
    [(4, None, True, False, 150, None), (4, "log", True, True, 64, None), (4, None, False, False, 0, None),
     (4, None, True, True, 150, 40), (2, None, True, True, 150, None)],
)  # fmt: skip
def test_the_kernel_that_attends_makes_the_step_of_a_new_token(
    key_heads, kernel, gain, masked, start, window, monkeypatch
):
    """Where each head has keys of its own; otherwise one more kernel does. What is stored beyond the token stays."""
    torch.manual_seed(0)
    q, k, v = make_inputs(2, 4, key_heads, 1, 200, 16)
    c = torch.rand(2, 4, 200).double().cumsum(-1)
    mask = torch.ones(2, 200, dtype=torch.bool)
    mask[0, 3], mask[1, start] = False, False
    token, place = _new_token(2, 4, 40, gain), torch.tensor(start)
    options = {"key_mask": mask if masked else None, "window": window, "query_start": place}
    wanted, got = (TokenBias(c.clone(), token, options["key_mask"], kernel) for _ in range(2))
    if key_heads == 4:
        monkeypatch.setattr(decoding, "advance", None)
    with torch.no_grad():
        said = attention(q, k, v, got, backend="triton", **options)
        exact = attention(q, k, v, wanted.settled(place), backend="reference", **options)
    torch.testing.assert_close(said, exact, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.c, wanted.c, atol=1e-6, rtol=1e-6)
    others = torch.arange(200) != start
    assert torch.equal(got.c[..., others], c[..., others])


def test_a_new_token_that_does_not_fit_is_named():
    q, k, v = make_inputs(2, 4, 4, 1, 70, 16)
    for c, x in ((torch.zeros(2, 4, 69).double(), 2), (torch.zeros(2, 4, 70).double(), 3)):
        with pytest.raises(CableError, match=r"c must be \[2, 4, 70\]|one new token in each of 2 texts"):
            attention(q, k, v, TokenBias(c, _new_token(x, 4, 40)), query_start=torch.tensor(60))


def test_the_operators_of_a_new_token_say_what_they_write():
    q, k, v = make_inputs(2, 4, 4, 1, 70, 16)
    c, start, token = torch.rand(2, 4, 70).double().cumsum(-1), torch.tensor(60), _new_token(2, 4, 40)
    operands = (q, k, v, c, None, start, 0, *[None] * 4, 0.25, 0, 0, 0.0, *token)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.cable_attn.decode_token.default, operands, test_utils=tests)
    torch.library.opcheck(decoding.advance, (c, start, None, *token), test_utils=tests)


@pytest.mark.parametrize(
    ("encoding", "beams", "cache"),
    [("cable", 1, "static"), ("cable", 2, "dynamic"), ("alibi", 2, "static"), ("kerple-log", 2, "static")],
)
def test_a_model_decodes_on_the_kernel_what_the_reference_says(cache, encoding, beams):
    """With pruning too, past the end of a block."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    model = stir(CableGPTForCausalLM(small_gpt(encoding, **sizes))).eval()
    text = torch.randint(1, 97, (3 - beams, 189))
    mask = torch.ones_like(text)
    mask[0, :3] = 0
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "num_beams": beams}
    options |= {"cache_implementation": cache, "disable_compile": True, "attention_mask": mask}
    said = []
    epsilon = None if encoding == "kerple-log" else 1e-4
    for backend, prune in (("reference", None), ("triton", None), ("triton", epsilon))[::beams]:
        model.config.attention_backend, model.config.attention_prune = backend, prune
        said.append(model.generate(text, **options))
    assert all(torch.equal(said[0], other) for other in said[1:])


def _pruned_model(**sizes):
    sizes = {"num_attention_heads": 2, "num_hidden_layers": 1, "attention_backend": "triton", **sizes}
    return stir(CableGPTForCausalLM(small_gpt("cable", attention_prune=1e-4, **sizes))).eval()


def _assert_summaries(model, cache, text):
    """Of all complete blocks, as if the text had come at once."""
    whole = DynamicCache(config=model.config)
    with torch.no_grad():
        model(text, past_key_values=whole)
    got, wanted = (held.layers[2 * model.config.num_hidden_layers] for held in (cache, whole))
    blocks = text.shape[1] // decoding.KEY_BLOCK
    for kind in ("keys", "values"):
        read, right = (getattr(layer, kind) for layer in (got, wanted))
        assert read.is_contiguous()  # as the kernels read them
        torch.testing.assert_close(read[:, :, :blocks], right[:, :, :blocks])


@pytest.mark.parametrize("removed", [150, 3])
def test_a_pruned_cache_may_be_cropped(removed):
    """As assisted decoding does; blocks that grow anew hold other keys."""
    model = _pruned_model()
    first, second = torch.randint(1, 97, (2, 200)), torch.randint(1, 97, (2, 200))
    text = torch.cat([first[:, : 200 - removed], second], 1)[:, :210]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(first, past_key_values=cache)
        cache.crop(-removed)
        for piece in text[:, 200 - removed :].split([removed + 8, 1, 1], 1):
            got = model(piece, past_key_values=cache).logits[:, -1]
    _assert_summaries(model, cache, text)
    model.config.attention_prune, model.config.attention_backend = None, "reference"
    with torch.no_grad():
        wanted = model(text, use_cache=False).logits[:, -1]
    torch.testing.assert_close(got, wanted, atol=1e-3, rtol=0)


def test_summaries_follow_the_beams_of_a_static_cache():
    """Also after a reset."""
    model, texts = _pruned_model(), torch.randint(1, 97, (2, 200))
    cache = StaticCache(config=model.config, max_cache_len=256)
    with torch.no_grad():
        for _ in range(2):
            cache.reset()
            model(texts, past_key_values=cache)
            before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
            cache.reorder_cache(torch.tensor([1, 0]))
            assert len(before) == 3
            for layer, (keys, values) in zip(cache.layers, before):
                assert torch.equal(layer.keys, keys[[1, 0]]) and torch.equal(layer.values, values[[1, 0]])
                assert not torch.equal(layer.keys, keys)


def test_pruning_may_be_switched_on_and_off():
    """What came in between is in the summaries too."""
    model, text = _pruned_model(), torch.randint(1, 97, (1, 320))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for piece, prune in zip(text.split([200, 60, 60], 1), (1e-4, None, 1e-4)):
            model.config.attention_prune = prune
            model(piece, past_key_values=cache)
    _assert_summaries(model, cache, text)


def test_a_mask_that_is_a_view_hides_what_it_hides():
    model = _pruned_model()
    with torch.no_grad():
        model.get_submodule("transformer.h.0.attn.encoding.step").bias.fill_(1.0)  # every token counts
    text, wide = torch.randint(1, 97, (2, 12)), torch.ones(2, 40, dtype=torch.bool)
    wide[:, 1::3] = False
    said = []
    for mask in (wide[:, :16], wide[:, :16].clone()):
        cache = StaticCache(config=model.config, max_cache_len=16)
        with torch.no_grad():
            model(text, past_key_values=cache, attention_mask=mask[:, :12])
            said.append(model(text[:, :1], past_key_values=cache, attention_mask=mask).logits)
    assert torch.equal(*said)
