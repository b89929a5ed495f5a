"""The adapter of a LoRA result as files of its own, without the weights of its base model.

GGUF has a low-rank pair for each weight and one number, alpha: llama.cpp adds alpha / rank * B A to a weight. vLLM
reads PEFT's files. What either would compute otherwise than PEFT is refused by name, before anything is written.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import Linear
from peft.tuners.tuners_utils import BaseTunerLayer

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.exports import ADAPTER_GGUF, ExportTarget, GgufType
from ..checkpoint.adapter_card import shown_name
from ..model.saving import describe
from .architectures import ARCHITECTURES, architecture_of, in_gguf, names_in_gguf
from .gguf_file import check_installed, encoded, file_type, metadata
from .proof import failed
from .reference import Trained

CHAT_TEMPLATE = "chat_template.jinja"
_BLOCKS = ".layers."
_MODULES = frozenset(
    {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj"}
)
"""Linear layers of a block that both programs add a pair to, in all mapped architectures that have them."""
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What `--max-lora-rank` may be."""
_FURTHER = ("bias", "modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication")
_PATTERNS = ("rank_pattern", "alpha_pattern", "alora_invocation_tokens")
_NONE: tuple[Any, ...] = (None, False, "none", (), [], {})
_DELTAS: Mapping[GgufType, float] = {"f32": 1e-5, "f16": 2e-3, "bf16": 1.6e-2}
"""Up to which fraction of its own norm the change of a weight may differ from PEFT's."""


class LoraModule(NamedTuple):
    name: str
    """Of its weight in the model's files."""
    layer: Linear


class Lora(NamedTuple):
    """An adapter that is nothing but pairs of one rank, with one scale."""

    modules: list[LoraModule]
    rank: int
    alpha: float
    """The scale times the rank: of rank-stabilized LoRA, alpha * sqrt(rank)."""
    adapter: str
    """PEFT's name for it."""

    def num_bytes(self) -> int:
        """Of its pairs in fp32."""
        return sum(4 * (a.numel() + b.numel()) for a, b in (_pair(one, self.adapter) for one in self.modules))


def lora_of(trained: Trained, target: ExportTarget) -> Lora:
    """The adapter of a model. Raises JobFailure: invalid_model, with what another program would compute otherwise."""
    model = trained.model
    if not isinstance(model, PeftModel):
        raise _refused(target, "it is a whole model, which has no adapter", "export it to gguf")
    config = model.active_peft_config
    if not isinstance(config, LoraConfig):
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise _refused(target, f"its adapter is of the kind {kind}, and LoRA alone is read")
    if config.use_dora:
        raise _refused(target, "its adapter is trained with DoRA (use_dora)")
    if getattr(config, "lora_bias", False):
        raise _refused(target, "its adapter has biases (lora_bias)")
    for name in (*_FURTHER, *_PATTERNS):
        if (value := getattr(config, name, None)) not in _NONE:
            raise _refused(target, f"its adapter sets {name} ({value!r:.80})")
    modules = list[LoraModule]()
    for name, layer in trained.plain.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        if not isinstance(layer, Linear) or layer.lora_variant or _BLOCKS not in name:
            raise _refused(target, f"its adapter changes {name!r} ({type(layer).__name__}), no linear layer of a block")
        if name.rpartition(".")[2] not in _MODULES:
            raise _refused(target, f"its adapter changes {name!r}, and known are {', '.join(sorted(_MODULES))}")
        modules.append(LoraModule(f"{name}.weight", layer))
    if not modules:
        raise _refused(target, "its adapter changes no linear layer")
    adapter = model.active_adapter
    rank = int(config.r)
    return Lora(modules, rank, config.lora_alpha * (math.sqrt(rank) if config.use_rslora else 1.0), adapter)


