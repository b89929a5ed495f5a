"""Loads tokenizers and models, and finds the modules that LoRA adapts, in any decoder that transformers loads."""

from __future__ import annotations

import copy
import difflib
import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, VeraConfig
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.pytorch_utils import Conv1D
from transformers.utils import CHAT_TEMPLATE_FILE

from ...errors import JobFailure
from ...specs.chat_templates import OF_TRL
from ...specs.events import Reason
from ...specs.job import Dtype, JobSpec, LoraSpec
from ...specs.model_source import ModelSource
from ..distributed import ranks
from . import quantization
from .agreement import complete, pad_within_embeddings, read_generation_config, refuse_padding, untie
from .attention import without_cudnn
from .configs import DAMAGE, invalid_model, read_config
from .files import (
    check_adapter_files,
    check_tokenizer_files,
    check_weights_index,
    stored_dtype,
    template_of_processor,
    whole_weights,
)
from .fsdp import blocks_of, is_sharded
from .merging import merged_later
from .shapes import missing_weights, not_loadable, refuse_unfitting

DTYPES: dict[Dtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


_MAMBA = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}
_MAMBA_KERNEL = {"conv1d", "out_proj"}
"""Modules of these architectures that PEFT 0.21 refuses to adapt (`_check_lora_target_modules_mamba`)."""


SCORE = "score.weight"
"""The head of a reward model, in most architectures that transformers has one for."""


def auto_class(config: Any, *, is_reward: bool) -> tuple[Any, dict[str, Any]]:
    """The class that loads a model of a configuration, and its arguments for the head."""
    if is_reward:
        return AutoModelForSequenceClassification, {"num_labels": 1}
    # Some vision-language models have a class of the first kind, too: it is the same one, or reads text alone.
    is_vision = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if is_vision else AutoModelForCausalLM, {}


