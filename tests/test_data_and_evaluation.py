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
from cable_attn.data import Document, embedded_corpus, encode, hold_out, read_texts, train_bpe
from cable_attn.evaluation import (
    HeldOut,
    Tally,
    comparable,
    drawn_anew,
    evaluate,
    from_texts,
    measure,
    output_head,
    perplexity_over,
    windows,
)

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
    with pytest.raises(CableError, match="at least 258 entries, got vocab_size=100"):
        train_bpe(documents, 100)


def test_documents_are_separated():
    documents = [Document("a", "one one"), Document("b", "two")]
    tokenizer = train_bpe(documents, 260)
    ids = encode(documents, tokenizer)
    assert tokenizer.decode(ids) == "<|endoftext|>one one<|endoftext|>two"
    tokenizer.bos_token = None  # as many are: what ends a text stands before one as well
    assert tokenizer.decode(encode(documents, tokenizer)) == "<|endoftext|>one one<|endoftext|>two"


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


def perplexity(model, tokens: np.ndarray, length: int, batch_tokens: int = 4096) -> float:
    held_out = HeldOut(tokens, np.zeros(1, np.int64), "tokens", "")
    return math.exp(measure(model, held_out, length, batch_tokens=batch_tokens).loss)


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


@pytest.fixture(scope="module")
def gpt2():
    return stir(GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=64, n_embd=32, n_layer=2, n_head=4))).eval()


def held_out(tokens, starts=(0,)):
    return HeldOut(np.asarray(tokens), np.asarray(starts), "made up", "")


