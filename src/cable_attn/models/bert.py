"""BERT with any position encoding, as a native Hugging Face encoder and masked language model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput
from transformers.utils.generic import can_return_tuple

from cable_attn.encodings import Encoding
from cable_attn.layout import Layout
from cable_attn.models.cache import make_layout
from cable_attn.models.layers import EncodedConfig, EncodedModel, FeedForward, SelfAttention


class CableBertConfig(EncodedConfig):
    """bert-base-uncased by default, trained without next-sentence prediction, so there is no pooler."""

    model_type = "cable_bert"
    is_causal = False
    PRESETS = {
        "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
    }

    vocab_size: int = 30522
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    hidden_dropout: float | int = 0.1
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0


class CableBertBlock(GradientCheckpointingLayer):
    def __init__(self, config: CableBertConfig, layer: int):
        super().__init__()
        self.attn = SelfAttention(config, layer)
        self.ln_1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = FeedForward(config)
        self.ln_2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self, x: Tensor, layout: Layout, shared_encoding: Encoding | None = None, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        y, weights = self.attn(x, layout, shared_encoding, need_weights=need_weights)
        x = self.ln_1(x + self.dropout(y))
        return self.ln_2(x + self.dropout(self.mlp(x))), weights


class CableBertPreTrainedModel(EncodedModel):
    config: CableBertConfig
    config_class = CableBertConfig
    base_model_prefix = "bert"
    _no_split_modules = ["CableBertBlock"]


class CableBertModel(CableBertPreTrainedModel):
    """The encoder: token and segment embeddings, then post-norm transformer layers."""

    def __init__(self, config: CableBertConfig):
        super().__init__(config)
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.encoding = config.make_encoding(for_all_layers=True)
        self.ln = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList(CableBertBlock(config, layer) for layer in range(config.num_hidden_layers))
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.word_embeddings = value  # type: ignore[assignment]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        document_ids: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """attention_mask: [B, T], 0 for padding. document_ids: [B, T], which document of a pack a token is in."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        output_attentions, output_hidden_states = self.config.wanted_outputs(output_attentions, output_hidden_states)
        x = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if token_type_ids is None:
            token_type_ids = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
        x = x + self.type_embeddings(token_type_ids)
        layout = make_layout(
            x,
            causal=False,
            window=self.config.attention_window,
            attention_mask=attention_mask,
            position_ids=position_ids,
            document_ids=document_ids,
        )
        if self.encoding is not None:
            x = self.encoding.embed(x, layout)
        x = self.dropout(self.ln(x))
        hidden_states, attentions = [], []
        for layer in self.layers:
            if output_hidden_states:
                hidden_states.append(x)
            x, weights = layer(x, layout, self.encoding, need_weights=bool(output_attentions))
            attentions.append(weights)
        return BaseModelOutput(
            last_hidden_state=x,
            hidden_states=(*hidden_states, x) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
        )


class CableBertHead(nn.Module):
    """From hidden states to logits; the output matrix is the embedding matrix."""

    def __init__(self, config: CableBertConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.act = ACT2FN[config.hidden_act]
        self.ln = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.ln(self.act(self.dense(x))))


class CableBertForMaskedLM(CableBertPreTrainedModel):
    """Masked-token prediction."""

    _tied_weights_keys = {"head.decoder.weight": "bert.word_embeddings.weight"}

    def __init__(self, config: CableBertConfig):
        super().__init__(config)
        self.bert = CableBertModel(config)
        self.head = CableBertHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.head.decoder = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        loss_only: bool = False,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """labels: [B, T], −100 where nothing was masked. loss_only: no logits in the output, so that only those of
        masked words are computed. The other arguments are those of :class:`CableBertModel`.
        """
        outputs = self.bert(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            document_ids=document_ids,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        hidden = outputs.last_hidden_state
        if loss_only and labels is not None:
            hidden, labels = hidden[labels != -100], labels[labels != -100]
        logits = self.head(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(
            loss=loss,
            logits=None if loss_only else logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
