"""Request and answer models of the HTTP API beyond the engine's own models."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, create_model

from llama_stack_provider_trl.documented import Documented
from llama_stack_provider_trl.jobs.store.tokens import Role
from llama_stack_provider_trl.requests.bodies import (
    COUNT,
    DataConfig,
    PreferenceOptimizeRequest,
    SupervisedFineTuneRequest,
    TrainingConfig,
)
from llama_stack_provider_trl.requests.options import Priority, ProviderOptions
from llama_stack_provider_trl.requests.work import KINDS, WorkRequest
from llama_stack_provider_trl.specs.events import InferenceCounts, PreviewedRow
from llama_stack_provider_trl.specs.methods import Call
from llama_stack_provider_trl.specs.names import CheckedElsewhere, CheckedNames
from llama_stack_provider_trl.stack.responses import Checkpoint

from ...wire import NAME
from .dataset_bodies import RequestBody, Sha256

_GivenOptions = Annotated[ProviderOptions | None, SkipValidation, CheckedElsewhere()]


class DataConfigBody(DataConfig):
    batch_size: int | None = Field(None, **COUNT)  # type: ignore[assignment]
    """Rows (SFT) or pairs (DPO) per rank and micro step. Required unless the service's configuration has a default."""


class TrainingConfigBody(TrainingConfig):
    data_config: DataConfigBody | None = None
    """Required: which data to train on."""


class _TrainingBody(Documented):
    """What the bodies of trainings have beside what Llama Stack sends."""

    training_config: TrainingConfigBody
    """How to train."""
    provider_options: _GivenOptions = None
    """Options that Llama Stack's schema has no field for; through Llama Stack, the key `trl` of
    X-LlamaStack-Provider-Data."""
    dataset_digests: Annotated[dict[str, Sha256], Field(max_length=65)] | None = None
    """Digest of the uploaded blob that each dataset_id means; other ids are looked up among the registered datasets."""


class SupervisedFineTuneBody(_TrainingBody, SupervisedFineTuneRequest):
    pass


class PreferenceOptimizeBody(_TrainingBody, PreferenceOptimizeRequest):
    pass


class WorkBody(WorkRequest):
    """What the bodies of all jobs have that do not train."""

    provider_options: _GivenOptions = None


def _body_of(kind: type[WorkRequest]) -> type[WorkBody]:
    options: Any = (_GivenOptions, Field(None, description=f"{', '.join(kind.options)}."))
    bases: Any = (WorkBody, kind)
    made: Any = create_model(f"{kind.kind.capitalize()}Body", __base__=bases, provider_options=options)
    return cast(type[WorkBody], made)


WORK_BODIES = {name: _body_of(kind) for name, kind in KINDS.items()}
"""Kind of jobs that do not train -> the body of its call."""


class PipelineBody(Documented, CheckedNames):
    """Jobs that may name one another. Each is checked as the body of its own call."""

    model_config = ConfigDict(extra="forbid")
    jobs: Annotated[dict[str, Any] | None, CheckedElsewhere()] = Field(
        None,
        description=f"Name -> body of a job, without `job_uuid`, and with `kind` ({', '.join(KINDS)}) where it does "
        "not train. `after` and `job:NAME` name jobs of the pipeline.",
    )
    teacher_student: Annotated[dict[str, Any] | None, CheckedElsewhere()] = None
    """A distillation, which stands for several jobs."""


class PipelineJobRow(BaseModel):
    name: str
    """As the pipeline has it."""
    job_uuid: str
    """The name with a digest of the job's request, rows, and the jobs before it."""
    is_new: bool
    """Whether it was queued; else it was here."""
    state: str
    """As Llama Stack names it."""
    evaluation: str | None = None
    """The job that evaluates its result (the provider option `evaluate`)."""


class PipelineResponse(BaseModel):
    data: list[PipelineJobRow]
    """Those that others depend on first."""


class PreflightBody(PreferenceOptimizeBody):
    """The body of a job of either kind."""

    job_uuid: str = "preflight"
    """Ignored: no job is created."""
    algorithm: Call | None = None
    """The call, sft or dpo. Left out, the body decides: only preference methods have a `finetuned_model`, an
    `algorithm_config` of their type, or the provider option `method`."""


