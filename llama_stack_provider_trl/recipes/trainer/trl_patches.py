"""The private names of TRL and transformers that the recipes use, override or replace, and the releases that have them.

Private names may change with every release, and an override of a method that is gone is never called. So an attempt
checks the installed releases first (`require_releases`), and other modules take these names from here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.job import JobSpec
from ...system.compiler import ADVICE, missing_compiler

if TYPE_CHECKING:
    import torch

    from ..fast.head import Head

RELEASES = {"trl": ((1, 16), (1, 17)), "transformers": ((5, 23), (6, 0))}
"""Library -> its first minor release with the names below, and the first without, as in pyproject.toml. The arguments
of transformers 5.17 lack activation_checkpointing."""
OVERRIDDEN = (
    "_clip_grad_norm",
    "_finalize_training",
    "_get_dataloader",
    "_get_eval_sampler",
    "_get_grad_norm",
    "_get_num_items_in_batch",
    "_get_output_dir",
    "_get_train_sampler",
    "_inner_training_loop",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_load_scaler",
    "_maybe_log_save_evaluate",
    "_prepare_for_training",
    "_save_checkpoint",
    "_save_optimizer_and_scheduler",
    "_save_rng_state",
    "_save_scaler",
    "_set_signature_columns_if_needed",
)
"""Methods of `transformers.Trainer` that `RecipeTrainer` and its subclasses override."""
OVERRIDDEN_DPO = ("_compute_loss", "_prepare_dataset")
"""Methods of `trl.DPOTrainer` itself that `PairRecipe` and its subclasses override."""
OVERRIDDEN_REWARD = ("_prepare_dataset",)
"""Methods of `trl.RewardTrainer` itself that `RewardRecipe` overrides."""
OVERRIDDEN_KTO = ("_compute_loss", "_prepare_dataset")
"""Methods of `trl.KTOTrainer` itself that `KtoRecipe` overrides."""


def require_releases() -> None:
    """Return if the installed releases have the private names that the recipes use. Raises JobFailure: launch_failed,
    with what was found and what was expected."""
    import transformers
    import trl

    for library, (first, end) in RELEASES.items():
        installed = {"trl": trl, "transformers": transformers}[library].__version__
        if not first <= _minor(installed) < end:
            expected = f"{'.'.join(map(str, first))} and later, before {'.'.join(map(str, end))}"
            raise _mismatch(f"{library} {installed} is installed, and the recipes are written for {library} {expected}")
    overridden = (
        (transformers.Trainer, OVERRIDDEN),
        (trl.DPOTrainer, OVERRIDDEN_DPO),
        (trl.RewardTrainer, OVERRIDDEN_REWARD),
        (trl.KTOTrainer, OVERRIDDEN_KTO),
    )
    for owner, names in overridden:
        if missing := [name for name in names if not hasattr(owner, name)]:
            raise _mismatch(f"{owner.__name__} has no {', '.join(missing)}, which the recipes override")


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _mismatch(found: str) -> JobFailure:
    return JobFailure(
        Reason.launch_failed,
        f"{found}. Install the releases of the training extra: pip install 'llama_stack_provider_trl[train]'.",
    )


def choose_head_kernels(kind: str) -> tuple[str, str]:
    """Have fused heads of this process compute in torch where Triton cannot compile its kernels.

    TRL uses Triton on every GPU, and a process without a C compiler would fail at its first step. Returns what fused
    heads compute with, triton or torch, and a warning; empty: none is due.

    Args:
        kind: cuda, mps or cpu.
    """
    import trl.kernels.chunked_divergence as divergence
    import trl.kernels.chunked_logprob as kernels

    # TRL itself decides by the installed packages and the device.
    if kind != "cuda" or not kernels._TRITON_AVAILABLE:
        return "torch", ""
    missing = missing_compiler()
    if not missing:
        return "triton", ""
    # Only the kernels are replaced: trl.trainer.utils has a name of its own for the function, and still leaves out the
    # tokens that are not trained.
    kernels._use_triton = divergence._use_triton = _never
    return "torch", (
        f"Triton cannot compile here: {missing}. The head computes with torch's kernels, which are slower and take "
        f"more memory; {ADVICE}"
    )


def _never(device: Any) -> bool:
    return False


def computes_in_torch() -> bool:
    """Whether `choose_head_kernels` has replaced Triton's kernels in this process."""
    import trl.kernels.chunked_logprob as kernels

    return kernels._use_triton is _never


