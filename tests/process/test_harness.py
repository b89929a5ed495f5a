"""Evaluations on tasks of lm-evaluation-harness, with the library, in the extra `harness`.

`.venv/bin/python -m pip install -c constraints/llama-stack-0.3.5.txt 'lm-eval>=0.4.13,<0.5'` installs it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.specs.events import Event, Failed, Finished
from llama_stack_provider_trl.specs.harness import HarnessSpec
from llama_stack_provider_trl.specs.job import JobSpec
from llama_stack_provider_trl.specs.kinds import EvaluateSpec
from tests.tiny import REPOSITORY, tiny_model
from tests.training import job_spec, of_kind, run

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(240),
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="the extra harness is not installed"),
    # The library and what it imports use what Python, numpy and nltk have deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning"),
]
EXAMPLES = REPOSITORY / "examples" / "harness"
NAMES = ("basics", "sums")


def spec_of(root: Path, *names: str, model: Path | None = None, fields: Any = None, **changes: Any) -> JobSpec:
    harness = HarnessSpec(**{"tasks": names or NAMES, "roots": (EXAMPLES,), **changes})
    given = {"rows": [], "batch_size": 4, "num_threads": 1, "work": EvaluateSpec(harness=harness), **(fields or {})}
    return job_spec(root, model or tiny_model(), **given)


def result_of(events: list[Event]) -> dict[str, Any]:
    assert not of_kind(events, Failed), of_kind(events, Failed)
    (found,) = (event.result for event in of_kind(events, Finished))
    assert found is not None
    return found


def measured(root: Path, *names: str, **changes: Any) -> dict[str, Any]:
    """The result of a job in this process."""
    return result_of(run(root / "run", spec_of(root, *names, **changes))[1])


def directly(names: list[str], monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> dict[str, Any]:
    """What the library finds by itself, with the model as it loads it."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    manager = TaskManager(include_path=str(EXAMPLES), include_defaults=False)
    found: Any = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(tiny_model()), "dtype": "float32"},
        **{"tasks": names, "batch_size": 4, "device": "cpu", "task_manager": manager, "bootstrap_iters": 1000},
        **arguments,
    )
    return {name: {key: found["results"][name][key] for key in found["results"][name]} for name in found["results"]}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_fewshot": 2, "limit": 3},
        {"num_fewshot": 2, "apply_chat_template": True, "fewshot_as_multiturn": False, "limit": 0.5},
        {"apply_chat_template": True, "system_instruction": "Answer in one word.", "num_fewshot": 1},
    ],
    ids=["defaults", "examples", "one turn", "system"],
)
def test_measures_are_those_of_the_library_called_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    names = ["capitals"] if "num_fewshot" in options else ["basics"]
    expected = directly(names, monkeypatch, **options)
    found = measured(tmp_path, *names, **options)
    for task, measures in {**found["tasks"], **found["groups"]}.items():
        assert {f"{name},none": value for name, value in measures.items()} == {
            name: value for name, value in expected[task].items() if "," in name
        }
