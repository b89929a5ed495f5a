"""Quantization: a frozen base in 4 bits under adapters (QLoRA), and quantization-aware training (QAT).

bitsandbytes and torchao are imported here only, and only for a job that uses them: they are in the extra
`quantization`, and together they cost a training process 1.5 s of its start.
"""

from __future__ import annotations

import copy
import importlib
import math
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import AutoHfQuantizer

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.job import Dtype, QatSpec


def base_arguments(dtype: Dtype, device: torch.device | str) -> dict[str, Any]:
    """Arguments of `from_pretrained` that load the base in 4 bits, directly onto `device`.

    Weights are stored as numbers of type bf16: FSDP2 shards only floating-point parameters, and its bf16 mixed
    precision would convert, and so destroy, packed bits of any other type. Raises JobFailure: invalid_request, when
    bitsandbytes is not installed.
    """
    library("bitsandbytes", "algorithm_config.quantize_base")
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if dtype == "bf16" else torch.float32,
        bnb_4bit_quant_storage=torch.bfloat16,
    )
    return {"quantization_config": config, "device_map": {"": device}}


@contextmanager
def in_files() -> Iterator[None]:
    """While this is open, `from_pretrained` does not quantize: weights of 4-bit layers stay as they are in their files.

    Each becomes a placeholder without memory, of the class, shape and dtype of the packed weight; `pack` quantizes it.
    """
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize

    quantize_now = Bnb4bitQuantize.convert

    def convert(self: Any, tensors: dict[str, Any], full_layer_name: str, model: PreTrainedModel, **more: Any) -> Any:
        if more["target_patterns"] != [full_layer_name]:  # made of several weights, so a copy: packed ones are smaller
            return quantize_now(self, tensors, full_layer_name=full_layer_name, model=model, **more)
        found = tensors[full_layer_name]
        return {full_layer_name: _placeholder(model, full_layer_name, found[0] if isinstance(found, list) else found)}

    with patch.object(Bnb4bitQuantize, "convert", convert):
        yield


def _placeholder(model: PreTrainedModel, name: str, values: torch.Tensor) -> Any:
    layer: Any = model.get_submodule(name.rpartition(".")[0])
    empty: Any = model.get_parameter(name)
    rows = math.ceil(values.numel() / 2 / empty.quant_storage.itemsize)
    # One element for each: accelerate recognizes the optimizer's parameters by their addresses.
    packed = torch.tensor(float("nan")).to(empty.quant_storage).expand(rows, 1)
    weight = type(empty)(packed, **{**vars(empty), "bnb_quantized": True})
    weight.in_files = values.T if issubclass(layer.source_cls, Conv1D) else values  # as transformers does
    layer._is_hf_initialized = True
    return weight


def is_in_files(weight: torch.Tensor) -> bool:
    """Whether this is a placeholder that `in_files` made."""
    return hasattr(weight, "in_files")


def pack(weight: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Quantize the values of a placeholder on `device`, to the numbers that `from_pretrained` makes of them there.

    Args:
        dtype: of the values when they are quantized, and after they are dequantized.
    """
    weight.data = vars(weight).pop("in_files").to(device=device, dtype=dtype)
    weight.bnb_quantized = False
    weight.to(device)  # quantizes in place, and gives the constants to the layer


def is_packed(weight: torch.Tensor) -> bool:
    """Whether a parameter holds packed weights, or is a placeholder of them."""
    # By name: a process that trains without bitsandbytes does not import it.
    return type(weight).__name__ == "Params4bit"


def stored_quantization(config: PreTrainedConfig) -> Any:
    """How the weights in a model's files are quantized, where transformers reads it; None or empty: they are not."""
    text = config.get_text_config(decoder=True)
    return getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)


def refuse_quantized(config: PreTrainedConfig, model: str, *, is_quantized: bool) -> None:
    """Refuse weights that were stored by bitsandbytes or torchao: the recipe quantizes while loading. Raises
    JobFailure: invalid_model.

    Args:
        is_quantized: the job quantizes weights, so that no other method is accepted either.
    """
    stored = stored_quantization(config)
    if not stored:
        return
    method = stored.get("quant_method", "bitsandbytes")
    if is_quantized or method in ("bitsandbytes", "torchao"):
        raise JobFailure(
            Reason.invalid_model,
            f"the weights of model {model!r} are quantized already ({method}). Name the model that they were made "
            "from; quantize_base in the LoRA settings loads it in 4 bits.",
        )


def check_stored(config: PreTrainedConfig, model: str, *, is_quantized: bool) -> None:
    """Return if a model's weights are not quantized, or by a method that the job can train and whose library is here.
    Raises JobFailure: invalid_model, with the method and what transformers requires; as `refuse_quantized`."""
    refuse_quantized(config, model, is_quantized=is_quantized)
    stored = stored_quantization(config)
    if stored is None:
        return
    try:
        if not AutoHfQuantizer.supports_quant_method(stored):
            return  # transformers loads such weights as they are
        quantizer = AutoHfQuantizer.from_config(copy.deepcopy(stored), pre_quantized=True)
        with suppress(RuntimeError, ValueError):  # such as of a GPU, which a preflight does not have
            quantizer.validate_environment(device_map=None, dtype=None)
    except (ImportError, ValueError, TypeError, KeyError, AttributeError) as error:
        what = " ".join(str(error).split())[:300].rstrip(".")
        raise JobFailure(
            Reason.invalid_model,
            f"model {model!r} is quantized, by quantization_config ({stored.get('quant_method')}) in its config.json, "
            f"which cannot be loaded where it trains: {what}. Install what that requires, or name the model that its "
            "weights were made from.",
        ) from error


