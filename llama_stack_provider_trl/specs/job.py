"""The specification of a job (`JobSpec`, frozen at POST) and of one attempt at it (`AttemptSpec`, `spec.json`).

Both are plain data. `requests.resolve` decides defaults that depend on a request, no torch is imported, and `spec.json`
holds everything that a training process needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from ..system.files import RunDir as RunDir  # lives where the runner can import it without pydantic
from .adapters import LoraSpec as LoraSpec  # parts of JobSpec
from .adapters import PeftMethod as PeftMethod
from .adapters import QatSpec as QatSpec
from .adapters import Quantizer as Quantizer
from .averaging import AveragingSpec
from .bases import BaseJob, Frozen, parts_of, with_parts
from .bases import ResumeFrom as ResumeFrom
from .methods import METHODS, MethodSpec, SftSpec
from .methods import Algorithm as Algorithm  # parts of JobSpec
from .methods import DpoLoss as DpoLoss
from .methods import DpoSpec as DpoSpec
from .methods import RowUse as RowUse
from .model_source import AdapterSpec, ModelSource
from .model_source import ReferenceSpec as ReferenceSpec  # a part of JobSpec
from .preflight import PreflightSpec
from .search import PruningSpec, SearchSpec
from .work import TRAINS, Kind, Work

Dtype = Literal["bf16", "fp16", "fp32"]
OptimizerName = Literal["adam", "adamw", "adamw_8bit", "sgd"]
SchedulerName = Literal["linear", "cosine", "constant", "warmup_stable_decay"]
DataFormat = Literal["instruct", "dialog"]
TruncationSide = Literal["right", "left"]
DroppedTurns = Literal["warn", "refuse"]
Duplicates = Literal["warn", "refuse"]
TrainOn = Literal["assistant", "all", "last_turn", "final_answer"]
ReasoningUse = Literal["keep", "drop"]
ShardingStrategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"]
PreflightMode = Literal["refuse", "warn", "off"]
AttnImplementation = Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3"]
AttentionMask = Literal["auto", "always"]
GradientSync = Literal["auto", "step", "micro_step"]
MergeMicroBatches = Literal["auto", "always", "never"]
ReadMetricsLater = Literal["auto", "always", "never"]
FuseLora = Literal["auto", "always", "never"]
HeadGradients = Literal["forward", "backward"]
TileMlp = Literal["auto", "always", "never"]
LigerKernels = Literal["auto", "always", "never"]
KeepAttention = Literal["auto", "always", "never"]
CompileBlocks = Literal["auto", "always", "never"]
Float8 = Literal["always", "never"]
Prefetch = Literal["BACKWARD_PRE", "BACKWARD_POST"]


def default_dtype(device: str) -> Dtype:
    """The dtype of a job that sets none: bf16 where the hardware computes in it.

    A CPU without bf16 instructions is ten times slower than in fp32 (10M Llama, AVX2, 80 against 600 tokens/s).
    """
    return "bf16" if device.startswith("cuda") else "fp32"


class ShardSpec(Frozen):
    """The rows of a dataset whose number modulo `count` is `index`."""

    index: int = Field(ge=0)
    count: int = Field(gt=0)


class RowNames(Frozen):
    """Names in a dataset for what its rows are read by, and what they all begin with."""

    columns: dict[str, str] = Field(default_factory=dict)
    """Column of a shape -> column of the dataset."""
    roles: dict[str, str] = Field(default_factory=dict)
    """Role in the dataset's messages -> system, user, assistant or tool."""
    system: str | None = None
    """Text of a system turn for conversations that begin with none; None: they stay as they are."""
    margins: bool = False
    """Each pair has a margin: the row's column `margin`, or the difference of its answers' scores."""


class RowsOrigin(Frozen):
    """Whence the rows of a dataset were read."""

    uri: str
    version: str | None = None
    """Of what the uri named when they were read: the commit of a hub dataset, size and time of a file, or a digest of
    the names, sizes and ETags of a bucket's files; None: it is not known."""


