"""``cable convert``: another encoding for a checkpoint of transformers."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)
from typer.testing import CliRunner

from cable_attn import CableError, adapting, cells, conversion, findings, pretraining, study
from cable_attn import recipe as recipes
from cable_attn.cli import app
from cable_attn.data import embedded_corpus, train_bpe
from cable_attn.models.loading import load_model, tokenizer_of
from cable_attn.recipe import ModelPart

SMALL = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
QUICK = [
    "learning_rate=1e-2",
    "tokens_per_update=256",
    "micro_batch=4",
    "save_every=2",
    "log_every=1",
    "eval_windows=4",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(embedded_corpus("train"), 300)


@pytest.fixture(scope="module")
def llama(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL, intermediate_size=64, num_key_value_heads=2, max_position_embeddings=16)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory, llama):
    recipe = conversion.plan(ModelPart(checkpoint=str(llama)), 8192)
    return conversion.prepare_data("embedded", recipe, tmp_path_factory.mktemp("data"))[0].data.path


def converted(llama, data, out, *overrides, tokens=1024, watch=None, eval_tokens=1000, **model):
    recipe = conversion.plan(ModelPart(checkpoint=str(llama), **model), tokens, overrides=[*QUICK, *overrides])
    recipe, text = conversion.prepare_data(str(data), recipe, out, eval_tokens)
    return conversion.convert(recipe, text, out, [16, 64], watch)


@pytest.mark.parametrize("weights", ["all", "new", "lora"])
def test_a_converted_checkpoint_is_a_checkpoint_like_any_other(weights, llama, data, tmp_path):
    found = converted(llama, data, tmp_path, weights=weights)
    assert [row["length"] for row in found["before"]] == [row["length"] for row in found["after"]] == [16, 64]
    before, after = load_file(llama / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert {name for name in after if name not in before} == {name for name in after if ".cable." in name} != set()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    if weights == "new":
        assert changed == set()
    else:
        assert found["after"][0]["loss"] < found["before"][0]["loss"] and changed
    plain = load_model(llama)
    torch.manual_seed(0)
    fresh = adapting.make(ModelPart(checkpoint=str(llama), weights="new"))
    learned = {
        name for name, value in fresh.named_parameters() if ".cable." in name and not torch.equal(value, after[name])
    }
    assert learned, "the encoding has learned nothing"
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model) is type(plain) and model.config.cable["encoding"] == "cable"
    assert (tmp_path / "tokenizer.json").exists()
    stored = json.loads((tmp_path / conversion.FILE).read_text())
    assert stored["after"] == json.loads(json.dumps(found["after"])) and stored["versions"]


@pytest.mark.parametrize("weights", ["all", "lora"])
def test_what_was_cut_off_goes_on_with_the_same_call(weights, llama, data, tmp_path):
    whole = converted(llama, data, tmp_path / "whole", weights=weights)

    class CutError(Exception):
        pass

    def cut(what, share):
        if "training" in what and share >= 0.75:
            raise CutError

    with pytest.raises(CutError):
        converted(llama, data, tmp_path / "cut", weights=weights, watch=cut)
    said = []
    again = converted(
        llama, data, tmp_path / "cut", weights=weights, watch=lambda what, share: said.append((what, share))
    )
    assert not any("before" in what for what, _ in said), "what was read before is stored"
    assert min(share for what, share in said if "training" in what) > 0.5, "training went on from its checkpoint"
    assert again["after"][1]["loss"] == pytest.approx(whole["after"][1]["loss"], abs=1e-6)
    said.clear()
    converted(llama, data, tmp_path / "cut", weights=weights, watch=lambda what, share: said.append(what))
    assert said == []
    with pytest.raises(CableError, match=r"other settings \(train.seed was 0 and is 1\)"):
        converted(llama, data, tmp_path / "cut", "seed=1", weights=weights)
    with pytest.raises(CableError, match=r"other settings \(tokens\)"):
        converted(llama, data, tmp_path / "cut", weights=weights, eval_tokens=2000)
    converted(llama, data, tmp_path / "cut", "workers=0", weights=weights)  # nothing that touches the losses


def test_positions_can_stay_and_start_at_what_the_model_said(llama):
    model = adapting.make(ModelPart(checkpoint=str(llama), keep_positions=True))
    ids = torch.arange(40)[None]
    torch.testing.assert_close(model(ids).logits, load_model(llama)(ids).logits, atol=1e-4, rtol=1e-4)


def test_more_training_with_yarn_for_comparison(llama, data, tmp_path):
    yarn = "overrides={rope_parameters = {rope_type = 'yarn', factor = 4.0, rope_theta = 10000.0, "
    yarn += "original_max_position_embeddings = 16}}"
    converted(llama, data, tmp_path, yarn, encoding="none")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not hasattr(model.config, "cable") and model.config.rope_parameters["rope_type"] == "yarn"
    waves = model.model.rotary_emb.inv_freq
    assert not torch.allclose(waves, load_model(llama).model.rotary_emb.inv_freq)


def test_a_table_of_positions_no_longer_ends_the_text(data, tokenizer, tmp_path):
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2, n_positions=16)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    found = converted(tmp_path / "gpt2", data, tmp_path / "out")
    assert "16 learned positions" in found["before"][1]["error"] and found["after"][1]["perplexity"] > 1


def test_a_config_alone_begins_with_fresh_weights_in_a_study(llama, data, tmp_path):
    """Pre-train a model of transformers, then convert it: two studies, one after the other."""
    (tmp_path / "config").mkdir()
    shutil.copy(llama / "config.json", tmp_path / "config")
    overrides = [*QUICK, "overrides={}", "length=16", "steps=4", f"path={data}"]
    common = f"""
