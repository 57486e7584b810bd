"""CABLE in people's own Hugging Face models: ``add_cable(model)``, and ``remove_cable(model)`` to have it as it was.

The model's classes stay as they are. Each attention layer gets an encoding as a sub-module, whose bias is computed by a
hook from what the layer reads; attention itself goes through transformers' attention interface, under the name
``cable``. The old positions are switched off by hooks on the modules that make them. The config remembers it all
(``config.cable``), so that ``from_pretrained`` builds the same model wherever cable_attn has been imported.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import StaticLayer

from cable_attn.attention import BACKENDS, attend, attention_weights, make_call
from cable_attn.blocks import find_bias_encoding
from cable_attn.encodings import Encoding, Geometry, PotentialEncoding
from cable_attn.errors import CableError, require_known
from cable_attn.layout import Layout
from cable_attn.models.cache import CachedPotential, key_mask

NAME = "cable"
LEARNED = ("cable", "cable-nw", "k-cable")
NEUTRAL_STEP = 1e-6
"""So small that a model with its own positions says what it said, and above 0, so that gradients come through."""


@dataclass(frozen=True)
class Family:
    """Where a kind of model has its attention, and where its positions come from."""

    attention: str
    positions: str
    """The name of the modules: a rotary embedding, or an embedding of places."""


FAMILIES = {
    "llama": Family("LlamaAttention", "rotary_emb"),
    "qwen3": Family("Qwen3Attention", "rotary_emb"),
    "mistral": Family("MistralAttention", "rotary_emb"),
    "gemma": Family("GemmaAttention", "rotary_emb"),
    "gemma3_text": Family("Gemma3Attention", "rotary_emb"),
    "olmo2": Family("Olmo2Attention", "rotary_emb"),
    "gpt2": Family("GPT2Attention", "wpe"),
    "gpt_neox": Family("GPTNeoXAttention", "rotary_emb"),
    "phi": Family("PhiAttention", "rotary_emb"),
    "bert": Family("BertSelfAttention", "position_embeddings"),
    "roberta": Family("RobertaSelfAttention", "position_embeddings"),
    "modernbert": Family("ModernBertAttention", "rotary_emb"),
}


def add_cable(
    model: PreTrainedModel,
    encoding: str = "cable",
    *,
    keep_positions: bool = False,
    backend: str = "auto",
    **options: Any,
) -> PreTrainedModel:
    """Give every attention layer of the model this encoding; the same model, changed.

    It replaces the model's own positions (RoPE, learned ones), starting close to ALiBi's slopes; with keep_positions it
    is added to them, and starts so that the model says what it said before. options: the encoding's own.
    """
    _require_model(model, "add_cable")
    if getattr(model.config, NAME, None) is not None or _encodings(model):
        raise CableError("this model has an encoding already. remove_cable(model) takes it out.")
    family = _family(model)
    require_known("attention backend", backend, ["auto", *BACKENDS])
    layers = _layers(model, family)
    find_bias_encoding(encoding, options, _is_causal(layers[0]))
    if options.get("shared"):
        raise CableError("shared=True is for the models of this package: here each layer has an encoding of its own.")
    if any(_is_offloaded(layer) for layer in layers):
        raise CableError(
            "some layers of this model are offloaded. Load it without, add_cable, save it: what was saved can then be "
            "loaded with offloading."
        )
    learns = encoding in LEARNED
    if keep_positions and not learns:
        raise CableError(
            f"keep_positions=True needs one of {', '.join(LEARNED)}: {encoding!r} cannot start at nothing."
        )
    if keep_positions and "init" in options:
        raise CableError(f"keep_positions=True has a start of its own: leave init={options['init']!r} out.")
    if learns and not keep_positions:
        options = {"init": "spread", **options}
    before = model.config._attn_implementation
    _give_own_config(model)
    model.config.cable = {
        "encoding": encoding,
        "keep_positions": keep_positions,
        "backend": backend,
        "options": options,
    }
    try:
        _install(model)
    except BaseException:
        _uninstall(model)
        raise
    model._cable_before = before
    return model


def _require_model(model: Any, what: str) -> None:
    if not isinstance(model, PreTrainedModel):
        raise CableError(
            f"{what} takes a model of transformers, got a {type(model).__name__}. With peft: add_cable first, then "
            "get_peft_model with modules_to_save=['cable']."
        )


def _give_own_config(model: PreTrainedModel) -> None:
    """Other models may have been made from the same one."""
    shared, own = model.config, copy.deepcopy(model.config)
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if getattr(module, "config", None) is shared:
            module.config = own


def remove_cable(model: PreTrainedModel) -> PreTrainedModel:
    """The model as it was."""
    _require_model(model, "remove_cable")
    if getattr(model.config, NAME, None) is None:
        raise CableError("this model has no encoding that add_cable gave it.")
    _uninstall(model)
    before = [module.__dict__.pop("_cable_before", "sdpa") for module in model.modules()]  # of it, or one inside it
    model.set_attn_implementation(next((name for name in before if name != "sdpa"), "sdpa"))
    return model


def _is_offloaded(layer: nn.Module) -> bool:
    """accelerate fetches its weights when they are needed; without its hooks the model is one that is only planned."""
    return any(hasattr(part, "_hf_hook") and any(p.is_meta for p in part.parameters()) for part in layer.modules())


def _encodings(model: nn.Module) -> list[Encoding]:
    """Those that add_cable has put there."""
    found = [getattr(module, NAME, None) for module in model.modules()]
    return [encoding for encoding in found if isinstance(encoding, Encoding)]


def _uninstall(model: PreTrainedModel) -> None:
    for module in model.modules():
        for handle in module.__dict__.pop("_cable_hooks", []):
            handle.remove()
        for name in ("_cable_names", "_cable_remembers"):
            module.__dict__.pop(name, None)
        if isinstance(getattr(module, NAME, None), Encoding):
            delattr(module, NAME)
    del model.config.cable


def _family(model: PreTrainedModel) -> Family:
    kind = model.config.model_type
    softcap = getattr(model.config, "attn_logit_softcapping", None)
    if softcap:
        raise CableError(f"this {kind} has attn_logit_softcapping={softcap}, which the kernels do not have.")
    if kind not in FAMILIES:
        raise CableError(f"add_cable does not know models of the type {kind!r}. It knows: {', '.join(FAMILIES)}.")
    return FAMILIES[kind]


def _layers(model: PreTrainedModel, family: Family) -> list[Any]:
    layers = [module for module in model.modules() if type(module).__name__ == family.attention]
    if not layers:
        raise CableError(f"this {type(model).__name__} has no {family.attention}.")
    if getattr(model.config, "add_cross_attention", False):
        raise CableError("cross-attention has no order of tokens in common: add_cable takes models without it.")
    return layers


def _is_causal(layer: Any) -> bool:
    """A config may make an encoder of a decoder."""
    return bool(getattr(layer, "is_causal", True)) and getattr(layer.config, "is_causal", None) is not False


def _install(model: PreTrainedModel) -> None:
    """What the config says, in the model: encodings, hooks and the attention interface."""
    config, family = model.config, _family(model)
    said = config.cable
    layers = _layers(model, family)
    for layer in layers:
        causal = _is_causal(layer)
        head_dim = getattr(layer, "head_dim", None) or config.hidden_size // config.num_attention_heads
        geometry = Geometry(
            config.hidden_size, config.num_attention_heads, head_dim, config.max_position_embeddings, causal
        )
        encoding = find_bias_encoding(said["encoding"], said["options"], causal)(geometry, **said["options"])
        layer.cable = encoding.to(next(layer.parameters()).device, model.dtype)  # a layer's own may be 4 or 8 bits
        if said["keep_positions"]:
            _start_neutral(encoding)
        if not any(True for _ in encoding.parameters()):  # or nobody would miss it where cable_attn is not imported
            encoding.register_buffer("is_there", torch.ones(1, device=model.device))
        layer._cable_remembers = isinstance(encoding, PotentialEncoding)  # asked here: an adapter may wrap it later
        layer._cable_names = list(inspect.signature(type(layer).forward).parameters)[1:]
        layer._cable_hooks = [layer.register_forward_pre_hook(_prepare, with_kwargs=True)]
    if config.model_type == "gpt2":
        base: Any = model.base_model
        base._cable_hooks = [base.register_forward_pre_hook(_ask_for_weights, with_kwargs=True)]
    if not said["keep_positions"]:
        for name, module in model.named_modules():
            owner, _, own = name.rpartition(".")
            if own == family.positions:
                module._cable_hooks = _switch_off(module, model.get_submodule(owner))
    model.set_attn_implementation(NAME)


def _ask_for_weights(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """GPT-2 does not tell its layers that attention weights are wanted."""
    asked = kwargs.get("output_attentions")
    wanted = module.config.output_attentions if asked is None else asked
    return args, {**kwargs, WEIGHTS: True} if wanted else kwargs


def _switch_off(positions: nn.Module, owner: nn.Module) -> list[Any]:
    """Hooks that make nothing of positions, and let a text be longer than a table of them."""
    hooks = [positions.register_forward_hook(_without_positions)]
    if isinstance(positions, nn.Embedding):
        hooks.append(positions.register_forward_pre_hook(_within_table))
        if hasattr(owner, "token_type_ids"):  # BERT has tables of them too, as long as that of positions
            hooks.append(owner.register_forward_pre_hook(_of_any_length, with_kwargs=True))
    return hooks


def _within_table(table: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0].clamp(max=table.num_embeddings - 1), *args[1:])


def _of_any_length(embeddings: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    names = list(inspect.signature(type(embeddings).forward).parameters)[1:]
    given = {**dict(zip(names, args)), **kwargs}
    read = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"][..., 0]
    for name in ("token_type_ids", "position_ids"):
        if given.get(name) is None:
            given[name] = torch.zeros_like(read, dtype=torch.long)
    return (), given


def _start(encoding: Any, keep_positions: bool) -> None:
    """As the encoding begins; what has been loaded already stays, as transformers' own initialisation lets it."""
    for part in reversed(list(encoding.modules())):
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    if keep_positions:
        _start_neutral(encoding)