@given(st.integers(2, 40), st.integers(1, 12), st.data())
def test_sliding_windows_predict_each_target_once_by_the_first_window_that_reaches_it(tokens, length, data):
    length = min(length, tokens - 1)
    stride = data.draw(st.integers(1, length))
    seen = {}
    for start, first in windows(tokens, length, stride):
        assert start >= 0 and start + length < tokens
        for place in range(first, length):
            assert start + place + 1 not in seen
            seen[start + place + 1] = start
    assert sorted(seen) == list(range(1, tokens))
    for target, start in seen.items():
        on_the_grid = -(-max(target - length, 0) // stride) * stride
        assert start == min(on_the_grid, tokens - 1 - length)


def test_a_sliding_window_equals_its_definition(gpt2):
    """Each target alone, from the tokens of the window that predicts it."""
    tokens = np.random.default_rng(0).integers(0, 97, 61)
    [row] = evaluate(gpt2, held_out(tokens), [20], stride=7)
    total = 0.0
    for target in range(1, 61):
        start = min(-(-max(target - 20, 0) // 7) * 7, 60 - 20)
        with torch.no_grad():
            logits = gpt2(torch.from_numpy(tokens[start:target])[None]).logits[0, -1].double()
        total -= logits.log_softmax(-1)[tokens[target]].item()
    assert row["tokens"] == 60 and row["loss"] == pytest.approx(total / 60, rel=1e-5)


def test_a_sliding_window_tells_only_the_places_that_count():
    tally = Tally(held_out(np.arange(9)), 4)
    tally.add(np.array([1.0, 2.0, 3.0, 4.0]), 0, 0)
    tally.add(np.array([9.0, 9.0, 5.0, 6.0]), 2, 2)
    assert tally.place_sums.tolist() == [1.0, 2.0, 8.0, 10.0] and tally.loss == 21 / 6


def test_the_worst_perplexity_is_infinite():
    assert evaluation_module.perplexity(1000.0) == math.inf


def test_losses_by_document_and_place(gpt2):
    """Against plain sums; documents that differ give an interval around the perplexity."""
    tokens = np.random.default_rng(1).integers(0, 97, 41)
    starts = [0, 11, 25]
    tally = measure(gpt2, held_out(tokens, starts), 8)
    with torch.no_grad():
        logits = gpt2(torch.from_numpy(tokens[:40]).view(5, 8)).logits.double().flatten(0, 1)
    losses = -logits.log_softmax(-1)[torch.arange(40), torch.from_numpy(tokens[1:])].numpy()
    assert np.allclose(tally.place_sums, losses.reshape(5, 8).sum(0), rtol=1e-5)
    documents = np.searchsorted(starts, np.arange(1, 41), side="right") - 1
    assert np.allclose(tally.sums, [losses[documents == n].sum() for n in range(3)], rtol=1e-5)
    assert tally.counts.tolist() == [10, 14, 16]
    low, high = tally.interval()
    assert low < math.exp(losses.mean()) < high
    assert drawn_anew(np.array([10.0, 60.0]), np.array([10, 20])) == pytest.approx((math.e, math.exp(3)))
    assert measure(gpt2, held_out(tokens), 8).interval() is None
    assert tally.by_place()[-1] == (8, pytest.approx(losses.reshape(5, 8)[:, 7].mean()))
    assert [count for count, _ in tally.by_document()] == [10, 14, 16]
    assert [loss for _, loss in tally.by_document()] == pytest.approx(tally.sums / tally.counts)


def test_two_models_are_compared_on_the_same_documents():
    """Documents that are hard for both do not blur how much better one is."""
    hard = [(100, 1.0), (300, 3.0), (200, 6.0), (100, 2.0)]
    ours, theirs = ([(n, loss + gap) for n, loss in hard] for gap in (0.0, math.log(1.1)))
    assert perplexity_over([theirs], [ours]) == pytest.approx((1.1, 1.1, 1.1))
    uneven = [(n, loss + (0.1 if loss > 2 else 0.3)) for n, loss in hard]
    ratio, low, high = perplexity_over([uneven, ours], [ours, ours])
    assert ratio == pytest.approx(math.exp((500 * 0.1 + 200 * 0.3) / 700 / 2)) and low < ratio < high
    assert (low, high) == pytest.approx((math.exp(0.05), math.exp(0.15)), rel=0.02)


def test_bits_per_byte_do_not_depend_on_the_tokenizer():
    """A uniform model over V tokens needs log2 V bits for each token's bytes."""
    documents = [Document("a", "Ünïcödé and plain words, ever again. " * 20)]
    for vocabulary in (260, 300):
        tokenizer = train_bpe(documents, vocabulary)
        model = CableGPTForCausalLM(small_gpt(vocab_size=vocabulary))
        with torch.no_grad():
            model.transformer.wte.weight.zero_()
        text = from_texts(documents, tokenizer, "a")
        [row] = evaluate(model, text.first(65), [64])
        size = len(tokenizer.decode(text.tokens[1:65]).encode())
        assert row["bits_per_byte"] == pytest.approx(math.log2(vocabulary) * 64 / size, rel=1e-5)


def test_logits_that_are_more_than_a_product_are_taken_whole(gpt2, monkeypatch):
    """A model that scales its logits after the head, as some do."""
    tokens = np.random.default_rng(0).integers(0, 97, 41)
    plain = perplexity(gpt2, tokens, 20)
    assert output_head(gpt2) is gpt2.lm_head
    forward = type(gpt2).forward

    def scaled(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        out.logits = out.logits * 0.0
        return out

    monkeypatch.setattr(type(gpt2), "forward", scaled)
    assert output_head(gpt2) is None
    assert perplexity(gpt2, tokens, 20) == pytest.approx(97, rel=1e-5) != plain


def test_a_length_that_cannot_be_read_is_told():
    model = CableGPTForCausalLM(small_gpt("learnable", max_position_embeddings=16))
    short, long = evaluate(model, held_out(np.arange(97)), [16, 32])
    assert short["perplexity"] > 1 and "16" in long["error"] and "perplexity" not in long


def test_a_table_of_positions_of_another_model_ends_with_a_message(gpt2):
    tokens = np.random.default_rng(0).integers(0, 97, 200)
    short, long = evaluate(gpt2, held_out(tokens), [64, 128])
    assert short["perplexity"] > 1 and "64 learned positions, 128 tokens" in long["error"]


def test_strides_and_equal_targets(gpt2):
    tokens = np.random.default_rng(0).integers(0, 97, 100)
    rows = evaluate(gpt2, held_out(tokens), [8, 12], same_tokens=True)
    assert [row["tokens"] for row in rows] == [96, 96]
    with pytest.raises(CableError, match="stride must lie between 1 and the shortest length, 8, got 9"):
        evaluate(gpt2, held_out(tokens), [8, 12], stride=9)


def test_beginnings_hold_one_document_each():
    starts = np.array([0, 5, 17, 20])  # of 5, 12, 3 and 10 tokens
    text = HeldOut(np.arange(30), starts, "tokens", "")
    cut = text.beginnings(8)
    assert cut.tokens.tolist() == [*range(5, 13), *range(20, 28), 28] and cut.document_starts.tolist() == [0, 8]
    assert [cut.documents(np.array([start + 1, start + 7])).tolist() for start, _ in windows(17, 8)] == [[0, 0], [1, 1]]
    assert text.beginnings(10).tokens.tolist() == [*range(5, 15), *range(20, 30), 5]  # a target for the last one
    with pytest.raises(CableError, match="no document of tokens has 13 tokens"):
        text.beginnings(13)


def test_losses_by_place_are_finer_where_the_text_begins():
    tally = Tally(HeldOut(np.arange(4097), np.zeros(1, np.int64), "tokens", ""), 4096)
    tally.add(np.arange(4096, dtype=np.float32), 0, 0)
    places = tally.by_place()
    assert places[0] == (4, 1.5) and places[-1][0] == 4096 and 50 <= len(places) <= 64
    assert all(b - a <= d - c for (a, _), (b, _), (c, _), (d, _) in zip(*(places[n:] for n in range(20, 24))))


def test_every_length_predicts_the_same_tokens():
    tokens = np.arange(1000)
    assert len(comparable(tokens, [8, 32, 64])) == 960 + 1
    with pytest.raises(CableError, match=r"from 1024 on, and need one more; the held-out text has 1000\. Choose"):
        comparable(tokens, [512, 1024])