def fuse_head(model: Any, outputs: tuple[str, ...], temperature: float = 1.0) -> None:
    """Have the model compute log-probabilities in its head, in tiles: no tensor of all logits is ever made.

    Args:
        outputs: what is computed per token. TRL itself also asks for entropy, one more pass over the vocabulary.
    """
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model, temperature=temperature, outputs=outputs)


def has_fast_head(spec: JobSpec, kind: str) -> bool:
    """Whether a job's head computes in `fast_head` on a kind of device: cuda, mps or cpu.

    The same for all models of a job, whose log-probabilities are compared: on cuda TRL's own computes those of a head
    whose gradients the forward pass does not know, as `fast_head` would, but with its weight cast in parts.
    """
    why = _why_no_gradients(spec, kind)
    return not why or (kind != "cuda" and why == _OF_THEIR_OWN)


def gradients_of_head(spec: JobSpec, kind: str, *, capped: bool) -> str:
    """When the gradients of a job's head are computed, for its record. capped: the model bounds its logits."""
    why = _why_no_gradients(spec, kind) or ("the logits are capped" if capped and kind != "cuda" else "")
    return f"in the backward pass: {why}" if why else "in the forward pass"


def _why_no_gradients(spec: JobSpec, kind: str) -> str:
    """Why the forward pass of a job's head computes no gradients; empty: it does."""
    if not spec.compute.padding_free:
        return "batches have padding"
    if spec.compute.head_gradients == "backward":
        return "head_gradients is 'backward'"
    if kind == "cuda" and spec.compute.dtype == "fp16":
        # A gradient of a logit is rounded before the scale of the loss multiplies it: small ones would be 0. And a
        # loss scaler takes gradients that are no number for an overflow, and skips the step.
        return "dtype is 'fp16'"
    if kind == "cuda" and computes_in_torch():
        return "Triton cannot compile here"
    return "" if weighs_tokens_alike(spec) or spec.lora else _OF_THEIR_OWN


_OF_THEIR_OWN = "the head is trained, and each token's gradient has a factor of its own"


def weighs_tokens_alike(spec: JobSpec) -> bool:
    """Whether each trained token of a batch has the same part of the loss: that of SFT is their mean."""
    return spec.algorithm == "sft"


