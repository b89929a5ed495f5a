"""Request bodies as our own models: lenient in form, strict in meaning.

They accept the bodies of Llama Stack 0.2.14 to 0.6.1 and the promised payload. Unset fields stay unset (None), and
unknown fields are kept, so that `resolve` can refuse them by name. docs/reference/api.md describes each field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ..documented import Documented
from ..specs.methods import Call
from ..specs.names import CheckedElsewhere, CheckedNames
from ..system.texts import json_digest

COUNT: dict[str, Any] = {"gt": 0, "le": 10**6}
"""Bounds of every count: far beyond any real job, and small enough that no product of them overflows the job store."""
SFT_TYPES = ("lora", "qat")
"""Values of `algorithm_config.type` in the call supervised-fine-tune, in small letters."""


class _Body(Documented, CheckedNames):
    model_config = ConfigDict(extra="allow", protected_namespaces=())


class DataConfig(_Body):
    dataset_id: str = Field(max_length=512)
    """Id of a dataset registered with Llama Stack."""
    batch_size: int = Field(**COUNT)
    """Rows (SFT) or pairs (DPO) per rank and micro step."""
    shuffle: bool = True
    """Shuffle all rows again in every epoch."""
    data_format: str | None = None
    """SFT rows: `instruct` or `dialog`; where a row carries both shapes, this one is read. DPO: not used."""
    validation_dataset_id: str | None = Field(None, max_length=512)
    """Dataset to evaluate on before every checkpoint and at the end."""
    packed: bool | None = None
    """SFT: several rows in one sequence of max_seq_length tokens, none of which sees another."""
    train_on_input: bool | None = None
    """SFT: the loss covers every token, not only the assistant's."""
    train_split_percentage: float | None = Field(None, gt=0, le=1)
    """Share of the rows to train on; the others, at least one, chosen by the seed, are for validation."""


class OptimizerConfig(_Body):
    optimizer_type: str | None = None
    """adamw (default), adamw_8bit, adam or sgd."""
    lr: float | None = Field(None, gt=0)
    """Peak learning rate."""
    weight_decay: float | None = Field(None, ge=0)
    """adamw and adamw_8bit: decoupled; adam and sgd: L2. Default 0."""
    num_warmup_steps: int | None = Field(None, ge=0, le=10**9)
    """Optimizer steps of linear warmup. Default 0."""
    warmup_ratio: float | None = Field(None, ge=0, lt=1)
    """Linear warmup as a share of all optimizer steps, in place of num_warmup_steps."""


class EfficiencyConfig(_Body):
    enable_activation_checkpointing: bool | None = None
    """Recompute activations in the backward pass: less memory, about 20 % slower."""
    enable_activation_offloading: bool | None = None
    """Activations wait for the backward pass in CPU memory. Only on cuda; elsewhere refused when true."""
    memory_efficient_fsdp_wrap: bool | None = None
    """Embeddings as FSDP2 units of their own, which the service always does. Inline: refused when true."""
    fsdp_cpu_offload: bool | None = None
    """Parts of the model rest in CPU memory while they are not used. Inline: refused when true."""


class TrainingConfig(_Body):
    n_epochs: int = Field(**COUNT)
    """Passes over the dataset."""
    max_steps_per_epoch: int | None = Field(None, **COUNT)
    """Optimizer steps after which an epoch ends early; only when you set it."""
    gradient_accumulation_steps: int | None = Field(None, **COUNT)
    """Micro steps per optimizer step. Default 1."""
    max_validation_steps: int | None = Field(None, **COUNT)
    """Batches per evaluation; only when you set it."""
    data_config: DataConfig | None = None
    """Required: the data to train on."""
    optimizer_config: OptimizerConfig | None = None
    """Optimizer, learning rate, weight decay, warmup; every part has a default."""
    efficiency_config: EfficiencyConfig | None = None
    """Memory savers."""
    dtype: str | None = None
    """bf16, fp32 or, on cuda, fp16. Default: bf16 on cuda, else fp32."""
    learning_rate: float | None = Field(None, gt=0)
    """The same as optimizer_config.lr; both with different values are refused."""


class LoraFinetuningConfig(_Body):
    type: str = "LoRA"
    """LoRA."""
    lora_attn_modules: list[str] = Field(default_factory=lambda: ["q_proj", "v_proj"])
    """Attention modules to adapt, in Llama Stack's or Hugging Face's names."""
    apply_lora_to_mlp: bool | None = None
    """Adapt every linear layer of the MLP blocks too."""
    apply_lora_to_output: bool | None = None
    """Refused when true."""
    rank: int = Field(8, **COUNT)
    """Rank of the adapters."""
    alpha: int = Field(16, **COUNT)
    """Scale: the adapter's output is multiplied by alpha / rank."""
    use_dora: bool | None = None
    """Weight-decomposed adapters (DoRA)."""
    quantize_base: bool | None = None
    """Hold the frozen base in 4 bits (QLoRA)."""


