"""Merges models, or adapters, into one on disk, weight by weight: no model is in memory as a whole."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from ...errors import JobFailure
from ...specs.checkpoint_files import is_data_name
from ...specs.events import Reason
from ...specs.merge import ADAPTER_METHODS, MODEL_METHODS, PRUNING_METHODS, STACKED_METHODS, MergeSpec
from ...specs.model_source import ModelSource
from ...system.files import MANIFEST, atomic_write_json, put_in_place
from ...system.model_damage import ADAPTER_FILES, CONFIG_FILES
from ..model import loading
from ..model.configs import DAMAGE
from ..model.files import check_adapter_files, check_files, check_tokenizer_files, whole_weights
from .merge_methods import merged_adapter, merged_weight, seeded, shares_of, slerp_weights
from .shards import Outline, outlines, write

_ADAPTER_CONFIG, _ADAPTER_WEIGHTS = ADAPTER_FILES
_RECORD = "merge.json"
_A, _B = ".lora_A.weight", ".lora_B.weight"
_ALIKE = ("peft_type", "task_type", "base_model_name_or_path", "fan_in_fan_out")
"""Entries of adapters' configurations that must be equal."""
_ABSENT: dict[str, Any] = {"rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None, "use_dora": False}
"""Entries that a merged adapter cannot have."""


_FIRST = "merge it into its base first (trl-remote adapter merge DIR -o MODEL)"


def merge(spec: MergeSpec) -> dict[str, Any]:
    """Write the merge of `spec.inputs` to `spec.output`, which appears when it is complete. Returns `kind` (model or
    adapter), `tensors` and `parameters` of the result. Raises JobFailure: invalid_request or invalid_model, before
    anything is written; disk_full."""
    if spec.output.exists():
        raise _refusal(f"{spec.output} exists: name a new directory")
    with ExitStack() as stack:
        inputs = [_Weights(one, stack) for one in spec.inputs]
        kinds = {one.kind for one in inputs}
        if len(kinds) > 1:
            adapter = next(one for one in inputs if one.kind == "adapter")
            raise _refusal(f"{adapter.given} is an adapter, and others are whole models: {_FIRST}")
        base = _Weights(spec.base, stack) if spec.base is not None else None
        planned = _planned_adapter(spec, inputs) if kinds == {"adapter"} else _planned_model(spec, inputs, base)
        staging = spec.output.with_name(f".{spec.output.name}.merging-{os.getpid()}")
        try:
            return _written(spec, inputs, planned, staging)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


class _Weights:
    def __init__(self, given: ModelSource, stack: ExitStack) -> None:
        self.given = given.model
        self.directory = _directory(given)
        self.kind = "adapter" if (self.directory / _ADAPTER_CONFIG).is_file() else "model"
        if self.kind == "adapter":
            check_adapter_files(self.directory)
        else:
            source = given.model_copy(update={"path": self.directory})
            check_files(source, CONFIG_FILES)
            check_tokenizer_files(source)
            whole_weights(source)
        self.outlines: dict[str, Outline] = {}
        self._files: dict[str, Any] = {}
        for path in self._paths():
            try:
                found = outlines(path)
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, KeyError, SafetensorError) as error:
                raise _invalid(self.given, f"{path.name} cannot be read ({error})", "save it again") from error
            self.outlines |= found
            self._files |= dict.fromkeys(found, file)

    def _paths(self) -> list[Path]:
        name = _ADAPTER_WEIGHTS if self.kind == "adapter" else SAFE_WEIGHTS_NAME
        if (path := self.directory / name).is_file():
            return [path]
        index = self.directory / SAFE_WEIGHTS_INDEX_NAME
        if self.kind == "adapter" or not index.is_file():
            raise _invalid(self.given, f"it has no {name}", "save it as safetensors (save_pretrained does)")
        found = self.read_json(index.name).get("weight_map", {})
        if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
            raise _invalid(self.given, f"{index.name} is no index of weights", "save it again")
        names = set(found.values())
        unsafe = [one for one in names if Path(one).name != one]
        if unsafe:
            raise _invalid(self.given, f"{index.name} names {unsafe[0]!r} as a file of weights", "save it again")
        return [self.directory / one for one in sorted(names)]

    def read_json(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads((self.directory / name).read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise _invalid(self.given, f"{name} cannot be read ({error})", "save it again") from error
        if not isinstance(found, dict):
            raise _invalid(self.given, f"{name} is no JSON object", "save it again")
        return found

    def tied(self) -> dict[str, str]:
        """The weights that its configuration ties, with what it ties them to; empty, too: no such model can be built.

        By names as in files: below another module than in the model, they end in the same way.
        """
        source = ModelSource(model=self.given, path=self.directory)
        try:
            model = loading.outline(source, loading.load_config(source), torch.float32)
        except (*DAMAGE, RuntimeError, JobFailure):  # with code of its own, or of another kind than a language model
            return {}
        named = model.get_expanded_tied_weights_keys(all_submodels=True)
        return {self._in_files(head): self._in_files(embedding) for head, embedding in named.items()}

    def _in_files(self, name: str) -> str:
        module, _, last = name.rpartition(".")
        end = f"{module.rpartition('.')[2]}.{last}"
        found = [one for one in self.outlines if one == end or one.endswith(f".{end}")]
        return found[0] if len(found) == 1 else name

    def are_equal(self, name: str, other: str) -> bool:
        return self.outlines[name] == self.outlines[other] and torch.equal(self.get(name), self.get(other))

    def get(self, name: str) -> torch.Tensor:
        return self._files[name].get_tensor(name)


class _Plan:
    """What is written: the outline of each tensor, how it is computed, and the configuration beside it."""

    def __init__(self, file: str, config: tuple[str, dict[str, Any]]) -> None:
        self.file, self.config = file, config
        self.outlines: dict[str, Outline] = {}
        self.compute: dict[str, Callable[[], torch.Tensor]] = {}

    def add(self, name: str, outline: Outline, compute: Callable[[], torch.Tensor]) -> None:
        self.outlines[name], self.compute[name] = outline, compute


def _planned_model(spec: MergeSpec, inputs: list[_Weights], base: _Weights | None) -> _Plan:
    _check_method(spec, MODEL_METHODS, "whole models")
    differences = spec.method in PRUNING_METHODS
    if differences != (base is not None):
        hint = "name the model from which they were trained" if differences else "leave it out"
        raise _refusal(f"method {spec.method} of whole models {'needs a' if differences else 'has no'} base: {hint}")
    if not differences:
        _check_shares(spec, "models")
    if base is not None and base.kind == "adapter":
        raise _refusal(f"the base {base.given} is an adapter: name the whole model, or {_FIRST}")
    models = [*inputs, *([base] if base else [])]
    has_own_head = _has_own_head(models)
    first = inputs[0]
    for other in models[1:]:
        _check_alike(first, other)
    _check_vocabularies(models)
    config = first.read_json(CONFIG_NAME)
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    if has_own_head:
        for part in (config, *(part for part in parts if part.get("tie_word_embeddings"))):
            part["tie_word_embeddings"] = False
    if any(part.get("quantization_config") for part in parts):
        raise _invalid(first.given, "it is quantized", "merge models in fp32, bf16 or fp16")
    if spec.dtype:
        config["dtype"] = str(loading.DTYPES[spec.dtype]).removeprefix("torch.")
        config.pop("torch_dtype", None)
    plan = _Plan(SAFE_WEIGHTS_NAME, (CONFIG_NAME, config))
    weights = [one.weight for one in spec.inputs]
    for name, outline in first.outlines.items():
        if not outline.dtype.is_floating_point:
            plan.add(name, outline, partial(first.get, name))
            continue

        def compute(name: str = name) -> torch.Tensor:
            tensors = [one.get(name).float() for one in inputs]
            with seeded(spec.seed, name):
                of_base = base.get(name).float() if base else None
                return merged_weight(spec.method, tensors, weights, of_base, spec.density or 1.0)

        plan.add(name, Outline(outline.shape, loading.DTYPES[spec.dtype] if spec.dtype else outline.dtype), compute)
    return plan


def _has_own_head(models: Sequence[_Weights]) -> bool:
    """Whether a weight that a configuration ties to the embeddings has values of its own in the files.

    transformers loads such a model with its own head, other programs with the embeddings in its place: the merged one
    is configured as untied, as a trained one is (`model.agreement.untie`). A head that is a copy of the embeddings in
    all models is left out: methods that draw numbers for each weight would make another of it.
    """
    tied = [one.tied() for one in models]
    has_own = False
    for head, embedding in {pair for found in tied for pair in found.items()}:
        having = [one for one in models if {head, embedding} <= one.outlines.keys()]
        if all(head in found for found in tied) and all(one.are_equal(head, embedding) for one in having):
            for one in having:
                del one.outlines[head]
        elif having:
            has_own = True
    return has_own


def _planned_adapter(spec: MergeSpec, inputs: list[_Weights]) -> _Plan:
    _check_method(spec, ADAPTER_METHODS, "adapters")
    if spec.base is not None:
        raise _refusal(f"adapters are merged without a base: leave {spec.base} out")
    configs = [one.read_json(_ADAPTER_CONFIG) for one in inputs]
    for one, config in zip(inputs, configs, strict=True):
        _check_adapter(one, config, configs[0])
    ranks = [int(config["r"]) for config in configs]
    if spec.method == "slerp":
        _check_shares(spec, "adapters")
    is_stacked = spec.method in STACKED_METHODS
    if not is_stacked and len(set(ranks)) > 1:
        methods = " and ".join(STACKED_METHODS)
        raise _refusal(f"adapters of ranks {ranks} are merged by the methods {methods} only, or give all the same rank")
    rank = sum(ranks) if is_stacked else ranks[0]
    shares = shares_of([one.weight for one in spec.inputs]) if spec.method == "slerp" else []
    targets = sorted({target for config in configs for target in config["target_modules"]})
    merged = {**configs[0], "r": rank, "lora_alpha": rank, "use_rslora": False, "target_modules": targets}
    plan = _Plan(_ADAPTER_WEIGHTS, (_ADAPTER_CONFIG, {**merged, "inference_mode": True}))
    scales = [_scale(config) for config in configs]
    modules = sorted({name.removesuffix(_A) for one in inputs for name in one.outlines if name.endswith(_A)})
    for module in modules:
        having = [number for number, one in enumerate(inputs) if module + _A in one.outlines]
        (outline_a, outline_b) = (inputs[having[0]].outlines[module + part] for part in (_A, _B))
        for number in having:
            a, b = (inputs[number].outlines[module + part].shape for part in (_A, _B))
            if a[1] != outline_a.shape[1] or b[0] != outline_b.shape[0]:
                raise _refusal(
                    f"{module} has other sizes in {inputs[number].given} than in {inputs[having[0]].given}: merge "
                    "adapters of one base model"
                )

        def compute(part: int, module: str = module, having: list[int] = having) -> torch.Tensor:
            pairs = [tuple(inputs[number].get(module + name).float() for name in (_A, _B)) for number in having]
            weights = [spec.inputs[number].weight * scales[number] for number in having]
            if spec.method == "slerp":
                of_pairs = [scales[number] for number in having]
                # Of a module that one adapter lacks, its change is 0: the arc is a line.
                alone = [shares[number] * scales[number] for number in having]
                weights = slerp_weights(pairs, of_pairs, shares[1]) if len(pairs) == 2 else alone
            with seeded(spec.seed, module):
                return _padded(merged_adapter(spec.method, pairs, weights, spec.density or 1.0), rank)[part]

        dtype = loading.DTYPES[spec.dtype] if spec.dtype else outline_a.dtype
        shapes = (rank, outline_a.shape[1]), (outline_b.shape[0], rank)
        for part, name in enumerate((_A, _B)):
            plan.add(module + name, Outline(torch.Size(shapes[part]), dtype), partial(compute, part))
    return plan


def _padded(pair: tuple[torch.Tensor, torch.Tensor], rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a module that not every adapter has, `cat` and `slerp` give fewer rows than the rank: the rest are 0."""
    a, b = pair
    missing = rank - a.shape[0]
    pad = torch.nn.functional.pad
    return (pad(a, (0, 0, 0, missing)), pad(b, (0, missing))) if missing else pair


def _written(spec: MergeSpec, inputs: list[_Weights], plan: _Plan, staging: Path) -> dict[str, Any]:
    size = sum(math.prod(one.shape) * one.dtype.itemsize for one in plan.outlines.values())
    try:
        staging.mkdir(parents=True)
        others = (SAFE_WEIGHTS_INDEX_NAME, MANIFEST)  # of the input's own weights
        for path in sorted(inputs[0].directory.iterdir()):
            if is_data_name(path.name) and path.suffix != ".safetensors" and path.name not in others:
                shutil.copyfile(path, staging / path.name)  # also what a symbolic link of the hub's cache leads to
        (staging / plan.config[0]).write_text(json.dumps(plan.config[1], indent=2, sort_keys=True) + "\n")
        write(staging / plan.file, plan.outlines, _values(plan))
        atomic_write_json(staging / _RECORD, _record(spec), mode=0o644)
        put_in_place(staging, spec.output)
    except OSError as error:
        raise JobFailure(
            Reason.disk_full if error.errno in (28, 122) else Reason.internal,
            f"{spec.output} cannot be written ({error.strerror}); {size / 1e9:.2f} GB are needed there",
        ) from error
    parameters = sum(math.prod(one.shape) for one in plan.outlines.values())
    return {"kind": inputs[0].kind, "tensors": len(plan.outlines), "parameters": parameters, "bytes": size}


def _values(plan: _Plan) -> Iterator[tuple[str, torch.Tensor]]:
    for name, compute in plan.compute.items():
        yield name, compute().to(plan.outlines[name].dtype)


def _record(spec: MergeSpec) -> dict[str, Any]:
    return spec.model_dump(mode="json", exclude={"output"}, exclude_none=True)


def _check_method(spec: MergeSpec, methods: tuple[str, ...], kind: str) -> None:
    if spec.method not in methods:
        raise _refusal(f"method {spec.method} does not merge {kind}: use one of {', '.join(methods)}")
    if (spec.density is not None) != (spec.method in PRUNING_METHODS):
        verb = "needs" if spec.density is None else "has no"
        hint = "set it, such as 0.5" if spec.density is None else "leave it out"
        raise _refusal(f"method {spec.method} {verb} density: {hint}")


def _check_shares(spec: MergeSpec, kind: str) -> None:
    if spec.method == "slerp" and len(spec.inputs) != 2:
        raise _refusal(f"slerp merges two {kind}, {len(spec.inputs)} were named: use linear for more")
    if sum(one.weight for one in spec.inputs) <= 0:
        raise _refusal(f"the weights of {spec.method} add up to 0 or less: their shares of the sum are used")


def _check_alike(first: _Weights, other: _Weights) -> None:
    differing = sorted(first.outlines.keys() ^ other.outlines.keys())
    if differing:
        owner = first if differing[0] in first.outlines else other
        raise _refusal(
            f"{first.given} and {other.given} have different weights: {len(differing)}, such as {differing[0]} of "
            f"{owner.given}; merge models of one architecture"
        )
    for name, outline in first.outlines.items():
        if outline.shape != other.outlines[name].shape:
            shapes = f"{list(outline.shape)} and {list(other.outlines[name].shape)}"
            raise _refusal(
                f"{name} has the shapes {shapes} in {first.given} and {other.given}: merge models of one architecture "
                "and vocabulary"
            )


def _check_vocabularies(models: list[_Weights]) -> None:
    """Models whose tokens have other numbers would be merged into one that knows neither."""
    found = [(one, _vocabulary(one)) for one in models if (one.directory / "tokenizer.json").is_file()]
    for other, vocabulary in found[1:]:
        if vocabulary != found[0][1]:
            raise _refusal(f"{found[0][0].given} and {other.given} have different vocabularies: their tokens differ")


def _vocabulary(model: _Weights) -> tuple[Any, Any]:
    tokenizer = model.read_json("tokenizer.json")
    inner = tokenizer.get("model")
    added = tokenizer.get("added_tokens") or []
    tokens = [(one.get("id"), one.get("content")) for one in added if isinstance(one, dict)]
    return inner.get("vocab") if isinstance(inner, dict) else None, tokens


def _check_adapter(adapter: _Weights, config: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise _invalid(adapter.given, f"it is an adapter of type {config.get('peft_type')}", "only LoRA is merged")
    for name in _ALIKE:
        if config.get(name) != first.get(name):
            raise _refusal(f"{name} of {adapter.given} is {config.get(name)!r}, of the first {first.get(name)!r}")
    for name, absent in _ABSENT.items():
        if config.get(name, absent) not in (absent, None):
            raise _invalid(adapter.given, f"its {name} is {config[name]!r}", "such an adapter cannot be merged")
    if not isinstance(config.get("target_modules"), list) or not isinstance(config.get("r"), int):
        raise _invalid(adapter.given, f"{_ADAPTER_CONFIG} lacks r or a list of target_modules", "save it again")
    strange = [name for name in adapter.outlines if not name.endswith((_A, _B))]
    lacking = [name for name in adapter.outlines if _partner(name) not in adapter.outlines]
    if strange or lacking:
        name = (strange or lacking)[0]
        raise _invalid(adapter.given, f"it has {name}", "only pairs of lora_A and lora_B matrices are merged")


def _partner(name: str) -> str:
    return name.removesuffix(_A) + _B if name.endswith(_A) else name.removesuffix(_B) + _A


def _scale(config: Mapping[str, Any]) -> float:
    rank = config["r"]
    return float(config.get("lora_alpha", rank)) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _directory(source: ModelSource) -> Path:
    given, path = source.model, Path(source.location).expanduser()
    if path.is_dir():
        return path
    for name in (CONFIG_NAME, _ADAPTER_CONFIG):
        try:
            found = cached_file(given, name, local_files_only=True, _raise_exceptions_for_missing_entries=False)
        except (OSError, ValueError):
            continue
        if found:
            return Path(found).parent
    raise _invalid(given, "it is neither a directory nor in the local cache", "name a directory, or download it first")


def _refusal(message: str) -> JobFailure:
    return JobFailure(Reason.invalid_request, f"{message}.")


def _invalid(model: str, problem: str, hint: str) -> JobFailure:
    return JobFailure(Reason.invalid_model, f"model {model!r}: {problem}; {hint}.")
