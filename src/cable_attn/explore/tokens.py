"""A text as a model reads it: its tokens, what each looks like on the page, and what kind of token it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cable_attn.data.tokens import separator_of
from cable_attn.errors import CableError

KINDS = (
    "line break",
    "space",
    "punctuation",
    "number",
    "function word",
    "capitalised",
    "other word",
    "inside a word",
    "special",
)
"""In the order in which a token is asked; each token is of exactly one kind."""

_GRAMMAR = """
    a about above after again against all also although am an and any are as at be because been before being below
    between both but by can cannot could did do does down during each either else ever every few for from had has have
    he her here hers herself him himself his how i if in into is it its itself just may me might mine more most much
    must my myself neither no nor not now of off on once one only or other ought our ours out over own shall she should
    since so some such than that the their theirs them themselves then there these they this those though through thus
    till to too under until up upon us very was we were what when where whether which while who whom whose why will
    with within without would yet you your yours yourself
"""
FUNCTION_WORDS = frozenset(_GRAMMAR.split())
"""English words that carry grammar rather than content."""


@dataclass(frozen=True)
class Tokenised:
    """The tokens of a text. The pieces, joined, are the text, after the token that stands before it."""

    ids: torch.Tensor  # [T], int64
    pieces: list[str]
    kinds: list[int]
    """Indices into :data:`KINDS`."""
    of: int
    """How many tokens the whole text has."""


def tokenise(tokenizer: Any, text: str, most: int) -> Tokenised:
    """At most the first ``most`` tokens of the text, after what stands before a document, if anything does."""
    if not getattr(tokenizer, "is_fast", False):
        raise CableError("the checkpoint's tokenizer has no offsets. Save it as a fast tokenizer (tokenizer.json).")
    read = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, ends = list(read["input_ids"]), [end for _, end in read["offset_mapping"]]
    if not ids:
        raise CableError("the text has no token. Give a file with text.")
    pieces = [text[start:end] for start, end in zip([0, *ends], ends)]
    kinds = [kind(pieces, n) for n in range(len(pieces))]
    separator = separator_of(tokenizer)
    if separator is not None:
        ids, pieces = [separator, *ids], [tokenizer.convert_ids_to_tokens(separator), *pieces]
        kinds = [KINDS.index("special"), *kinds]
    return Tokenised(torch.tensor(ids[:most]), pieces[:most], kinds[:most], len(ids))


def kind(pieces: list[str], n: int) -> int:
    """What kind the n-th piece is. A word counts as a function word only if it is whole, and first of all as that."""
    bare = pieces[n].strip()
    if not pieces[n]:  # one of several tokens that make up a letter
        return KINDS.index("inside a word")
    if not bare:
        return KINDS.index("line break" if "\n" in pieces[n] else "space")
    if not any(letter.isalnum() for letter in bare):
        return KINDS.index("punctuation")
    if not any(letter.isalpha() for letter in bare):
        return KINDS.index("number")
    if not (pieces[n][0].isspace() or n == 0 or not pieces[n - 1][-1:].isalpha()):
        return KINDS.index("inside a word")
    is_whole = n + 1 == len(pieces) or not pieces[n + 1][:1].isalpha()
    if is_whole and bare.lower() in FUNCTION_WORDS:
        return KINDS.index("function word")
    return KINDS.index("capitalised" if bare[0].isupper() else "other word")