@dataclass(frozen=True)
class TrlKernels:
    """`recipes.fast.head.Kernels` by those of TRL's head: by Triton on GPUs, else by torch.

    Args:
        scale: the logits are multiplied by it, then bounded by `cap`, then divided by `temperature`.
        cap: None: they are not bounded.
    """

    scale: float
    cap: float | None
    temperature: float

    def fold(
        self, tile: torch.Tensor, targets: torch.Tensor, with_top1: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        import torch
        import trl.kernels.chunked_logprob as kernels

        def begin(value: float) -> torch.Tensor:
            return torch.full((len(tile),), value, dtype=torch.float32, device=tile.device)

        largest, before_target, total, of_target = begin(-math.inf), begin(-math.inf), begin(0.0), begin(0.0)
        if len(tile):  # a grid of no programs cannot be launched
            fold = kernels._forward_kernel[(len(tile),)] if _by_triton(tile) else kernels._forward_tile
            fold(
                *(tile, tile.stride(0), targets, largest, total),
                *(total, total, total),  # other sums, which are not wanted
                *(before_target, of_target, 0, tile.shape[1]),
                BLOCK_SIZE=kernels._BLOCK_SIZE,
                **{f"HAS_{name.upper()}": False for name in kernels.OPTIONAL_OUTPUTS} | {"HAS_IS_TOP1": with_top1},
                **self._transformation,
            )
        log_sums = largest + total.log()
        hits = (of_target >= largest) & (of_target > before_target) if with_top1 else None
        return of_target - log_sums, log_sums, hits

    def differentiate(
        self, tile: torch.Tensor, targets: torch.Tensor, log_sums: torch.Tensor, factors: torch.Tensor
    ) -> None:
        import trl.kernels.chunked_logprob as kernels

        if not len(tile):
            return
        blocks = -(-tile.shape[1] // kernels._BLOCK_SIZE)
        fold = kernels._backward_kernel[(len(tile), blocks)] if _by_triton(tile) else kernels._backward_tile
        fold(
            *(tile, tile.stride(0), targets, log_sums),
            *(log_sums, factors.contiguous(), log_sums),  # no entropy, and no gradient of it
            *(0, tile.shape[1]),
            HAS_LOGPROB_GRAD=True,
            HAS_ENTROPY_GRAD=False,
            BLOCK_SIZE=kernels._BLOCK_SIZE,
            **self._transformation,
        )

    def add_product(self, sums: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> None:
        import trl.kernels.chunked_logprob as kernels

        kernels._addmm_fp32(sums, one, other)

    @property
    def _transformation(self) -> dict[str, Any]:
        return {
            "logit_scale": self.scale,
            "softcap": self.cap or 1.0,
            "inv_t": 1 / self.temperature,
            "HAS_SOFTCAP": self.cap is not None,
        }


def _by_triton(tile: torch.Tensor) -> bool:
    import trl.kernels.chunked_logprob as kernels

    return bool(kernels._use_triton(tile.device))


@contextmanager
def fast_head(
    counting: Callable[[], AbstractContextManager[None]] = nullcontext, *, kind: str = "cpu", alike: bool = False
) -> Iterator[None]:
    """While this is open, fused heads compute with `recipes.fast.head`, and score every position that they get
    (`every_position`). But for capped logits, where no kernels bound them.

    Args:
        kind: of the device: on cuda TRL's kernels compute.
    """
    import torch
    import trl.trainer.utils as utils

    from ..fast import head

    folding = utils._ChunkedLogProbFunction

    def compute(
        hidden: Any, weight: Any, bias: Any, targets: Any, temperature: float, chunk: int, cap: Any, *more: Any
    ) -> Any:
        scale, outputs = more
        kernels = TrlKernels(scale, cap, temperature) if kind == "cuda" else None
        if (cap is not None and kernels is None) or set(outputs) - {"log_probs", "is_top1"}:
            return folding.apply(hidden, weight, bias, targets, temperature, chunk, cap, *more)
        keep = torch.is_grad_enabled()
        with counting():
            log_probs, top1 = head.LogProbs.apply(
                hidden, weight, bias, targets, scale / temperature, "is_top1" in outputs, keep, alike, kernels
            )
        return log_probs, None, None, None, top1

    with every_position(), patch.object(utils, "_ChunkedLogProbFunction", SimpleNamespace(apply=compute)):
        yield


@contextmanager
def every_position() -> Iterator[None]:
    """While this is open, fused heads on a GPU score every position that they get, with the same kernels.

    TRL selects the positions with a label by a mask, in the forward and in the backward pass: for how many these are
    Python waits for the GPU three times. A batch in one sequence has no others; its placeholder's result becomes 0.
    """
    import trl.trainer.utils as utils

    with patch.object(utils, "_use_triton", _never):
        yield


@contextmanager
def computing_heads(compute: Callable[[Head, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """While this is open, a function computes what fused heads do. `compute` gets a `recipes.fast.head.Head` and the
    targets, shape (tokens,); returns their log-probabilities, and whether each is the most probable token."""
    import torch
    import trl.trainer.utils as utils

    from ..fast.head import Head

    def call(
        hidden: Any, weight: Any, bias: Any, targets: Any, temperature: float, chunk: int, cap: Any, *more: Any
    ) -> Any:
        scale, _ = more
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        log_probs, top1 = compute(Head(hidden, weight, bias, scale / temperature, cap, dtype), targets)
        return log_probs, None, None, None, top1

    # No class: its reference cycles would keep what `compute` holds, a teacher's states, until they are collected.
    with patch.object(utils, "_ChunkedLogProbFunction", SimpleNamespace(apply=call)):
        yield


def divergence_of_hidden(
    own: Head, teacher: Head, beta: float, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """TRL's divergence of a model from a teacher, and the model's entropy, of each token; shape (tokens,).

    Args:
        own: of the model that is trained; the gradient is its own.
        teacher: for the same tokens, with a weight of as many rows.
    """
    import trl.kernels.chunked_divergence as kernels

    return kernels.ChunkedDivergenceFunction.apply(
        own.hidden,
        own.weight,
        own.bias,
        teacher.hidden,
        teacher.weight,
        teacher.bias,
        beta,
        temperature,
        own.scale,
        own.cap,
        teacher.scale,
        teacher.cap,
    )


def keep_allocator_cache(trainer: Any) -> None:
    """Have activation offloading leave the GPU allocator's cache alone. TRL empties it at each micro step where
    bitsandbytes is imported, as under QLoRA."""
    _keep_cache(getattr(trainer, "maybe_activation_offload_context", None))


def offloaded_activations(model: Any) -> AbstractContextManager[Any]:
    """While this is open, forwards move activations to CPU memory until the backward pass, as TRL's trainers have it
    under `activation_offloading`."""
    from trl.models import get_act_offloading_ctx_manager

    offloading: AbstractContextManager[Any] = get_act_offloading_ctx_manager(model=model)
    _keep_cache(offloading)
    return offloading


def _keep_cache(offloading: Any) -> None:
    if hasattr(offloading, "device_module"):
        offloading.device_module = _WithCache(offloading.device_module)


class _WithCache:
    """A module such as torch.cuda whose `empty_cache` does nothing."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def empty_cache(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """While this is open, a PEFT model computes as its base model.

    PEFT's `disable_adapter` also changes which parameters have a gradient. Under FSDP2 a module has those that are
    gathered or those of the shards: where a forward gathers them meanwhile, the shards would stay without one.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    with _set_on_layers(model, (BaseTunerLayer, AuxiliaryTrainingWrapper), "_disable_adapters", True):
        yield


@contextmanager
def with_adapter(model: Any, name: str) -> Iterator[None]:
    """While this is open, a PEFT model computes with another of its adapters, without a gradient.

    PEFT's `set_adapter` also changes which parameters have a gradient, in the middle of a step and under FSDP2's units.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    with _set_on_layers(model, (BaseTunerLayer,), "_active_adapter", [name]):
        yield


@contextmanager
def _set_on_layers(model: Any, kinds: tuple[type, ...], attribute: str, value: Any) -> Iterator[None]:
    layers = [layer for layer in model.modules() if isinstance(layer, kinds)]
    before = [getattr(layer, attribute) for layer in layers]
    try:
        for layer in layers:
            setattr(layer, attribute, value)
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            setattr(layer, attribute, own)


class PreparedDatasets:
    """A mixin before `trl.DPOTrainer`, `RewardTrainer` and `KTOTrainer`, whose datasets are tokenized already.
    SFTTrainer has an argument for that."""

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return dataset


@contextmanager
def traced_head(kind: str, vocab_size: int, counting: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """While this is open, fused heads compute inside `counting()`, with the kernels of another kind of device.

    Args:
        kind: cuda, mps or cpu. On cuda a Triton kernel works in the tile itself and adds to its result, unless
            `choose_head_kernels` has chosen torch; on others a tile is as wide as 32,768 tokens, of which a smaller
            vocabulary leaves a part untouched.
    """
    import trl.kernels.chunked_logprob as kernels
    import trl.trainer.utils as utils

    class CountedHead(kernels.ChunkedLogProbFunction):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            with counting():
                return kernels.ChunkedLogProbFunction.forward(ctx, *arguments)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            with counting():
                return kernels.ChunkedLogProbFunction.backward(ctx, *gradients)

    with ExitStack() as stack:
        stack.enter_context(patch.object(utils, "_ChunkedLogProbFunction", CountedHead))
        if kind == "cuda":
            folds = () if computes_in_torch() else ("_forward_tile", "_backward_tile")
            for name in (*folds, "_addmm_fp32"):
                stack.enter_context(patch.object(kernels, name, lambda *_, **__: None))
        else:
            width = math.ceil(min(utils._CHUNKED_LOGPROB_CHUNK_SIZE, vocab_size))
            stack.enter_context(patch.object(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", width))
        yield


@contextmanager
def traced_divergence(
    kind: str, vocab_size: int, counting: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """While this is open, divergences of two heads are computed as `traced_head` has heads compute."""
    import trl.kernels.chunked_divergence as kernels

    whole = kernels.ChunkedDivergenceFunction

    class CountedDivergence(whole):  # type: ignore[valid-type, misc]
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            with counting():
                return whole.forward(ctx, *arguments)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            with counting():
                return whole.backward(ctx, *gradients)

    def project(tile: Any, hidden: Any, weight: torch.Tensor, bias: Any, start: int, end: int, dtype: Any) -> None:
        weight[start:end].to(dtype)  # the product itself is written into the tile

    with ExitStack() as stack:
        stack.enter_context(patch.object(kernels, "ChunkedDivergenceFunction", CountedDivergence))
        if kind == "cuda":
            folds = () if kernels._use_triton is _never else ("_stats_tile", "_jsd_tile", "_backward_tile")
            for name in (*folds, "_addmm_fp32"):
                stack.enter_context(patch.object(kernels, name, lambda *_, **__: None))
            stack.enter_context(patch.object(kernels, "_project", project))
        else:
            stack.enter_context(
                patch.object(kernels, "VOCAB_CHUNK_SIZE", math.ceil(min(kernels.VOCAB_CHUNK_SIZE, vocab_size)))
            )
        yield


@contextmanager
def traced_attention(*, packed: bool) -> Iterator[None]:
    """While this is open, transformers takes rows for what they are: packed, or one in each sequence.

    It reads that from the values of the position ids. Fake tensors have none, and would get a mask for packed rows.
    """
    import transformers.masking_utils as masks

    with ExitStack() as stack:
        if not packed:
            stack.enter_context(patch.object(masks, "find_packed_sequence_indices", lambda position_ids: None))
        yield


@contextmanager
def traced_experts() -> Iterator[None]:
    """While this is open, mixtures of experts compute with a product that has the memory of torch's grouped one.

    torch's own refuses fake tensors in CPU memory unless they are bf16. The one that transformers has for this case
    computes the gradient of frozen weights too.
    """
    import torch
    import transformers.integrations.moe as moe

    class GroupedProduct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
            of_rows, of_experts = ctx.needs_input_grad
            ctx.save_for_backward(rows if of_experts else None, experts if of_rows else None)
            ctx.outlines = (rows.shape, rows.dtype), (experts.shape, experts.dtype)
            return rows.new_empty(rows.shape[0], experts.shape[2])

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            def gradient(number: int) -> torch.Tensor | None:
                shape, dtype = ctx.outlines[number]
                return gradients[0].new_empty(shape, dtype=dtype) if ctx.needs_input_grad[number] else None

            return gradient(0), gradient(1)

    def product(rows: torch.Tensor, experts: torch.Tensor, offs: torch.Tensor) -> Any:
        return GroupedProduct.apply(rows.to(experts.dtype), experts)

    with patch.object(moe, "_grouped_mm", product):
        yield