class DatasetRef(Frozen):
    """A dataset as a content-addressed NDJSON file: one JSON object per line, absent values left out."""

    dataset_id: str
    path: Path
    sha256: str
    num_rows: int
    of_job: str | None = None
    """The job that makes these rows, where they are not known before it has completed: `path`, `sha256` and `num_rows`
    are then decided when an attempt starts (`jobs.inputs.made_rows`)."""
    shard: ShardSpec | None = None
    """The part of the rows of `of_job` that is meant; None: all."""
    names: RowNames | None = None
    """Other names than those of shapes and roles."""
    origin: RowsOrigin | None = None
    """None: a request has sent them."""


class ShareSpec(Frozen):
    """How much of an epoch a dataset of a mixture has: each of its rows once where neither field is set."""

    weight: float | None = Field(None, gt=0)
    """In proportion to the weights of the others, of as many rows as all of them have together."""
    rows: int | None = Field(None, gt=0)
    """Rows of an epoch."""


class MixedDataset(Frozen):
    """One of the datasets that a job is trained on, when there are several."""

    dataset: DatasetRef
    validation: DatasetRef | None = None
    """Rows of it that are held out; None: none."""
    share: ShareSpec = ShareSpec()


class OptimizerSpec(Frozen):
    name: OptimizerName = "adamw"
    learning_rate: float = Field(gt=0)
    weight_decay: float = Field(0.0, ge=0)
    """adamw and adamw_8bit: decoupled. adam and sgd: L2, added to the gradient. Never applied to biases and norms."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_epsilon: float = Field(1e-8, gt=0)
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the learning rate rises linearly from 0."""
    warmup_ratio: float = Field(0.0, ge=0, lt=1)
    """The same as a share of all optimizer steps, where `warmup_steps` is 0."""
    scheduler: SchedulerName = "linear"
    decay_steps: int | None = Field(None, gt=0)
    """Optimizer steps of warmup_stable_decay's last part (arXiv:2404.06395), in which the learning rate falls to 0
    along a cosine; None: a tenth of all."""
    num_cycles: float = Field(0.5, gt=0)
    """Waves of the cosine schedule; half a wave falls to 0."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Gradients are clipped to this norm; 0 switches clipping off."""


class EarlyStoppingSpec(Frozen):
    """When to end a job before its last step."""

    patience: int = Field(gt=0)
    """Evaluations in a row that are not better than the best before them."""
    min_delta: float = Field(0.0, ge=0)
    """By more than this an evaluation must be better."""
    metric: str = "eval_loss"
    """Its name in the evaluations' metrics."""


class SampleMessage(Frozen):
    """One turn of a prompt."""

    role: str
    """system, user, assistant or tool."""
    content: str


class SamplesSpec(Frozen):
    """Prompts that the model answers greedily, without a change to the training: before its first step, before each
    step checkpoint is written, and at the end."""

    prompts: tuple[tuple[SampleMessage, ...], ...]
    max_new_tokens: int = Field(gt=0)
    """Tokens of an answer at most."""


class ShardingSpec(Frozen):
    """How several ranks hold one model: FSDP2 (torch.distributed.fsdp.fully_shard, arXiv:2304.11277), or DDP."""

    strategy: ShardingStrategy = "FULL_SHARD"
    """FULL_SHARD: weights, gradients and optimizer in parts. SHARD_GRAD_OP: weights stay whole between forward and
    backward. HYBRID_SHARD: parts within a node, copies across nodes. NO_SHARD: DDP, every rank holds everything."""
    cpu_offload: bool = False
    """Parts rest in CPU memory while they are not used."""
    forward_prefetch: bool = False
    """Fetch the next block's weights while this one computes forward."""
    backward_prefetch: Prefetch | None = None
    """BACKWARD_PRE: fetch the next block's weights before this one's gradients are computed; BACKWARD_POST: after."""


class ResourcesSpec(Frozen):
    """The resources that a job requires, per node."""

    nodes: int = Field(1, gt=0)
    """Machines that train together."""
    min_nodes: int = Field(1, gt=0)
    """After a failure it may continue on as few as these, with the same global batch."""
    gpu_memory_gb: float | None = Field(None, gt=0)
    """GiB that each of its GPUs has at least."""
    cpus: int | None = Field(None, gt=0)
    """Cores that a node has at least; this chooses nodes and reserves nothing."""
    reserve_cpus: int | None = Field(None, gt=0)
    """Cores of the CPU that it reserves on a node; None: it gets the whole device."""
    memory_gb: float | None = Field(None, gt=0)
    """GiB of memory that a node has at least; with `reserve_cpus` reserved, within the share of these cores."""
    labels: dict[str, str] = Field(default={})
    """Labels that a node has, with these values."""
    model_present: bool = False
    """Only nodes that have the model in their local cache."""


