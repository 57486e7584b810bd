"""GPT-2 with any position encoding, as a native Hugging Face causal language model."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from cable_attn.encodings import Encoding
from cable_attn.layout import Layout
from cable_attn.models.cache import make_layout
from cable_attn.models.layers import EncodedConfig, EncodedModel, FeedForward, SelfAttention


class CableGPTConfig(EncodedConfig):
    """A GPT-2 of any size; ``vocab_size`` is GPT-2's 50257 padded to a multiple of 64."""

    model_type = "cable_gpt"
    keys_to_ignore_at_inference = ["past_key_values"]
    PRESETS = {
        "tiny": {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8},
        "small": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
        "medium": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16},
    }

    use_cache: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        # The defaults are GPT-2's; a smaller vocabulary does not hold them.
        if self.bos_token_id is not None and self.bos_token_id >= self.vocab_size:
            self.bos_token_id = None
        if isinstance(self.eos_token_id, int) and self.eos_token_id >= self.vocab_size:
            self.eos_token_id = None
        super().__post_init__(**kwargs)


class CableGPTBlock(GradientCheckpointingLayer):
    def __init__(self, config: CableGPTConfig, layer: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attn = SelfAttention(config, layer)
        self.ln_2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = FeedForward(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        x: Tensor,
        layout: Layout,
        shared_encoding: Encoding | None = None,
        past_key_values: Cache | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        y, weights = self.attn(self.ln_1(x), layout, shared_encoding, past_key_values, need_weights)
        x = x + self.dropout(y)
        return x + self.dropout(self.mlp(self.ln_2(x))), weights


class CableGPTPreTrainedModel(EncodedModel):
    config: CableGPTConfig
    config_class = CableGPTConfig
    base_model_prefix = "transformer"
    _no_split_modules = ["CableGPTBlock"]
    _skip_keys_device_placement = ["past_key_values"]
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # GPT-2 scales the projections into the residual stream by their number.
        std = self.config.initializer_range / math.sqrt(2 * self.config.num_hidden_layers)
        if isinstance(module, SelfAttention):
            nn.init.normal_(module.out.weight, std=std)
        elif isinstance(module, FeedForward):
            nn.init.normal_(module.down.weight, std=std)


class CableGPTModel(CableGPTPreTrainedModel):
    """The transformer without the language-model head."""

    def __init__(self, config: CableGPTConfig):
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.encoding = config.make_encoding(for_all_layers=True)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.h = nn.ModuleList(CableGPTBlock(config, layer) for layer in range(config.num_hidden_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.wte

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.wte = value  # type: ignore[assignment]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        document_ids: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """attention_mask: [B, Tk], 0 for padding. document_ids: [B, Tk], which document of a pack a token belongs to:
        attention, potential and positions stay inside it."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        output_attentions, output_hidden_states = self.config.wanted_outputs(output_attentions, output_hidden_states)
        x = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training  # in training nothing would ever read it
        if self.gradient_checkpointing and self.training:
            use_cache = False
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        layout = make_layout(
            x,
            causal=True,
            window=self.config.attention_window,
            cache=past_key_values,
            attention_mask=attention_mask,
            position_ids=position_ids,
            document_ids=document_ids,
        )
        if self.encoding is not None:
            x = self.encoding.embed(x, layout)
        x = self.dropout(x)
        hidden_states, attentions = [], []
        for block in self.h:
            if output_hidden_states:  # those of a long text are large, and go when nobody wants them
                hidden_states.append(x)
            x, weights = block(
                x, layout, self.encoding, past_key_values=past_key_values, need_weights=bool(output_attentions)
            )
            attentions.append(weights)
        x = self.ln_f(x)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=(*hidden_states, x) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
        )


class CableGPTForCausalLM(CableGPTPreTrainedModel, GenerationMixin):
    """Next-token prediction; the output matrix is the embedding matrix."""

    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}

    def __init__(self, config: CableGPTConfig):
        super().__init__(config)
        self.transformer = CableGPTModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        loss_only: bool = False,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """labels: [B, T], shifted inside, −100 is ignored. loss_only: no logits in the output, which nobody can then
        keep or copy; in training they are the largest tensor. The other arguments are those of :class:`CableGPTModel`.
        """
        outputs = self.transformer(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            document_ids=document_ids,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=None if loss_only else logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    @staticmethod
    def create_masks_for_generate(
        config: CableGPTConfig, attention_mask: Tensor | None, past_key_values: Cache, **kwargs: Any
    ) -> Tensor | None:
        """Called by ``generate`` for a static cache: the 2-D mask, at the cache's size so that graphs are reused."""
        if attention_mask is None:
            return None
        missing = past_key_values.get_mask_sizes(0, 0)[0] - attention_mask.shape[1]
        return nn.functional.pad(attention_mask, (0, max(missing, 0)))
