"""The methods beside SFT and DPO, and the jobs that answer prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_stack_provider_trl.specs.model_source import ModelSource

from .inputs import DEEP, TEACHER, model, rows
from .jobs import Outcome, largest_difference, problems, run, spec, train_in_one_process
from .report import Finding
from .setting import Setting

if TYPE_CHECKING:
    from llama_stack_provider_trl.specs.job import JobSpec

AS_ON_A_CPU = 1e-3
"""Fraction by which the losses of a few steps in fp32 may differ from those on a CPU."""
STEPS = 6
FIRST, SECOND = "first", "second"


def methods(setting: Setting) -> Finding:
    """Decides whether ORPO, CPO, SimPO, KTO and reward models have the losses in fp32 that they have on a CPU."""
    path = model(setting, DEEP)
    places = [setting, _on_a_cpu(setting)]
    running = [train_in_one_process(where, _jobs(where, path)) for where in places]
    (here, there) = ([ended for ended, _ in one.wait()] for one in running)
    names = [name for name, _ in _methods()]
    return judge_methods(dict(zip(names, here, strict=True)), dict(zip(names, there, strict=True)))


def _on_a_cpu(setting: Setting) -> Setting:
    """A setting of the same check, whose jobs run on the CPU."""
    return replace(setting, is_dry_run=True, folder=setting.folder / "cpu")


def _methods() -> list[tuple[str, Any]]:
    """Names and parameters."""
    from llama_stack_provider_trl.specs.methods import CpoSpec, KtoSpec, OrpoSpec, RewardSpec

    simpo = CpoSpec(algorithm="simpo", loss_type="simpo", beta=2.0, gamma=0.7, alpha=0.0)
    return [
        ("ORPO", OrpoSpec()),
        ("CPO", CpoSpec()),
        ("SimPO", simpo),
        ("KTO", KtoSpec()),
        ("reward model", RewardSpec()),
    ]


def _jobs(setting: Setting, path: Path) -> list[JobSpec]:
    pairs = rows("dpo", 4 * STEPS, 200)
    labelled = [
        {"prompt": row["prompt"], "completion": row["chosen" if number % 2 else "rejected"], "label": bool(number % 2)}
        for number, row in enumerate(pairs)
    ]
    sizes: dict[str, Any] = {"batch_size": 4, "tokens": 256, "dtype": "fp32"}
    return [
        spec(
            setting,
            name.replace(" ", "-"),
            path,
            method=method,
            rows=labelled if method.algorithm == "kto" else pairs,
            **sizes,
        )
        for name, method in _methods()
    ]


def judge_methods(here: Mapping[str, Outcome], there: Mapping[str, Outcome]) -> Finding:
    """
    Args:
        here: by name, on the device that is checked.
        there: the same on a CPU.
    """
    if failed := problems({**here, **{f"{name} on the CPU": one for name, one in there.items()}}):
        return Finding(False, failed)
    differences = {name: largest_difference(one.losses, there[name].losses) for name, one in here.items()}
    table = {
        name: f"loss {one.losses[0]:.5f} to {one.losses[-1]:.5f}, within {differences[name]:.1e} of the CPU's"
        for name, one in here.items()
    }
    wrong = [name for name, difference in differences.items() if not difference <= AS_ON_A_CPU]
    summary = f"losses of {STEPS} steps in fp32 within {max(differences.values()):.1e} of those on a CPU"
    return Finding(not wrong, f"{summary}; too far: {', '.join(wrong)}" if wrong else summary, table)


def own_answers(setting: Setting) -> Finding:
    """Decides whether GRPO, distillation and distillation over another vocabulary's distances train, and repeat."""
    path, teacher = model(setting, DEEP), model(setting, TEACHER)
    jobs = {
        f"{name}, {turn}": _answering(setting, f"{name}-{turn}", path, method)
        for name, method in _methods_with_answers(teacher).items()
        for turn in (FIRST, SECOND)
    }
    ended = train_in_one_process(setting, [*jobs.values()]).wait()
    return judge_answers(dict(zip(jobs, (one for one, _ in ended), strict=True)))


