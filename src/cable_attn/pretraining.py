"""``cable train``: a recipe's run on Hugging Face's Trainer, resumable at any moment.

A run folder holds the resolved ``recipe.toml``, ``environment.json``, ``metrics.jsonl``, ``checkpoints/`` and, when it
is done, the model and its tokenizer, ready for ``from_pretrained``.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, SequentialSampler, Subset
from transformers import IntervalStrategy, PreTrainedModel, TrainingArguments, set_seed

from cable_attn import adapting
from cable_attn.data.shards import TOKENIZER, Request, Tokens, holds, prepare, read_manifest
from cable_attn.data.sources import open_source
from cable_attn.data.tokenizers import find_tokenizer, load_tokenizer
from cable_attn.data.windows import Masked, Order, TokenWindows
from cable_attn.devices import has_bf16
from cable_attn.environment import environment
from cable_attn.errors import CableError, reason, require_known
from cable_attn.evaluation import checkpoint_hash, require_own_tokens, require_positions
from cable_attn.files import alone, read_json, writable_folder, write_atomically, write_json
from cable_attn.models import CableBertConfig, CableBertForMaskedLM, CableGPTConfig, CableGPTForCausalLM
from cable_attn.models.layers import encoding_parameters
from cable_attn.models.loading import checkpoint_folder, tokenizer_of
from cable_attn.passkey import Mixed, Task
from cable_attn.recipe import Recipe, load, to_toml
from cable_attn.training import (
    DecayingTrainer,
    Metrics,
    Stopped,
    Stopping,
    Watcher,
    Watching,
    last_complete_checkpoint,
    leads,
    processes,
    remove_cut_off,
    set_learning_rate,
    stop_when_asked,
)

FREE = ("train.workers", "train.report_to", "train.keep", "train.log_every", "train.eval_every", "train.save_every")
"""What a resumed run may change: nothing of it touches the losses."""
ENVIRONMENT = "environment.json"
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow", "comet_ml", "clearml", "swanlab")
"""Those of transformers that are packages of the same name."""


@dataclass(frozen=True)
class Data:
    train: Dataset
    validation: Dataset | None
    tokenizer: Any
    tokens: int
    manifest: str


MODELS: dict[str, tuple[Any, Any]] = {
    "gpt": (CableGPTConfig, CableGPTForCausalLM),
    "bert": (CableBertConfig, CableBertForMaskedLM),
}


def make_config(recipe: Recipe) -> Any:
    part = recipe.model
    if part.checkpoint:
        return adapting.read_config(part)
    settings = {
        "encoding": part.encoding,
        "encoding_options": part.encoding_options or None,
        "vocab_size": part.vocab_size,
        "max_position_embeddings": recipe.data.length,
        **part.overrides,
    }
    try:
        return MODELS[part.family][0].preset(part.preset, **settings)
    except CableError:
        raise
    except Exception as error:  # transformers' own, of many kinds, for fields that are its own
        if not part.overrides:
            raise
        raise CableError(f"model.overrides={part.overrides}: {reason(error)}.") from error


def make_model(recipe: Recipe) -> PreTrainedModel:
    if recipe.model.checkpoint:
        return adapting.make(recipe.model)
    return MODELS[recipe.model.family][1](make_config(recipe))


def compile_layers(model: Any, **options: Any) -> None:
    """torch.compile for each layer, in place, and for the loss: the logits are the largest tensor by far."""
    layers = set(model._no_split_modules or ())
    for module in model.modules():
        if type(module).__name__ in layers:
            module.compile(**options)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    inner.loss_function = torch.compile(inner.loss_function, **options)


def load_data(recipe: Recipe, folder: Path) -> Data:
    path, vocabulary = Path(recipe.data.path), make_config(recipe).vocab_size
    own = _own_tokenizer(recipe)
    if recipe.data.path == "embedded":
        if recipe.model.checkpoint and own is None and not adapting.is_fresh(recipe.model):
            raise CableError(f"{recipe.model.checkpoint!r} has no tokenizer. Give its tokens with data.path.")
        path = folder / "data"
        _prepare_embedded(path, f"bpe:{vocabulary}" if own is None else recipe.model.checkpoint)
    split = Tokens(path, "train")
    if split.vocab_size > vocabulary:
        whose = "the checkpoint's" if recipe.model.checkpoint else "model.vocab_size"
        raise CableError(f"{str(path)!r} has a vocabulary of {split.vocab_size}, {whose} is {vocabulary}.")
    tokenizer = load_tokenizer(str(path / TOKENIZER)) if (path / TOKENIZER).is_dir() else None
    if own is not None:
        require_own_tokens(own, path, recipe.model.checkpoint)
    samples = recipe.windows_per_update * recipe.train.steps
    windows: Dataset = TokenWindows(split, recipe.data.length, recipe.data.separate_documents)
    if recipe.data.passkey:
        windows = Mixed(windows, Task(tokenizer), recipe.data.passkey, recipe.train.seed)
    train: Dataset = Order(windows, recipe.train.seed, samples)
    validation = _validation(recipe, path)
    if recipe.model.family == "bert":
        train = Masked(train, tokenizer, recipe.train.masked, recipe.train.seed)
        validation = validation and Masked(validation, tokenizer, recipe.train.masked, recipe.train.seed + 1)
    return Data(train, validation, tokenizer, len(split), split.manifest_hash)


def _prepare_embedded(path: Path, name: str) -> None:
    """Made by one process with this tokenizer; the others, and the runs beside this one, find it done."""
    request = Request("embedded", name)
    if leads() and not holds(path, request):
        done = next((other for other in path.parent.parent.glob("*/data") if holds(other, request)), None)
        if done is not None and not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                shutil.copytree(done, Path(folder) / "data").rename(path)
        else:
            streams = open_source("embedded")
            prepare(path, request, streams, find_tokenizer(name, streams["train"](0)))
    if dist.is_initialized():
        dist.barrier()


def _validation(recipe: Recipe, path: Path) -> Dataset | None:
    entry = read_manifest(path)["splits"].get("validation")
    if entry is None or (entry["complete"] and entry["tokens"] < recipe.data.length):
        return None
    windows = TokenWindows(Tokens(path, "validation"), recipe.data.length, recipe.data.separate_documents)
    return Subset(windows, range(min(recipe.train.eval_windows, len(windows))))


def plan(recipe: Recipe, devices: int = 1) -> dict[str, Any]:
    """What a run would be, without training."""
    model = _blank(recipe)
    require_positions(model, recipe.data.length)
    parameters = sum(p.numel() for p in model.parameters())
    windows, steps = recipe.batches(devices)
    config, micro = model.config, windows * recipe.data.length
    half = 2 if recipe.train.precision != "fp32" else 4
    activations = micro * config.num_hidden_layers * config.hidden_size * 17 * half
    logits = micro * config.vocab_size * (half + 8)
    weights = {"weights": "fresh"} if recipe.model.checkpoint and adapting.is_fresh(recipe.model) else {}
    learning = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "parameters": parameters,
        **weights,
        **({} if learning == parameters else {"of these learn": learning}),
        "tokens per update": recipe.train.tokens_per_update,
        "updates": recipe.train.steps,
        "tokens in all": recipe.train.tokens_per_update * recipe.train.steps,
        "micro batches to an update": steps,
        "devices": devices,
        "memory per device, about": f"{(parameters * 16 + activations + logits) / 2**20:,.0f} MiB",
    }


_BLANKS: dict[str, PreTrainedModel] = {}


def _blank(recipe: Recipe) -> PreTrainedModel:
    """Without memory for its weights."""
    if recipe.model.checkpoint:
        return adapting.make_blank(recipe.model)
    known = repr((recipe.model, recipe.data))  # many cells of a study differ in other things
    if known not in _BLANKS:
        with torch.device("meta"):
            _BLANKS[known] = make_model(recipe)
    return _BLANKS[known]


def run(recipe: Recipe, folder: Path, resume: bool = False, watch: Watcher | None = None) -> dict[str, float]:
    """Train; the last metrics. Raises :class:`Stopped` after a SIGTERM or a Ctrl-C, when all is saved."""
    if not leads():
        return _run(recipe, folder, resume, watch)
    if resume and not (folder / "recipe.toml").exists():
        raise CableError(f"{str(folder)!r} holds no run to resume. Leave --resume out to begin one.")
    with alone(writable_folder(folder), "training"):
        _claim(folder, recipe, resume)
        return _run(recipe, folder, resume, watch)


def _run(recipe: Recipe, folder: Path, resume: bool, watch: Watcher | None) -> dict[str, float]:
    checkpoints = folder / "checkpoints"
    arguments = _arguments(recipe, checkpoints)
    data = load_data(recipe, folder)
    if data.validation is None:
        arguments.eval_strategy = IntervalStrategy.NO
    set_seed(recipe.train.seed)
    model = make_model(recipe)
    if not recipe.model.checkpoint:
        _name_tokens(model, data.tokenizer)
    if recipe.train.compile == "layers" and torch.cuda.is_available():
        compile_layers(model)
    _same_data(folder / ENVIRONMENT, data.manifest, resume)
    with stop_when_asked() as asked:
        stop = Stopping(asked)
        callbacks = [stop, Metrics(folder / "metrics.jsonl", recipe.train.tokens_per_update), Watching(watch)]
        trainer = _PretrainTrainer(
            model=model, args=arguments, train_dataset=data.train, eval_dataset=data.validation, callbacks=callbacks
        )
        trainer.tokenizer = _own_tokenizer(recipe) or data.tokenizer
        trainer.windows_per_update = recipe.windows_per_update
        trainer.encoding_learning_rate = recipe.train.encoding_learning_rate
        if trainer.is_world_process_zero():
            write_json(folder / ENVIRONMENT, {**environment(), "data": data.manifest, "tokens": data.tokens})
            write_atomically(folder / "recipe.toml", to_toml(recipe))
        trainer.train(resume_from_checkpoint=last_complete_checkpoint(checkpoints) if resume else None)
    trainer.require_finite()
    if stop.agreed:
        raise Stopped(f"stopped at step {trainer.state.global_step}, saved.", *asked[:1])
    if recipe.model.checkpoint:
        trainer.model = adapting.finished(trainer.model, recipe.model)
    _save_model(trainer, folder)
    return {key: value for entry in trainer.state.log_history[-2:] for key, value in entry.items()}


def _name_tokens(model: Any, tokenizer: Any) -> None:
    """What begins, ends and fills a text, as its tokenizer has it: generation stops there."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(tokenizer, name, None) is not None:
            for config in (model.config, getattr(model, "generation_config", None)):
                if config is not None:
                    setattr(config, name, getattr(tokenizer, name))