class LifecycleSpec(Frozen):
    """When a job is tried again, and when it ends."""

    retries: int = Field(0, ge=0)
    """Number of retries after failures that a retry can resolve."""
    retry_backoff: float | None = Field(None, gt=0)
    """Seconds to wait before the first retry, doubled with each further one; None: by the reason of the failure."""
    oom_retry: bool = False
    """Out of memory: try once more with a smaller batch_size and as much more accumulation."""
    failover: bool = True
    """A lost node is followed by another attempt; False: by the end of the job."""
    max_duration: float | None = Field(None, gt=0)
    """Seconds of training, over all attempts; then the job saves what it has and fails. None: no limit."""
    priority: int = 0
    """The higher, the sooner it gets a device; equals in order of arrival."""
    min_free_bytes: int = Field(0, ge=0)
    """Disk space that a checkpoint must leave free."""


class DataSpec(Frozen):
    """The rows of a job, and how they become batches."""

    dataset: DatasetRef
    validation: DatasetRef | None = None
    share: ShareSpec = ShareSpec()
    """How much of an epoch `dataset` has, in a mixture."""
    mixed_with: tuple[MixedDataset, ...] = ()
    """The other datasets of a mixture; empty: there is one dataset."""
    data_format: DataFormat | None = None
    """Which shape to read where a row carries both; a row with only one shape is read by that one."""
    batch_size: int = Field(gt=0)
    """Rows (SFT) or pairs (DPO and other preference methods) per rank and micro step."""
    unmerged_batch_size: int | None = Field(None, exclude=True)
    """The same before micro steps were merged, which an attempt does itself, and writes nowhere; None: none are."""
    max_seq_length: int = Field(1024, gt=1)
    """Tokens; longer sequences are cut, and counted."""
    max_seq_length_is_default: bool = False
    """The request did not set it: a model with fewer positions lowers it, with a warning."""
    truncation_side: TruncationSide = "right"
    """What is cut. right: the end. left: the beginning, but for a token that begins texts; of a pair, the prompt's."""
    dropped_turns: DroppedTurns = "warn"
    """Where a chat template leaves out turns, or text of trained answers: warn, a warning; refuse, the job fails before
    its model is loaded."""
    duplicates: Duplicates | None = "warn"
    """Where examples are trained several times, or are in the validation rows, too: warn, a warning; refuse, the job
    fails before its model is loaded. None, of what is evaluated only: they are not looked for."""
    chat_template: str | None = None
    """Its text, or its name in `chat_templates.OF_TRL`: in place of the model's own one, also in what the job exports;
    None: that of the model."""
    train_on_input: bool = False
    """SFT: False, the loss covers what `train_on` says; True, every token."""
    train_on: TrainOn = "assistant"
    """SFT: what the loss covers. assistant: every answer. all: every token. last_turn: the last answer. final_answer:
    the last answer without its thoughts."""
    reasoning: ReasoningUse = "keep"
    """SFT: thoughts of answers are kept in the rows, or dropped before anything is written."""
    token_cache: Path | None = None
    """Directory of tokenized rows, and of traces of its memory check, for other jobs, too; None: in memory only."""
    dataloader_num_workers: int | None = Field(None, ge=0)
    """Processes per rank that prepare batches; None: 2 on cuda, else 0."""
    group_by_length: bool = True
    """Put the rows of an optimizer step into batches by length: less padding, the same numbers up to rounding."""
    has_images: bool = False
    """Rows have images, which an attempt finds out itself: the model is one that reads them."""
    packed: bool = False
    """SFT: several rows in a sequence of `max_seq_length` tokens, none of which sees another; `batch_size` counts
    sequences. The rows of an evaluation are packed too, which does not change its numbers."""
    max_validation_steps: int | None = Field(None, gt=0)
    """Batches per evaluation; None: the whole validation dataset."""
    seed: int = 42

    @property
    def evaluated_batch_size(self) -> int:
        """Rows or pairs per rank that are scored together, without gradients. As before micro steps were merged: the
        numbers of an evaluation stay the same, and rows that are longer than those that are trained on take no more
        memory."""
        return self.unmerged_batch_size or self.batch_size

    @property
    def trained(self) -> TrainOn:
        """What the loss of SFT covers."""
        return "all" if self.train_on_input else self.train_on

    @property
    def mixed(self) -> tuple[MixedDataset, ...]:
        """All datasets that are trained on, in their order, with what they hold out."""
        return MixedDataset(dataset=self.dataset, validation=self.validation, share=self.share), *self.mixed_with