class RowCounts(BaseModel):
    """Of a dataset's rows, as a job would train on them."""

    num_rows: int
    """Of the dataset."""
    examples: int
    """Pairs or sequences that are made of the rows: one of most rows, of some shapes several."""
    trained: int
    """Of those, the ones that are trained on."""
    truncated: int
    """Of those that are trained on, the ones that are cut to `max_seq_length`."""
    dropped: int
    """Of the examples, the ones that are not trained on."""
    total_tokens: int
    """After the cut."""
    trained_tokens: int
    """Tokens that the loss covers."""
    longest_before_cut: int
    """The smallest `max_seq_length` at which no row is cut."""
    median_tokens: int
    histogram: list[dict[str, int]]
    """Examples, as `rows`, of more than half of `up_to` tokens, and at most `up_to`."""
    images: int = 0
    """Of the examples that are trained on."""


class MixturePart(BaseModel):
    dataset_id: str
    rows: int
    """That can be trained on; of a packed job, sequences."""
    rows_per_epoch: int
    """Of these, in an epoch; more: some of them several times."""


class DataVerdict(RowCounts):
    max_tokens: int
    mixture: list[MixturePart] = []
    """Of a job with the option `mixture`: its datasets."""


class StepsVerdict(BaseModel):
    epochs: int
    steps_per_epoch: int
    total_steps: int
    global_batch: int


class Nearest(BaseModel):
    changes: dict[str, Any]
    """Field of the request -> value."""
    estimate_bytes: int


class MemoryVerdict(BaseModel):
    fits: bool
    """estimate x 1.1 <= limit, and machine x 1.1 <= machine_limit."""
    device: str
    devices: int
    """Ranks of the job; the numbers are those of each."""
    estimate_bytes: int
    """The sum of the following parts, up to vllm."""
    limit_bytes: int
    largest_batch: dict[str, int]
    """Sequences, and tokens of each with padding."""
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    logits_bytes: int
    reference_bytes: int
    overhead_bytes: int
    checkpoint_copy_bytes: int
    loading_bytes: int
    vllm_bytes: int = 0
    """vLLM beside training."""
    host_bytes: int
    """Of CPU memory, for each device; not in the estimate."""
    host_offloaded_bytes: int
    """Of host: offloaded activations and parts; the rest is the copy for checkpoints."""
    host_loading_bytes: int
    """The same while the model is loaded: copies of weights that are not mapped."""
    page_cache_bytes: int
    """The files of weights, once for each machine, in memory that the kernel can free; not in the estimate."""
    machine_bytes: int
    """Of CPU memory, for all ranks of a machine: while they load or while they train, whichever is more."""
    ranks_per_machine: int
    machine_limit_bytes: int | None
    """CPU memory of the machine; null: the devices are on other machines."""
    gradient_sync: str | None = None
    """step: each rank keeps whole gradients between micro steps; micro_step: its part of them. null: nothing is
    accumulated on ranks that shard the model."""
    kept_attention: bool | None = None
    """Whether outputs of attention are kept, by what the device has; null: the memory does not decide it."""
    nearest: Nearest | None = None
    """Changes after which a job fits that does not; null: there are none."""
    message: str | None = None


class DiskVerdict(BaseModel):
    fits: bool
    needed_bytes: int
    free_bytes: int
    step_checkpoints: int
    """How many of them there are at a time."""
    step_checkpoint_bytes: int
    final_bytes: int
    merged_bytes: int


class PreflightResponse(BaseModel):
    fits: bool
    """Memory and disk."""
    message: str
    data: DataVerdict
    steps: StepsVerdict
    memory: MemoryVerdict
    disk: DiskVerdict
    warnings: list[str]


class JobName(RequestBody):
    job_uuid: str
    """Name of the job."""


class JobRow(BaseModel):
    """One job of the list; all but the name only with `full=true`."""

    job_uuid: str
    status: str | None = None
    state: str | None = None
    algorithm: str | None = None
    model: str | None = None
    priority: int | None = None
    step: int | None = None
    total_steps: int | None = None
    percent: float | None = None
    detail: str | None = None
    """The reason for waiting or for the failure."""
    created_by: str | None = None
    """Name of the token that submitted it."""
    scheduled_at: datetime | None = None
    started_at: datetime | None = None
    completed_at: datetime | None = None