def origin(recipe: Recipe) -> dict[str, str]:
    """What a run began with, if not with fresh weights."""
    if not recipe.model.checkpoint or adapting.is_fresh(recipe.model):
        return {}
    return {"begun_with_sha256": checkpoint_hash(checkpoint_folder(recipe.model.checkpoint))}


def _own_tokenizer(recipe: Recipe) -> Any:
    return tokenizer_of(checkpoint_folder(recipe.model.checkpoint)) if recipe.model.checkpoint else None


def _claim(folder: Path, recipe: Recipe, resume: bool) -> None:
    """A run folder belongs to one recipe, from its first checkpoint on."""
    path = folder / "recipe.toml"
    begun = path.exists() and last_complete_checkpoint(folder / "checkpoints") is not None
    if begun and not resume:
        raise CableError(f"{str(folder)!r} holds a run. Add --resume to go on with it, or choose another with --out.")
    if (folder / "config.json").exists() and not begun:
        raise CableError(f"{str(folder)!r} holds a finished model. Choose another folder with --out.")
    if begun and (changed := changes(path, recipe)):
        raise CableError(
            f"the run in {str(folder)!r} has another recipe: {'; '.join(changed)}. Give the same settings, or choose "
            "another folder with --out."
        )
    if path.exists() and not (folder / ENVIRONMENT).exists():
        raise CableError(f"{str(path)!r} is of no run, and would be overwritten. Choose another folder with --out.")
    remove_cut_off(folder / "checkpoints")