class QATFinetuningConfig(_Body):
    type: str = "QAT"
    """QAT: every weight is trained for being rounded to few bits."""
    quantizer_name: str | None = None
    """Int8DynActInt4WeightQATQuantizer or Int4WeightOnlyQATQuantizer."""
    group_size: int | None = Field(None, gt=1, le=10**6)
    """Weights that share a scale; must divide the input width of every linear layer."""


class DPOAlignmentConfig(_Body):
    type: str | None = None
    """dpo, or left out; the name of another method, which has the fields of its own model."""
    beta: float | None = Field(None, gt=0)
    """How strongly the reference holds the model back. Default 0.1."""
    loss_type: str | None = None
    """sigmoid (default), hinge, ipo or kto_pair."""
    reward_scale: float | None = Field(None, ge=0)
    """Factor on the margin. 0.0 together with a reward_clip of 0.0: not set."""
    reward_clip: float | None = Field(None, ge=0)
    """Largest absolute margin that the loss sees."""
    epsilon: float | None = None
    """No meaning in DPO: a warning of the job reports it."""
    gamma: float | None = None
    """No meaning in DPO: a warning of the job reports it."""


class ORPOConfig(_Body):
    type: str
    """orpo."""
    beta: float | None = Field(None, gt=0)
    """Weight of the odds ratio. Default 0.1."""


class CPOConfig(_Body):
    type: str
    """cpo."""
    beta: float | None = Field(None, gt=0)
    """Factor on the margin. Default 0.1."""
    loss_type: str | None = None
    """sigmoid (default), hinge or ipo."""
    alpha: float | None = Field(None, ge=0)
    """Weight of the chosen answers' own loss. Default 1."""


class SimPOConfig(_Body):
    type: str
    """simpo."""
    beta: float | None = Field(None, gt=0)
    """Factor on the margin. Default 2.0."""
    gamma: float | None = Field(None, ge=0)
    """The margin that is aimed at. Default 0.5."""
    alpha: float | None = Field(None, ge=0)
    """Weight of the chosen answers' own loss. Default 0."""


class RewardConfig(_Body):
    type: str
    """reward."""
    center_rewards_coefficient: float | None = Field(None, ge=0)
    """Weight of the squared sum of both rewards of a pair. Default 0."""
    margin: bool | None = None
    """Each pair has a margin: the row's `margin`, or the difference of its answers' scores. Default false."""


class KTOConfig(_Body):
    type: str
    """kto."""
    beta: float | None = Field(None, gt=0)
    """How strongly the reference holds the model back. Default 0.1."""
    loss_type: str | None = None
    """kto (default) or apo_zero_unpaired."""
    desirable_weight: float | None = Field(None, ge=0)
    """Weight of the losses of rows with label true. Default 1."""
    undesirable_weight: float | None = Field(None, ge=0)
    """Weight of the losses of rows with label false. Default 1."""


class GRPOReward(CheckedNames):
    """A part of GRPO's reward."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    check: Annotated[dict[str, Any] | None, CheckedElsewhere()] = None
    """A check as those of evaluations: {type, ...}."""
    function: str | None = None
    """Name of an installed package's function."""
    model: str | None = None
    """The reward model of another job: job:NAME or job:NAME/CHECKPOINT."""
    weight: float | None = Field(None, ge=-1e6, le=1e6)
    """Factor of the reward. Default 1."""


class GRPOConfig(_Body):
    type: str
    """grpo."""
    rewards: Annotated[list[dict[str, Any]] | None, CheckedElsewhere()] = Field(None, max_length=100)
    """What an answer is rewarded for: a list of {check, function or model, weight, ...}. Required."""
    num_generations: int | None = Field(None, ge=2, le=1000)
    """Answers to each prompt. Default 8."""
    max_completion_length: int | None = Field(None, gt=0, le=10**5)
    """Tokens of an answer at most. Default 256."""
    temperature: float | None = Field(None, gt=0, le=100)
    """Divides the logits before a token is chosen. Default 1."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Each token is chosen among the most likely ones that reach this. Default 1."""
    beta: float | None = Field(None, ge=0)
    """Weight of the KL divergence from the model as it begins. Default 0."""
    loss_type: str | None = None
    """grpo or dapo (default)."""
    scale_rewards: str | None = None
    """group (default), batch or none."""
    use_vllm: bool | None = None
    """Have vLLM compute the answers, where the operator has set `vllm_python`. Default false: transformers."""
    vllm_gpu_memory_utilization: float | None = Field(None, gt=0, lt=1)
    """Share of a GPU's memory that vLLM takes while it answers. Default 0.3, and 0.9 with vllm_mode server."""
    vllm_sync: str | None = None
    """What vLLM gets in each optimizer step: adapter, or weights (all, merged). Default adapter where it can add it."""
    vllm_mode: str | None = None
    """Where vLLM runs: colocate, on the devices that train, or server, on devices of its own. Default colocate."""
    vllm_tensor_parallel_size: int | None = Field(None, ge=1)
    """Devices of one vLLM, which divide its weights. With colocate it divides the ranks. Default 1."""
    vllm_importance_sampling_correction: bool | None = None
    """Correct the loss for the difference between vLLM's log-probabilities and those of training. Default true."""
    vllm_importance_sampling_mode: str | None = None
    """token_truncate, token_mask, sequence_truncate or sequence_mask (default)."""
    vllm_importance_sampling_clip_max: float | None = Field(None, gt=0, le=1e6)
    """The largest ratio of both. Default 3."""
    vllm_importance_sampling_clip_min: float | None = Field(None, ge=0, le=1e6)
    """The smallest ratio. Default: none."""