class ComputeSpec(Frozen):
    """In which numbers and by which kernels a job computes."""

    dtype: Dtype = "bf16"
    """bf16: bf16 autocast over fp32 trainable weights, a frozen base under LoRA held in bf16. fp32: fp32 throughout.
    fp16: as bf16, with loss scaling (arXiv:1710.03740); cuda only."""
    dtype_by_device: bool = False
    """The request set neither dtype nor device, and the job may run on any node: bf16 if its first attempt gets GPUs,
    else fp32. `dtype` is then the default of the service's own machine."""
    attn_implementation: AttnImplementation | None = None
    """Of transformers; the flash kernels are for cuda in bf16 or fp16. None: transformers' choice, sdpa for most."""
    attention_mask: AttentionMask = "auto"
    """auto: the model gets the padding mask only where padding behind a row could change its numbers. always: always,
    but in packed sequences."""
    padding_free: bool = True
    """Batches in one sequence: no padding, and of a pair the prompt once, where the model's attention allows it
    (`recipes.fast`)."""
    head_gradients: HeadGradients = "forward"
    """In batches in one sequence, forward: the pass that computes the logits computes their gradients too, as far as it
    can (`recipes.fast.head`). backward: TRL's head, which computes the logits again for them."""
    fuse_lora: FuseLora = "auto"
    """Whether a LoRA layer computes its base product and its update as one operation (`recipes.fast.lora`), where that
    has the numbers of PEFT's own. auto: on cuda."""
    tile_mlp: TileMlp = "auto"
    """Whether networks and norms compute long batches in tiles of tokens (`recipes.fast.mlp`). auto: on cuda, in jobs
    whose rows may be long. always: on any device, also where only batches are."""
    accumulator_bytes: int | None = Field(None, exclude=True)
    """Bytes that attention's backward pass may take to add in a fixed order, which an attempt decides itself, and
    writes nowhere (`recipes.micro_steps`); None: `fast.attention.LARGEST_ACCUMULATORS`."""
    compile_blocks: CompileBlocks = "auto"
    """Whether torch's compiler makes few kernels of each block (`recipes.fast.compiled`). auto: not, until it is
    measured on a GPU."""
    float8: Float8 = "never"
    """Whether the linear layers of compiled blocks multiply in 8 bits (`recipes.fast.float8`)."""
    liger_kernels: LigerKernels = "auto"
    """Whether Liger's Triton kernels compute norms, rotary embeddings and activations of blocks (`recipes.fast.liger`).
    auto: not, until it is measured on a GPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    keep_attention: KeepAttention = "auto"
    """With gradient_checkpointing: whether outputs of attention are kept, so that the backward pass computes only the
    rest again (`recipes.fast.kept_attention`): the same numbers. auto: on cuda, in jobs whose rows may be long, where
    the memory estimate fits with them."""
    checkpoint_every: int = Field(1, gt=0)
    """With gradient_checkpointing: of every so many blocks one is recomputed, the others keep their activations."""
    activation_offloading: bool = False
    """Activations that the backward pass needs wait for it in CPU memory; cuda only."""
    num_threads: int | None = Field(None, gt=0)
    """CPU threads for torch; None: torch's own choice."""


