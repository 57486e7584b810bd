"""Texts, tokenizers and windows of tokens."""

from cable_attn.data.corpus import Document, embedded_corpus, hold_out, read_texts
from cable_attn.data.tokens import encode, train_bpe

__all__ = ["Document", "embedded_corpus", "encode", "hold_out", "read_texts", "train_bpe"]
