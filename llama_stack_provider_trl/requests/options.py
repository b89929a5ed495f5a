"""Per-job options that Llama Stack's schema lacks, under the key `trl` of `X-LlamaStack-Provider-Data`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ..documented import Documented
from ..errors import InvalidRequest
from ..specs.job import (
    AttentionMask,
    AttnImplementation,
    CompileBlocks,
    DroppedTurns,
    Duplicates,
    Float8,
    FuseLora,
    GradientSync,
    HeadGradients,
    KeepAttention,
    LigerKernels,
    MergeMicroBatches,
    PeftMethod,
    Prefetch,
    PreflightMode,
    ReadMetricsLater,
    ReasoningUse,
    RowNames,
    ShardingStrategy,
    TileMlp,
    TrainOn,
)
from ..specs.model_source import AdapterUse
from ..specs.names import CheckedElsewhere, CheckedNames, FreeText, problem_of_name
from ..specs.rows import COLUMNS, ROLES
from .bodies import LoraFinetuningConfig
from .choices import fields_at, nearest, problem_of

PRIORITIES = {"low": -1, "normal": 0, "high": 1, "critical": 2}
Priority = Literal["low", "normal", "high", "critical"]


class ProviderData(BaseModel):
    """The model with which Llama Stack validates the header. It accepts anything: Llama Stack passes a failed
    validation on as None. `ProviderOptions` refuses invalid options inside the call."""

    model_config = ConfigDict(extra="allow")
    trl: Any = None


class EarlyStopping(Documented, CheckedNames):
    """Conditions for ending a job before its last step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    patience: int = Field(gt=0, le=10**6)
    """Evaluations in a row that are not better."""
    min_delta: float = Field(0.0, ge=0)
    """An evaluation is better only by more than this."""
    metric: str = "eval_loss"
    """What is checked."""