def choose_device(name: str) -> torch.device:
    """`auto` (cuda, then mps, then cpu), `cpu`, `cuda`, `cuda:N` or `mps` as a torch device that exists here.

    Sets which kernels a GPU computes attention with. Raises JobFailure: invalid_request, when the device is not there.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    kind = name.partition(":")[0]
    if kind == "auto":
        kind = next(kind for kind, there in available.items() if there)
    if not available.get(kind, False):
        there = ", ".join(kind for kind, there in available.items() if there)
        raise JobFailure(
            Reason.invalid_request,
            f"device {name!r} was requested, but torch {torch.__version__} finds only: {there}. "
            "Set `device: auto`, or install a torch build for this device in the environment that trains.",
        )
    if kind == "cuda":
        without_cudnn()
        # The launcher makes only the task's GPUs visible, so they are numbered from 0 here.
        number = ranks.local_rank()
        if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":  # of NCCL 2.30: as accelerate numbers them
            number %= torch.cuda.device_count()
        return torch.device("cuda", number)
    return torch.device(kind)


@dataclass(frozen=True)
class WeightStorage:
    """How the weights of a model are held in memory while a job trains."""

    dtype: torch.dtype
    """fp32, but `frozen_dtype` under adapters."""
    compute_dtype: Dtype
    in_4_bits: bool
    """The linear layers are held in 4 bits (QLoRA)."""
    is_quantized: bool
    """The job quantizes weights, in 4 bits or by QAT."""
    is_sharded: bool
    is_deferred: bool = False
    """The weights stay in their files until the model is sharded (`DeferredWeights`). Not under DoRA, which computes
    its magnitudes from them, nor for a reward model, whose head is in no file."""
    is_reward: bool = False
    """The model has the head of a reward model, with new weights where the files have none."""
    has_head: bool = False
    """That head has to be in the files."""

    @classmethod
    def of(cls, spec: JobSpec) -> WeightStorage:
        in_4_bits = spec.lora is not None and spec.lora.quantize_base
        return cls(
            dtype=DTYPES[spec.frozen_dtype] if spec.lora else torch.float32,
            compute_dtype=spec.compute.dtype,
            in_4_bits=in_4_bits,
            is_quantized=in_4_bits or spec.train.qat is not None,
            is_sharded=is_sharded(spec),
            is_deferred=is_sharded(spec) and not (spec.lora and spec.lora.use_dora) and not spec.trains_reward,
            is_reward=spec.trains_reward,
        )

    @classmethod
    def as_stored(cls, source: ModelSource) -> WeightStorage:
        """Weights in the dtype of their files, as transformers loads them."""
        stored = stored_dtype(source.location, source.revision, fetch=True)
        names: dict[torch.dtype, Dtype] = {dtype: name for name, dtype in DTYPES.items()}
        name: Dtype = names.get(stored, "fp32") if stored is not None else "fp32"
        return cls(dtype=DTYPES[name], compute_dtype=name, in_4_bits=False, is_quantized=False, is_sharded=False)

    def with_dtype(self, dtype: torch.dtype) -> WeightStorage:
        return replace(self, dtype=dtype)


def load_tokenizer(
    source: ModelSource, *, model: ModelSource | None = None, warn: Callable[[str], None] = lambda _: None
) -> PreTrainedTokenizerBase:
    """The model's own tokenizer, with a padding token that the model has an embedding for. Raises JobFailure:
    invalid_model, when there is none that transformers can load.

    Args:
        model: that it is used with; None: the one that it lies beside.
    """
    check_tokenizer_files(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.location, **source_arguments(source))
    except MemoryError:
        raise
    except Exception as error:  # the library tokenizers raises no class of its own
        load_config(model or source)  # which transformers reads, too
        raise invalid_model(source.model, "its tokenizer cannot be loaded", error) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of a library in Rust
            raise
        raise invalid_model(source.model, "its tokenizer cannot be loaded", error) from error
    if source.path is not None:
        tokenizer.name_or_path = source.model
    if tokenizer.chat_template is None:
        tokenizer.chat_template = template_of_processor(source)
    if isinstance(tokenizer.chat_template, str):  # transformers keeps the mark, which would begin every prompt
        tokenizer.chat_template = tokenizer.chat_template.removeprefix("\ufeff")
    complete(tokenizer, source, warn)
    model = model or source
    with suppress(JobFailure):  # loading the model reports it
        pad_within_embeddings(tokenizer, load_config(model), vocabulary_size(model), model.model, warn)
    return tokenizer


def load_job_tokenizer(spec: JobSpec, warn: Callable[[str], None] = lambda _: None) -> PreTrainedTokenizerBase:
    """The tokenizer of the model that a job trains or asks, with the chat template that the job sets, or the one that
    its adapter was trained with. Raises JobFailure: as `load_tokenizer`."""
    tokenizer = load_tokenizer(spec.source, warn=warn)
    template = spec.data.chat_template
    if template in OF_TRL:
        template = _shipped(template)
    if template is None and spec.adapter is not None:
        template = _template_of(spec.adapter)
    if template is not None and (text := template.removeprefix("\ufeff")).strip():
        tokenizer.chat_template = text
    return tokenizer


def _shipped(name: str) -> str:
    package = find_spec("trl")  # an import would take seconds
    assert package is not None
    assert package.origin is not None
    return (Path(package.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def _template_of(adapter: ModelSource) -> str | None:
    """The chat template that lies beside an adapter; None: there is none. Raises JobFailure: it cannot be read."""
    try:
        return (Path(adapter.location) / CHAT_TEMPLATE_FILE).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):  # an id of a hub is no directory
        return None
    except (OSError, ValueError) as error:
        raise invalid_model(adapter.model, f"its {CHAT_TEMPLATE_FILE} cannot be read", error) from error


def load_teacher_tokenizer(spec: JobSpec) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a teacher with another vocabulary; None: the job has none. Raises as `load_tokenizer`."""
    return None if spec.method.other_vocabulary is None else load_tokenizer(spec.reference_source)


def load_config(source: ModelSource) -> Any:
    """The model's configuration; reads only its config.json. Raises JobFailure: invalid_model."""
    return read_config(source, source_arguments(source))