def _start_neutral(encoding: Any) -> None:
    nn.init.zeros_(encoding.step.weight)
    nn.init.constant_(encoding.step.bias, NEUTRAL_STEP)


def _without_positions(module: nn.Module, args: Any, output: Any) -> Any:
    """A rotation by nothing, or embeddings of nothing."""
    if isinstance(output, tuple):
        cos, sin = output
        return torch.ones_like(cos), torch.zeros_like(sin)
    return torch.zeros_like(output)


WEIGHTS = "cable_weights"
"""What tells the attention of a GPT-2 that its weights are wanted."""
CALL = "cable_call"
"""A layer's hook hands the layout and the bias on under this name, through what the layer gives to attention."""


def _prepare(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Before a layer's attention: where its queries stand, and its encoding's bias."""
    if module.config._attn_implementation != NAME:
        raise CableError(
            f"this model has an encoding, and {module.config._attn_implementation!r} attention knows nothing of it. "
            f"remove_cable(model) takes it out; set_attn_implementation({NAME!r}) goes back."
        )
    given = {**dict(zip(module._cable_names, args)), **kwargs}
    x, cache = given["hidden_states"], given.get("past_key_values", given.get("layer_past"))
    memory, start, keys = None, 0, x.shape[1]
    if cache is not None:
        memory = CachedPotential(cache, module.layer_idx, module.config.num_hidden_layers)
        start, keys = _place(cache, module.layer_idx, x.shape[1])
        if module._cable_remembers and isinstance(start, int) and start > 0 and not memory.is_kept:
            raise CableError(
                "the cache holds keys of which no potential is known: it was filled without the encoding, as by prefix "
                "tuning or before add_cable. Begin with an empty one."
            )
    layout = Layout(x.shape[1], keys, start, x.device, _is_causal(module))
    if cache is not None and isinstance(start, int) and start < (seen := int(cache.get_seq_length(module.layer_idx))):
        layout.known_positions = given.get("position_ids")  # what padding there was is forgotten with its keys
        if layout.known_positions is None:
            layout.known_positions = torch.arange(seen, seen + x.shape[1], device=x.device)[None]
    mask = given.get("attention_mask")
    if mask is not None and mask.dim() != 2:
        raise CableError(f"attention_mask must be [batch, tokens] with {NAME!r}, got {tuple(mask.shape)}.")
    if mask is not None and mask.dtype == DOCUMENTS:
        layout.document_ids = mask
    else:
        layout.key_mask = key_mask(mask, keys)
    bias = module.cable(x, layout, memory if module._cable_remembers else None)
    return args, {**kwargs, CALL: (layout, bias)}


def _place(cache: Any, layer: int, queries: int) -> tuple[Any, int]:
    """Where the new tokens stand among a layer's keys, and how many those are."""
    start, keys = cache.get_seq_length(layer), cache.get_mask_sizes(queries, layer)[0]
    if isinstance(start, Tensor) and layer < len(cache.layers) and isinstance(cache.layers[layer], StaticLayer):
        return start.clone(), keys  # it counts on in place
    return min(int(start), keys - queries), keys  # a sliding cache has forgotten what came before


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Under the name ``cable`` in transformers' attention interface."""
    if CALL not in kwargs:
        raise CableError(f"the attention {NAME!r} serves models that add_cable has prepared.")
    layout, bias = kwargs[CALL]
    layout.window = kwargs.get("sliding_window")
    query, key, value = _in_one_precision(query, key, value)
    call = make_call(
        query, key, value, bias, layout, scale=kwargs.get("scaling"), dropout=kwargs.get("dropout") or 0.0
    )  # fmt: skip
    out = attend(call, module.config.cable["backend"])
    wanted = kwargs.get("output_attentions") or kwargs.get(WEIGHTS)
    weights = attention_weights(call, range(query.shape[2])) if wanted else None
    return out.transpose(1, 2).contiguous(), weights


def _in_one_precision(*tensors: Tensor) -> list[Tensor]:
    """Under autocast a rotation leaves queries and keys in fp32."""
    kind = tensors[0].device.type
    wanted = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensors[-1].dtype
    return [x if x.dtype == torch.float64 else x.to(wanted) for x in tensors]


DOCUMENTS = torch.int64
"""What a mask is made of that tells the documents of a pack; one that tells padding is bool."""


def _mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Any, attention_mask: Tensor | None = None,
    device: Any = None, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """Under the same name in its mask interface: which keys are real [B, T], or the number of each token's document
    where ``mask_function`` lets a token not see the one before."""
    if attention_mask is not None:
        attention_mask = attention_mask[:, -kv_length:]
        looks = attention_mask.shape[1] == kv_length and not torch.compiler.is_compiling()
        return None if looks and bool(attention_mask.all()) else key_mask(attention_mask, kv_length)
    if q_length != kv_length or q_length == 1:
        return None
    text, place = torch.arange(batch_size, device=device)[:, None], torch.arange(q_length, device=device)[None]
    together = mask_function(text, torch.zeros_like(text), place[:, 1:], place[:, :-1]).expand(batch_size, -1)
    if not torch.compiler.is_compiling() and bool(together.all()):
        return None
    return torch.nn.functional.pad((~together).cumsum(1, dtype=DOCUMENTS), (1, 0))


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


def _remember_in_post_init() -> None:
    """A model whose config says so is built with its encodings, before its weights are loaded."""
    plain = PreTrainedModel.post_init

    def post_init(self: PreTrainedModel) -> None:
        inner = _encodings(self)
        begun = [{key: value.clone() for key, value in encoding.state_dict().items()} for encoding in inner]
        plain(self)
        for encoding, state in zip(inner, begun):  # those of a model inside this one, which was just initialised again
            encoding.load_state_dict(state)
        if getattr(self.config, NAME, None) and not inner:
            before = self.config._attn_implementation
            _install(self)
            self.__dict__["_cable_before"] = "sdpa" if before == NAME else before

    initialise = PreTrainedModel._initialize_weights

    def _initialize_weights(self: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        initialise(self, module, *args, **kwargs)
        if isinstance(module, Encoding) and getattr(self.config, NAME, None):  # weights may lack what the config tells
            _start(module, self.config.cable["keep_positions"])

    if not getattr(plain, "knows_cable", False):
        post_init.knows_cable = True  # type: ignore[attr-defined]
        PreTrainedModel.post_init = post_init  # type: ignore[method-assign]
        PreTrainedModel._initialize_weights = _initialize_weights  # type: ignore[method-assign]


_remember_in_post_init()
