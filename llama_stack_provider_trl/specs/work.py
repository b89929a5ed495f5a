"""What a job does in place of training: a kind is a spec here, a check at POST (`requests.work`) and a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from .adapters import LoraSpec
from .answer_checks import AnswerCheck
from .bases import Frozen
from .exports import ExportSpec
from .harness import HarnessSpec
from .merge import MergeSpec
from .model_source import AdapterSpec, ModelSource
from .promotion import CheckedCondition, PromotionCondition

ANSWERS, ROWS = "answers.jsonl", "rows.jsonl"
"""Files in the checkpoint directory of a `generate` job: every answer with its row, and the dataset made of them. An
`evaluate` job with checks has the first, with what each answer passes."""
VERDICTS = "verdicts-{}.jsonl"
"""File beside the answers of an `evaluate` job: the verdicts of the check with this number, whose type is judge."""
OF_JOB = "job:"
"""Before the name of a job, in place of a dataset id: the rows that this job makes."""
MERGING = "merging"
"""Directory in the checkpoint directory of a `merge` job: the result while it is not whole."""


Engine = Literal["transformers", "vllm"]


class Answering(Frozen):
    """How a model answers prompts."""

    max_new_tokens: int = Field(gt=0)
    temperature: float = Field(ge=0)
    """0: the most likely token each time."""
    top_p: float = Field(gt=0, le=1)
    """Each token is chosen among the most likely ones whose probabilities together reach this."""
    seed: int
    samples_per_prompt: int = Field(gt=0)
    engine: Engine = "transformers"
    """What computes the answers."""
    vllm_python: Path | None = None
    """Engine vllm: the interpreter that has it."""


class GenerateSpec(Answering):
    """Answers the prompts of the job's dataset."""

    kind: Literal["generate"] = "generate"
    output_dataset_id: str
    """The dataset that the answers become."""


class FurtherModel(ModelSource):
    """A model that a job reads beside its own."""

    adapter: AdapterSpec | None = None
    """The adapter of `model` that it has; None: none."""
    lora: LoraSpec | None = None
    """Settings of the adapter."""

    @property
    def source(self) -> ModelSource:
        """Where the model, without an adapter, is read from."""
        return self.alone()

    def as_own(self) -> dict[str, Any]:
        """The fields of a JobSpec whose own model it is."""
        return {"source": self.source, "adapter": self.adapter, "lora": self.lora}


class CheckedAnswering(Answering):
    """Answers that are checked."""

    checks: tuple[AnswerCheck, ...]
    judges: tuple[FurtherModel, ...] = ()
    """The models of the checks whose type is judge, in their order."""


class EnsembleMember(FurtherModel):
    """One of the models of an ensemble."""

    weight: float = Field(ge=0)
    """Of its probabilities in the mean. Those of all members have the sum 1."""


class EvaluateSpec(Frozen):
    """Evaluates the job's model on its dataset: SFT's measures, or DPO's against the reference, or its answers. Or on
    tasks that have rows of their own: then the job's dataset has none."""

    kind: Literal["evaluate"] = "evaluate"
    answers: CheckedAnswering | None = None
    """Not None: the measures are those of answers to the dataset's prompts."""
    harness: HarnessSpec | None = None
    """Not None: the measures are those of tasks of lm-evaluation-harness."""
    members: tuple[EnsembleMember, ...] = ()
    """Not empty: SFT's measures are those of an ensemble, whose probability of each token is the weighted mean of its
    members'. The job's own model is the first of them."""


class MergeWork(Frozen):
    """Merges models, or adapters, into the job's checkpoint `final`. The job's dataset has no rows."""

    kind: Literal["merge"] = "merge"
    merge: MergeSpec
    of_adapters: bool
    """Whether the inputs are adapters, and so is the result."""


class ExportWork(Frozen):
    """Exports the job's model, with its adapter merged in, into the job's checkpoint `final`, and compares the export
    with the model. The job's dataset has no rows."""

    kind: Literal["export"] = "export"
    export: ExportSpec
    promote_if: tuple[PromotionCondition, ...] = ()
    """What evaluations must have found before anything is written."""
    gates: tuple[CheckedCondition, ...] = ()
    """Of an attempt: these conditions, which hold, with what was found."""

    @property
    def evaluations(self) -> tuple[str, ...]:
        """The jobs whose measures its conditions read, each once."""
        named = (name for one in self.promote_if for name in (one.evaluation, one.against) if name is not None)
        return tuple(dict.fromkeys(named))


Work = GenerateSpec | EvaluateSpec | MergeWork | ExportWork


def members_of(work: Work | None) -> tuple[EnsembleMember, ...]:
    """The models of the ensemble that a job evaluates; empty: it evaluates none."""
    return work.members if isinstance(work, EvaluateSpec) else ()