class Averaging(Documented, CheckedNames):
    """Training whose workers meet every so many optimizer steps (DiLoCo, arXiv:2311.08105)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    interval: int = Field(gt=0, le=10**6)
    """Optimizer steps that each worker trains on its own rows, without exchanging gradients."""
    outer_learning_rate: float = Field(0.7, gt=0, le=10)
    """Of the step from the last common weights towards the mean of the workers' weights."""
    outer_momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of those steps."""
    nesterov: bool | None = None
    """Whether it is Nesterov's. Default: with any momentum."""

    @field_validator("nesterov")
    @classmethod
    def _check_nesterov(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("outer_momentum") == 0:
            raise ValueError("outer_momentum is 0: set a momentum, or leave nesterov out")
        return value


class Resources(Documented, CheckedNames):
    """Requirements of a job on its machines; all of them are per node."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    nodes: int | None = Field(None, gt=0, le=1024)
    """Machines that train together, with `nproc_per_node` processes on each. Default: the configuration's nnodes."""
    min_nodes: int | None = Field(None, gt=0, le=1024)
    """After a failure continue with as few as these, with the same global batch. Default: nodes."""
    gpu_memory_gb: float | None = Field(None, gt=0, le=10**6)
    """GiB that each of its GPUs has at least."""
    cpus: int | None = Field(None, gt=0, le=10**6)
    """CPUs that a node has at least."""
    reserve_cpus: int | None = Field(None, gt=0, le=10**4)
    """Train on the CPU, on this many cores of each node, which other jobs that reserve cores share."""
    memory_gb: float | None = Field(None, gt=0, le=10**6)
    """GiB of memory that a node has at least."""
    labels: dict[str, str] = Field(default={}, max_length=64)
    """Labels that a node has, such as {"zone": "a"}."""
    model_present: bool = False
    """Only nodes with the model in their local cache."""


class FsdpOptions(Documented, CheckedNames):
    """How the ranks of a job hold its model, where that differs from the configuration's `fsdp_config`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sharding_strategy: ShardingStrategy | None = None
    """FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD or NO_SHARD (DDP)."""
    cpu_offload: bool | None = None
    """Shards rest in CPU memory while they are not used."""
    forward_prefetch: bool | None = None
    """Fetch the next block's weights during the forward pass."""
    backward_prefetch: Prefetch | None = None
    """BACKWARD_PRE or BACKWARD_POST."""

    @model_validator(mode="after")
    def _check_unsharded(self) -> FsdpOptions:
        parts = [name for name in ("cpu_offload", "forward_prefetch", "backward_prefetch") if getattr(self, name)]
        if self.sharding_strategy == "NO_SHARD" and parts:
            raise ValueError(f"NO_SHARD has no parts, so that {parts[0]} would have no effect: leave it out")
        return self


class Shard(Documented, CheckedNames):
    """A part of the rows of a dataset."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    index: int = Field(ge=0, lt=10**6)
    """Number of the part, from 0."""
    count: int = Field(gt=0, le=10**6)
    """Parts of the dataset."""

    @model_validator(mode="after")
    def _check_index(self) -> Shard:
        if self.index >= self.count:
            raise ValueError(f"index is {self.index}: with count {self.count} it is 0 to {self.count - 1}")
        return self


def _checked_text(text: str) -> str:
    if problem := "it is blank, expected text" if not text.strip() else _problem_of_text(text):
        raise ValueError(problem)
    return text


def _checked_columns(columns: dict[str, str]) -> dict[str, str]:
    for own, name in columns.items():
        if own not in COLUMNS:
            raise ValueError(f"{own!r} is no column of a row shape, expected one of {', '.join(sorted(COLUMNS))}")
        if not name.strip():
            raise ValueError(f"{own!r} has no name, expected that of a column of the dataset")
    return columns


def _checked_roles(roles: dict[str, str | list[str]]) -> dict[str, str | list[str]]:
    known = dict[str, str]()
    for own, names in roles.items():
        if own not in (expected := sorted(set(ROLES.values()))):
            raise ValueError(f"{own!r} is no role, expected one of {', '.join(expected)}")
        for name in [names] if isinstance(names, str) else names:
            if known.setdefault(name, own) != own:
                raise ValueError(f"{name!r} is there for {known[name]} and for {own}: name it once")
    return roles


MOST_METADATA = 32_768
"""Characters of a job's metadata, names included."""
RESERVED = "openai"
"""Name in a job's metadata that the service sets itself, of jobs that were made over OpenAI's API."""


def _checked_metadata(metadata: dict[str, str]) -> dict[str, str]:
    for name, text in metadata.items():
        if problem := _problem_of_text(text) or problem_of_name(name):
            raise ValueError(f"{name!r}: {problem}")
        if name == RESERVED:
            raise ValueError(f"the name {name!r} is reserved: choose another one")
    characters = sum(len(name) + len(text) for name, text in metadata.items())
    if characters > MOST_METADATA:
        raise ValueError(f"names and texts have {characters} characters together, at most {MOST_METADATA} fit")
    return metadata


Columns = Annotated[dict[str, str], Field(max_length=64), AfterValidator(_checked_columns)]
Roles = Annotated[dict[str, str | list[str]], Field(max_length=4), AfterValidator(_checked_roles)]
SystemPrompt = Annotated[str, Field(max_length=32_000), AfterValidator(_checked_text)]
ChatTemplate = Annotated[str, Field(max_length=200_000), AfterValidator(_checked_text)]


class MixtureEntry(Documented, CheckedNames):
    """A dataset of a mixture, and how much of an epoch it has: each of its rows once, where neither is set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dataset_id: str = Field(max_length=200)
    """Its id, as in `data_config`, which names the first one."""
    weight: float | None = Field(None, gt=0, le=10**6)
    """Share of an epoch, in proportion to the other weights. An epoch then has as many rows as all datasets."""
    rows: int | None = Field(None, gt=0, le=10**9)
    """Rows of an epoch: fewer than there are, others in the next; more, and rows are taken several times."""
    columns: Columns = Field({})
    """As the option `columns`, for this dataset. Default: that option's."""
    roles: Roles = Field({})
    """As the option `roles`, for this dataset. Default: that option's."""
    system_prompt: Annotated[SystemPrompt | None, FreeText()] = None
    """As the option `system_prompt`, for this dataset. Default: that option's."""

    @model_validator(mode="after")
    def _check_share(self) -> MixtureEntry:
        if self.weight is not None and self.rows is not None:
            raise ValueError("it has a weight and rows: send one of them")
        return self


def row_names(columns: dict[str, str], roles: dict[str, str | list[str]], system_prompt: str | None) -> RowNames | None:
    """What rows are read by; None: by the names of shapes and roles."""
    if not columns and not roles and system_prompt is None:
        return None
    by_name = {name: own for own, names in roles.items() for name in ([names] if isinstance(names, str) else names)}
    return RowNames(columns=columns, roles=by_name, system=system_prompt)


SAMPLE_ROLES = ("system", "user", "assistant", "tool")
SAMPLE_CHARACTERS = 32_000
"""Of all prompts together."""


class Samples(Documented, CheckedNames):
    """Prompts that the model answers before training, at each checkpoint and at the end."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompts: Annotated[list[str | list[dict[str, str]]], FreeText()] = Field(min_length=1, max_length=16)
    """Each is the text of a user, or a list of messages {role, content} that the model answers."""
    max_new_tokens: int = Field(64, gt=0, le=512)
    """Tokens of an answer at most."""

    @field_validator("prompts", mode="before")
    @classmethod
    def _check_prompts(cls, prompts: Any) -> Any:
        if not isinstance(prompts, list):
            raise ValueError("expected a list of prompts")
        for number, prompt in enumerate(prompts):
            if problem := _problem_of_prompt(prompt):
                raise ValueError(f"prompt {number}: {problem}")
        characters = sum(
            len(prompt) if isinstance(prompt, str) else sum(len(message["content"]) for message in prompt)
            for prompt in prompts
        )
        if characters > SAMPLE_CHARACTERS:
            raise ValueError(f"all prompts together have {characters} characters, at most {SAMPLE_CHARACTERS} fit")
        return prompts


def _problem_of_prompt(prompt: Any) -> str:
    """Why a prompt cannot be answered; empty: it can."""
    if isinstance(prompt, str):
        return _problem_of_text(prompt) if prompt.strip() else "it is blank, expected text"
    if not isinstance(prompt, list) or not prompt:
        return "expected text, or a list of messages {role, content}"
    for message in prompt:
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            return "each message has a role and a content, and nothing else"
        if message["role"] not in SAMPLE_ROLES:
            return f"the role of a message is one of {', '.join(SAMPLE_ROLES)}"
        if not isinstance(message["content"], str):
            return "the content of a message is text"
        if problem := _problem_of_text(message["content"]):
            return problem
    return "its last message is the assistant's: end with one to answer" if prompt[-1]["role"] == "assistant" else ""


def _problem_of_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return "it has half of a UTF-16 surrogate pair, expected valid Unicode text"
    return ""


class ProviderOptions(Documented, CheckedNames):
    """One job's options; unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    method: Annotated[dict[str, Any] | None, CheckedElsewhere()] = None
    """The fields of `algorithm_config` with a preference method's `type`, for releases that drop them there."""
    lora: LoraFinetuningConfig | None = None
    """Preference methods with LoRA adapters: the same fields as SFT's `algorithm_config`. SFT uses that itself."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """DPO and CPO with loss_type `sigmoid`, SimPO: how likely a preference is taken to be the wrong way round."""
    peft_method: PeftMethod = "lora"
    """With LoRA settings: the kind of adapter that their modules get: `lora`, `ia3` or `vera`."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """Under LoRA: the probability with which an input of an adapter is set to 0 in training."""
    use_rslora: bool = False
    """Under LoRA: scale adapters by alpha / sqrt(rank) in place of alpha / rank."""
    merge_adapter: bool = False
    """Under LoRA: besides the adapter, write the base model with the adapter merged in, as checkpoint `merged`."""
    adapter: AdapterUse | None = None
    """Where `model` is an adapter: `continue`, train it further; `merge`, merge it into its base model first."""
    reference_model: str | None = Field(None, min_length=1)
    """DPO: the model that the trained one is compared with, a directory or a model id. Default: the base model."""
    precompute_reference: bool = False
    """DPO: the reference's answers are computed once, before training, and kept for later jobs on the same rows."""
    max_seq_length: int | None = Field(None, gt=1, le=10**7)
    """Tokens per sequence; longer ones are cut and counted. Default: the provider configuration's."""
    token_cache: bool = True
    """Tokenized rows are kept on disk for the job's ranks and attempts, its preflight and later jobs."""
    truncation_side: Literal["right", "left"] = "right"
    """What of a longer sequence is cut: its end, or its beginning (DPO: that of the prompt)."""
    dropped_turns: DroppedTurns = "warn"
    """Where the chat template leaves out turns of rows, or text of trained answers: `warn`, or `refuse`, which fails
    the job."""
    duplicates: Duplicates = "warn"
    """Where training examples repeat others, or validation examples are trained, too: `warn`, or `refuse`, which fails
    the job."""
    columns: Columns = Field({})
    """Names of the dataset's columns, under those of row shapes: `{"prompt": "question"}` reads `question` as
    `prompt`."""
    roles: Roles = Field({})
    """Names of roles in the dataset's messages, under system, user, assistant and tool: `{"assistant": "agent"}`."""
    system_prompt: Annotated[SystemPrompt | None, FreeText()] = None
    """Text of a system turn for rows whose conversation begins without one. Send it in inference, too."""
    chat_template: Annotated[ChatTemplate | None, FreeText()] = None
    """The chat template of the model that is trained: Jinja text, `chatml`, or a name such as `qwen3`, by which TRL has
    it. Default: the model's own."""
    mixture: list[MixtureEntry] | None = Field(None, min_length=1, max_length=64)
    """Datasets to train on together, that of `data_config` first: [{dataset_id, weight or rows, columns, roles}]."""
    train_on: TrainOn = "assistant"
    """SFT: the loss is on every answer (`assistant`), on `all` tokens, on the last answer (`last_turn`), or on that
    without its thoughts (`final_answer`)."""
    reasoning: ReasoningUse = "keep"
    """SFT: thoughts of answers are kept in the rows (`keep`), or left out of them (`drop`)."""
    group_by_length: bool = True
    """The rows of an optimizer step are put into micro batches and ranks by length, which saves padding."""
    padding_free: bool = True
    """Batches without padding, and each DPO prompt computed once, where the architecture allows it."""
    attention_mask: AttentionMask = "auto"
    """`auto`: the model gets the padding mask only where its attention is not causal throughout. `always`: always."""
    attn_implementation: AttnImplementation | None = None
    """`eager`, `sdpa`, or on cuda `flash_attention_2` or `flash_attention_3`, where installed. Default: the model's."""
    gradient_sync: GradientSync = "auto"
    """Sharded ranks that accumulate: reduce gradients once per `step` or `micro_step`. `auto`: by the memory."""
    merge_micro_batches: MergeMicroBatches = "auto"
    """Compute the micro steps of a step together, where numbers stay and memory is left. `auto`: on cuda."""
    read_metrics_later: ReadMetricsLater = "auto"
    """Read a step's metrics once the next one is queued, so that no GPU waits for that. `auto`: on cuda."""
    head_gradients: HeadGradients = "forward"
    """The output head's gradients: in the `forward` pass where possible, or in the `backward` pass, logits again."""
    fuse_lora: FuseLora = "auto"
    """Compute a LoRA layer's base product and its update as one operation, where numbers stay. `auto`: on cuda."""
    tile_mlp: TileMlp = "auto"
    """Compute networks and norms of long batches in tiles. `auto`: on cuda, where rows have above 16,384 tokens."""
    keep_attention: KeepAttention = "auto"
    """With activation checkpointing: keep outputs of attention. `auto`: on cuda, of long rows, where they fit."""
    compile_blocks: CompileBlocks = "auto"
    """Compile the model's blocks with torch's compiler: `always` or `never`. `auto`: `never`, until it is measured."""
    float8: Float8 = "never"
    """With compile_blocks `always` and all weights: linear layers of blocks multiply in 8 bits: `always`, `never`."""
    liger_kernels: LigerKernels = "auto"
    """Norms, rotary embeddings and activations by Liger's kernels: `always` (cuda), `never`. `auto`: `never`."""
    dataloader_num_workers: int | None = Field(None, ge=0, le=64)
    """Processes per rank that prepare batches while the device computes. Default: 2 on cuda, else 0."""
    lr_scheduler: Literal["linear", "cosine", "constant", "warmup_stable_decay"] = "linear"
    """Learning rate after warmup."""
    lr_decay_steps: int | None = Field(None, gt=0, le=10**9)
    """With warmup_stable_decay: the last so many optimizer steps bring the learning rate to 0. Default: a tenth."""
    num_cycles: float | None = Field(None, gt=0, le=10**6)
    """With cosine: waves of the schedule after the warmup; at half a wave the learning rate is 0. Default: 0.5."""
    adam_beta1: float | None = Field(None, ge=0, lt=1)
    """adam, adamw and adamw_8bit: decay of the mean of the gradients. Default: 0.9."""
    adam_beta2: float | None = Field(None, ge=0, lt=1)
    """adam, adamw and adamw_8bit: decay of the mean of the squared gradients. Default: 0.999."""
    adam_epsilon: float | None = Field(None, gt=0, le=1)
    """adam, adamw and adamw_8bit: added to the root of that mean. Default: 1e-8."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Clip gradients to this norm; 0: no clipping."""
    save_steps: int | None = Field(None, gt=0, le=10**9)
    """A checkpoint every so many optimizer steps. Default: the configuration's, else each epoch and 30 minutes."""
    eval_steps: int | None = Field(None, gt=0, le=10**9)
    """Evaluate every so many optimizer steps, besides before checkpoints and at the end."""
    early_stopping: EarlyStopping | None = None
    """End the job when evaluations in a row are not better than the best: {patience, min_delta 0, metric eval_loss}."""
    best_checkpoint: str | None = None
    """Keep the checkpoint that is best by this metric of the evaluations, and make it `final`."""
    samples: Samples | None = None
    """The model's answers to fixed prompts, before, at checkpoints and after: {prompts, max_new_tokens 64}."""
    keep_last: int | None = Field(None, gt=0, le=10**9)
    """Keep the newest so many step checkpoints and delete older ones. Default: the configuration's, else all stay."""
    retries: int | None = Field(None, ge=0, le=1000)
    """How often the job is tried again, from its last checkpoint, after a failure that a retry can fix."""
    oom_retry: bool | None = None
    """Out of memory: try once more with half the batch_size, twice the accumulation. Default: the configuration's."""
    failover: bool = True
    """False: a lost node ends the job (`node_lost`), which else is started again on the nodes that there are."""
    max_duration: float | None = Field(None, gt=0, le=10**9)
    """Seconds of training in all; then the job saves a checkpoint and fails. Default: the configuration's."""
    priority: Priority | None = None
    """`low`, `normal`, `high` or `critical`: who gets a free device first; equals in order of arrival."""
    logging_steps: int = Field(1, gt=0, le=10**9)
    """A metric point every so many optimizer steps."""
    seed: int = Field(42, ge=0, lt=2**31)
    """Decides shuffling and the initial values of adapters."""
    shard: Shard | None = None
    """Train on the rows whose number modulo `count` is `index`: {index, count}. Default: all rows."""
    nproc_per_node: int | None = Field(None, gt=0, le=1024)
    """Processes that train together (torchrun), each on a GPU of its own; on a CPU they share it. The inline provider
    trains in one. Default: the configuration's."""
    context_parallel_size: int = Field(1, gt=0, le=1024)
    """SFT: so many ranks of a node train the same rows, each on its share of their tokens, for rows that fit on no GPU.
    It divides the ranks of a node. The service only."""
    resources: Resources | None = None
    """Machines: {nodes, min_nodes, gpu_memory_gb, cpus, reserve_cpus, memory_gb, labels, model_present}. The service
    only."""
    fsdp_config: FsdpOptions | None = None
    """How several ranks hold the model: {sharding_strategy, cpu_offload, forward_prefetch, backward_prefetch}. What it
    leaves out is the configuration's. The service only."""
    averaging: Averaging | None = None
    """Workers train on their own, and their weights are averaged every `interval` optimizer steps: {interval,
    outer_learning_rate 0.7, outer_momentum 0.9, nesterov true}."""
    resume_from: str | None = None
    """Resume from a step checkpoint of another job, `JOB_UUID` (its newest) or `JOB_UUID/checkpoint-N`."""
    after: list[str] | None = Field(None, min_length=1, max_length=64)
    """Jobs that must have completed before this one starts; one that fails, or is cancelled, fails this one."""
    cancel_with: bool = False
    """With `after`: this job is cancelled, and does not fail, where one of those is cancelled."""
    evaluate: Annotated[dict[str, Any] | None, CheckedElsewhere()] = None
    """A job `JOB_UUID-evaluation` that comes after this one evaluates its result: {dataset_id, checks ...}."""
    preflight: PreflightMode = "refuse"
    """Where the estimated memory does not fit: `refuse` fails the job before it loads its model, `warn`, `off`."""
    metadata: Annotated[dict[str, str], AfterValidator(_checked_metadata), FreeText()] = Field({}, max_length=64)
    """Texts that the job carries under names of your choice, such as {"team": "a"}. Its status has them, and nothing in
    its training reads them. The name `openai` is reserved."""
    device: str | None = None
    """One of the provider's devices, such as `cuda:1`; left out: the first free one."""

    @property
    def row_names(self) -> RowNames | None:
        """What the rows of the datasets are read by; None: by the names of shapes and roles."""
        return row_names(self.columns, self.roles, self.system_prompt)

    @classmethod
    def parse(cls, value: Any) -> ProviderOptions:
        """The options in a header's `trl` key or a body's `provider_options`; None means none given. Raises
        InvalidRequest: naming the first field that is unknown or has a wrong value."""
        try:
            return cls.model_validate(value if value is not None else {})
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(["provider_options", *map(str, first["loc"])])
            problem = problem_of(first)
            if first["type"] == "extra_forbidden":
                *path, name = first["loc"]
                names = fields_at(cls, path)
                problem = f"there is no such option{nearest(name, names)}; the options are: {', '.join(names)}"
            # Without its cause, which Llama Stack would log: it takes 10 s to highlight a name of 30,000 characters.
            raise InvalidRequest(field, first["input"], problem) from None