def vocabulary_size(source: ModelSource) -> int:
    """Number of tokens that the model has embeddings for, which some architectures have more of than `vocab_size`.
    Raises JobFailure: invalid_model, as `load_config`; or the model pads with a token that it has no embedding for."""
    config = load_config(source)
    text = config.get_text_config()
    for blocks in (1, None):  # one is enough, but where a configuration lists its blocks
        with suppress(Exception):  # an architecture that cannot be built without weights may still be trained
            built = outline(source, config if blocks is None else with_depth(config, blocks), torch.float32)
            return int(built.get_input_embeddings().weight.shape[0])
    size = getattr(text, "vocab_size", None)
    if not isinstance(size, int):
        raise JobFailure(
            Reason.invalid_model,
            f"model {source.model!r}: its config.json has no vocab_size, as the one of a language model has. Name a "
            "causal language model.",
        )
    refuse_padding(text, size, source.model)
    return size


def commit_of(source: ModelSource) -> str | None:
    """The commit that a model id stands for; None for a directory. Raises as `load_config`."""
    return getattr(load_config(source), "_commit_hash", None)


def check_weights(
    source: ModelSource,
    *,
    is_reward: bool = False,
    has_head: bool = False,
    warn: Callable[[str], None] = lambda _: None,
) -> None:
    """Return if a model's files of weights that are on this machine are whole, and what its configuration describes.

    Reads their headers, once in a process. Of a model with code of its own, or with quantized weights, weights are not
    compared. Raises JobFailure: invalid_model, with the file, and the weight with both shapes, or those that are
    missing.
    """
    config, files = load_config(source), whole_weights(source)
    if not is_reward:
        _refuse_classifier(config, source)
        _warn_of_ends(config, source, warn)
    if not source.trust_remote_code:
        for unknown in (str(name)[:100] for name in config.architectures or () if not hasattr(transformers, str(name))):
            warn(
                f"config.json of {source.model!r} names the architecture {unknown}, which transformers lacks: "
                f"the model is loaded by its model_type, {config.model_type}"
            )
    if files.unused_index:
        warn(f"{files.unused_index} of {source.model!r} is not read: {files.paths[0].name} has the weights")
    if not source.trust_remote_code and not quantization.stored_quantization(config):
        may_lack = {SCORE} if is_reward and not has_head else set()
        bare = partial(outline, source, config, torch.float32, is_reward=is_reward)
        for unused in refuse_unfitting(source, files, config, bare, may_lack, is_reward=is_reward):
            warn(unused)