class TrainSpec(Frozen):
    """How a job trains: its optimizer, its steps, and what is done between them."""

    method: MethodSpec = SftSpec()
    optimizer: OptimizerSpec
    qat: QatSpec | None = None
    merge_adapter: bool = False
    """Besides the adapter, write `<checkpoint_dir>/merged`: the base model with the adapter merged into it."""
    averaging: AveragingSpec | None = None
    """None: gradients are reduced in every optimizer step."""
    n_epochs: int = Field(gt=0)
    max_steps_per_epoch: int | None = Field(None, gt=0)
    """Optimizer steps; None: the whole epoch."""
    gradient_accumulation_steps: int = Field(1, gt=0)
    gradient_sync: GradientSync = "auto"
    """When ranks that shard the model reduce accumulated gradients. micro_step: in every micro step, so that each rank
    keeps a part. step: once per optimizer step, each rank keeps whole gradients. auto: step where the memory estimate
    fits with them, else micro_step."""
    merge_micro_batches: MergeMicroBatches = "auto"
    """Whether the micro steps of an optimizer step are computed together where that changes no number beyond rounding
    and the memory estimate fits. auto: on cuda. always: on a CPU, too."""
    read_metrics_later: ReadMetricsLater = "auto"
    """Whether a step's metrics are read once the next one is queued. auto: on cuda. always: on a CPU, too."""
    save_steps: int | None = Field(None, gt=0)
    """Optimizer steps between checkpoints; None: at the end of every epoch and every 30 minutes."""
    eval_steps: int | None = Field(None, gt=0)
    """Optimizer steps between evaluations; None: only before checkpoints and at the end."""
    early_stopping: EarlyStoppingSpec | None = None
    best_checkpoint: str | None = None
    """A metric of the evaluations: each one that is better than all before ends in a checkpoint, the best one is kept,
    and `final` holds its weights. None: `final` holds the last step's."""
    samples: SamplesSpec | None = None
    """None: no prompts are answered."""
    keep_last: int | None = Field(None, gt=0)
    """Step checkpoints that are kept, the newest ones; None: all. `final` and `merged` always stay."""
    logging_steps: int = Field(1, gt=0)
    shuffle: bool = True