def _methods_with_answers(teacher: Path) -> dict[str, Any]:
    from llama_stack_provider_trl.specs.answer_checks import AnswerCheck
    from llama_stack_provider_trl.specs.methods import DistillationSpec, GrpoSpec, UldSpec
    from llama_stack_provider_trl.specs.model_source import ReferenceSpec
    from llama_stack_provider_trl.specs.rewards import RewardSource

    letters = RewardSource(name="letters", check=AnswerCheck(type="regex", pattern="[a-m]{2}"))
    learned: dict[str, Any] = {
        "reference": ReferenceSpec(source=ModelSource(model=str(teacher))),
        "max_completion_length": 32,
    }
    return {
        "GRPO": GrpoSpec(rewards=(letters,), num_generations=4, max_completion_length=32, beta=0.1),
        "distillation": DistillationSpec(**learned),
        "GOLD": DistillationSpec(**learned, beta=0.5, uld=UldSpec()),
    }


def _answering(setting: Setting, name: str, path: Path, method: Any) -> JobSpec:
    prompts = [{"prompt": f"{number} and then?"} for number in range(4 * STEPS)]
    return spec(setting, name, path, method=method, rows=prompts, batch_size=4, tokens=128)


def judge_answers(found: Mapping[str, Outcome]) -> Finding:
    """Losses are numbers, and the same job has the same weights twice."""
    if failed := problems(found):
        return Finding(False, failed)
    wrong, table = [], {}
    for name in dict.fromkeys(name.partition(",")[0] for name in found):
        first, second = found[f"{name}, {FIRST}"], found[f"{name}, {SECOND}"]
        if len(first.losses) != STEPS or not all(map(math.isfinite, first.losses)):
            wrong.append(f"{name}: losses {first.losses}")
        if first.weights != second.weights:
            wrong.append(f"{name}: the second time losses differ by {largest_difference(second.losses, first.losses)}")
        reward = first.steps[-1].metrics.get("reward")
        table[name] = f"{first.step_seconds:.3f} s a step, loss {first.losses[0]:.5f} to {first.losses[-1]:.5f}" + (
            f", reward {reward:.3f}" if reward is not None else ""
        )
    return Finding(not wrong, "; ".join(wrong) or "the same job has equal weights twice", table)


def answers(setting: Setting) -> Finding:
    """Decides whether a generate job has the answers that it has on a CPU, in fp32 and with the same random numbers."""
    path = model(setting, DEEP)
    found, texts = {}, []
    for name, where in (("here", setting), ("on a CPU", _on_a_cpu(setting))):
        job = _generate(where, path)
        found[name] = run(where, job)
        texts.append(_texts(job.checkpoint_dir))
    return judge_generated(found, *texts)


def _generate(setting: Setting, path: Path) -> JobSpec:
    from llama_stack_provider_trl.specs.work import GenerateSpec

    work = GenerateSpec(
        max_new_tokens=48, temperature=1.0, top_p=0.9, seed=1, samples_per_prompt=1, output_dataset_id="answers"
    )
    prompts = [{"prompt": f"{number} and{' then' * (number % 5)}?"} for number in range(24)]
    return spec(setting, "generate", path, rows=prompts, batch_size=8, tokens=128, dtype="fp32", work=work)


def _texts(folder: Path) -> list[Any]:
    """The answers in the order of their rows; none where the job has written none."""
    from llama_stack_provider_trl.specs.work import ANSWERS

    path = folder / ANSWERS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def judge_generated(found: Mapping[str, Outcome], here: list[Any], there: list[Any]) -> Finding:
    """Nearly all answers are equal: a random number may lie where rounding decides between two tokens."""
    failed = "; ".join(f"{name}: {one.problem}" for name, one in found.items() if not one.finished)
    if failed or not here or len(here) != len(there):
        return Finding(False, failed or f"{len(here)} answers, and {len(there)} on a CPU")
    same = sum(one == other for one, other in zip(here, there, strict=True))
    return Finding(same >= 0.9 * len(here), f"{same} of {len(here)} answers are those of a CPU")