def _same_data(path: Path, manifest: str, resume: bool) -> None:
    """Other tokens would be another order of samples."""
    if resume and path.exists() and read_json(path).get("data") not in (None, manifest):
        raise CableError("the tokens have changed since the run began: the hash of their manifest is another one.")


def changes(path: Path, recipe: Recipe) -> list[str]:
    """What differs from a stored recipe and touches the losses."""
    before, now = asdict(load(str(path))), asdict(recipe)
    return [
        f"{part}.{key} was {before[part][key]!r} and is {now[part][key]!r}"
        for part in now
        for key in now[part]
        if before[part][key] != now[part][key] and f"{part}.{key}" not in FREE
    ]


def _require_trackers(names: list[str]) -> None:
    for name in names:
        require_known("tracker in train.report_to", name, TRACKERS)
        if importlib.util.find_spec(name) is None:
            raise CableError(
                f"train.report_to names {name!r}, which is not installed. Install it (pip install {name}), "
                "or train with report_to=none."
            )


def _arguments(recipe: Recipe, folder: Path) -> TrainingArguments:
    _require_trackers(recipe.train.report_to)
    part, cuda = recipe.train, torch.cuda.is_available()
    devices = processes()
    if part.fsdp and not cuda:
        raise CableError("train.fsdp=true needs GPUs: accelerate shards nothing on the CPU. Leave it out there.")
    if part.fsdp and "RANK" not in os.environ:
        raise CableError("train.fsdp=true shards over processes: start it with torchrun, as docs/training.md shows.")
    precision = part.precision
    if precision == "auto":
        precision = "bf16" if has_bf16() else "fp32"
    windows, steps = recipe.batches(devices)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=part.steps,
        per_device_train_batch_size=windows,
        per_device_eval_batch_size=windows,
        gradient_accumulation_steps=steps,
        learning_rate=part.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": part.lowest_learning_rate},
        warmup_steps=part.warmup_steps,
        weight_decay=part.weight_decay,
        adam_beta1=part.betas[0],
        adam_beta2=part.betas[1],
        max_grad_norm=part.clip,
        optim="adamw_torch_fused" if cuda else "adamw_torch",
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        tf32=True if cuda and torch.cuda.get_device_capability() >= (8, 0) else None,
        torch_compile=part.compile == "model" and cuda,
        seed=part.seed,
        logging_steps=part.log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=part.eval_every,
        prediction_loss_only=True,
        save_steps=part.save_every,
        save_total_limit=part.keep,
        report_to=part.report_to or "none",
        disable_tqdm=True,
        dataloader_num_workers=part.workers,
        dataloader_pin_memory=cuda,
        dataloader_persistent_workers=part.workers > 0,
        use_cpu=not cuda,
        ddp_backend=("nccl" if cuda else "gloo") if devices > 1 else None,
        ddp_find_unused_parameters=False,
        fsdp=part.fsdp or None,  # type: ignore[arg-type]
        remove_unused_columns=False,
    )
    if cuda and devices == 1 and arguments.n_gpu > 1:
        arguments._n_gpu = 1  # one process uses one GPU; transformers would spread the batch and change the update
    return arguments


