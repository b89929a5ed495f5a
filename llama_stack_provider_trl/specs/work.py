"""What a job does in place of training. A kind of jobs is a spec here, a request in `requests.work`, and a recipe.
Others read the properties of `Kind`, and know no kind by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

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


_NO_CHECKPOINT = "does not train ({}) and has no checkpoint: name one that does"
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


class Kind(Frozen):
    """What the engine asks of what a job does. Of itself one that trains, and does nothing else; the other kinds
    override what differs."""

    leaves_model: ClassVar[bool] = True
    """Whether its result is a model, or an adapter, as transformers and peft read them."""
    copies: ClassVar[int] = 0
    """The disk that a job takes which does not train: copies of its model's weights in fp32."""

    @property
    def recipe(self) -> tuple[str, str]:
        """What runs an attempt of it: a module of `recipes`, and the function there."""
        return "session", "train_attempt"

    @property
    def answering(self) -> Answering | None:
        """How it answers the prompts that its rows are; None: they are read for something else."""
        return None

    def answered_by(self, python: Path) -> Self:
        """The same, whose answers vLLM computes; itself where it answers no prompts."""
        return self

    @property
    def checks(self) -> tuple[AnswerCheck, ...]:
        """What its answers are checked for."""
        return ()

    @property
    def reads_rows(self) -> bool:
        """Whether it reads the rows of a dataset."""
        return True

    @property
    def measures_rows(self) -> bool:
        """Whether it measures the rows of a dataset as they are: their tokens are kept for other jobs."""
        return False

    @property
    def made_dataset(self) -> str | None:
        """The dataset that its answers become; None: they become none."""
        return None

    @property
    def answer_files(self) -> tuple[str, ...]:
        """The files in its checkpoint directory, of a job that answers prompts. The first grows by whole batches. The
        second is written at the end, from the first."""
        if self.answering is None:
            return ()
        return (ANSWERS,) if self.made_dataset is None else (ANSWERS, ROWS)

    @property
    def ensemble(self) -> tuple[EnsembleMember, ...]:
        """The models of the ensemble that it evaluates; empty: it evaluates none."""
        return ()

    @property
    def judges(self) -> tuple[FurtherModel, ...]:
        """The models that judge its answers."""
        return ()

    @property
    def tasks(self) -> HarnessSpec | None:
        """The tasks that it measures its model on; None: it reads the rows of a dataset."""
        return None

    @property
    def merging(self) -> MergeSpec | None:
        """How it merges its inputs; None: it does not."""
        return None

    @property
    def makes_adapter(self) -> bool:
        """Whether what it merges are adapters, and so is the result."""
        return False

    @property
    def conditions(self) -> tuple[PromotionCondition, ...]:
        """What evaluations must have found before it writes anything."""
        return ()

    @property
    def evaluations(self) -> tuple[str, ...]:
        """The jobs whose measures its conditions read, each once."""
        named = (name for one in self.conditions for name in (one.evaluation, one.against) if name is not None)
        return tuple(dict.fromkeys(named))

    @property
    def exporting(self) -> ExportSpec | None:
        """How it exports its model; None: it does not."""
        return None

    @property
    def why_no_model(self) -> str:
        """Why no job can begin with its result, behind the job's name, and what to do; empty: one can."""
        return ""


TRAINS = Kind()
"""What a job does that trains."""


class GenerateSpec(Answering, Kind):
    """Answers the prompts of the job's dataset."""

    leaves_model = False
    recipe: ClassVar[tuple[str, str]] = "answers.generate", "generate_attempt"
    kind: Literal["generate"] = "generate"
    output_dataset_id: str
    """The dataset that the answers become."""

    @property
    def answering(self) -> Answering:
        return self

    def answered_by(self, python: Path) -> Self:
        return self.model_copy(update={"vllm_python": python})

    @property
    def made_dataset(self) -> str:
        return self.output_dataset_id

    @property
    def why_no_model(self) -> str:
        return _NO_CHECKPOINT.format(self.kind)


class EvaluateSpec(Kind):
    """Evaluates the job's model on its dataset: SFT's measures, or DPO's against the reference, or its answers. Or on
    tasks that have rows of their own: then the job's dataset has none."""

    leaves_model = False
    kind: Literal["evaluate"] = "evaluate"
    answers: CheckedAnswering | None = None
    """Not None: the measures are those of answers to the dataset's prompts."""
    harness: HarnessSpec | None = None
    """Not None: the measures are those of tasks of lm-evaluation-harness."""
    members: tuple[EnsembleMember, ...] = ()
    """Not empty: SFT's measures are those of an ensemble, whose probability of each token is the weighted mean of its
    members'. The job's own model is the first of them."""

    @property
    def recipe(self) -> tuple[str, str]:
        if self.answers is not None:
            return "answers.checked", "check_attempt"
        return (
            ("evaluation.harness", "measure_attempt") if self.harness else ("evaluation.evaluate", "evaluate_attempt")
        )

    @property
    def answering(self) -> Answering | None:
        return self.answers

    def answered_by(self, python: Path) -> Self:
        assert self.answers is not None
        return self.model_copy(update={"answers": self.answers.model_copy(update={"vllm_python": python})})

    @property
    def checks(self) -> tuple[AnswerCheck, ...]:
        return () if self.answers is None else self.answers.checks

    @property
    def reads_rows(self) -> bool:
        return self.harness is None

    @property
    def measures_rows(self) -> bool:
        return self.answers is None and self.harness is None

    @property
    def ensemble(self) -> tuple[EnsembleMember, ...]:
        return self.members

    @property
    def judges(self) -> tuple[FurtherModel, ...]:
        return () if self.answers is None else self.answers.judges

    @property
    def tasks(self) -> HarnessSpec | None:
        return self.harness

    @property
    def why_no_model(self) -> str:
        return _NO_CHECKPOINT.format(self.kind)


class MergeWork(Kind):
    """Merges models, or adapters, into the job's checkpoint `final`. The job's dataset has no rows."""

    copies = 1
    recipe: ClassVar[tuple[str, str]] = "merge", "merge_attempt"
    reads_rows: ClassVar[bool] = False
    kind: Literal["merge"] = "merge"
    merge: MergeSpec
    of_adapters: bool
    """Whether the inputs are adapters, and so is the result."""

    @property
    def merging(self) -> MergeSpec:
        return self.merge

    @property
    def makes_adapter(self) -> bool:
        return self.of_adapters


class ExportWork(Kind):
    """Exports the job's model, with its adapter merged in, into the job's checkpoint `final`, and compares the export
    with the model. The job's dataset has no rows."""

    leaves_model = False
    copies = 2  # merged weights, and a GGUF file that is made of them
    recipe: ClassVar[tuple[str, str]] = "exports.attempt", "export_attempt"
    reads_rows: ClassVar[bool] = False
    kind: Literal["export"] = "export"
    export: ExportSpec
    promote_if: tuple[PromotionCondition, ...] = ()
    """What evaluations must have found before anything is written."""
    gates: tuple[CheckedCondition, ...] = ()
    """Of an attempt: these conditions, which hold, with what was found."""

    @property
    def conditions(self) -> tuple[PromotionCondition, ...]:
        return self.promote_if

    @property
    def exporting(self) -> ExportSpec:
        return self.export

    @property
    def why_no_model(self) -> str:
        return f"exports to {self.export.target}: name the model that it exports"


Work = GenerateSpec | EvaluateSpec | MergeWork | ExportWork
WORKS: dict[str, type[Kind]] = {one.model_fields["kind"].default: one for one in get_args(Work)}
"""Kind -> what a job of it does."""
