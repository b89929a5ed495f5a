"""Evaluates an ensemble: the probability of a token is the weighted mean of those of several models.

The first member is the trainer's own model. The others score each batch before it; what their heads would compute
logits from is kept, and the own model's head averages the probabilities of all, a few tokens at a time. So no member's
logits are ever in memory as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.job import JobSpec
from ...specs.work import EnsembleMember
from ..fast.head import Head, averaged
from ..model.adapters import DEFAULT, added
from ..model.loading import load_tokenizer
from .reference import vocabulary_problem
from .sft import SftRecipe
from .trl_patches import computing_heads, fuse_head, with_adapter


def check_members(spec: JobSpec) -> None:
    """Refuse members whose vocabulary differs from that of the first one, whose tokenizer reads the rows. Raises
    JobFailure: invalid_model, naming both models and where they differ."""
    tokenizer = load_tokenizer(spec.source)
    for source in dict.fromkeys(member.source for member in spec.does.ensemble):
        if source.model != spec.source.model and (problem := vocabulary_problem(tokenizer, source)):
            raise JobFailure(
                Reason.invalid_model,
                f"models: {source.model!r} does not fit {spec.source.model!r}, the first one: {problem}. Name models "
                "with the same tokenizer.",
            )


class EnsembleRecipe(SftRecipe):
    """Computes SFT's measures of an ensemble. It evaluates only."""

    def __init__(self, *, spec: JobSpec, **arguments: Any) -> None:
        super().__init__(spec=spec, **arguments)
        self.others: list[tuple[torch.nn.Module, str]] = []
        """The members after the first: a model, and which of its adapters they are; empty: as it is."""
        self._heads: list[Head] = []
        """Theirs, for the batch at hand."""

    def add_members(self, load: Callable[[JobSpec, torch.device], Any]) -> None:
        """Load the members after the first. Those with LoRA on the same base share it. Raises JobFailure: as for the
        first one. `load` loads the policy of a job (`recipes.build.load_policy`)."""
        first, *others = self._members
        shared: dict[Any, Any] = {_base_of(first): self.model}
        for number, member in enumerate(others, 2):
            alone, base = _alone(self.spec, member), _base_of(member)
            if base is not None and base in shared:
                name = f"member-{number}"
                added(alone, shared[base], name)
            else:
                policy, name = load(alone, self.args.device), ""
                fuse_head(policy.model, outputs=self.head_outputs)
                shared[base] = policy.continued or policy.model
            self.others.append((shared[base], (name or DEFAULT) if member.adapter else ""))
        for model in self.models:
            # With dropout, an adapter that was added would differ; of weights with gradients autocast keeps copies.
            model.eval().requires_grad_(False)

    @property
    def _members(self) -> list[EnsembleMember]:
        first, *others = self.spec.does.ensemble
        return [first, *(member for member in others if member.weight)]

    @property
    def models(self) -> list[torch.nn.Module]:
        return list({id(model): model for model in (self.model, *(model for model, _ in self.others))}.values())

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Sum of the negative logarithms of the mean probabilities of the trained tokens, over their number."""
        assert len(self.others) == len(self._members) - 1, "members are missing"
        self._heads = [self._head_of(one, adapter, inputs) for one, adapter in self.others]
        try:
            return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self._heads = []

    def scoring(self) -> AbstractContextManager[None]:
        """While this is open, the head of the first member averages over all."""
        weights = [member.weight for member in self._members]
        logs = [math.log(weight) if weight else -math.inf for weight in weights]
        return computing_heads(lambda own, targets: averaged([own, *self._heads], logs, targets))

    def _head_of(self, model: torch.nn.Module, adapter: str, inputs: dict[str, torch.Tensor]) -> Head:
        """What a member computes the logits of a batch from."""
        active = with_adapter(model, adapter) if adapter else nullcontext()
        kept: list[Head] = []

        def keep(head: Head, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            kept.append(head)
            return torch.zeros(len(targets), device=targets.device), torch.zeros_like(targets, dtype=torch.bool)

        with torch.no_grad(), self.accelerator.autocast(), active, computing_heads(keep):
            model(**self.forward_arguments(inputs, model))
        (head,) = kept
        return head


def _base_of(member: EnsembleMember) -> tuple[Any, ...] | None:
    """What members have in common that share a base; None: this one shares none.

    Adapters of other kinds than LoRA are not mixed in a model, and those of VeRA share matrices.
    """
    if member.lora is None or member.lora.method != "lora":
        return None
    return member.source, member.lora.quantize_base


def _alone(spec: JobSpec, member: EnsembleMember) -> JobSpec:
    return spec.model_copy(update=member.as_own())
