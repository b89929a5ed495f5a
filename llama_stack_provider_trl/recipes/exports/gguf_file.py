"""Writes a model in a directory as one GGUF file, tensor by tensor."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import PreTrainedTokenizerBase

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.exports import GgufType
from .architectures import architecture_of, describe, in_gguf, names_in_gguf, rope_factors
from .vocabulary import Vocabulary, unmapped, vocabulary_of

_FACTORS = "rope_freqs.weight"
_BLOCK = 32
"""Weights of a row that share a scale in Q8_0."""
_PHI3_TOKENS = {"</s>", "<unk>", "<s>", "<|endoftext|>"}
"""Without which llama.cpp cannot read a model of that name."""
_MOST_ENDS = 3
"""Tokens that end an answer, for which GGUF has names: eos, eot, eom."""


def check_installed() -> None:
    """Raises JobFailure: the package that writes GGUF is not installed."""
    if importlib.util.find_spec("gguf") is None:
        raise JobFailure(
            Reason.invalid_request,
            "the environment that trains lacks the package gguf, which writes GGUF files: install the extra `gguf` "
            "there (pip install 'llama-stack-provider-trl[gguf]'), or export to safetensors.",
        )


class GgufPlan:
    """Everything of a GGUF file but the values of its tensors. Making one writes nothing. Raises JobFailure:
    invalid_model, naming the architecture, setting, tensor or part of the tokenizer that is not mapped.

    Args:
        ends: tokens that end an answer, the tokenizer's own among them.
    """

    def __init__(
        self, config: Any, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], rows: int, name: str
    ) -> None:
        check_installed()
        import gguf

        self.config = config
        architecture = architecture_of(config)
        arch = gguf.MODEL_ARCH_NAMES[getattr(gguf.MODEL_ARCH, architecture.name)]
        self.writer = gguf.GGUFWriter(None, arch)
        vocabulary = vocabulary_of(tokenizer, rows)
        # By this name alone llama.cpp decides that special tokens take the spaces behind them.
        name = re.sub("(?i)phi-?3", "phi 3", name)
        if vocabulary.strips_right:
            if config.model_type != "phi3" or not {*vocabulary.tokens} >= _PHI3_TOKENS:
                raise unmapped("its special tokens take the spaces behind them, and GGUF has no place for that")
            name = f"phi-3 {name}"
        self.writer.add_type("model")
        self.writer.add_name(name)
        describe(self.writer, config)
        _write_tokenizer(self.writer, vocabulary, tokenizer, ends)

    def write(
        self,
        directory: Path,
        kind: GgufType,
        output: Path,
        progress: Callable[[int, int], None] = lambda done, total: None,
        change: Callable[[str], torch.Tensor | None] = lambda name: None,
    ) -> None:
        """Write the weights of `directory`, in safetensors, to the new file `output`. A plan writes one file.

        Args:
            kind: of the weights; those of one dimension are F32 always.
            change: what is added to the weight of a name in GGUF, of its shape; None: nothing.

        Raises:
            JobFailure: a tensor that is not mapped, before anything is written; weights that F16 cannot hold.
            OSError: the disk is full.
        """
        import gguf

        quantization = getattr(gguf.GGMLQuantizationType, kind.upper())
        self.writer.add_file_type(file_type(kind))
        self.writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        with ExitStack() as stack:
            files = _open(directory, stack)
            names = names_in_gguf(self.config, files)
            factors = rope_factors(self.config)
            planned: list[tuple[str, str | None, Any]] = []
            if factors is not None:
                planned.append((_FACTORS, None, gguf.GGMLQuantizationType.F32))
            for name in files:
                shape = files[name].get_slice(name).get_shape()
                planned.append((names[name], name, _type_of(shape, quantization)))
            total = 0
            for written, source, of_tensor in planned:
                shape = (
                    list(factors.shape)
                    if source is None and factors is not None
                    else files[source or ""].get_slice(source).get_shape()
                )
                total += _announce(self.writer, written, shape, of_tensor)
            self.writer.write_header_to_file(path=output)
            self.writer.write_kv_data_to_file()
            self.writer.write_ti_data_to_file()
            done = 0
            for written, source, of_tensor in planned:
                weight = factors if source is None else in_gguf(self.config, source, files[source].get_tensor(source))
                assert weight is not None
                if (added := change(written)) is not None:
                    weight = weight.float() + added
                values = encoded(source or _FACTORS, weight, of_tensor)
                self.writer.write_tensor_data(values)
                done += values.nbytes
                progress(done, total)
            self.writer.close()


_FILE_TYPES: Mapping[GgufType, str] = {
    "f32": "ALL_F32",
    "f16": "MOSTLY_F16",
    "bf16": "MOSTLY_BF16",
    "q8_0": "MOSTLY_Q8_0",
}


def file_type(kind: GgufType) -> Any:
    """`general.file_type` of a file whose matrices have a type."""
    import gguf

    return getattr(gguf.LlamaFileType, _FILE_TYPES[kind])


def _type_of(shape: Sequence[int], wanted: Any) -> Any:
    """Norms and biases are F32; a matrix whose rows cannot be divided into blocks is F16."""
    from gguf import GGMLQuantizationType as Kind

    if len(shape) < 2:
        return Kind.F32
    return Kind.F16 if wanted == Kind.Q8_0 and shape[-1] % _BLOCK else wanted


def _announce(writer: Any, name: str, shape: Sequence[int], kind: Any) -> int:
    """Add a tensor to the file's list; returns its bytes."""
    import gguf

    plain = {gguf.GGMLQuantizationType.F32: np.float32, gguf.GGMLQuantizationType.F16: np.float16}.get(kind)
    if plain is not None:
        size = int(np.prod(shape)) * np.dtype(plain).itemsize
        writer.add_tensor_info(name, list(shape), np.dtype(plain), size)
        return size
    stored = gguf.quant_shape_to_byte_shape(tuple(shape), kind)
    size = int(np.prod(stored))
    writer.add_tensor_info(name, list(stored), np.dtype(np.uint8), size, raw_dtype=kind)
    return size