class DistillationConfig(_Body):
    type: str
    """distillation."""
    teacher: str | None = Field(None, max_length=4096)
    """The model whose distribution is learned: a local directory, a model id, or job:NAME. Required."""
    max_completion_length: int | None = Field(None, gt=0, le=10**5)
    """Tokens of an answer at most. Default 256."""
    temperature: float | None = Field(None, gt=0, le=100)
    """Divides the logits, where tokens are chosen and where both models are compared. Default 1."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Each token is chosen among the most likely ones that reach this. Default 1."""
    beta: float | None = Field(None, ge=0, le=1)
    """The divergence: 1 (default), the reverse KL; 0, the forward one; between, Jensen-Shannon."""
    lmbda: float | None = None
    """Share of prompts that the model answers itself: 1 only."""
    use_uld_loss: bool | None = None
    """Compare spans of text: for a teacher with another vocabulary. Default false: the same vocabulary."""
    uld_token_merge_strategy: str | None = None
    """How the tokens of a span are merged: bayesian only."""
    uld_use_hybrid_loss: bool | None = None
    """Compare tokens of both vocabularies as they are, and only the others by their rank. Default false."""
    uld_hybrid_matched_weight: float | None = Field(None, ge=0, le=1e6)
    """Weight of the tokens of both vocabularies. Default: their share of the teacher's vocabulary."""
    uld_hybrid_unmatched_weight: float | None = Field(None, ge=0, le=1e6)
    """Weight of the other tokens. Default: the rest. Both weights or none."""
    uld_crossentropy_weight: float | None = None
    """Weight of the answers' cross entropy: 0 only."""
    uld_distillation_weight: float | None = Field(None, gt=0, le=1e6)
    """Multiplies the loss. Default 1."""
    uld_student_temperature: float | None = Field(None, gt=0, le=100)
    """Divides the model's logits where they are compared. Default 1."""
    uld_teacher_temperature: float | None = Field(None, gt=0, le=100)
    """Divides the teacher's logits where they are compared. Default 1."""
    uld_skip_student_eos: bool | None = None
    """Leave the ends of answers out of the loss. Default true."""
    uld_skip_teacher_eos: bool | None = None
    """The same: each sets both."""


class _JobRequest(_Body):
    job_uuid: str
    """Name of the job: letters, digits, `.`, `_`, `-`, at most 128."""
    training_config: TrainingConfig
    """How to train."""
    hyperparam_search_config: dict[str, Any] | None = None
    """A search over other fields: {method, parameters, trials, seed, parallel, objective, ...}. {}: none."""
    logger_config: dict[str, Any] | None = None
    """Tracker -> true, false or {project, run}. Default: the configuration's trackers."""
    model: str | None = None
    """Base model: a local directory or a model id. Required for SFT."""
    checkpoint_dir: str | None = None
    """Where checkpoints go: relative to the data directory, or absolute inside an allowed root."""

    def digest(self, options: BaseModel) -> str:
        """See `request_digest`."""
        return request_digest(type(self), self.model_dump(mode="json", exclude_unset=True), options)


class SupervisedFineTuneRequest(_JobRequest):
    algorithm_config: Annotated[dict[str, Any] | None, CheckedElsewhere()] = None
    """LoRA settings; left out: every weight is trained."""


class PreferenceOptimizeRequest(_JobRequest):
    algorithm_config: Annotated[dict[str, Any] | None, CheckedElsewhere()] = None
    """DPO settings, or those of the method that its `type` names."""
    finetuned_model: str | None = None
    """Name of the result; where `model` is left out, the base model (Llama Stack's own meaning)."""


def request_digest(kind: type[BaseModel], given: Mapping[str, Any], options: BaseModel) -> str:
    """sha256 of what a caller set: two requests with the same digest ask for the same job.

    It is stored with jobs: releases must agree on it. Values that the caller did not set are left out, so that a new
    field or another default does not make another request of an old one.

    Args:
        options: the provider options; those that the caller did not set are left out here.
    """
    parts = {"call": kind.__name__, "body": given, "options": options.model_dump(mode="json", exclude_unset=True)}
    return json_digest(parts)


def algorithm_of(given: Mapping[str, Any]) -> Call:
    """The call that a body is meant for where the caller names none: only preference methods have a `finetuned_model`,
    an `algorithm_config` of another type than LoRA and QAT, or the provider option `method`."""
    config, options = given.get("algorithm_config") or {}, given.get("provider_options") or {}
    kind = config.get("type") or "dpo" if isinstance(config, Mapping) and config else None
    # Any other type may be a method of a package that is installed where the request is checked.
    is_preference = kind is not None and str(kind).lower() not in SFT_TYPES
    has_method = isinstance(options, Mapping) and options.get("method") is not None
    return "dpo" if "finetuned_model" in given or has_method or is_preference else "sft"
