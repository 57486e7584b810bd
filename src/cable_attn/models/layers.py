"""What GPT and BERT share: attention with an encoding, the feed-forward part, and the fields that describe them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache

from cable_attn.attention import BACKENDS, attend, attention_weights, make_call
from cable_attn.attention.call import Call
from cable_attn.devices import kernels_run_on
from cable_attn.encodings import ENCODINGS, Encoding, Geometry, find_encoding
from cable_attn.encodings.base import PotentialEncoding
from cable_attn.errors import CableError, require_known, unknown
from cable_attn.layout import Layout
from cable_attn.models.cache import CachedPotential, cached_summaries, drop_summaries
from cable_attn.models.forgetting import ForgettingCache

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
SIZES_OR_NONE = ("num_key_value_heads", "intermediate_size", "attention_window")


class EncodedConfig(PreTrainedConfig):
    """The fields that GPT and BERT share.

    encoding: a name in ``ENCODINGS``; encoding_options: its options, see ``cable encodings``.
    attention_backend: ``auto`` or one of ``BACKENDS``. attention_window: a sliding window in all layers.
    qk_norm: queries and keys are normalised (RMS, with a learned weight), which bounds the scores.
    attention_prune: ε, permission to skip, outside training, keys that provably carry less than ε of a row's weight.
    """

    is_causal = True
    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {}

    vocab_size: int = 50304
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    max_position_embeddings: int = 1024
    encoding: str = "cable"
    encoding_options: dict | None = None
    attention_backend: str = "auto"
    attention_window: int | None = None
    attention_prune: float | None = None
    qk_norm: bool = False
    attention_dropout: float | int = 0.0
    hidden_dropout: float | int = 0.0
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        self.check()
        super().__post_init__(**kwargs)

    def check(self) -> None:
        """Raise an error that names the first field that does not fit."""
        for name in (*SIZES, *SIZES_OR_NONE):
            value = getattr(self, name)
            if value is None and name in SIZES_OR_NONE:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise CableError(f"{name} must be a whole number of at least 1, got {value!r}.")
        for name in ("attention_dropout", "hidden_dropout", "layer_norm_eps", "initializer_range"):
            if not isinstance(getattr(self, name), float | int) or not 0 <= getattr(self, name) <= 1:
                raise CableError(f"{name} must lie between 0 and 1, got {getattr(self, name)!r}.")
        for name in ("qk_norm", "tie_word_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise CableError(f"{name} must be true or false, got {getattr(self, name)!r}.")
        prune = self.attention_prune
        if prune is not None and not (isinstance(prune, float | int) and 0 < prune < 1):
            raise CableError(f"attention_prune must lie between 0 and 1, got {prune!r}.")
        if self.hidden_size % self.num_attention_heads:
            divisors = [str(n) for n in range(1, 65) if self.hidden_size % n == 0]
            raise CableError(
                f"num_attention_heads={self.num_attention_heads} does not divide hidden_size={self.hidden_size}. "
                f"These do: {', '.join(divisors)}."
            )
        if self.num_attention_heads % self.key_heads:
            raise CableError(
                f"num_key_value_heads={self.num_key_value_heads} does not divide "
                f"num_attention_heads={self.num_attention_heads}."
            )
        require_known("hidden_act", self.hidden_act, ACT2FN)
        require_known("attention backend", self.attention_backend, ["auto", *BACKENDS])
        encoding = find_encoding(self.encoding, self.options, causal=self.is_causal)
        if self.attention_prune is not None and not encoding.prunable:
            names = ", ".join(name for name, known in ENCODINGS.items() if known.prunable)
            raise CableError(
                f"attention_prune={self.attention_prune} with the encoding {self.encoding!r}: nothing that lies far "
                f"away is provably negligible there. Leave it out, or use one of {names}."
            )

    def wanted_outputs(self, attentions: bool | None, hidden_states: bool | None) -> tuple[bool, bool]:
        """What a call asks for, or else the config."""
        return (
            bool(self.output_attentions if attentions is None else attentions),
            bool(self.output_hidden_states if hidden_states is None else hidden_states),
        )

    @property
    def key_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def feed_forward_size(self) -> int:
        return self.intermediate_size or 4 * self.hidden_size

    @property
    def options(self) -> dict[str, Any]:
        return self.encoding_options or {}

    @classmethod
    def preset(cls, name: str, **overrides: Any):  # type: ignore[no-untyped-def]
        """A known size, with any field set otherwise: ``preset("tiny", encoding="alibi", vocab_size=2048)``."""
        require_known("preset", name, cls.PRESETS)
        allowed = [f.name for f in fields(cls)]
        for key in overrides:
            if key not in allowed:
                raise unknown(f"field of {cls.__name__}", key, allowed)
        return cls(**{**cls.PRESETS[name], **overrides})

    @property
    def geometry(self) -> Geometry:
        return Geometry(
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            head_dim=self.hidden_size // self.num_attention_heads,
            max_length=self.max_position_embeddings,
            causal=self.is_causal,
        )

    def make_encoding(self, *, for_all_layers: bool) -> Encoding | None:
        """The encoding for its place: the model's own instance, or a layer's; ``None`` at the other place."""
        encoding = find_encoding(self.encoding, self.options, causal=self.is_causal)
        if encoding.serves_all_layers(self.options) != for_all_layers:
            return None
        return encoding(self.geometry, **self.options)


class SelfAttention(nn.Module):
    """Queries, keys and values from one projection; position from the layer's encoding or the model's."""

    def __init__(self, config: EncodedConfig, layer: int):
        super().__init__()
        self.config, self.layer = config, layer
        self.heads, self.key_heads = config.num_attention_heads, config.key_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, (self.heads + 2 * self.key_heads) * self.head_dim)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)
        self.norms: nn.ModuleList | None = None
        if config.qk_norm:
            self.norms = nn.ModuleList(nn.RMSNorm(self.head_dim, eps=config.layer_norm_eps) for _ in ("q", "k"))
        self.encoding = config.make_encoding(for_all_layers=False)

    def forward(
        self,
        x: Tensor,
        layout: Layout,
        shared_encoding: Encoding | None = None,
        cache: Cache | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """x [B, Tq, C] → the same, and the attention weights [B, H, Tq, Tk] if they are wanted."""
        call = self.call(x, layout, shared_encoding, cache)
        y = attend(call, self.config.attention_backend)
        weights = attention_weights(call, range(call.q.shape[2])) if need_weights else None
        return self.out(y.transpose(1, 2).flatten(2)), weights

    def call(
        self, x: Tensor, layout: Layout, shared_encoding: Encoding | None = None, cache: Cache | None = None
    ) -> Call:
        """What this layer asks of attention."""
        encoding = self.encoding if self.encoding is not None else shared_encoding
        assert encoding is not None
        layout = layout.to(x.device)
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.key_heads, self.key_heads], dim=1)
        if self.norms is not None:
            q, k = (norm(x.to(norm.weight.dtype)).to(v.dtype) for norm, x in zip(self.norms, (q, k)))
        q, k = encoding.rotate(q, k, layout)
        memory, prune, summaries = None, None if self.training else self.config.attention_prune, None
        if cache is not None:
            if isinstance(cache, ForgettingCache):
                cache.forget(self.layer)
            k, v = cache.update(k, v, self.layer)
            layout = layout.of_last_keys(k.shape[2])
            memory = CachedPotential(cache, self.layer, self.config.num_hidden_layers)
        dropout = self.config.attention_dropout if self.training else 0.0
        untouched = self.norms is None and type(encoding).rotate is Encoding.rotate
        together = qkv if cache is None and untouched else None
        bias = encoding(x, layout, memory)
        if memory is not None and encoding.prunable and kernels_run_on(k.device) and not memory.cache.offloading:
            behind = isinstance(encoding, PotentialEncoding)
            if prune is not None:
                summaries = cached_summaries(memory, k, layout, behind)
            else:
                drop_summaries(memory, behind)
        return make_call(
            q,
            k,
            v,
            bias,
            layout,
            dropout=dropout,
            mix=encoding.mix,
            prune=prune,
            together=together,
            summaries=summaries,
        )


class FeedForward(nn.Module):
    def __init__(self, config: EncodedConfig):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.feed_forward_size)
        self.act = ACT2FN[config.hidden_act]
        self.down = nn.Linear(config.feed_forward_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class EncodedModel(PreTrainedModel):
    """Initialises encodings, which know how they start."""

    supports_gradient_checkpointing = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Encoding):
            module.reset_parameters()

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # Outside its own models transformers passes over modules whose parameters all belong to children, as those of
        # encodings and attention do. It need not: everything here respects what has been loaded already.
        super()._initialize_weights(module, is_custom_code=False)


def encoding_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Those of an encoding within another come twice."""
    for module in model.modules():
        if isinstance(module, Encoding):
            yield from module.parameters()


def undecayed_by_encodings(model: nn.Module) -> Iterator[str]:
    """The names of matrices that their encoding wants free of weight decay."""
    for name, module in model.named_modules():
        if isinstance(module, Encoding):
            yield from (f"{name}.{parameter}" for parameter in module.no_weight_decay)
