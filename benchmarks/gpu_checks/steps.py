"""Where the time of a step goes: the GPU computes or waits, and Python works outside forward and backward.

In a training process of `gpu_checks.trainer --steps`.
"""

from __future__ import annotations

import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

WARMUP = 4
"""Steps before those that are traced: kernels have been chosen, and memory is allocated."""
TRACED = 3
_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_CALLS = {"cuda_runtime", "cuda_driver"}


def watch_steps() -> dict[str, float]:
    """Have each `Trainer.train` time its steps and trace some of them. Returns where the numbers will be, in seconds a
    step: `outside` (forward and backward, the median of the steps that are not traced), and those of `totals`."""
    from transformers import Trainer

    train, found = Trainer.train, dict[str, float]()

    def watched(trainer: Any, *arguments: Any, **named: Any) -> Any:
        found.clear()
        steps = Steps(found)
        steps.time_inside(trainer, "compute_loss")
        steps.time_inside(trainer.accelerator, "backward")
        trainer.add_callback(steps.callback())
        return train(trainer, *arguments, **named)

    Trainer.train = watched
    return found


class Steps:
    """The steps of a training.

    Args:
        found: gets the numbers.
    """

    def __init__(self, found: dict[str, float]) -> None:
        self._found = found
        self._inside = 0.0
        """Seconds in forward and backward since the last step's end."""
        self._outside: list[float] = []
        self._ended: float | None = None
        """None: the step at hand is not timed."""
        self._trace: Any = None
        self._traced_since = 0.0

    def time_inside(self, owner: Any, name: str) -> None:
        work: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(work)
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return work(*arguments, **named)
            finally:
                self._inside += time.perf_counter() - began

        setattr(owner, name, timed)

    def callback(self) -> Any:
        from transformers import TrainerCallback

        ended = self.ended

        class Watch(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                ended(state.global_step)

        return Watch()

    def ended(self, step: int) -> None:
        now = time.perf_counter()
        if self._ended is not None and self._trace is None and step > WARMUP:
            self._outside.append(now - self._ended - self._inside)
            self._found["outside"] = statistics.median(self._outside)
        if step == WARMUP:
            self._begin_trace()
        elif step == WARMUP + TRACED:
            self._end_trace()
        # A trace's own end is no part of the next step, whose beginning would else have waited for the GPU.
        self._ended, self._inside = time.perf_counter(), 0.0

    def _begin_trace(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        # Of the CPU only the calls of CUDA: each operator of torch would take twice its time.
        self._trace = profile(activities=[ProfilerActivity.CUDA if _on_gpu() else ProfilerActivity.CPU])
        _synchronize()
        self._trace.start()
        self._traced_since = time.perf_counter()

    def _end_trace(self) -> None:
        _synchronize()
        seconds = time.perf_counter() - self._traced_since
        self._trace.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            self._trace.export_chrome_trace(str(path))
            self._found.update(totals(json.loads(path.read_text())["traceEvents"], seconds, TRACED))
        self._trace = None


def totals(events: Iterable[dict[str, Any]], seconds: float, steps: int) -> dict[str, float]:
    """Of a trace of `steps` steps, for one: `step`, `busy` (the GPU computes or copies), `idle` (it does not), `host`
    (Python does not wait for it) in seconds, and the number of kernels."""
    spans = [event for event in events if event.get("ph") == "X"]
    on_gpu = [event for event in spans if event.get("cat") in _ON_GPU]
    waits = [event for event in spans if event.get("cat") in _CALLS and "Synchronize" in event["name"]]
    busy = _covered(on_gpu)
    return {
        "step": seconds / steps,
        "busy": busy / steps,
        "idle": max(0.0, seconds - busy) / steps,
        "host": max(0.0, seconds - _covered(waits)) / steps,
        "kernels": sum(event["cat"] == "kernel" for event in on_gpu) / steps,
    }


def _covered(spans: Iterable[dict[str, Any]]) -> float:
    """Seconds in which at least one of the spans is: streams and threads overlap."""
    total, end = 0.0, float("-inf")
    for begin, length in sorted((float(one["ts"]), float(one.get("dur", 0))) for one in spans):
        total += max(0.0, begin + length - max(begin, end))
        end = max(end, begin + length)
    return total / 1e6


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _synchronize() -> None:
    import torch

    if _on_gpu():
        torch.cuda.synchronize()