def write_gguf(trained: Trained, lora: Lora, kind: GgufType, output: Path) -> float:
    """Write an adapter as GGUF, with the chat template beside it, and compare each pair with PEFT's. Returns what
    `check_written` does.

    Raises:
        JobFailure: a layer that is not mapped; values that F16 cannot hold; a file that is not the adapter.
        OSError: the disk is full.
    """
    config = trained.plain.config
    name = name_of(trained)
    write_lora(config, lora, kind, name, output / ADAPTER_GGUF)
    if isinstance(template := trained.tokenizer.chat_template, str):
        (output / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
    return check_written(config, lora, kind, WrittenLora(output / ADAPTER_GGUF))


def write_peft(trained: Trained, output: Path) -> None:
    """Write an adapter as PEFT has it, with the tokenizer and the generation configuration of the trained model. Raises
    JobFailure: invalid_model, the generation configuration cannot be written; OSError: the disk is full."""
    model: Any = trained.model
    model.active_peft_config.base_model_name_or_path = shown_name(trained.spec.source.model)
    model.save_pretrained(output, save_embedding_layers=False)
    trained.tokenizer.save_pretrained(output)
    try:
        trained.plain.generation_config.save_pretrained(output)
    except ValueError as error:
        raise _refused("vllm", f"its generation_config.json cannot be written again: {describe(error)}") from error


def name_of(trained: Trained) -> str:
    """A name for an export: of the job that trained it, or of its directory."""
    spec = trained.spec
    made_by = (spec.adapter or spec.source).made_by
    return made_by.job_uuid if made_by is not None else (spec.adapter or spec.source).model.rpartition("/")[2]


def command_of(trained: Trained, lora: Lora | None, most_rank: int | None) -> str:
    """The command that serves an export, in the directory of the export."""
    if most_rank is None and lora is not None:
        template = isinstance(trained.tokenizer.chat_template, str)
        further = f" --jinja --chat-template-file {CHAT_TEMPLATE}" if template else ""
        return f'llama-server -m "$BASE" --lora {ADAPTER_GGUF}{further}'
    source = trained.spec.source
    is_local = source.made_by is not None or Path(source.model).is_absolute()
    return vllm_command(None if is_local else source.model, source.revision, name_of(trained), most_rank)


def write_lora(config: Any, lora: Lora, kind: GgufType, name: str, output: Path) -> None:
    """Write an adapter as a GGUF file, with the names and the order of rows of its base model's GGUF file.

    Args:
        kind: of the pairs: f32, f16, bf16.

    Raises:
        JobFailure: a layer that is not mapped, before anything is written; values that F16 cannot hold.
        OSError: the disk is full.
    """
    check_installed()
    import gguf

    names = names_in_gguf(config, [module.name for module in lora.modules])
    quantization = getattr(gguf.GGMLQuantizationType, kind.upper())
    writer = gguf.GGUFWriter(output, _architecture(config))
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_name(name)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, lora.alpha)
    writer.add_file_type(file_type(kind))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for module in lora.modules:
        a, b = _pair(module, lora.adapter)
        for part, weight in (("lora_a", a), ("lora_b", in_gguf(config, module.name, b))):
            values = encoded(f"{module.name} ({part})", weight, quantization)
            writer.add_tensor(f"{names[module.name]}.{part}", values, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class WrittenLora:
    """An adapter in a GGUF file, as llama.cpp computes with it."""

    def __init__(self, path: Path) -> None:
        import gguf

        self.metadata = metadata(path)
        self._tensors = {one.name: one for one in gguf.GGUFReader(path).tensors}

    def names(self) -> set[str]:
        """Of the weights that it changes, and of any tensor that belongs to none."""
        return {name.removesuffix(".lora_a").removesuffix(".lora_b") for name in self._tensors}

    def change(self, name: str) -> torch.Tensor | None:
        """What is added to a weight of the base model's GGUF file, fp32 [outputs, inputs]; None: nothing."""
        import gguf

        pair = [self._tensors.get(f"{name}.{part}") for part in ("lora_a", "lora_b")]
        found = [
            torch.from_numpy(gguf.quants.dequantize(one.data, one.tensor_type).copy())
            for one in pair
            if one is not None
        ]
        if len(found) != 2:
            return None
        a, b = found
        alpha = float(self.metadata["adapter.lora.alpha"])
        return b @ a * (alpha / a.shape[0])


def check_written(config: Any, lora: Lora, kind: GgufType, written: WrittenLora) -> float:
    """Compare a file with PEFT's adapter, weight by weight. Raises JobFailure: export_failed, with what differs.
    Returns the largest difference of a weight's change, as a fraction of its norm."""
    expected = {
        "general.architecture": _architecture(config),
        "general.type": "adapter",
        "adapter.type": "lora",
    }
    for name, wanted_text in expected.items():
        if written.metadata.get(name) != wanted_text:
            raise failed(f"its {name} is {written.metadata.get(name)!r}, expected {wanted_text!r}")
    names = names_in_gguf(config, [module.name for module in lora.modules])
    if strange := sorted(written.names() ^ set(names.values())):
        raise failed(f"it has other weights than the adapter, such as {strange[0]!r}")
    largest = 0.0
    for module in lora.modules:
        wanted = in_gguf(config, module.name, module.layer.get_delta_weight(lora.adapter).detach().float())
        found = written.change(names[module.name])
        if found is None or found.shape != wanted.shape:
            shape = None if found is None else [*found.shape]
            raise failed(f"its change of {names[module.name]} is {shape}, expected {[*wanted.shape]}")
        value = float((found - wanted).norm() / wanted.norm().clamp(min=1e-12))
        if not value <= _DELTAS[kind]:  # nor a NaN
            raise failed(
                f"its change of {names[module.name]} differs from the trained one by {value:.2g} of its norm, where "
                f"{kind} explains {_DELTAS[kind]:g}"
            )
        largest = max(largest, value)
    return largest


def check_vllm(trained: Trained, lora: Lora | None) -> int | None:
    """Return the `--max-lora-rank` for an adapter; None: for a whole model. Raises JobFailure: invalid_model, naming
    what vLLM has no place for."""
    model_type = trained.plain.config.model_type
    if model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise _refused("vllm", f"its model_type is {model_type!r}, and those that are known to be served are {known}")
    if lora is None:
        return None
    for most in _VLLM_RANKS:
        if lora.rank <= most:
            return most
    raise _refused(
        "vllm", f"its adapter has rank {lora.rank}, and vLLM serves ranks up to {_VLLM_RANKS[-1]}", "merge the adapter"
    )


def vllm_command(base: str | None, revision: str | None, name: str, most_rank: int | None) -> str:
    """The command that serves an export, in its directory.

    Args:
        base: id of an adapter's base model; None: it is a directory, for which "$BASE" stands.
        most_rank: None: the export is a whole model.
    """
    words: Sequence[str]
    if most_rank is None:
        words = ["vllm", "serve", ".", "--served-model-name", name]
        return shlex.join(words)
    told = '"$BASE"' if base is None else shlex.quote(base)
    words = ["--revision", revision] if revision and base else []
    words = [*words, "--tokenizer", ".", "--generation-config", ".", "--enable-lora", "--lora-modules", f"{name}=."]
    return f"vllm serve {told} {shlex.join([*words, '--max-lora-rank', str(most_rank)])}"


def _architecture(config: Any) -> str:
    import gguf

    return gguf.MODEL_ARCH_NAMES[getattr(gguf.MODEL_ARCH, architecture_of(config).name)]


def _pair(module: LoraModule, adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        module.layer.lora_A[adapter].weight.detach().float(),
        module.layer.lora_B[adapter].weight.detach().float(),
    )


_PROGRAMS: Mapping[str, str] = {"lora-gguf": "a GGUF file of its adapter", "vllm": "vLLM"}


def _refused(
    target: ExportTarget, found: str, instead: str = "merge the adapter: export to safetensors or gguf"
) -> JobFailure:
    return JobFailure(
        Reason.invalid_model,
        f"the model cannot be exported to {_PROGRAMS[target]}: {found}. Nothing was written; {instead}.",
    )
