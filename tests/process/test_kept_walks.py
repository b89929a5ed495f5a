"""Steps do not walk over the modules of a model, and train the same bits as with the walks."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from llama_stack_provider_trl.recipes.trainer import optimization
from llama_stack_provider_trl.recipes.trainer.kept_walks import keep_walks
from llama_stack_provider_trl.recipes.trainer.metrics import TrainingMetrics
from llama_stack_provider_trl.recipes.trainer.optimization import Optimization
from llama_stack_provider_trl.specs.events import CheckpointSaved, Progress
from tests.tiny import tiny_model
from tests.training import LORA, SAMPLES, SFT_ROWS, job_spec, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


class Walks:
    """Counts visits of a module of the model by `train` and by listings of parameters."""

    def __init__(self) -> None:
        self.trained = self.listed = 0


class Unkept:
    """The model as Trainer takes it."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = model.parameters


def test_steps_do_not_walk_and_train_the_same_bits(tmp_path: Path) -> None:
    """With an evaluation between steps, which switches the model."""
    kept, walks = _trained(tmp_path / "kept", keeps=True)
    plain, more = _trained(tmp_path / "plain", keeps=False)
    assert kept == plain
    steps = len(kept[0])
    assert more.trained - walks.trained >= steps
    assert more.listed - walks.listed >= steps


def _trained(root: Path, *, keeps: bool) -> tuple[tuple[list[Any], bytes], Walks]:
    """Points and weights of a training, and the walks that it made."""
    walks, listing, switch = Walks(), nn.Module.named_modules, nn.Linear.train
    seen: list[nn.Module] = []

    def named_modules(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        walks.listed += type(self).__name__ == "PeftModelForCausalLM"
        return listing(self, *args, **kwargs)

    def train(self: nn.Linear, mode: bool = True) -> Any:
        seen[:] = seen or [self]
        walks.trained += self is seen[0]
        return switch(self, mode)

    spec = job_spec(
        root, tiny_model(), lora=LORA, n_epochs=2, gradient_accumulation_steps=2, batch_size=1, samples=SAMPLES,
        rows=SFT_ROWS[:8], validation_rows=SFT_ROWS[:2],
    )  # fmt: skip
    with patch.object(nn.Module, "named_modules", named_modules), patch.object(nn.Linear, "train", train, create=True):
        if keeps:
            status, events = run(root, spec)
        else:
            plain = patch.object(Optimization, "floating_point_ops", TrainingMetrics.floating_point_ops)
            with plain, patch.object(optimization, "keep_walks", Unkept):
                status, events = run(root, spec)
    assert status == 0
    points = [{**point.metrics, "step": point.step} for point in of_kind(events, Progress)]
    final = [Path(saved.path) for saved in of_kind(events, CheckpointSaved)][-1]
    timed = ("seconds", "per_second", "memory")
    kept = [{name: value for name, value in one.items() if not any(part in name for part in timed)} for one in points]
    return (kept, (final / "adapter_model.safetensors").read_bytes()), walks


def test_a_model_that_was_switched_below_its_wrapper_is_switched_again() -> None:
    wrapper = nn.Module()
    wrapper.module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    keep_walks(wrapper)
    wrapper.module.eval()
    wrapper.train()
    assert wrapper.module.training
    assert wrapper.module[1].training
    assert not wrapper.eval().module[1].training


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_emptied_as_torch_does(set_to_none: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    parameters = keep_walks(model)
    model(torch.ones(1, 2)).sum().backward()
    assert list(parameters.parameters()) == list(model.parameters())
    model.zero_grad(set_to_none=set_to_none)
    gradient = model[0].weight.grad
    assert gradient is None if set_to_none else gradient is not None and not gradient.any()
