"""AdamW with moments in 8 bits (arXiv:2110.02861): bitsandbytes' kernels on this rank's part of each weight.

bitsandbytes' own optimizer does not know DTensor, and its blocks begin anywhere in a row. Here a block lies within a
row, so that codes and scales are sharded as their weight, and step checkpoints hold them for any number of ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch

from ...specs.optimizer_state import BLOCK, has_8_bit_moments
from ..model.fsdp import local
from ..model.quantization import library

_CPU_CHUNK = 1 << 20
"""Weights that are updated at a time on a CPU, where the kernel makes copies in fp32 of all that it gets."""


class AdamW8Bit(torch.optim.Optimizer):
    """AdamW; the moments of weights for which `has_8_bit_moments` are codes with a scale per block, others fp32.

    State of each weight: `step`, `exp_avg` and `exp_avg_sq`; of codes also `exp_avg_scale` and `exp_avg_sq_scale`.
    Raises JobFailure: invalid_request, when bitsandbytes is not installed.
    """

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._kernels: ModuleType = library("bitsandbytes.functional", "optimizer_type adamw_8bit")
        self._values: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state.update(_initial(weight))
                state["step"] += 1
                self._update(group, weight, state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `recipes.checkpoint.optimizer_state` has read. torch's own method would make the codes fp32. Raises
        ValueError: a state does not have the tensors that its weight needs; a kernel would read beyond them."""
        weights = [weight for group in self.param_groups for weight in group["params"]]
        states: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for number, saved in state_dict["state"].items():
            expected = _outlines(_initial(weights[number]))
            if _outlines(saved) != expected:
                raise ValueError(f"the state of a weight is {_outlines(saved)}, expected {expected}")
            states[weights[number]] = {
                name: value.to(weights[number].device) if isinstance(value, torch.Tensor) else value
                for name, value in saved.items()
            }
        groups = [
            {**saved, "params": group["params"]}
            for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True)
        ]
        self.__setstate__({"state": states, "param_groups": groups})

    def _update(self, group: dict[str, Any], weight: torch.Tensor, state: dict[str, Any]) -> None:
        gradient, values = local(weight.grad), local(weight)
        tensors = {name: local(value) for name, value in state.items() if isinstance(value, torch.Tensor)}
        if not values.numel():  # more ranks than rows
            return
        (beta1, beta2), rate = group["betas"], {"lr": float(group["lr"]), "eps": group["eps"], "step": state["step"]}
        rate["weight_decay"] = group["weight_decay"]
        if "exp_avg_scale" not in tensors:
            self._kernels.optimizer_update_32bit(
                "adam",
                gradient.contiguous(),
                values,
                tensors["exp_avg"],
                beta1,
                state2=tensors["exp_avg_sq"],
                beta2=beta2,
                **rate,
            )
            return
        signed, unsigned = self._codes_of(values.device)
        for rows in _chunks(values):
            part = {name: tensor[rows] for name, tensor in tensors.items()}
            self._kernels.optimizer_update_8bit_blockwise(
                "adam",
                gradient[rows].contiguous(),
                values[rows],
                part["exp_avg"],
                part["exp_avg_sq"],
                beta1=beta1,
                beta2=beta2,
                beta3=0.0,
                alpha=0.0,
                qmap1=signed,
                qmap2=unsigned,
                absmax1=part["exp_avg_scale"].view(-1),
                absmax2=part["exp_avg_sq_scale"].view(-1),
                **rate,
            )

    def _codes_of(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The values that codes stand for: of moments with and without a sign."""
        if device not in self._values:
            signed, unsigned = (self._kernels.create_dynamic_map(signed=signed) for signed in (True, False))
            self._values[device] = signed.to(device), unsigned.to(device)
        return self._values[device]


def _initial(weight: torch.Tensor) -> dict[str, Any]:
    in_8_bits = has_8_bit_moments(weight.shape)
    state: dict[str, Any] = {"step": 0}
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = _zeros_like(weight, torch.uint8 if in_8_bits else torch.float32)
        if in_8_bits:
            blocks = math.prod(weight.shape[1:]) // BLOCK
            state[f"{name}_scale"] = _zeros_like(weight.detach().flatten(1)[:, :blocks], torch.float32)
    return state


def _zeros_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(tensor, dtype=dtype, requires_grad=False, memory_format=torch.contiguous_format)


def _chunks(values: torch.Tensor) -> Iterable[slice]:
    if values.device.type != "cpu":
        return [slice(None)]
    at_once = max(1, _CPU_CHUNK // math.prod(values.shape[1:]))
    return [slice(first, first + at_once) for first in range(0, values.shape[0], at_once)]


def _outlines(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else type(value)
        for name, value in state.items()
    }