class JobSpec(Frozen):
    """One job, resolved: every default filled in, every path absolute. This is the effective configuration."""

    job_uuid: str
    source: ModelSource
    """The base model."""
    output_name: str
    """Name of the result; identifiers of checkpoints start with it."""
    checkpoint_dir: Path
    """Absolute and this job's own: `<checkpoint_dir of the request>/<job_uuid>`."""
    data: DataSpec
    compute: ComputeSpec = ComputeSpec()
    train: TrainSpec
    adapter: AdapterSpec | None = None
    """A trained adapter of the base model to begin with; None: none."""
    lora: LoraSpec | None = None
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    ranks: int = Field(1, gt=0)
    """Processes that train together, as many on each node; on cuda each has a GPU of its own, on a CPU those of a node
    share it."""
    resources: ResourcesSpec | None = None
    """None: it runs on the service's (or provider's) own machine."""
    sharding: ShardingSpec | None = None
    """None: one process."""
    context_parallel_size: int = Field(1, gt=0)
    """Ranks that train the same rows, each on its share of their tokens; it divides `ranks_per_node`."""
    lifecycle: LifecycleSpec = LifecycleSpec()
    preflight: PreflightMode = "refuse"
    """Where the estimated memory does not fit: refuse, before its model is loaded; warn; off: nothing is estimated."""
    resume_from: ResumeFrom | None = None
    """Another job's checkpoint to begin with, in place of the model as it is; None: from the start."""
    after: tuple[str, ...] = ()
    """Jobs that must have completed before this one starts."""
    cancel_with: bool = False
    """A cancel of one of these cancels this job; False: it fails."""
    evaluation: str | None = None
    """Name of the job, stored with this one, that evaluates its result; None: none does."""
    metadata: dict[str, str] = Field(default={})
    """Texts that its caller gave it, by their names: for lists and statuses."""
    search: SearchSpec | None = None
    """Not None: it is not trained itself, its trials are; the other fields are those of its first trial."""
    pruning: PruningSpec | None = None
    """Of a trial: it pauses at the rungs of its search, after an evaluation."""
    work: Work | None = Field(None, discriminator="kind")
    """What it does in place of training; None: it trains."""

    @staticmethod
    def parts() -> dict[str, type[Frozen]]:
        """Its parts, whose fields `of`, `changed` and `value` take beside its own."""
        return _PARTS

    @classmethod
    def of(cls, **fields: Any) -> JobSpec:
        """A job of its own fields, and of those of its parts, by their names."""
        rest = dict(fields)
        for part, kind in _PARTS.items():
            if own := {name: rest.pop(name) for name in kind.model_fields if name in rest}:
                rest[part] = kind(**own)
        return cls(**rest)

    def changed(self, **fields: Any) -> JobSpec:
        """The job with other values of its own fields, or of those of its parts. They are not validated."""
        rest = dict(fields)
        for part, kind in _PARTS.items():
            if own := {name: rest.pop(name) for name in kind.model_fields if name in rest}:
                rest[part] = rest.get(part, getattr(self, part)).model_copy(update=own)
        return self.model_copy(update=rest)

    def value(self, name: str) -> Any:
        """One of its fields, or of those of its parts, by its name."""
        for part, kind in _PARTS.items():
            if name in kind.model_fields:
                return getattr(getattr(self, part), name)
        return getattr(self, name)

    def flat(self, exclude: Any = None) -> dict[str, Any]:
        """All fields as JSON has them, those of its parts but `lifecycle` beside its own: what statuses and trackers
        show.

        Args:
            exclude: as for pydantic's `model_dump`.
        """
        own = self.model_dump(mode="json", exclude=exclude)
        source, data, compute, train = (own.pop(part) for part in _PARTS if part != "lifecycle")
        model_path = source.pop("path")
        del source["made_by"]  # one of `bases`
        job_uuid = own.pop("job_uuid")
        return {
            "job_uuid": job_uuid,
            "algorithm": self.algorithm,
            **source,
            "model_path": model_path,
            "bases": [job.model_dump() for job in self.bases],
            **own,
            **data,
            **compute,
            **train,
        }

    def on(self, device: str) -> JobSpec:
        """The job as an attempt on a concrete device, or on a core of the CPU, trains it."""
        if device.startswith("cpu:"):
            device = "cpu"
        dtype = default_dtype(device) if self.compute.dtype_by_device else self.compute.dtype
        return self.changed(device=device, dtype=dtype)

    @property
    def method(self) -> MethodSpec:
        """The method that trains it, with its parameters."""
        return self.train.method

    @property
    def algorithm(self) -> Algorithm:
        """The method that trains it."""
        return self.method.algorithm

    @property
    def reference_source(self) -> ModelSource:
        """Where the reference is read from: the source of the base model where the job names no other."""
        return (self.reference and self.reference.source) or self.source

    @property
    def reference(self) -> ReferenceSpec | None:
        """The reference or teacher of a method that has one."""
        return self.method.compared_with

    @property
    def does(self) -> Kind:
        """What it does, as the parts of the engine ask of it."""
        return self.work or TRAINS

    def without_model_paths(self) -> JobSpec:
        """The job without what holds on one machine only: how checkpoints record it."""
        job = self.changed(method=self.method.without_interpreter())
        return with_parts(job, ModelSource, ModelSource.without_path)

    @property
    def models(self) -> tuple[ModelSource, ...]:
        """The models and adapters that it reads, its own first."""
        return tuple(dict.fromkeys(source for _, source in parts_of(self, ModelSource)))

    @property
    def bases(self) -> tuple[BaseJob, ...]:
        """Those of `jobs_read` that its models and adapters are, and not what its method compares them with."""
        method = [job for _, job in parts_of(self.method, BaseJob)]
        return tuple(job for job in self.jobs_read if job not in method)

    @property
    def jobs_read(self) -> tuple[BaseJob, ...]:
        """The checkpoints of other jobs that it reads, in the order of its fields."""
        return tuple(dict.fromkeys(job for _, job in parts_of(self, BaseJob)))

    @property
    def rows_per_step(self) -> int:
        """The global batch: rows (SFT) or pairs (DPO) per optimizer step, over all ranks."""
        groups = self.ranks // self.context_parallel_size
        return self.data.batch_size * self.train.gradient_accumulation_steps * groups

    @property
    def has_pairs(self) -> bool:
        """Whether its rows are preference pairs."""
        return METHODS[self.algorithm].has_pairs

    @property
    def sequences_per_row(self) -> int:
        """Sequences that a row is trained on: two of a pair, as many as a prompt has answers."""
        return 2 if self.has_pairs else self.method.answers_per_prompt

    @property
    def trains_reward(self) -> bool:
        """Whether it trains a reward model: one number in place of the vocabulary's logits."""
        return METHODS[self.algorithm].trains_reward

    @property
    def frozen_dtype(self) -> Dtype:
        """What the base is held in under adapters. PEFT trains the head of a reward model in the base's dtype, whose
        updates bf16 would round away."""
        return "fp32" if self.trains_reward else self.compute.dtype

    @property
    def nodes(self) -> int:
        """Machines that train together."""
        return self.resources.nodes if self.resources else 1

    @property
    def uses_flash_kernels(self) -> bool:
        """Whether attention is a kernel that takes several rows in one sequence, with their lengths and no mask."""
        return self.compute.attn_implementation in ("flash_attention_2", "flash_attention_3")

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes

    @property
    def devices_of_vllm(self) -> int:
        """Devices that the job takes beside those of its ranks: its vLLM has them for itself."""
        vllm = self.method.answered_by_vllm
        return 0 if vllm is None else vllm.own_devices

    @property
    def is_sharded(self) -> bool:
        """Whether the ranks shard the model, rather than being one process or DDP."""
        return self.ranks > 1 and self.sharding is not None and self.sharding.strategy != "NO_SHARD"

    def may_merge(self, device: str) -> bool:
        """Whether micro batches may be merged on a device: cpu, cuda, cuda:N, mps, or auto, which may be cuda."""
        return _is_chosen(self.train.merge_micro_batches, device)

    def fuses_lora(self, device: str) -> bool:
        """Whether LoRA layers may compute as one operation on a device, named as in `may_merge`."""
        return _is_chosen(self.compute.fuse_lora, device)

    def tiles_mlp(self, device: str) -> bool:
        """Whether networks and norms may compute in tiles on a device, named as in `may_merge`."""
        return _is_chosen(self.compute.tile_mlp, device)

    def keeps_attention(self, device: str) -> bool:
        """Whether outputs of attention may be kept on a device, named as in `may_merge`."""
        return _is_chosen(self.compute.keep_attention, device)

    def may_read_later(self, device: str) -> bool:
        """Whether metrics may be read a step later on a device: cpu, cuda, cuda:N or mps."""
        return self.train.read_metrics_later == "always" or (
            self.train.read_metrics_later == "auto" and device.partition(":")[0] == "cuda"
        )

    def in_smaller_parts(self) -> JobSpec | None:
        """The same job in less memory: at most half the batch_size, and so much more accumulation that every step and
        every evaluation sees the same rows; no whole gradients and no kept attention unless the job requests them, and
        no merged micro batches. None: nothing of it is possible, since batch_size is 1, or the loss has means over the
        batch (kto_pair)."""
        if self.compute.gradient_checkpointing and self.compute.keep_attention == "auto":
            parted = self.changed(keep_attention="never")
            return parted.in_smaller_parts() or (parted if self.keeps_attention(self.device) else None)
        if self.train.gradient_accumulation_steps > 1 and self.may_merge(self.device):
            parted = self.changed(merge_micro_batches="never")
            return parted.in_smaller_parts() or parted
        if self.train.gradient_sync == "auto":
            parted = self.changed(gradient_sync="micro_step")
            is_less = self.is_sharded and self.train.gradient_accumulation_steps > 1
            return parted.in_smaller_parts() or (parted if is_less else None)
        if self.data.batch_size == 1 or self.method.has_batch_means:
            return None
        return self.with_batches_of(
            max(n for n in range(1, self.data.batch_size // 2 + 1) if self.data.batch_size % n == 0)
        )

    def with_batches_of(self, batch_size: int) -> JobSpec:
        """The same job with batches of a size that divides its own: a step and an evaluation see the same rows."""
        times = self.data.batch_size // batch_size
        accumulation = self.train.gradient_accumulation_steps * times
        batches = None if self.data.max_validation_steps is None else self.data.max_validation_steps * times
        changes = {"gradient_accumulation_steps": accumulation, "max_validation_steps": batches}
        return self.changed(batch_size=batch_size, **changes)


def _is_chosen(option: Literal["auto", "always", "never"], device: str) -> bool:
    """Whether an option applies on a device; auto: on cuda."""
    return option == "always" or (option == "auto" and device.partition(":")[0] in ("auto", "cuda"))


_PARTS: dict[str, type[Frozen]] = {
    "source": ModelSource,
    "data": DataSpec,
    "compute": ComputeSpec,
    "train": TrainSpec,
    "lifecycle": LifecycleSpec,
}


class AttemptSpec(Frozen):
    """One attempt at a job: `derive(JobSpec, placement, resume point)`. Written to the run directory as `spec.json`."""

    job: JobSpec
    age: int = Field(0, ge=0)
    """The job's place in the order of submission, which no other job of the service gets; 0: it was not submitted."""
    attempt: int = Field(gt=0)
    run_dir: Path
    """`<data_dir>/jobs/<job_uuid>/attempts/<attempt>`; every path of the attempt is a function of it."""
    world_size: int = 1
    """Processes that train together in this attempt; may differ from the job's `ranks`."""
    rows_per_step: int | None = Field(None, gt=0)
    """The global batch, the same in every attempt; None: that of `job`."""
    has_run_out: bool = False
    """Whether an attempt before ran out of memory."""
    resume_from: Path | None = None
    """A checkpoint directory of this job to resume from; None: from the start."""
    fall_back_to: tuple[Path, ...] = ()
    """Checkpoints to resume from where that one is damaged, the best first."""
    turn: Path | None = None
    """The fencing token, on a disk that several machines see: a file with the task_id of the attempt that may write
    into the job's checkpoint directory. None: no other attempt can."""

    @property
    def resume_candidates(self) -> tuple[Path, ...]:
        return (self.resume_from, *self.fall_back_to) if self.resume_from else ()

    preflight: PreflightSpec | None = None
    """Not None: nothing is trained, the process reports what a job would do (`events.Preflighted`)."""

    @property
    def is_private(self) -> bool:
        """Whether all its files are in the data directory, which no other user can enter."""
        *above, jobs, _, attempts, _ = ("", "", "", "", *self.run_dir.parts)
        data_dir = Path(*above)
        in_it = (jobs, attempts) == ("jobs", "attempts") and self.job.checkpoint_dir.is_relative_to(data_dir)
        return in_it or self.preflight is not None

    @property
    def task_id(self) -> str:
        return f"{self.job.job_uuid}-{self.attempt}"

    @property
    def compiled(self) -> Path | None:
        """Code that is compiled for the job, in its directory: of all its attempts, and of no other job, whose code
        it would run. A node may still have that of an earlier job of this name, which had another age. None: nothing
        is compiled."""
        job = self.job
        trains = job.work is None and self.preflight is None
        if not trains or job.compute.compile_blocks != "always" or METHODS[job.algorithm].padded_because:
            return None
        home = self.run_dir.parents[1] if self.run_dir.parent.name == "attempts" else self.run_dir
        return home / "compiled" / str(self.age)


def derive(
    spec: JobSpec,
    attempt: int,
    device: str,
    run_dir: Path,
    resume_from: Path | None = None,
    *fall_back_to: Path,
    in_smaller_parts: bool = False,
    has_trained: bool = False,
    nodes: int | None = None,
    age: int = 0,
) -> AttemptSpec:
    """One attempt at a job on a concrete device. Pure: the same arguments give the same spec.

    Args:
        fall_back_to: checkpoints for the case that `resume_from` is damaged, the best first.
        in_smaller_parts: it ran out of memory before.
        has_trained: an earlier attempt has done steps, so the job fits. An estimate no longer refuses it, since other
            programs may use the GPU's memory at the moment.
        nodes: that it runs on; None: as many as the job requests.
        age: the job's; 0: it was not submitted.
    """
    spec = (spec.in_smaller_parts() if in_smaller_parts else None) or spec
    preflight = "warn" if has_trained and spec.preflight == "refuse" else spec.preflight
    placed = spec.on(device).model_copy(update={"preflight": preflight})
    return AttemptSpec(
        job=placed,
        age=age,
        attempt=attempt,
        run_dir=run_dir,
        world_size=spec.ranks_per_node * (nodes or spec.nodes),
        # Of the job and not of `placed`: every attempt takes the same rows per step.
        rows_per_step=spec.rows_per_step,
        has_run_out=in_smaller_parts,
        resume_from=resume_from,
        fall_back_to=fall_back_to,
    )