recipe = "gpt-embedded"
lengths = [16, 64]
overrides = [{", ".join(map(json.dumps, overrides))}]
[reading]
tokens = 1000
"""
    (tmp_path / "first.toml").write_text(
        f'{common}\n[variants]\nrope = ["encoding=none", "checkpoint={tmp_path / "config"}"]\n'
    )
    first = study.load(str(tmp_path / "first.toml"))
    assert cells.run(first, tmp_path / "first") == {}
    assert json.loads((tmp_path / "first/rope-0/config.json").read_text())["hidden_size"] == 32
    (tmp_path / "second.toml").write_text(
        f'{common}\n[variants]\nrope = ["encoding=none"]\ncable = ["encoding=cable"]\n'.replace(
            '"steps=4"', f'"steps=4", "checkpoint={tmp_path / "first" / "rope-0"}"'
        )
    )
    second = study.load(str(tmp_path / "second.toml"))
    assert cells.run(second, tmp_path / "second") == {}
    found = findings.by_variant(list(cells.results(second, tmp_path / "second")))
    before = findings.by_variant(list(cells.results(first, tmp_path / "first")))["rope"]
    assert found["rope"][16] < before[16] and found["cable"][64] != found["rope"][64]
    shutil.rmtree(tmp_path / "first")  # what is stored can be shown without its checkpoint
    command = ["study", "report", str(tmp_path / "second.toml"), "--out", str(tmp_path / "second")]
    assert CliRunner().invoke(app, command).exit_code == 0


def test_the_command_shows_both_and_takes_one_text(llama, tmp_path):
    (tmp_path / "novel.txt").write_text("It is a truth universally acknowledged. " * 400)
    command = ["convert", str(llama), str(tmp_path / "out"), *QUICK, "--data", str(tmp_path / "novel.txt")]
    command += ["--tokens", "512"]
    done = CliRunner().invoke(app, [*command, "--lengths", "16,32", "--eval-tokens", "500"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "before" in done.output and "after, cable" in done.output and conversion.FILE in done.output


@pytest.mark.parametrize(
    ("model", "overrides", "words"),
    [
        ({"weights": "some"}, [], "unknown model.weights 'some'"),
        ({"encoding": "none", "weights": "new"}, [], "there is none"),
        ({"encoding": "rope"}, [], "does more than add a bias"),
        ({"encoding": "alibi", "weights": "new"}, [], "there is nothing to learn"),
        ({"overrides": {"rope_paramters": {}}}, [], "Did you mean 'rope_parameters'?"),
        ({"overrides": {"hidden_size": 64}}, [], "a checkpoint has sizes of its own. Add overrides={}."),
        ({}, ["encoding=alibi"], "encoding=alibi is an option or argument of its own"),
        ({}, ["path=elsewhere"], "path=elsewhere is an option or argument of its own"),
        ({}, ["separate_documents=true"], "without separate_documents"),
    ],
)
def test_bad_wishes_are_refused_before_anything_is_read(model, overrides, words, llama):
    with pytest.raises(CableError) as error:
        pretraining.plan(conversion.plan(ModelPart(checkpoint=str(llama), **model), 1024, overrides=overrides))
    assert words in str(error.value)


def test_checkpoints_that_are_none_are_named(tmp_path):
    with pytest.raises(CableError, match="cannot be read"):
        conversion.plan(ModelPart(checkpoint=str(tmp_path)), 1024)
    BertForMaskedLM(BertConfig(**SMALL, intermediate_size=64)).save_pretrained(tmp_path / "bert")
    with pytest.raises(CableError, match="causal"):
        pretraining.plan(conversion.plan(ModelPart(checkpoint=str(tmp_path / "bert")), 1024))


@pytest.mark.parametrize("model", [{}, {"keep_positions": True}, {"weights": "lora"}, {"encoding": "none"}])
def test_layers_compile_in_one_graph_each_and_learn_the_same(model, llama):
    ids = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    made = adapting.make(ModelPart(checkpoint=str(llama), **model)).train()

    def gradients():
        made.zero_grad()
        made(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return {name: value.grad.clone() for name, value in made.named_parameters() if value.grad is not None}

    plain = gradients()
    torch.compiler.reset()
    pretraining.compile_layers(made, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(), plain)


def test_a_folder_of_something_else_is_never_taken_for_a_conversion(llama, data, tmp_path):
    shutil.copytree(llama, tmp_path / "other")
    with pytest.raises(CableError, match="holds another model or run"):
        converted(llama, data, tmp_path / "other")
    assert not (tmp_path / "other/data").exists()
    with pytest.raises(CableError, match="is the checkpoint itself"):
        converted(llama, data, llama)


def test_weights_of_another_kind_are_not_taken_for_none(llama, tmp_path):
    shutil.copytree(llama, tmp_path / "old", ignore=shutil.ignore_patterns("*.safetensors"))
    part = ModelPart(checkpoint=str(tmp_path / "old"))
    assert adapting.is_fresh(part)
    (tmp_path / "old" / "pytorch_model.bin").write_bytes(b"x")
    assert not adapting.is_fresh(part)
    with pytest.raises(CableError, match="cannot be loaded"):
        adapting.make(part)


def test_tokens_of_another_tokenizer_are_refused(llama, tmp_path):
    other = train_bpe(embedded_corpus("test"), 280)
    other.save_pretrained(tmp_path / "tokenizer")
    done = CliRunner().invoke(
        app, ["data", "prepare", "embedded", str(tmp_path / "data"), "--tokenizer", str(tmp_path / "tokenizer")]
    )
    assert done.exit_code == 0, done.output
    recipe = conversion.plan(ModelPart(checkpoint=str(llama)), 1024)
    with pytest.raises(CableError, match="made with another tokenizer"):  # before anything is read
        conversion.prepare_data(str(tmp_path / "data"), recipe, tmp_path / "out")


def test_about_as_many_tokens_as_were_asked_for(llama):
    """Updates are whole windows: 4000 tokens are one of 3968 and not two."""
    train = conversion.plan(ModelPart(checkpoint=str(llama)), 4000, length=64).train
    assert (train.tokens_per_update, train.steps) == (3968, 1)


def test_a_checkpoint_keeps_its_tokenizer_whatever_its_files_are(llama, tmp_path):
    """Slow ones have no tokenizer.json; without any, the tokens must be given."""
    old = tmp_path / "old"
    shutil.copytree(llama, old)
    words = json.loads((old / "tokenizer.json").read_text())["model"]
    (old / "vocab.json").write_text(json.dumps(words["vocab"]))
    (old / "merges.txt").write_text("\n".join(" ".join(pair) for pair in words["merges"]))
    (old / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (old / "tokenizer.json").unlink()
    found = tokenizer_of(old)
    assert found("It is a truth")["input_ids"] == tokenizer_of(llama)("It is a truth")["input_ids"]
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        (old / name).unlink()
    told = ["overrides={}", f"checkpoint={old}", "weights=new"]
    for order in (told, told[::-1]):  # values are judged together
        chosen = recipes.load("gpt-embedded", order)
    with pytest.raises(CableError, match="has no tokenizer"):
        pretraining.load_data(chosen, tmp_path / "run")


def test_half_precision_stays(llama, data, tmp_path):
    half = load_model(llama, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    shutil.copy(llama / "tokenizer.json", tmp_path / "half")
    shutil.copy(llama / "tokenizer_config.json", tmp_path / "half")
    converted(tmp_path / "half", data, tmp_path / "out", tokens=256)
    assert {value.dtype for value in load_file(tmp_path / "out/model.safetensors").values()} == {torch.bfloat16}