def load_model(
    source: ModelSource, storage: WeightStorage, device: torch.device, warn: Callable[[str], None] = lambda _: None
) -> PreTrainedModel:
    """The causal LM to train. A model that is to be sharded stays in CPU memory: a deferred one in the files' own
    dtype, so that its weights are mapped and not copied, nor quantized. Raises JobFailure: invalid_model, when it is
    missing, is no causal LM, its weights are damaged or of other shapes, or its index names files outside its
    directory."""
    check_weights(source, is_reward=storage.is_reward, has_head=storage.has_head)
    check_weights_index(source.location, source.revision)
    # The whole model might not fit on the device of a rank that trains a part of it.
    placed_on = "cpu" if storage.is_sharded else device
    placing = quantization.base_arguments(storage.compute_dtype, placed_on) if storage.in_4_bits else {}
    config = load_config(source)
    try:
        quantization.refuse_quantized(config, source.model, is_quantized=storage.is_quantized)
        # The files decide, not the configuration: weights in fp32 would be rounded where it names bf16.
        stored = stored_dtype(source.location, source.revision, fetch=True) if storage.is_deferred else None
        dtype = loading_dtype(source, storage, config, stored)
        # Copies in another dtype would take more than packed weights, and as much as merged ones.
        is_mapped = storage.is_deferred and dtype == stored
        with (
            quantization.in_files() if is_mapped and storage.in_4_bits else nullcontext(),
            merged_later() if is_mapped else nullcontext(),
        ):
            auto, head = auto_class(config, is_reward=storage.is_reward)
            model, loaded = auto.from_pretrained(
                source.location,
                dtype=dtype,
                output_loading_info=True,
                **placing,
                **head,
                **_generation(source),
                **source_arguments(source),
            )
    except (*DAMAGE, RuntimeError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        # Of files that were downloaded meanwhile.
        check_weights(source, is_reward=storage.is_reward, has_head=storage.has_head)
        raise not_loadable(source, error) from error
    _name(model, source)
    may_lack = {SCORE} if storage.is_reward and not storage.has_head else set()
    if missing := sorted(set(loaded["missing_keys"]) - may_lack):
        raise missing_weights(source, model, missing)
    untie(model, source, warn)
    return model if storage.is_sharded or storage.in_4_bits else model.to(device)


def _generation(source: ModelSource) -> dict[str, Any]:
    """The argument of `from_pretrained` for a generation configuration that could not be written as it is read."""
    config, warning = read_generation_config(source)
    return {"generation_config": config} if warning else {}


def _refuse_classifier(config: Any, source: ModelSource) -> None:
    """Refuse a reward model: with tied weights nothing would be missing, and its head would be dropped."""
    named = [name for name in config.architectures or () if str(name).endswith("ForSequenceClassification")]
    if named:
        raise JobFailure(
            Reason.invalid_model,
            f"model {source.model!r} is a {named[0]}, such as a reward model, and no causal language model: name the "
            "model that it was trained from, or another one.",
        )


def _warn_of_ends(config: Any, source: ModelSource, warn: Callable[[str], None]) -> None:
    """Warn of tokens that answers are to end with, and that the model cannot write."""
    named, size = read_generation_config(source).config.eos_token_id, getattr(config.get_text_config(), "vocab_size", 0)
    for token in named if isinstance(named, list) else [named]:
        if isinstance(token, int) and isinstance(size, int) and token >= size > 0:
            warn(
                f"the generation configuration of {source.model!r} has eos_token_id {token}, and its vocabulary has "
                f"{size} tokens: no answer ends with it. Set it in generation_config.json to a token that ends answers"
            )


def _name(model: PreTrainedModel, source: ModelSource) -> None:
    """Have what is saved of a model, such as adapter_config.json, name it, and not a directory of this machine."""
    if source.path is not None:
        model.name_or_path = source.model
        model.config._name_or_path = source.model


def loading_dtype(source: ModelSource, storage: WeightStorage, config: Any, stored: torch.dtype | None) -> torch.dtype:
    """The dtype to load a model in: for deferred weights that of the files, where that changes no number later."""
    if not storage.is_deferred or stored is None or stored == storage.dtype:
        return storage.dtype
    as_stored, as_used = (outline(source, config, dtype) for dtype in (stored, storage.dtype))
    keeps_some = any(getattr(as_used, f"_keep_in_fp32_modules{ending}", None) for ending in ("", "_strict"))
    is_uniform = all(weight.dtype == stored for weight in as_stored.parameters())
    same_buffers = {name: buffer.dtype for name, buffer in as_stored.named_buffers()} == {
        name: buffer.dtype for name, buffer in as_used.named_buffers()
    }
    return stored if is_uniform and same_buffers and not keeps_some else storage.dtype


def outline(source: ModelSource, config: Any, dtype: torch.dtype, *, is_reward: bool = False) -> PreTrainedModel:
    """The model without weights; uses up no random numbers of the job."""
    auto, head = auto_class(config, is_reward=is_reward)
    config = copy.deepcopy(config)
    for name, value in head.items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model: PreTrainedModel = auto.from_config(config, dtype=dtype, trust_remote_code=source.trust_remote_code)
    return model


def with_depth(config: Any, layers: int) -> Any:
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    is_derived = isinstance(getattr(type(text), "layer_types", None), property)  # of Mamba, from the number of blocks
    if getattr(text, "layer_types", None) and not is_derived:
        text.layer_types = text.layer_types[:layers]
    return config


def shallow_model(source: ModelSource, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The first two blocks of the model's architecture, with random weights; uses up no random numbers of the job.
    Raises JobFailure: invalid_model."""
    with torch.random.fork_rng(), torch.device(device):
        config = with_depth(load_config(source), 2)
        auto, _ = auto_class(config, is_reward=False)
        model: PreTrainedModel = auto.from_config(config, dtype=dtype, trust_remote_code=source.trust_remote_code)
    return model


def load_adapter(spec: JobSpec, adapter: Path, *, as_trained: bool = False) -> PeftModel:
    """The base model in CPU memory with a trained adapter on it.

    Args:
        as_trained: with the base in 4 bits where the job trained it so; False: as it is on disk.
    """
    source, storage = spec.source, WeightStorage.of(spec)
    check_adapter_files(adapter)
    if as_trained and storage.in_4_bits:
        base = load_model(source, replace(storage, is_deferred=False), torch.device("cpu"))
        quantization.prepare_4bit_base(base)
    else:
        base = load_whole(source, DTYPES[spec.frozen_dtype], is_reward=spec.trains_reward)
    return PeftModel.from_pretrained(base, adapter)


def load_whole(source: ModelSource, dtype: torch.dtype, *, is_reward: bool = False) -> PreTrainedModel:
    """A model as it is on disk, in CPU memory. Raises JobFailure: invalid_model."""
    check_weights(source, is_reward=is_reward)
    check_weights_index(source.location, source.revision)
    auto, head = auto_class(load_config(source), is_reward=is_reward)
    base: PreTrainedModel = auto.from_pretrained(
        source.location,
        dtype=dtype,
        **head,
        **_generation(source),
        **source_arguments(source),
    )
    _name(base, source)
    untie(base, source, lambda _: None)
    return base


def quantize(spec: JobSpec, model: PreTrainedModel) -> dict[str, Any] | None:
    """Quantize the model where the job does; returns what was done, for its record. Raises JobFailure: invalid_request,
    where this model cannot be quantized so."""
    if spec.train.qat:
        attention, mlp = linear_modules(model)
        return quantization.fake_quantize(model, [*attention, *mlp], spec.train.qat)
    return quantization.prepare_4bit_base(model) if spec.lora and spec.lora.quantize_base else None


def adapter_config(model: PreTrainedModel, spec: LoraSpec, *, is_reward: bool = False) -> PeftConfig:
    """PEFT's configuration of adapters for the modules that `spec` names in this model. Raises JobFailure:
    invalid_request, when the model has no module of a given name, or one that LoRA cannot adapt."""
    attention, mlp = linear_modules(model)
    unknown = [name for name in spec.target_modules if not _matching(attention + mlp, [name])]
    if unknown:
        has = f"attention modules are: {', '.join(_suffixes(attention))}"
        if not attention:
            has = f"linear modules are: {', '.join(_suffixes(mlp)) or 'none'}"
        near = difflib.get_close_matches(unknown[0], _suffixes(attention + mlp), 1)
        raise JobFailure(
            Reason.invalid_request,
            f"lora_attn_modules names {', '.join(unknown)}, which this {type(model).__name__} does not have. "
            f"Its {has}{f'; the nearest is {near[0]}' if near else ''}.",
        )
    experts = expert_parameters(model) if spec.mlp else []
    if experts:
        raise JobFailure(
            Reason.invalid_request,
            f"apply_lora_to_mlp is true, and this {type(model).__name__} holds its experts as 3-D parameters "
            f"({', '.join(_suffixes(experts))}), which LoRA over linear layers does not reach. Set it to false and "
            f"name attention modules ({', '.join(_suffixes(attention))}), or train every weight.",
        )
    wanted = adapted_modules(model, spec)
    suffixes = _suffixes(wanted)
    if getattr(model.config, "model_type", None) in _MAMBA and (bad := sorted(_MAMBA_KERNEL & set(suffixes))):
        usable = [name for name in _suffixes(attention + mlp) if name not in _MAMBA_KERNEL]
        raise JobFailure(
            Reason.invalid_request,
            f"LoRA cannot adapt {', '.join(bad)} of this {type(model).__name__}: its kernels read those weights "
            f"directly. Set apply_lora_to_mlp to false and name lora_attn_modules among: {', '.join(usable)}.",
        )
    # Short names keep adapter_config.json readable; full names where a short one would also match something else.
    alike = [name for name, _ in model.named_modules()] if language_model(model) else attention + mlp
    is_exact = set(_matching(alike, suffixes)) == set(wanted)
    if spec.method == "ia3":
        return _ia3_config(wanted, [name for name in wanted if name in mlp], is_exact)
    target_modules = suffixes if is_exact else wanted
    if spec.method == "vera":
        return VeraConfig(task_type="CAUSAL_LM", r=spec.rank, target_modules=target_modules, save_projection=True)
    return LoraConfig(
        task_type="SEQ_CLS" if is_reward else "CAUSAL_LM",  # for which PEFT trains and saves the head, too
        r=spec.rank,
        lora_alpha=spec.alpha,
        lora_dropout=spec.dropout,
        use_rslora=spec.use_rslora,
        use_dora=spec.use_dora,
        target_modules=target_modules,
    )


def adapted_modules(model: PreTrainedModel, spec: LoraSpec) -> list[str]:
    """Names of the linear layers that get adapters, without what the model lacks."""
    attention, mlp = linear_modules(model)
    wanted = [
        name for module in spec.target_modules for name in _matching(attention, [module]) or _matching(mlp, [module])
    ]
    return wanted + [name for name in mlp if spec.mlp and name not in wanted]


def _ia3_config(wanted: list[str], feedforward: list[str], is_exact: bool) -> IA3Config:
    """IA3 for modules, given by their full names; those of `feedforward` get a factor for each input."""
    short = _suffixes(feedforward)
    # PEFT compares the ends of names, and requires the names of both lists to be of one kind.
    others = [name for name in wanted if name not in feedforward]
    if is_exact and not any(name.endswith(tuple(short)) for name in others):
        wanted, feedforward = _suffixes(wanted), short
    return IA3Config(task_type="CAUSAL_LM", target_modules=wanted, feedforward_modules=feedforward)


def linear_modules(model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Names of the linear layers inside the decoder blocks: (attention, everything else).

    The output projection is in no block. Of a vision-language model only the blocks of its language model count.
    """
    decoder = language_model(model)
    roots = [name for name in blocks_of(model) if name.startswith(decoder)]
    attention: list[str] = []
    other: list[str] = []
    for root in roots:
        for name, module in model.get_submodule(root).named_modules():
            if isinstance(module, (torch.nn.Linear, Conv1D)):
                is_attention = any("attn" in part or "attention" in part for part in name.lower().split("."))
                (attention if is_attention else other).append(f"{root}.{name}")
    return attention, other


def language_model(model: PreTrainedModel) -> str:
    """The beginning of the names of modules in the language model of a vision-language model; empty: it is no such."""
    if model.config.get_text_config() is model.config or getattr(model.config, "vision_config", None) is None:
        return ""
    decoder = model.get_decoder()
    return next((f"{name}." for name, module in model.named_modules() if module is decoder and name), "")


def expert_parameters(model: PreTrainedModel) -> list[str]:
    """Names of the parameters that hold the weights of several experts in one tensor, as transformers 5 keeps them."""
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.modules.conv._ConvNd):
            found += [f"{name}.{own}" for own, value in module.named_parameters(recurse=False) if value.dim() == 3]
    return found


def parameter_counts(model: torch.nn.Module) -> tuple[int, int]:
    """(trainable, total) parameters; tied weights count once, packed ones as what they hold."""
    packed = quantization.packed_elements(model)
    counts = [(p.requires_grad, packed.get(id(p), p.numel())) for p in model.parameters()]
    return sum(count for trainable, count in counts if trainable), sum(count for _, count in counts)


def source_arguments(source: ModelSource) -> dict[str, Any]:
    """Arguments of `from_pretrained` beside the model's name."""
    # False, not None: with None transformers prompts on the terminal.
    return {"trust_remote_code": source.trust_remote_code, **({"revision": source.revision} if source.revision else {})}


def _matching(names: Iterable[str], suffixes: Iterable[str]) -> list[str]:
    endings = tuple("." + suffix for suffix in suffixes)
    return [name for name in names if ("." + name).endswith(endings)]


def _suffixes(names: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})
