"""GPT and BERT as people use them: through transformers."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    StaticCache,
    Trainer,
    TrainingArguments,
    pipeline,
)

from cable_attn import (
    ENCODINGS,
    CableBertConfig,
    CableBertForMaskedLM,
    CableBertModel,
    CableError,
    CableGPTConfig,
    CableGPTForCausalLM,
    CableGPTModel,
    ForgettingCache,
    from_bert,
    from_gpt2,
)
from cable_attn.attention import make_call
from cable_attn.data import Document, train_bpe
from cable_attn.models.capture import layer_calls
from cable_attn.models.loading import load_causal_lm
from cable_attn.training import decayed_parameters

from .conftest import small_bert, small_gpt, stir

TEXT = torch.tensor([[5, 17, 3, 80, 4, 9, 33], [7, 2, 41, 41, 6, 12, 90]])
LEFT_PADDED = torch.tensor([[0, 0, 3, 80, 4, 9, 33], [7, 2, 41, 41, 6, 12, 90]])
LEFT_MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
CACHED = ["cable", "k-cable", "fox", "alibi", "fire", "rope", "learnable", "dapev2-cable", "cope"]


def gpt(encoding: str = "cable", **overrides) -> CableGPTForCausalLM:
    return stir(CableGPTForCausalLM(small_gpt(encoding, **overrides))).eval()


def greedy(model, ids=TEXT, **kwargs) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=10, do_sample=False, pad_token_id=0, eos_token_id=None, **kwargs)


@pytest.mark.parametrize(("preset", "millions"), [("tiny", 44), ("small", 124), ("medium", 354)])
def test_gpt_sizes(preset, millions):
    with torch.device("meta"):
        model = CableGPTForCausalLM(CableGPTConfig.preset(preset, encoding="cable"))
    assert abs(model.num_parameters() / 1e6 - millions) < 1


def test_bert_size_is_the_papers():
    with torch.device("meta"):
        model = CableBertForMaskedLM(CableBertConfig.preset("base", encoding="cable"))
    assert abs(model.num_parameters() / 1e6 - 110) < 1


def test_learnable_gpt_is_gpt2():
    """Weights copied over, same logits, same gradients: a GPT-2 checkpoint is one of ours."""
    theirs = stir(GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=3, n_head=4))).eval()
    ours = from_gpt2(theirs)
    assert torch.allclose(ours(TEXT).logits, theirs(TEXT).logits, atol=1e-5)
    losses = [model(TEXT, labels=TEXT).loss for model in (ours, theirs)]
    assert abs(losses[0] - losses[1]) < 1e-6
    for loss in losses:
        loss.backward()
    ours_wpe, theirs_wpe = ours.transformer.encoding.table.grad, theirs.transformer.wpe.weight.grad
    assert torch.allclose(ours_wpe, theirs_wpe, atol=1e-6)
    assert torch.equal(greedy(ours), greedy(theirs))
    padded = {"attention_mask": LEFT_MASK}
    assert torch.equal(greedy(ours, LEFT_PADDED, **padded), greedy(theirs, LEFT_PADDED, **padded))


@pytest.mark.parametrize(
    "fields",
    [
        {"activation_function": "relu"},
        {"scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_weights": False},
        {"tie_word_embeddings": False},
    ],
)
def test_what_a_gpt2_does_otherwise_comes_along(fields):
    sizes = {"vocab_size": 97, "n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 4, "eos_token_id": 5}
    theirs = stir(GPT2LMHeadModel(GPT2Config(**sizes, **fields))).eval()
    ours = from_gpt2(theirs, max_position_embeddings=32)
    assert torch.allclose(ours(TEXT).logits, theirs(TEXT).logits, atol=1e-4)
    assert ours.config.eos_token_id == ours.generation_config.eos_token_id == 5


def test_an_untied_bert_comes_along_and_a_decoder_is_refused():
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    theirs = stir(BertForMaskedLM(BertConfig(**sizes, intermediate_size=64, tie_word_embeddings=False))).eval()
    assert torch.allclose(from_bert(theirs)(TEXT).logits, theirs(TEXT).logits, atol=1e-4)
    with pytest.raises(CableError, match="is a decoder"):
        from_bert(BertForMaskedLM(BertConfig(**sizes, is_decoder=True)))


def test_learnable_bert_is_bert():
    config = BertConfig(vocab_size=97, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64)
    theirs = stir(BertForMaskedLM(config)).eval()
    ours = from_bert(theirs)
    mask = LEFT_MASK.flip(1)
    types = torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2)
    for kwargs in ({}, {"attention_mask": mask, "token_type_ids": types}):
        a, b = ours(TEXT, labels=TEXT, **kwargs), theirs(TEXT, labels=TEXT, **kwargs)
        seen = kwargs.get("attention_mask", torch.ones_like(TEXT)).bool()
        assert torch.allclose(a.logits[seen], b.logits[seen], atol=1e-4)
    assert abs(ours(TEXT, labels=TEXT).loss - theirs(TEXT, labels=TEXT).loss) < 1e-5


def test_converted_models_may_take_another_encoding():
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=4))
    ours = from_gpt2(theirs, encoding="cable")
    assert torch.equal(ours.transformer.wte.weight, theirs.transformer.wte.weight)
    assert ours(TEXT.repeat(1, 10)).logits.isfinite().all()  # 70 tokens, past the 32 of the source
    with pytest.raises(CableError, match="takes a GPT2LMHeadModel, got CableGPTForCausalLM"):
        from_gpt2(ours)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_save_and_load(encoding, tmp_path):
    """safetensors, through the Auto classes, bit for bit; options and backend come back too."""
    options = {"gain_floor": 0.25} if encoding == "cable" else {}
    model = gpt(encoding, encoding_options=options, attention_backend="reference")
    model.save_pretrained(tmp_path)
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".safetensors"}
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is CableGPTForCausalLM
    assert again.config.encoding_options == options and again.config.attention_backend == "reference"
    assert torch.equal(again(TEXT).logits, model(TEXT).logits)
    assert type(AutoModel.from_pretrained(tmp_path)) is CableGPTModel
    assert type(AutoConfig.from_pretrained(tmp_path)) is CableGPTConfig


def test_save_and_load_bert(tmp_path):
    model = stir(CableBertForMaskedLM(small_bert())).eval()
    model.save_pretrained(tmp_path)
    again = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(again(TEXT).logits, model(TEXT).logits)
    encoder = AutoModel.from_pretrained(tmp_path)
    assert type(encoder) is CableBertModel
    assert torch.equal(encoder(TEXT).last_hidden_state, model.bert(TEXT).last_hidden_state)


def test_a_checkpoint_loads_in_a_process_that_only_imports_the_package(tmp_path):
    gpt().save_pretrained(tmp_path)
    code = (
        "import sys, cable_attn; from transformers import AutoModelForCausalLM; "
        "print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("CableGPTForCausalLM")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_way_to_generate_agrees(encoding):
    """Uncached, dynamic cache, static cache; with left padding, the padded row equals the row alone."""
    model = gpt(encoding)
    wanted = greedy(model, use_cache=False)
    assert torch.equal(greedy(model), wanted)
    assert torch.equal(greedy(model, cache_implementation="static", disable_compile=True), wanted)
    alone = greedy(model, LEFT_PADDED[:1, 2:])
    for how in ({}, {"cache_implementation": "static", "disable_compile": True}, {"use_cache": False}):
        padded = greedy(model, LEFT_PADDED, attention_mask=LEFT_MASK, **how)
        assert torch.equal(padded[:1, 2:], alone), how
        assert torch.equal(padded[1:], wanted[1:]), how


@pytest.mark.parametrize("encoding", CACHED)
def test_beams_sampling_and_assisted_decoding(encoding):
    model = gpt(encoding)
    assert torch.equal(greedy(model, num_beams=3), greedy(model, num_beams=3, use_cache=False))
    sampled = []
    for cached in (True, False):
        torch.manual_seed(5)
        kwargs = {"max_new_tokens": 10, "pad_token_id": 0, "eos_token_id": None, "use_cache": cached}
        sampled.append(model.generate(TEXT, do_sample=True, num_return_sequences=2, **kwargs))
    assert torch.equal(*sampled)
    # Prompt look-up proposes tokens and crops the cache when they are wrong.
    repeated = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    assert torch.equal(greedy(model, repeated, prompt_lookup_num_tokens=3), greedy(model, repeated))


def test_the_cache_keeps_the_potential_in_double_precision():
    model = gpt().to(torch.bfloat16)
    cache = model(TEXT, use_cache=True).past_key_values
    assert [layer.keys.dtype for layer in cache.layers] == [torch.bfloat16] * 2 + [torch.float64] * 2
    assert cache.get_seq_length() == 7


def test_static_cache_by_hand_in_pieces():
    """A prompt fed in pieces into a static cache equals one pass, also under grouped queries."""
    model = gpt(num_key_value_heads=2)
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.inference_mode():
        pieces = [model(piece, past_key_values=cache).logits for piece in TEXT.split([3, 1, 3], dim=1)]
        assert torch.allclose(torch.cat(pieces, 1), model(TEXT).logits, atol=1e-5)


def test_pipeline(tmp_path):
    tokenizer = train_bpe([Document("a", "It is a truth universally acknowledged. " * 50)], 300)
    model = gpt(vocab_size=300)
    model.generation_config.max_new_tokens = 5
    (result,) = pipeline("text-generation", model=model, tokenizer=tokenizer)("It is a")
    assert result["generated_text"].startswith("It is a")
    assert len(result["generated_text"]) > len("It is a")


@pytest.mark.parametrize("encoding", ["cable", "kerple-log", "t5", "dapev2-cable", "rope"])
@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_gradient_checkpointing_changes_nothing(encoding, kind):
    model = CableGPTForCausalLM(small_gpt(encoding)) if kind == "gpt" else CableBertForMaskedLM(small_bert(encoding))
    stir(model).train()
    grads = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(TEXT, labels=TEXT).loss.backward()
        grads.append({name: value.grad.clone() for name, value in model.named_parameters()})
    for name in grads[0]:
        assert torch.allclose(grads[0][name], grads[1][name], atol=1e-6), name


@pytest.fixture
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_torch_compile_without_graph_breaks():
    model = stir(CableGPTForCausalLM(small_gpt("cable", num_hidden_layers=1)))
    wanted = model(TEXT, labels=TEXT, use_cache=False)
    wanted.loss.backward()
    grads = [value.grad.clone() for value in model.parameters()]
    model.zero_grad()
    out = torch.compile(model, fullgraph=True)(TEXT, labels=TEXT, use_cache=False)
    out.loss.backward()
    assert torch.allclose(out.logits, wanted.logits, atol=1e-5)
    for value, grad in zip(model.parameters(), grads):
        assert torch.allclose(value.grad, grad, atol=1e-5)


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding_traces_without_graph_breaks(encoding):
    """The graph is captured whole; eager kernels then run it."""
    model = gpt(encoding)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.allclose(compiled(TEXT, use_cache=False).logits, model(TEXT, use_cache=False).logits, atol=1e-5)


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("encoding", ["cable", "alibi"])
def test_static_decoding_traces_once(encoding):
    """Steps after the first reuse one graph: the cache position must not be baked into it."""
    model = gpt(encoding)
    counter = CompileCounter()
    step = torch.compile(model, fullgraph=True, backend=counter)
    cache = StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        model(TEXT, past_key_values=cache)
        full = model(TEXT.repeat(1, 2)).logits
        for t in range(7):
            out = step(TEXT[:, t : t + 1], past_key_values=cache)
            assert torch.allclose(out.logits[:, 0], full[:, 7 + t], atol=1e-5)
    assert counter.frame_count == 1


def test_outputs_that_people_ask_for():
    model = gpt()
    out = model(TEXT, output_attentions=True, output_hidden_states=True)
    assert len(out.hidden_states) == 3 and len(out.attentions) == 2
    assert torch.allclose(out.attentions[0].sum(-1), torch.ones(2, 4, 7))
    assert torch.equal(model.lm_head(out.hidden_states[-1]), out.logits)
    assert model(TEXT, logits_to_keep=2).logits.shape == (2, 2, 97)
    assert isinstance(model(TEXT, return_dict=False), tuple)
    embedded = model(inputs_embeds=model.transformer.wte(TEXT)).logits
    assert torch.equal(embedded, out.logits)
    with pytest.raises(ValueError, match="exactly one of"):
        model()


@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_the_loss_alone_is_the_same_loss(kind):
    model = gpt() if kind == "gpt" else stir(CableBertForMaskedLM(small_bert()))
    labels = TEXT.clone()
    labels[:, 2:5] = -100
    losses = [model(TEXT, labels=labels, loss_only=alone) for alone in (False, True)]
    assert losses[0].logits.shape == (2, 7, 97) and losses[1].logits is None
    grads = [torch.autograd.grad(out.loss, list(model.parameters())) for out in losses]
    assert torch.allclose(losses[0].loss, losses[1].loss)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads))


def test_trainer_takes_the_models(tmp_path):
    """Real Trainer steps lower the loss, and decay falls on matrices only."""
    rows = [{"input_ids": TEXT[0], "labels": TEXT[0]}] * 8
    model = CableGPTForCausalLM(small_gpt())
    args = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=10,
        learning_rate=1e-2,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    before = model(TEXT[:1], labels=TEXT[:1]).loss
    Trainer(model=model, args=args, train_dataset=rows).train()
    assert model(TEXT[:1], labels=TEXT[:1]).loss < before - 0.5


def test_weight_decay_is_for_matrices():
    names = decayed_parameters(CableGPTForCausalLM(small_gpt("cable")))
    assert "transformer.h.0.attn.encoding.step.weight" in names
    assert not [name for name in names if name.endswith("bias") or "ln_" in name]
    for encoding in ("t5", "kerple-log", "kerple-power"):
        names = decayed_parameters(CableGPTForCausalLM(small_gpt(encoding)))
        assert not [name for name in names if ".encoding." in name], encoding


def test_paper_init():
    """W N(0, 0.02), biases 0, residual projections scaled by 1/√(2L)."""
    model = CableGPTForCausalLM(CableGPTConfig.preset("tiny", encoding="cable", vocab_size=64))
    attention = model.transformer.h[0].attn
    assert abs(attention.encoding.step.weight.std() - 0.02) < 2e-3
    assert abs(attention.encoding.strength.weight.std() - 0.02) < 2e-3
    assert attention.encoding.step.bias.abs().max() == 0
    assert abs(attention.out.weight.std() - 0.02 / 12**0.5) < 3e-4


def test_spread_init_survives_from_pretrained(tmp_path):
    model = CableGPTForCausalLM(small_gpt(encoding_options={"init": "spread"}))
    assert model.transformer.h[0].attn.encoding.step.bias.min() == 1
    with torch.no_grad():
        model.transformer.h[0].attn.encoding.step.bias.fill_(3.0)
    model.save_pretrained(tmp_path)
    again = CableGPTForCausalLM.from_pretrained(tmp_path)
    assert again.transformer.h[0].attn.encoding.step.bias.min() == 3


def test_a_mask_that_tells_of_too_few_tokens_is_refused():
    model, ids = CableGPTForCausalLM(small_gpt()).eval(), torch.arange(1, 13)[None]
    with pytest.raises(CableError, match="tells of 11 tokens, and there are 12"):
        model(ids, attention_mask=torch.ones(1, 11))
    cache = model(ids[:, :10], use_cache=True).past_key_values
    with pytest.raises(CableError, match="tells of 1 tokens, and there are 11"):
        model(ids[:, 10:11], attention_mask=torch.ones(1, 1), past_key_values=cache)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_attention_heads": 10}, ["num_attention_heads=10 does not divide hidden_size=32", "1, 2, 4, 8, 16, 32"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads=3 does not divide num_attention_heads=4"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers must be a whole number of at least 1, got 0"]),
        ({"num_hidden_layers": "two"}, ["num_hidden_layers must be a whole number of at least 1, got 'two'"]),
        ({"attention_window": 0}, ["attention_window must be a whole number of at least 1, got 0"]),
        ({"hidden_dropout": 2}, ["hidden_dropout must lie between 0 and 1, got 2"]),
        ({"hidden_dim": 64}, ["unknown field of CableGPTConfig 'hidden_dim'", "Did you mean 'hidden_size'?"]),
        ({"attention_backend": "flash"}, ["unknown attention backend 'flash'", "auto, "]),
        ({"attention_prune": 2.0}, ["attention_prune must lie between 0 and 1, got 2.0"]),
        ({"attention_prune": "a"}, ["attention_prune must lie between 0 and 1, got 'a'"]),
        ({"intermediate_size": -3}, ["intermediate_size must be a whole number of at least 1, got -3"]),
        ({"layer_norm_eps": "a"}, ["layer_norm_eps must lie between 0 and 1, got 'a'"]),
        ({"qk_norm": 5}, ["qk_norm must be true or false, got 5"]),
        ({"attention_prune": 0.1, "encoding": "rope"}, ["attention_prune=0.1", "'rope'", "cable, cable-nw", "alibi"]),
    ],
)
def test_bad_configs_are_named(fields, words):
    with pytest.raises(CableError) as error:
        small_gpt(**fields)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_prunable_is_what_attention_would_prune(encoding):
    calls = layer_calls(gpt(encoding), TEXT)
    takes = all(call.mix is None for call in calls)
    for call in calls:
        try:
            make_call(call.q, call.k, call.v, call.bias, call.layout, prune=1e-4)
        except CableError:
            takes = False
    assert ENCODINGS[encoding].prunable == takes


def test_unknown_preset():
    with pytest.raises(CableError, match=r"unknown preset 'tine'. Did you mean 'tiny'\? Allowed: tiny, small, medium"):
        CableGPTConfig.preset("tine")


def test_an_explicit_backend_never_falls_back():
    model = gpt("dapev2-cable", attention_backend="sdpa")
    with pytest.raises(CableError, match=r"sdpa: .*\(mix\)"):
        model(TEXT)


def corrupt(folder, how):
    weights = folder / "model.safetensors"
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "no weights":
        weights.unlink()
    elif how == "garbage":
        weights.write_bytes(b"not a safetensors file")
    elif how == "bad config":
        (folder / "config.json").write_text("{")
    elif how == "other shape":
        config = folder / "config.json"
        config.write_text(config.read_text().replace('"hidden_size": 32', '"hidden_size": 64'))
    elif how == "more layers":
        config = folder / "config.json"
        config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    elif how == "no config":
        (folder / "config.json").unlink()


@pytest.mark.parametrize(
    "how", ["truncated", "no weights", "garbage", "bad config", "other shape", "more layers", "no config"]
)
def test_a_corrupt_checkpoint_is_one_clear_error(how, tmp_path):
    tokenizer = train_bpe([Document("a", "some text")], 300)
    gpt(vocab_size=300).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    load_causal_lm(tmp_path)
    corrupt(tmp_path, how)
    with pytest.raises(CableError, match="checkpoint") as error:
        load_causal_lm(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def forgetful(encoding="cable", **fields):
    options = {"gain_floor": 2.0} if encoding == "cable" else {}
    model = gpt(encoding, qk_norm=True, encoding_options=options, num_hidden_layers=2, **fields)
    for block in model.transformer.h:
        for norm in block.attn.norms:
            torch.nn.init.constant_(norm.weight, 1.2)
        if encoding in ("cable", "cable-nw"):
            torch.nn.init.constant_(block.attn.encoding.step.bias, 1.0)
    return model


@pytest.mark.parametrize("encoding", ["cable", "cable-nw", "fox", "alibi"])
def test_a_forgetting_cache_stops_growing_and_says_the_same(encoding):
    model, text = forgetful(encoding), torch.randint(1, 97, (2, 700), generator=torch.Generator().manual_seed(0))
    epsilon = 1e-3
    cache, held = ForgettingCache(model, epsilon), []
    with torch.no_grad():
        wanted = model(text, use_cache=False).logits
        pieces = [text[:, :130], *text[:, 130:].split(19, 1)]
        got = []
        for piece in pieces:
            got.append(model(piece, past_key_values=cache).logits)
            held.append(max(layer.keys.shape[2] for layer in cache.layers[:2]))
    assert cache.get_seq_length() == 700
    if encoding != "alibi":  # whose smallest slope reaches further than this text
        assert max(held) < 350 and max(held[-10:]) <= max(held[:-10])
    assert (torch.cat(got, 1) - wanted).abs().max() < 20 * epsilon
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    said = model.generate(text, past_key_values=ForgettingCache(model, epsilon), **options)
    assert torch.equal(said, model.generate(text, use_cache=False, **options))
    assert torch.equal(ForgettingCache(model.transformer).reach[0], ForgettingCache(model).reach[0])


def test_forgetting_bounds_what_is_lost():
    """Every weight that a later token could have given to what is dropped adds up to less than ε."""
    model, text = forgetful("cable"), torch.randint(1, 97, (1, 600), generator=torch.Generator().manual_seed(3))
    cache = ForgettingCache(model, 1e-3)
    with torch.no_grad():
        model(text[:, :500], past_key_values=cache)
        model(text[:, 500:501], past_key_values=cache)
        gone = [layer.gone for layer in cache.layers[:2]]
        assert min(gone) > 100
        attentions = model(text, use_cache=False, output_attentions=True).attentions
    for dropped, weights in zip(gone, attentions):
        assert weights[:, :, 501:, :dropped].sum(-1).max() < 1e-3


@pytest.mark.parametrize(
    ("encoding", "fields", "words"),
    [
        ("cable", {"encoding_options": {}}, "gain_floor above 0"),
        ("rope", {}, "'rope' may let a later token feel any distance"),
        ("k-cable", {}, "'k-cable' may let a later token feel any distance"),
        ("cable-nw", {"qk_norm": False}, "qk_norm"),
        ("cable-nw", {"attention_prune": 1e-3}, "attention_prune"),
    ],
)
def test_a_cache_that_may_not_forget_says_why(encoding, fields, words):
    with pytest.raises(CableError, match=words):
        ForgettingCache(gpt(encoding, **{"qk_norm": True, **fields}))


def test_a_forgetting_cache_knows_its_limits():
    model = forgetful("cable-nw")
    with pytest.raises(CableError, match="epsilon must lie between 0 and 1"):
        ForgettingCache(model, 0.0)
    cache = ForgettingCache(model, most_tokens=7)
    model(TEXT, past_key_values=cache)
    with pytest.raises(CableError, match="made for 7 tokens"):
        model(TEXT, past_key_values=cache)
    with pytest.raises(CableError, match="cannot go back"):
        cache.crop(-2)


def test_a_forgetting_cache_that_was_reset_forgets_as_a_new_one():
    model, text = forgetful("cable"), torch.randint(1, 97, (1, 400), generator=torch.Generator().manual_seed(0))
    used, held = ForgettingCache(model, 1e-3), []
    with torch.no_grad():
        for cache in (used, used, ForgettingCache(model, 1e-3)):
            cache.reset()
            for piece in text.split(40, 1):
                model(piece, past_key_values=cache)
            held.append([layer.gone for layer in cache.layers])
    assert held[0] == held[1] == held[2] and min(held[0]) > 0


def test_normalised_queries_and_keys_are_saved_and_bounded(tmp_path):
    model = gpt("cable", qk_norm=True)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(TEXT).logits, model(TEXT).logits)
    for call, block in zip(layer_calls(model, TEXT), model.transformer.h):
        most = call.q.shape[-1] * torch.stack([norm.weight.abs().max() for norm in block.attn.norms]).prod()
        assert (call.q @ call.k.mT).abs().max() <= most * 1.0001


def test_packs_are_told_by_positions_that_begin_anew():
    """As transformers' collator for packed texts sends them; ordinary positions are no pack."""
    model = gpt("cable")
    first, second = torch.randint(1, 97, (1, 6)), torch.randint(1, 97, (1, 8))
    both, places = torch.cat([first, second], 1), torch.cat([torch.arange(6), torch.arange(8)])[None]
    packed = model(both, position_ids=places).logits
    assert torch.allclose(packed, torch.cat([model(first).logits, model(second).logits], 1), atol=1e-5)
    assert torch.equal(model(both, position_ids=torch.arange(14)[None]).logits, model(both).logits)
    with pytest.raises(CableError, match=r"attention_mask must be \[batch, tokens\]"):
        model(both, attention_mask=torch.ones(1, 1, 14, 14))
    with pytest.raises(CableError, match=r"document_ids must be \[1, 14\]"):
        model(both, document_ids=torch.zeros(1, 3))


@pytest.mark.parametrize("made", [CableGPTForCausalLM, CableBertForMaskedLM])
def test_a_config_may_ask_for_hidden_states_and_attentions(made):
    config = small_gpt("cable") if made is CableGPTForCausalLM else small_bert("cable")
    config.output_hidden_states = True
    config.output_attentions = True
    out = made(config).eval()(TEXT)
    assert len(out.hidden_states) == 3 and len(out.attentions) == 2
    assert made(config).eval()(TEXT, output_hidden_states=False).hidden_states is None