class QueueRow(JobRow):
    """One job of the queue."""

    loss: float | None = None
    """Of its last training point; of a search, the lowest of its trials."""
    eval_loss: float | None = None
    """Of its last evaluation; of a search, the lowest of its trials."""
    eta_seconds: float | None = None
    """Seconds of training left at the pace so far."""
    reason: str | None = None
    """Of its failure, in one word."""
    model_job: str | None = None
    """The job whose checkpoint it reads as its model, or as an adapter on that; null: its model is of no job."""
    metadata: dict[str, str] = {}
    search: str | None = None
    """The search that it is a trial of."""
    root: str | None = None
    """With `folded`: the job under which it stands, itself where it has others."""
    members: dict[str, int] = {}
    """With `folded`: state -> jobs, of those that are left out since they stand under this one."""

    predicted_start: datetime | None = None
    """Of a waiting job, if the jobs before it continue at their pace; null: it cannot be predicted."""
    unpredicted: str | None = None
    """Why the start of a waiting job cannot be predicted."""


class ListJobsResponse(BaseModel):
    data: list[JobRow]
    next: str | None
    """Cursor: pass it as `after` for the next page; null: this is the last one."""


class QueueResponse(BaseModel):
    data: list[QueueRow]
    matching: int
    """Jobs that match the filters, on all pages; with `folded` without those that stand under others."""
    counts: dict[str, int]
    """State -> jobs, of all jobs; states without any are left out."""


class JobStateRow(BaseModel):
    job_uuid: str
    state: str


class JobStatesResponse(BaseModel):
    data: list[JobStateRow]
    """In the order in which the jobs were requested."""
    next: str
    """Pass it as `after` for the events that follow."""


class EventPoint(BaseModel):
    """What an event adds to the curves of its job. Step, epoch and time are the event's."""

    kind: Literal["train", "validation"]
    metrics: dict[str, float]
    """By the names that `series` has: the memory of rank 1 is `memory_bytes_rank_1`. What is no number is null."""


class Derived(BaseModel):
    """What follows from an event. A field that does not concern it is left out."""

    point: EventPoint | None = None
    superseded_after: int | None = None
    """Points beyond this step no longer count: the steps are done again."""
    eta_seconds: float | None = None
    """As in the status of the job, when this was sent."""


class EventLine(BaseModel):
    id: str
    """Cursor behind this event: pass it as `after` to get those that follow."""
    event: dict[str, Any]


class EventsResponse(BaseModel):
    data: list[EventLine]
    next: str
    """Pass it as `after` for what follows."""


class Point(BaseModel):
    kind: Literal["train", "validation"]
    step: int
    epoch: float
    time: datetime
    metrics: dict[str, float | None]


class MetricsResponse(BaseModel):
    data: list[Point]
    next: int | None = None
    """Step: pass it as `after` for the next page; null: this is the last one."""


class Curve(BaseModel):
    """The points of one metric, by step. The lists are equally long."""

    step: list[int]
    epoch: list[float]
    time: list[float]
    """Seconds since the epoch of the clock."""
    value: list[float | None]


class SeriesResponse(BaseModel):
    train: dict[str, Curve]
    """Metric -> its points."""
    validation: dict[str, Curve]
    exact: bool
    """Whether these are all points of the range. Otherwise each part of the range has its lowest and highest point, and
    the range its first and last one."""
    next: str
    """Cursor behind the last point that the series could have: events that follow it are not in the series."""


class ListCheckpointsResponse(BaseModel):
    data: list[Checkpoint]


class CheckpointFile(BaseModel):
    path: str
    """Relative to the checkpoint's directory."""
    size: int
    sha256: str


class CheckpointFiles(BaseModel):
    identifier: str
    path: str
    files: list[CheckpointFile]


class CreateToken(RequestBody):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(pattern=NAME)
    """For records: `created_by` of jobs and datasets, and the audit log."""
    role: Role = "submit"
    """submit: everything but deleting jobs and what nodes do. read: what submit sees, and no change. node: what agents
    do. metrics: `GET /metrics`. admin: everything."""
    expires_in: float | None = Field(None, gt=0, le=315_360_000)
    """Seconds until it expires, at most ten years; null: never."""
    max_queued_jobs: int | None = Field(None, gt=0, le=10**6)
    """Jobs of this token that may wait at once, paused ones included; null: any number."""
    requests_per_second: float | None = Field(None, ge=0.001, le=10**6)
    """Requests on average, in bursts of up to twice as many; null: any number."""
    priorities: list[Priority] | None = Field(None, min_length=1, max_length=4)
    """Priorities that its jobs may have; null: all."""


class TokenRow(BaseModel):
    name: str
    role: Role
    source: str
    """`created`, or the setting that holds it: such a one is changed there."""
    created_at: datetime | None = None
    created_by: str | None = None
    expires_at: datetime | None = None
    last_used_at: datetime | None = None
    """Last use, after a restart to a minute; null: never, or unknown for a configured one."""
    max_queued_jobs: int | None = None
    requests_per_second: float | None = None
    priorities: list[str] | None = None