class _PretrainTrainer(DecayingTrainer):
    """Samples in their order, and never a step further than the loss is finite."""

    windows_per_update = 0
    encoding_learning_rate = 0.0
    tokenizer: Any = None

    def __init__(self, model: Any, **kwargs: Any):
        self.is_ours = isinstance(model, (CableGPTForCausalLM, CableBertForMaskedLM))
        super().__init__(model=model, **kwargs)

    @property
    def checkpoints(self) -> Path:
        return Path(str(self.args.output_dir))

    def create_accelerator_and_postprocess(self) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        super().create_accelerator_and_postprocess()
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and self.accelerator.native_amp:
            # Autocast chooses the precision of each operation, as it does in one process.
            plugin.mixed_precision_policy = MixedPrecisionPolicy()

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new and self.encoding_learning_rate:
            trained: Any = self.model if model is None else model
            set_learning_rate(optimizer, encoding_parameters(trained), self.encoding_learning_rate)
        return optimizer

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        found: Any = train_dataset if train_dataset is not None else self.train_dataset
        return SequentialSampler(found)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        # In low precision accelerate makes fp32 copies of all outputs, and the logits are gigabytes.
        own = {"loss_only": True} if self.is_ours else {"use_cache": False}
        return super().compute_loss(model, {**inputs, **own}, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        # Noted on the device and looked at when the host waits anyway.
        if not hasattr(self, "bad_step"):
            self.bad_step = torch.full((), -1, device=loss.device, dtype=torch.long)
        found = (self.bad_step < 0) & ~torch.isfinite(loss.detach())
        self.bad_step = torch.where(found, self.state.global_step, self.bad_step)
        return loss

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> Any:
        if self.control.should_log or self.control.should_save or self.control.should_evaluate:
            # fp16 skips updates whose gradients are not finite.
            if grad_norm is not None and not self.args.fp16 and not math.isfinite(float(grad_norm)):
                self.bad_step = torch.where(self.bad_step < 0, self.state.global_step - 1, self.bad_step)
            self.require_finite()
        return super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def require_finite(self) -> None:
        if not hasattr(self, "bad_step"):
            return
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self.bad_step, op=dist.ReduceOp.MAX)  # all processes stop, or none
        step = int(self.bad_step)
        if step < 0:
            return
        order: Any = self.train_dataset
        order = order if isinstance(order, Order) else order.samples
        first = step * self.windows_per_update
        numbers = [order.window(place) for place in range(first, first + self.windows_per_update)]
        shown = ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
        raise CableError(
            f"the loss or its gradient is not finite at step {step + 1} (windows {shown}). The last good checkpoint: "
            f"{last_complete_checkpoint(self.checkpoints) or 'none'}. A lower learning rate or more warm-up helps "
            "most often."
        )

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Every checkpoint can be read and written with."""
        super()._save(output_dir, state_dict)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(output_dir or self.args.output_dir)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._save_checkpoint(*args, **kwargs)
        except Exception as error:  # a full disk comes as OSError, RuntimeError or SafetensorError
            if leads():
                remove_cut_off(self.checkpoints)
            raise CableError(
                f"the checkpoint of step {self.state.global_step} could not be written ({error}). What was saved "
                f"before is untouched: {last_complete_checkpoint(self.checkpoints) or 'nothing yet'}."
            ) from error


def _save_model(trainer: Any, folder: Path) -> None:
    """The finished model beside the recipe, file by file, each whole; config.json, the last, says that all is there."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".model.") as partial:
        trainer.save_model(partial)
        if not trainer.is_world_process_zero():
            return
        for file in sorted(Path(partial).iterdir(), key=lambda path: path.name == "config.json"):
            if file.name != "training_args.bin":
                shutil.move(str(file), folder / file.name)
