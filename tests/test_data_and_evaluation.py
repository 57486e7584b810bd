"""From text to perplexity, checked against independent counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from cable_attn import CableError, CableGPTForCausalLM
from cable_attn import evaluation as evaluation_module
from cable_attn.data import Document, Windows, embedded_corpus, encode, hold_out, read_texts, train_bpe
from cable_attn.evaluation import comparable, perplexity

from .conftest import small_gpt, stir


def test_the_embedded_corpus_is_split_by_whole_novels():
    novels = {split: embedded_corpus(split) for split in ("train", "validation", "test")}
    assert [document.name for document in novels["validation"]] == ["persuasion"]
    assert [document.name for document in novels["test"]] == ["northangerabbey"]
    assert len(novels["train"]) == 4
    assert sum(len(d.text) for split in novels.values() for d in split) > 4_000_000
    assert "A NOTE ON THE TEXT" not in novels["test"][0].text
    with pytest.raises(CableError, match="Did you mean 'train'"):
        embedded_corpus("trian")


def test_the_tokenizer_is_lossless_and_deterministic():
    documents = [Document("a", "Ünïcödé, tabs\t and\n\nlines. " * 30)]
    tokenizer = train_bpe(documents, 300)
    assert tokenizer.decode(tokenizer.encode(documents[0].text)) == documents[0].text
    again = train_bpe(documents, 300)
    assert again.get_vocab() == tokenizer.get_vocab()
    with pytest.raises(CableError, match="at least 257 entries, got vocab_size=100"):
        train_bpe(documents, 100)


def test_documents_are_separated():
    documents = [Document("a", "one one"), Document("b", "two")]
    tokenizer = train_bpe(documents, 260)
    ids = encode(documents, tokenizer)
    assert tokenizer.decode(ids) == "<|endoftext|>one one<|endoftext|>two"


def test_windows_cover_each_token_once():
    windows = Windows(np.arange(23), 5)
    rows = torch.stack([windows[n]["input_ids"] for n in range(len(windows))])
    assert rows.flatten().tolist() == list(range(20))
    with pytest.raises(CableError, match="23 tokens, fewer than one window of 24"):
        Windows(np.arange(23), 24)


def test_reading_texts(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.md").write_text("no")
    assert [document.text for document in read_texts(tmp_path)] == ["first", "second"]
    assert [document.text for document in read_texts(tmp_path / "b.txt")] == ["second"]


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "no such file"), (b"", "is empty"), (b" \n", "is empty"), (b"abc\xff", "is not UTF-8 (byte 3)")],
)
def test_bad_texts_are_named(content, words, tmp_path):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CableError) as error:
        read_texts(path)
    assert words in str(error.value) and "text.txt" in str(error.value)


def test_a_folder_without_text_is_named(tmp_path):
    with pytest.raises(CableError, match=r"has no \.txt file with text"):
        read_texts(tmp_path)


@given(st.integers(1, 30))
def test_hold_out_loses_and_repeats_nothing(count):
    documents = [Document(str(n), "word " * 20) for n in range(count)]
    kept, held_out = hold_out(documents)
    assert kept and held_out
    assert "".join(d.text for d in kept + held_out) == "".join(d.text for d in documents)


def test_a_uniform_model_has_the_vocabulary_as_perplexity():
    model = CableGPTForCausalLM(small_gpt())
    with torch.no_grad():
        model.transformer.wte.weight.zero_()
    tokens = np.random.default_rng(0).integers(0, 97, 200)
    for length in (1, 7, 64):
        assert perplexity(model, tokens, length) == pytest.approx(97, rel=1e-5)


@pytest.mark.parametrize("logits", [2**26, 97 * 10])
def test_perplexity_equals_a_plain_loop(logits, monkeypatch):
    """On a GPT-2 of transformers, window by window; with the logits of a batch at once, and ten rows at a time."""
    monkeypatch.setattr(evaluation_module, "LOGIT_ELEMENTS", logits)
    model = stir(GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=4))).eval()
    tokens = np.random.default_rng(0).integers(0, 97, 101)
    total = 0.0
    for start in range(0, 100, 20):
        window = torch.from_numpy(tokens[start : start + 21])
        with torch.no_grad():
            p = model(window[None, :-1]).logits[0].double().softmax(-1)
        total += -p[torch.arange(20), window[1:]].log().sum().item()
    assert perplexity(model, tokens, 20, batch_tokens=40) == pytest.approx(math.exp(total / 100), rel=1e-5)


def test_every_length_predicts_the_same_tokens():
    tokens = np.arange(1000)
    assert len(comparable(tokens, [8, 32, 64])) == 960 + 1
    assert len(comparable(tokens, [8, 32, 64], limit=200)) == 192 + 1
    assert len(comparable(tokens, [8, 32, 64], limit=5)) == 64 + 1
    with pytest.raises(CableError, match="held-out text has 1000 tokens, fewer than one window of 1025"):
        comparable(tokens, [512, 1024])