def encoded(name: str, weight: torch.Tensor, kind: Any) -> Any:
    """The values of a tensor as they stand in a file. Raises JobFailure: F16 cannot hold them."""
    import gguf

    values = weight.float().contiguous().numpy()
    if kind == gguf.GGMLQuantizationType.F32:
        return values
    if kind == gguf.GGMLQuantizationType.F16:
        largest = float(np.abs(values).max(initial=0.0))
        if largest > np.finfo(np.float16).max:
            raise JobFailure(
                Reason.export_failed,
                f"{name} has a value of {largest:.3g}, and F16 ends at 65504: export with gguf_type bf16 or f32.",
            )
        return values.astype(np.float16)
    return gguf.quants.quantize(values, kind)


def _open(directory: Path, stack: ExitStack) -> dict[str, Any]:
    """Tensor -> the open file that has it, in the order of the files."""
    found: dict[str, Any] = {}
    for path in sorted(directory.glob("*.safetensors")):
        file = stack.enter_context(safe_open(path, framework="pt"))
        found |= dict.fromkeys(file.keys(), file)
    return found


def _write_tokenizer(
    writer: Any, vocabulary: Vocabulary, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]
) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    writer.add_token_types(vocabulary.types)
    if vocabulary.merges is not None:
        writer.add_token_merges(vocabulary.merges)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(vocabulary.adds_space)
    own = tokenizer.eos_token_id
    named = [*([own] if own in ends else []), *(end for end in ends if end != own)]
    if not named or len(named) > _MOST_ENDS:
        raise unmapped(f"its answers end with {len(named)} tokens, and GGUF has names for 1 to {_MOST_ENDS}")
    for add, token in zip(
        (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id), named, strict=False
    ):
        add(token)
    for add, other in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if other is not None:
            add(other)
    template: Any = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)


def metadata(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file, without lists of tokens. Raises what the library raises for a damaged file."""
    import gguf

    reader = gguf.GGUFReader(path)
    return {name: field.contents() for name, field in reader.fields.items() if len(field.data) <= 1}


def tensors(path: Path) -> Iterator[tuple[str, Any]]:
    import gguf

    for one in gguf.GGUFReader(path).tensors:
        yield one.name, one.tensor_type