def prepare_4bit_base(model: PreTrainedModel) -> dict[str, Any]:
    """Prepare a base in 4 bits for training; returns what was quantized, for the job's record. Raises JobFailure:
    invalid_request, when it has no layer that bitsandbytes can hold in 4 bits."""
    layers = [module for module in model.modules() if _is_4bit(module)]
    if not layers:
        raise JobFailure(
            Reason.invalid_request,
            f"quantize_base is true, and this {type(model).__name__} has no linear layer that bitsandbytes can "
            "hold in 4 bits. Set quantize_base to false.",
        )
    for layer in layers:
        # On CPUs with bf16 instructions the first evaluation would repack the weights for a bf16 kernel, permanently.
        layer.support_avx512bf16_for_cpu = False
    return {"base": "nf4", "layers": len(layers), "bytes": model.get_memory_footprint(return_buffers=False)}


def move_constants(model: torch.nn.Module, device: torch.device) -> None:
    """Move the quantization constants of a base in 4 bits to the device that its sharded weights are used on. Modules
    hold them, since FSDP2 replaces the weights that held them, and they are not sharded."""
    for layer in (module for module in model.modules() if _is_4bit(module)):
        layer.quant_state.to(device)


def keep_adapters_in_fp32(model: torch.nn.Module) -> None:
    """TRL makes adapters over a quantized base bf16, as in the QLoRA paper. Ours are fp32 over every base: an
    update that is small relative to its weight is lost in bf16."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def fake_quantize(model: PreTrainedModel, layers: Iterable[str], qat: QatSpec) -> dict[str, Any]:
    """Make the named linear layers compute with weights (and activations) rounded as the quantizer would, in fp32.

    The weights themselves stay plain, under their names. Gradients pass the rounding unchanged (straight-through).
    Returns what was done, for the job's record. Source: torchao's `QATConfig`, step "prepare". Raises JobFailure:
    invalid_request, when torchao is not installed, or a layer is no torch.nn.Linear, or its width no multiple of the
    group size.
    """
    torchao = library("torchao.quantization", "QAT")
    names = set(layers)
    modules = {name: module for name, module in model.named_modules() if name in names}
    _check_layers(model, modules, qat.group_size)
    quantizer = getattr(torchao.qat, qat.quantizer_name)(groupsize=qat.group_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torchao 0.18 uses a name that it has deprecated
        activations = quantizer.get_activation_fake_quantize_config()
        weights = quantizer.get_weight_fake_quantize_config()
    config = torchao.qat.QATConfig(activation_config=activations, weight_config=weights, step="prepare")
    torchao.quantize_(model, config, filter_fn=lambda module, name: name in names)
    return {"quantizer": qat.quantizer_name, "group_size": qat.group_size, "layers": len(names)}


def packed_elements(model: torch.nn.Module) -> dict[int, int]:
    """id of each parameter with packed weights -> the number of weights."""
    layers = [module for module in model.modules() if _is_4bit(module)]
    return {id(layer.weight): layer.in_features * layer.out_features for layer in layers}


def let_4bit_be_traced(model: torch.nn.Module) -> None:
    """Have layers in 4 bits compute what torch's compiler can trace: the same product. bitsandbytes makes a weight anew
    that FSDP2 has replaced, and changes the dtype of a bias, within its forward."""
    layers = [module for module in model.modules() if _is_4bit(module)]
    kinds = {kind: _traced(kind) for kind in {type(layer) for layer in layers}}
    for layer in layers:
        layer.__class__ = kinds[type(layer)]


def _traced(kind: Any) -> type[torch.nn.Module]:
    matmul_4bit = library("bitsandbytes", "algorithm_config.quantize_base").matmul_4bit

    def forward(self: Any, states: torch.Tensor) -> torch.Tensor:
        dtype = self.compute_dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        product: torch.Tensor = matmul_4bit(states.to(dtype), self.weight, bias=bias, quant_state=self.quant_state)
        return product.to(states.dtype)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _is_4bit(module: torch.nn.Module) -> bool:
    # By name: a process that trains without bitsandbytes does not import it. PEFT has a class of the same name.
    kind = type(module)
    return kind.__name__ == "Linear4bit" and kind.__module__.startswith("bitsandbytes.")


def _check_layers(model: PreTrainedModel, modules: dict[str, torch.nn.Module], group_size: int) -> None:
    others = [name for name, module in modules.items() if type(module) is not torch.nn.Linear]
    if others or not modules:
        found = f"{others[0]} is a {type(modules[others[0]]).__name__}" if others else "no block has linear layers"
        raise JobFailure(
            Reason.invalid_request,
            f"QAT works on torch.nn.Linear only, and in this {type(model).__name__} {found}. Train without QAT.",
        )
    widths = {name: module.in_features for name, module in modules.items()}
    if wrong := [name for name, width in widths.items() if width % group_size]:
        common = math.gcd(*widths.values())
        raise JobFailure(
            Reason.invalid_request,
            f"group_size {group_size} does not divide the {widths[wrong[0]]} inputs of {wrong[0]} ({len(wrong)} of "
            f"{len(widths)} layers have such a width). The sizes that divide all of them are the divisors of {common}.",
        )


def library(name: str, feature: str, extra: str = "quantization") -> ModuleType:
    """Import a module of an extra. Raises JobFailure: invalid_request, when it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise JobFailure(
            Reason.invalid_request,
            f"{feature} needs {name.partition('.')[0]}, which the environment that trains ({sys.executable}) cannot "
            f"import: {error}. Install the extra there: pip install 'llama_stack_provider_trl[{extra}]'.",
        ) from error