class CreatedToken(TokenRow):
    token: str
    """Shown here only: the service keeps its sha256."""
    required: bool
    """false: the service has no configured token and requires none, this one included."""


class ListTokensResponse(BaseModel):
    data: list[TokenRow]
    next: str | None = None
    """Pass it as `after` for the next page; null: this is the last one."""


class AuditLine(BaseModel):
    """One line of the audit log; what does not apply is left out."""

    seq: int
    """Numbers have no gaps."""
    time: datetime
    event: str
    """begin and end of a call, refused, login and logout of a browser, started and stopped (the service), lost (lines
    that could not be written)."""
    caller: str | None = None
    """Name of the token; left out: none that is known."""
    role: str | None = None
    node: str | None = None
    address: str | None = None
    method: str | None = None
    route: str | None = None
    """Path template; left out: refused before a route was found."""
    params: dict[str, Any] | None = None
    """Names of the subjects of the call."""
    status: int | None = None
    """Of the answer; left out of an end: the call was broken off."""
    error: str | None = None
    state: str | None = None
    """Of the job, after the call."""
    of: int | None = None
    """Of an end: number of its begin; left out: the call was refused before it began."""
    count: int | None = None
    """How many refusals this line stands for, beyond the first."""
    version: str | None = None
    cut: int | None = None
    """Bytes of a torn last line that the start removed."""


class AuditPage(BaseModel):
    data: list[AuditLine]
    next: int
    """Pass it as `after` for what follows. The same as `after`: there is nothing yet."""
    last: int
    """Number of the newest line."""


class Health(BaseModel):
    status: Literal["OK"]
    version: str
    supervising: bool
    """false: another process supervises this data directory, and this one only accepts requests."""
    storage_problem: str | None = None
    """Why something cannot be stored, and what to do: a disk is read-only or full, or does not answer. null: all can.
    Reads are answered, and trainings continue."""


NOT_OF_JOBS = ("algorithm", "first_row", "rows")
"""Fields of these bodies that a job's body lacks."""


class PreviewBody(PreflightBody):
    """The body of a job of either kind, and which of its rows to show."""

    first_row: int = Field(0, ge=0, le=2**53)
    """The first row to show, counted from 0, of a mixture through all its datasets. Counts and histogram begin there,
    too."""
    rows: int = Field(10, ge=1, le=100)
    """Rows to show; of 8000 tokens and 100 pairs or sequences in all, further ones have counts only."""


class PreviewCounts(RowCounts):
    """The histogram has the lengths before the cut."""

    read: int
    """Rows behind the other counts: from `first_row` on, at most 2000, or fewer that have a million tokens."""


class PreviewResponse(BaseModel):
    max_seq_length: int
    data: PreviewCounts
    inference: InferenceCounts
    """Of the same rows: whether what is trained is what inference renders."""
    rows: list[PreviewedRow]
    warnings: list[str]


class PromptMessage(BaseModel):
    role: str
    content: str


class SampleAnswer(BaseModel):
    text: str
    tokens: int
    complete: bool
    """Whether the model ended it; false: it has `max_new_tokens`."""


class SampleSet(BaseModel):
    kind: Literal["before", "checkpoint", "after"]
    """after: of the weights in `final`."""
    step: int
    epoch: float
    time: datetime
    answers: list[SampleAnswer]
    """In the order of the prompts."""


class SamplesResponse(BaseModel):
    prompts: list[list[PromptMessage]]
    """Empty: the job was submitted without the provider option `samples`."""
    data: list[SampleSet]
    """In the order in which they were taken."""
    total: int
    """Sets without `limit` and `offset`."""


class GradedAnswer(BaseModel):
    """What a grader gives an answer."""

    reward: float
    error: str | None = None


class JudgedAnswer(BaseModel):
    """What a judge gives an answer."""

    score: float | None = None
    """None: the verdict is unreadable."""


class AnswerLine(BaseModel):
    """A line of the file of answers that a generate job, or an evaluation with checks, leaves."""

    model_config = ConfigDict(extra="ignore")

    row: int
    sample: int = 0
    prompt: list[dict[str, Any]]
    text: str
    tokens: int
    complete: bool
    passed: dict[str, bool] = {}
    timed_out: list[str] = []
    expected: dict[str, str] = {}
    """Check that fails -> the text, or the pattern, that it expects."""
    graded: dict[str, GradedAnswer] = {}
    judged: dict[str, JudgedAnswer] = {}
