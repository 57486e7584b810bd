"""CABLE in unmodified models of transformers."""

from __future__ import annotations

import copy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import accelerate
import peft
import pytest
import torch
import transformers as hf
from torch._dynamo.testing import CompileCounterWithBackend

from cable_attn import CableError, add_cable, remove_cable

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
SLIDING = {**GROUPED, "sliding_window": 6}
WIDE = {**GROUPED, "head_dim": 16}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 0}
MODERN = {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}
CAUSAL = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**WIDE)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SLIDING)),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**WIDE)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**{**WIDE, **SLIDING}, **LAYERS)),
    "olmo2": lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**GROUPED)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, bos_token_id=1, eos_token_id=2)),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SIZES)),
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**GROUPED)),
}
MASKED = {
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES)),
    "roberta": lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**SIZES)),
    "modernbert": lambda: hf.ModernBertForMaskedLM(hf.ModernBertConfig(**SIZES, **MODERN)),
}
ALL = {**CAUSAL, **MASKED}
WINDOWED = ("mistral", "gemma3")
TEXT = torch.randint(3, 97, (2, 13), generator=torch.Generator().manual_seed(5))
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def make(name, *args, **kwargs):
    torch.manual_seed(0)
    model = ALL[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # random weights of 0.02 would say nearly nothing
            parameter.mul_(4) if parameter.dim() > 1 else None
    return add_cable(model, *args, **kwargs) if args or kwargs else model


@pytest.mark.parametrize("name", ALL)
def test_it_can_be_added_without_changing_anything_and_taken_out_again(name):
    model = make(name)
    before, names, implementation = model(TEXT).logits, list(model.state_dict()), model.config._attn_implementation
    add_cable(model, keep_positions=True)
    assert torch.allclose(model(TEXT).logits, before, atol=1e-4)
    loss = model(TEXT, labels=TEXT).loss
    new = {key: value for key, value in model.named_parameters() if ".cable." in key}
    assert len(new) == 8
    grads = torch.autograd.grad(loss, list(new.values()))
    assert all(grad.abs().sum() > 0 for key, grad in zip(new, grads) if ".step." in key)
    remove_cable(model)
    assert torch.equal(model(TEXT).logits, before) and list(model.state_dict()) == names
    assert model.config._attn_implementation == implementation and not hasattr(model.config, "cable")


@pytest.mark.parametrize("name", ALL)
def test_it_replaces_positions(name):
    """What is said then depends on the order by the bias alone, and every new parameter learns."""
    model = make(name, "cable")
    loss = model(TEXT, labels=TEXT).loss
    loss.backward()
    assert all(p.grad.abs().sum() > 0 for key, p in model.named_parameters() if ".cable." in key)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if ".cable.step." in key:
                parameter.zero_()
        shuffled = torch.cat([TEXT[:, :-1].flip(1), TEXT[:, -1:]], 1)
        last = [model(text).logits[:, -1] for text in (TEXT, shuffled)]
    if name not in (*WINDOWED, "modernbert"):  # a window tells near from far
        # One layer of a causal model mixes prefixes, whose sums differ: only a bidirectional one forgets all order.
        same = torch.allclose(*last, atol=1e-4)
        assert same == (name in MASKED)


@pytest.mark.parametrize("name", ALL)
def test_a_text_may_be_longer_than_any_table_of_positions(name):
    model = make(name, "cable")
    text = torch.randint(3, 97, (1, 100), generator=torch.Generator().manual_seed(1))
    logits = model(text).logits
    assert logits.shape == (1, 100, 97) and torch.isfinite(logits).all()
    if name in CAUSAL:
        assert torch.allclose(model(text[:, :50]).logits, logits[:, :50], atol=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_attention_weights_can_be_looked_at(name):
    model = make(name, "cable")
    assert model(TEXT).attentions is None
    weights = model(TEXT, output_attentions=True).attentions
    assert len(weights) == 2 and all(torch.allclose(one.sum(-1), torch.ones(2, 4, 13), atol=1e-5) for one in weights)
    assert not hasattr(remove_cable(model).base_model, "_cable_hooks")
    assert len(model(TEXT).logits) == 2


@pytest.mark.parametrize("padded", [False, True])
def test_a_window_does_not_move_the_places_of_tokens(padded):
    """FIRE divides by how far into the text a query stands, which a cache that forgets still knows."""
    model = make("mistral", "fire", threshold=4.0)
    mask = torch.ones_like(TEXT)
    mask[0, :3] = 0 if padded else 1
    said = model.generate(TEXT, attention_mask=mask, **GREEDY, output_logits=True, return_dict_in_generate=True)
    whole = torch.cat([mask, torch.ones(2, 8, dtype=mask.dtype)], 1)
    with torch.no_grad():
        places = (whole.cumsum(-1) - 1).clamp(min=0)
        logits = model(said.sequences, attention_mask=whole, position_ids=places, use_cache=False).logits
    assert torch.allclose(torch.stack(said.logits, 1), logits[:, 12:-1], atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_copy_is_a_model_of_its_own(name):
    model = make(name, "cable")
    twin = copy.deepcopy(model)
    remove_cable(model)
    assert torch.equal(twin(TEXT).logits, make(name, "cable")(TEXT).logits)
    assert torch.equal(remove_cable(twin)(TEXT).logits, model(TEXT).logits)


@pytest.mark.parametrize("name", ALL)
def test_padding_changes_nothing(name):
    model = make(name, "cable")
    mask = torch.ones(2, 17, dtype=torch.long)
    mask[:, :4] = 0
    padded = model(torch.cat([torch.zeros(2, 4, dtype=torch.long), TEXT], 1), attention_mask=mask).logits[:, 4:]
    assert torch.allclose(padded, model(TEXT).logits, atol=1e-4)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("encoding", ["cable", "alibi"])
def test_generation_with_a_cache_is_generation_without(name, encoding):
    model = make(name, encoding)
    mask = torch.ones_like(TEXT)
    mask[0, :3] = 0
    plain = model.generate(TEXT, attention_mask=mask, use_cache=False, **GREEDY)
    assert torch.equal(model.generate(TEXT, attention_mask=mask, **GREEDY), plain)
    if name not in WINDOWED:
        options = {"cache_implementation": "static", "disable_compile": True}
        assert torch.equal(model.generate(TEXT, attention_mask=mask, **GREEDY, **options), plain)
    beams = [model.generate(TEXT, num_beams=3, use_cache=cached, **GREEDY) for cached in (True, False)]
    assert torch.equal(*beams)
    one = TEXT[:1].repeat(1, 2)
    looked_up = model.generate(one, prompt_lookup_num_tokens=3, **GREEDY)
    assert torch.equal(looked_up, model.generate(one, use_cache=False, **GREEDY))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("keep", [True, False])
def test_it_is_saved_and_loaded(name, keep, tmp_path):
    model = make(name, "cable", keep_positions=keep)
    model.save_pretrained(tmp_path)
    auto = hf.AutoModelForCausalLM if name in CAUSAL else hf.AutoModelForMaskedLM
    again, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(again.eval()(TEXT).logits, model(TEXT).logits)


def test_a_process_that_only_imports_the_package_loads_it(tmp_path):
    model = make("llama", "cable")
    model.save_pretrained(tmp_path)
    code = (
        "import sys, torch, cable_attn; from transformers import AutoModelForCausalLM as M;"
        "print(float(M.from_pretrained(sys.argv[1]).eval()(torch.arange(3, 16)[None]).logits.double().sum()))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(float(model(torch.arange(3, 16)[None]).logits.double().sum()), abs=1e-3)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_checkpointing_and_compiling_change_nothing(name):
    model = make(name, "cable")
    model.config.use_cache = False
    wanted = model(TEXT, labels=TEXT)
    grads = torch.autograd.grad(wanted.loss, list(model.parameters()), allow_unused=True)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(TEXT).logits, wanted.logits, atol=1e-5)
    model.gradient_checkpointing_enable()
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    loss = model(TEXT, labels=TEXT).loss
    again = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    assert all(a is b or torch.allclose(a, b, atol=1e-4) for a, b in zip(grads, again))


@pytest.mark.parametrize("name", ALL)
def test_a_padded_batch_compiles_to_one_graph(name):
    model, mask = make(name, "cable"), torch.ones_like(TEXT)
    mask[0, :4] = 0
    cached = {"use_cache": False} if name in CAUSAL else {}
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)(TEXT, attention_mask=mask, **cached)
    plain = model(TEXT, attention_mask=mask, **cached)
    assert torch.allclose(compiled.logits[mask.bool()], plain.logits[mask.bool()], atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_static_cache_and_padding_share_one_graph_for_all_steps(name):
    model, mask = make(name, "cable"), torch.ones_like(TEXT)
    mask[0, :4] = 0
    wanted = model.generate(TEXT, attention_mask=mask, use_cache=False, **GREEDY)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    model.forward = torch.compile(model.forward, backend=counter, fullgraph=True)
    options = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(model.generate(TEXT, attention_mask=mask, **GREEDY, **options), wanted)
    assert counter.frame_count <= 3  # the prompt, and the steps behind it


def test_lora_leaves_the_encoding_trainable():
    model = make("llama", "cable", keep_positions=True)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["cable"], r=2)
    tuned = peft.get_peft_model(model, config)
    tuned(TEXT, labels=TEXT).loss.backward()
    trained = {name for name, p in tuned.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert any("lora_" in name for name in trained) and any(".cable." in name and "step" in name for name in trained)
    said = [tuned.generate(input_ids=TEXT, use_cache=cached, **GREEDY) for cached in (True, False)]
    assert torch.equal(*said)


@pytest.mark.parametrize(
    ("name", "kwargs", "words"),
    [
        ("llama", {"encoding": "rope"}, "'rope' does more than add a bias"),
        ("llama", {"encoding": "alibi", "keep_positions": True}, "'alibi' cannot start at nothing"),
        ("llama", {"encoding": "cables"}, "Did you mean 'cable'"),
    ],
)
def test_what_does_not_go_is_named_and_leaves_the_model_alone(name, kwargs, words):
    model = make(name)
    before = model(TEXT).logits
    with pytest.raises(CableError, match=words):
        add_cable(model, **kwargs)
    assert torch.equal(model(TEXT).logits, before)


def test_unknown_models_and_features_are_refused():
    sizes = {"vocab_size": 97, "hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    opt = hf.OPTForCausalLM(hf.OPTConfig(**sizes))
    with pytest.raises(CableError, match="models of the type 'opt'"):
        add_cable(opt)
    gemma = hf.GemmaForCausalLM(hf.GemmaConfig(**WIDE))
    gemma.config.attn_logit_softcapping = 50.0
    with pytest.raises(CableError, match="attn_logit_softcapping"):
        add_cable(gemma)
    llama = make("llama", "cable")
    with pytest.raises(CableError, match="already"):
        add_cable(llama)
    with pytest.raises(CableError, match="no encoding"):
        remove_cable(make("llama"))


class Int8Linear(torch.nn.Module):
    """What 8-bit loading makes of a layer: integers for weights, and a scale."""

    def __init__(self, plain: torch.nn.Linear):
        super().__init__()
        scale = plain.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = torch.nn.Parameter((plain.weight / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


def test_layers_of_eight_bits_get_an_encoding_of_the_models_precision():
    model = make("llama")
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, Int8Linear(getattr(layer.self_attn, name)))
    before = model(TEXT).logits
    add_cable(model, keep_positions=True)
    assert torch.allclose(model(TEXT).logits, before, atol=1e-4)
    new = {key: value for key, value in model.named_parameters() if ".cable." in key}
    assert {value.dtype for value in new.values()} == {torch.float32}
    model(TEXT, labels=TEXT).loss.backward()
    assert all(value.grad.abs().sum() > 0 for key, value in new.items() if ".step." in key)
    remove_cable(model)
    assert torch.equal(model(TEXT).logits, before)


def test_bitsandbytes_finds_nothing_to_replace_in_the_encoding():
    """bitsandbytes takes what is nn.Linear and nothing that only inherits from it."""
    model = make("llama", "cable")
    linear = {name for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    assert linear and not any(".cable." in name for name in linear)


@pytest.mark.parametrize("name", ALL)
def test_it_trains_under_autocast(name):
    """A rotation leaves queries and keys in fp32 there."""
    model = make(name, "cable").train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(TEXT, labels=TEXT, **({"use_cache": False} if name in CAUSAL else {})).loss
    loss.backward()
    assert all(p.grad.abs().sum() > 0 for key, p in model.named_parameters() if ".cable." in key)


@pytest.mark.parametrize("name", CAUSAL)
def test_documents_of_a_pack_do_not_see_each_other(name):
    """Where positions begin anew, as transformers tells them apart."""
    model = make(name, "cable")
    places = torch.tensor([[*range(6), *range(7)], [*range(9), *range(4)]])
    with torch.no_grad():
        packed = model(TEXT, position_ids=places, use_cache=False).logits
        apart = [model(TEXT[:1, 6:], use_cache=False).logits, model(TEXT[1:, 9:], use_cache=False).logits]
    torch.testing.assert_close(packed[:1, 6:], apart[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(packed[1:, 9:], apart[1], atol=1e-4, rtol=0)


def test_another_attention_does_not_drop_the_encoding_in_silence():
    model = make("llama", "cable")
    model.set_attn_implementation("sdpa")
    with pytest.raises(CableError, match="'sdpa' attention knows nothing of it"):
        model(TEXT)
    model.set_attn_implementation("cable")
    assert torch.equal(model(TEXT).logits, make("llama", "cable")(TEXT).logits)


def test_a_decoder_may_look_both_ways():
    torch.manual_seed(0)
    model = hf.LlamaModel(hf.LlamaConfig(**GROUPED, is_causal=False)).eval()
    before = model(TEXT).last_hidden_state
    assert torch.allclose(add_cable(model, keep_positions=True)(TEXT).last_hidden_state, before, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_cache_may_be_made_without_a_config(name):
    model = make(name, "cable")
    cache = hf.DynamicCache()
    with torch.no_grad():
        model(TEXT[:, :5], past_key_values=cache)
        said = model(TEXT[:, 5:], past_key_values=cache).logits
    assert torch.allclose(said, model(TEXT).logits[:, 5:], atol=1e-4)


def test_adapters_of_all_linear_layers_learn_for_the_encoding_too():
    """What a layer of the encoding gives has the shape that peft expects, for any length."""
    model = peft.get_peft_model(make("llama", "cable"), peft.LoraConfig(target_modules="all-linear", r=2))
    for length in (4, 13):  # as many tokens as heads, and not
        model(TEXT[:, :length], labels=TEXT[:, :length]).loss.backward()
    grads = [p.grad for key, p in model.named_parameters() if ".cable.step.lora_B" in key]
    assert grads and all(grad.abs().sum() > 0 for grad in grads)


@pytest.mark.parametrize("keep", [False, True])
def test_a_config_alone_makes_a_model_that_starts_as_it_should(keep):
    config = make("llama", "cable", keep_positions=keep).config
    for fresh in (hf.AutoModelForCausalLM.from_config(config).model, hf.AutoModel.from_config(config)):
        encoding = fresh.layers[0].self_attn.cable
        assert torch.allclose(encoding.step.bias, torch.tensor(1e-6 if keep else 1.0))
        assert bool((encoding.step.weight == 0).all()) == keep


@pytest.mark.parametrize("encoding", ["cable", "t5", "fire", "kerple-log"])
def test_weights_without_the_encoding_get_one_that_starts_as_it_should(encoding, tmp_path):
    make("llama").save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = add_cable(hf.AutoModelForCausalLM.from_pretrained(tmp_path), encoding).config
    own = hf.AutoModelForCausalLM.from_pretrained(tmp_path, config=config).model.layers[1].self_attn.cable
    fresh = hf.AutoModelForCausalLM.from_config(config).model.layers[1].self_attn.cable
    for (name, a), (_, b) in zip(own.named_parameters(), fresh.named_parameters(), strict=True):
        assert torch.isfinite(a).all() and float((a.mean() - b.mean()).abs()) < 0.5, name
        assert bool((a == a.flatten()[0]).all()) == bool((b == b.flatten()[0]).all()), name


def test_a_neutral_start_does_not_need_weights_of_its_own(tmp_path):
    plain = make("llama")
    plain.save_pretrained(tmp_path)
    config = make("llama", "cable", keep_positions=True).config
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path, config=config, attn_implementation="eager").eval()
    assert torch.allclose(loaded(TEXT).logits, plain(TEXT).logits, atol=1e-4)
    assert remove_cable(loaded).config._attn_implementation == "eager"
    assert torch.allclose(loaded(TEXT).logits, plain(TEXT).logits, atol=1e-5)


@pytest.mark.parametrize("encoding", ["cable", "t5", "kerple-log", "alibi"])
def test_an_encoding_may_be_offloaded_with_its_layer(encoding):
    model = make("llama", encoding)
    wanted = model(TEXT).logits
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert torch.equal(model(TEXT).logits, wanted)
    with pytest.raises(CableError, match="are offloaded"):
        add_cable(accelerate.cpu_offload(make("llama"), execution_device=torch.device("cpu")))


def test_models_of_one_config_are_changed_one_by_one():
    config = hf.LlamaConfig(**GROUPED)
    first, second = hf.LlamaForCausalLM(config).eval(), hf.LlamaForCausalLM(config).eval()
    before = second(TEXT).logits
    add_cable(first)
    assert torch.equal(second(TEXT).logits, before) and not hasattr(config, "cable")
    add_cable(second, "alibi")
    assert first.config.cable["encoding"] == "cable" and second.config.cable["encoding"] == "alibi"


def test_what_fails_leaves_the_model_as_it_was():
    model = make("llama")
    before = model(TEXT).logits
    with pytest.raises(CableError, match="gain_floor"):
        add_cable(model, gain_floor=-1.0)
    with pytest.raises(CableError, match="unknown attention backend 'nonsense'"):
        add_cable(model, backend="nonsense")
    with pytest.raises(CableError, match="leave init='spread' out"):
        add_cable(model, keep_positions=True, init="spread")
    assert torch.equal(model(TEXT).logits, before) and not hasattr(model.config, "cable")
    add_cable(model)


def test_what_it_does_not_take_is_refused_by_name():
    cross = hf.BertLMHeadModel(hf.BertConfig(**SIZES, is_decoder=True, add_cross_attention=True))
    with pytest.raises(CableError, match="cross-attention"):
        add_cable(cross)
    with pytest.raises(CableError, match=r"got a PeftModel.*add_cable first"):
        add_cable(peft.get_peft_model(make("llama"), peft.LoraConfig(target_modules=["q_proj"], r=2)))
    with pytest.raises(CableError, match="each layer has an encoding of its own"):
        add_cable(make("llama"), "t5", shared=True)
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(CableError, match="no potential is known"):
        peft.get_peft_model(make("llama", "cable"), prefix)(input_ids=TEXT, attention_mask=torch.ones_like(TEXT))
    inside = make("llama")
    add_cable(inside.model)
    with pytest.raises(CableError, match="has an encoding already"):
        add_cable(inside)
    with pytest.raises(CableError, match="got a Linear"):
        remove_cable(torch.nn.Linear(2, 2))
    with pytest.raises(CableError, match="attn_logit_softcapping"):
        add_cable(hf.Gemma2ForCausalLM(hf.Gemma2Config(**WIDE)))


def test_an_encoding_without_weights_is_in_the_checkpoint_too():
    """So that transformers warns where it is left out."""
    assert sum(".cable." in key for key in make("llama", "alibi").state_dict()) == 2


def test_threads_may_share_a_model():
    model = make("llama", "cable")
    texts = [TEXT[:, :length] for length in range(2, 14)] * 5
    with torch.no_grad(), ThreadPoolExecutor(4) as pool:
        wanted = [model(text).logits for text in texts]
        for got, right in zip(pool.map(lambda text: _said(model, text), texts), wanted):
            torch.testing.assert_close(got, right)


def _said(model, text):
    with torch.no_grad():
        return model(text).logits
