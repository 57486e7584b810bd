"""Texts with a passkey or a needle: how they are made, taught and counted."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch

from cable_attn import CableGPTForCausalLM, passkey
from cable_attn.data import Document, embedded_corpus, train_bpe
from cable_attn.errors import CableError

from .conftest import small_gpt


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe([Document("a", embedded_corpus("test")[0].text[:200_000])], 400)


@pytest.mark.parametrize("form", list(passkey.FORMS))
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_passkey_text_has_its_length_fact_and_answer(tokenizer, form, depth):
    task = passkey.Task(tokenizer, form)
    filler = np.full(50, tokenizer.encode("x")[0])
    sample = task.make(filler, 200, depth, np.random.default_rng(0))
    assert len(sample.tokens) == 200
    answer = tokenizer.decode(sample.tokens[-sample.answer :]).strip()
    body = tokenizer.decode(sample.tokens[: -sample.answer])
    assert answer in body and body.endswith(task.form.question)
    place = body.index("The ") / len(body)
    assert place < 0.05 if depth == 0 else place > depth / 2
    other = task.make(filler, 200, depth, np.random.default_rng(1))
    assert not np.array_equal(other.tokens, sample.tokens)


def test_a_length_that_cannot_be_read_has_a_row_that_says_so(tokenizer):
    model = CableGPTForCausalLM(small_gpt("learnable", vocab_size=400, max_position_embeddings=96))
    rows = passkey.measure(model, passkey.Task(tokenizer), np.arange(300), [10, 95, 128], [0.5], samples=1)
    assert "needs at least" in rows[0]["error"] and rows[1]["samples"] == 1 and "96" in rows[2]["error"]


def test_a_taught_window_has_one_text_or_several_each_with_its_own_answer(tokenizer):
    """Which is asked for once or several times, behind the fact."""
    task, counts, times = passkey.Task(tokenizer), set(), set()
    filler = np.asarray(tokenizer("and so on " * 2000)["input_ids"])[:1024]
    for seed in range(40):
        window = task.teach(filler, np.random.default_rng(seed))
        text = tokenizer.decode(window)
        told = re.findall(r"The pass key is (\d{5})\. Remember it\. (\d{5}) is", text)
        asked = re.findall(r"The pass key is (\d{5})\. Remember|What is the pass key\? The pass key is (\d{5})", text)
        runs = {key: len(list(run)) - 1 for key, run in itertools.groupby(one or other for one, other in asked)}
        assert len(window) == len(filler) and [a for a, b in told if a == b] == list(runs)
        counts.add(len(runs))
        times |= set(runs.values())
    assert times == {1, 2, 4, passkey.MOST_ASKED}
    assert counts == {1, 2, 4, 8} or counts == {1, 2, 4}  # by the tokens that its words have


def test_a_passkey_text_that_does_not_fit_is_refused(tokenizer):
    with pytest.raises(CableError, match="needs at least"):
        passkey.Task(tokenizer).make(np.arange(5), 10, 0.5, np.random.default_rng(0))
    with pytest.raises(CableError, match="--tokenizer"):
        passkey.Task(None)


def test_an_answer_counts_only_if_every_token_is_the_likeliest(tokenizer):
    """A model that always says the same token finds an answer only if it consists of it."""
    model = CableGPTForCausalLM(small_gpt(vocab_size=400))
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.fill_(1.0)
        model.transformer.wte.weight.zero_()
        model.transformer.wte.weight[7] = 1.0
    head = passkey.output_head(model)
    assert passkey._is_found(model, head, passkey.Sample(np.array([1, 2, 7, 7]), 2))
    assert not passkey._is_found(model, head, passkey.Sample(np.array([1, 2, 8, 7]), 2))
    rows = passkey.measure(model, passkey.Task(tokenizer), np.arange(300), [90], [0.5], samples=2)
    assert rows == [{"length": 90, "depth": 0.5, "accuracy": 0.0, "samples": 2}]
