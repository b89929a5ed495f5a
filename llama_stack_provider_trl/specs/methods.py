"""The training methods: the call that requests each, the rows that it reads, its parameters, its metrics.

A new method is an entry of `METHODS` with a spec of its parameters here, a request model in `requests.preference`, and
a trainer in `recipes.trainer.methods`. Installed packages add methods without one (`specs.custom`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue

from .bases import Frozen
from .model_source import ModelSource, ReferenceSpec
from .rewards import RewardModel, RewardSource, grading_models_of, reward_models_of
from .work import FurtherModel

OTHER_VOCABULARY = "name a teacher with the same tokenizer, or set algorithm_config.use_uld_loss: it compares others"
"""What to do about a teacher with another vocabulary."""
Algorithm = Literal[
    "sft", "dpo", "orpo", "cpo", "simpo", "reward", "kto", "grpo", "distillation", "custom_pairs", "custom_rows"
]
"""The last two: methods of installed packages, by the rows that they read."""
RowUse = Literal[Algorithm, "prompts"]
"""What rows are read for: training by an algorithm, or prompts to answer."""
Call = Literal["sft", "dpo"]
"""The two calls of Llama Stack: supervised-fine-tune, and preference-optimize for every other method."""
DpoLoss = Literal["sigmoid", "hinge", "ipo", "kto_pair"]
CpoLoss = Literal["sigmoid", "hinge", "ipo", "simpo"]
KtoLoss = Literal["kto", "apo_zero_unpaired"]
GrpoLoss = Literal["grpo", "dapo"]
VllmCorrection = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
VllmSync = Literal["adapter", "weights"]
VllmMode = Literal["colocate", "server"]
RewardScale = Literal["group", "batch", "none"]


class MethodParameters(Frozen):
    """What the engine asks of the parameters of every method. A method overrides what differs."""

    @property
    def compared_with(self) -> ReferenceSpec | None:
        """The reference, or the teacher; None: it has none."""
        reference: ReferenceSpec | None = getattr(self, "reference", None)
        return reference

    @property
    def has_teacher(self) -> bool:
        """Whether `compared_with` is a teacher, which it learns from."""
        return False

    @property
    def teacher_source(self) -> ModelSource | None:
        """Where the teacher is read from; None: it has none."""
        return self.compared_with.source if self.has_teacher and self.compared_with is not None else None

    @property
    def answer_tokens(self) -> int | None:
        """Tokens of an answer at most, of a method that trains on the model's own answers; None: of another method."""
        return None

    @property
    def answers_per_prompt(self) -> int:
        """Answers to each prompt, of a method that trains on the model's own answers."""
        return 1

    @property
    def temperature_of_scores(self) -> float:
        """Divides the logits where answers are scored: GRPO scores the distribution that they were chosen from."""
        return 1.0

    @property
    def kl_weight(self) -> float:
        """Weight of the KL divergence from the model as it began; 0: there is none."""
        return 0.0

    @property
    def estimates_kl(self) -> bool:
        """Whether a row is compared with the other rows of its optimizer step."""
        return False

    @property
    def has_batch_means(self) -> bool:
        """Whether the loss has means over the pairs of a batch, so that other batches are another loss."""
        return False

    @property
    def has_margins(self) -> bool:
        """Whether each pair has a margin."""
        return False

    @property
    def answered_by_vllm(self) -> VllmSpec | None:
        """How vLLM computes the answers; None: it does not."""
        return None

    @property
    def other_vocabulary(self) -> UldSpec | None:
        """How a model is compared with a teacher of another vocabulary; None: no such teacher."""
        return None

    @property
    def rewards_of_answers(self) -> tuple[RewardSource, ...]:
        """What an answer is rewarded for."""
        return ()

    @property
    def reward_models(self) -> tuple[RewardModel, ...]:
        """The reward models that reward the answers."""
        return reward_models_of(self.rewards_of_answers)

    @property
    def installed(self) -> CustomSpec | None:
        """The method of an installed package that it is; None: it is one of the engine."""
        return None

    @property
    def grading_models(self) -> tuple[FurtherModel, ...]:
        """The models that graders ask about the answers, each once."""
        return ()

    def with_reference(self, **changes: object) -> Self:
        """The same with another reference or teacher; the same where it has none."""
        if self.compared_with is None:
            return self
        return self.model_copy(update={"reference": self.compared_with.model_copy(update=changes)})

    def without_interpreter(self) -> Self:
        """The same without the path of the interpreter that has vLLM."""
        if self.answered_by_vllm is None:
            return self
        return self.model_copy(update={"vllm": self.answered_by_vllm.model_copy(update={"python": None})})


class SftSpec(MethodParameters):
    """Supervised fine-tuning: the loss is the mean negative log-probability of the trained tokens."""

    algorithm: Literal["sft"] = "sft"


class DpoSpec(MethodParameters):
    """Direct Preference Optimization (arXiv:2305.18290); `ipo` is arXiv:2310.12036, `hinge` SLiC (arXiv:2305.10425),
    `kto_pair` KTO on pairs (arXiv:2402.01306).

    The margin is clip(reward_scale * beta * (log-ratio chosen - log-ratio rejected), +-reward_clip); with `kto_pair`
    each completion has one of its own, against the estimated KL divergence of the other half (`recipes.trainer.dpo`).
    """

    algorithm: Literal["dpo"] = "dpo"
    beta: float = Field(0.1, gt=0)
    loss_type: DpoLoss = "sigmoid"
    reward_scale: float = Field(1.0, gt=0)
    reward_clip: float | None = Field(None, gt=0)
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """`sigmoid`: the probability with which a preference is taken to be the wrong way round."""
    reference: ReferenceSpec = ReferenceSpec()

    @property
    def has_batch_means(self) -> bool:
        return self.loss_type == "kto_pair"


class OrpoSpec(MethodParameters):
    """Odds ratio preference optimization (arXiv:2403.07691): no reference model. The loss is the mean negative
    log-probability of the tokens of prompt and chosen answer, minus beta * log sigmoid(log odds ratio), where the odds
    are of an answer's mean log-probability per token."""

    algorithm: Literal["orpo"] = "orpo"
    beta: float = Field(0.1, gt=0)
    """Weight of the odds ratio; lambda in the paper."""


class CpoSpec(MethodParameters):
    """Contrastive preference optimization (arXiv:2401.08417), and SimPO (arXiv:2405.14734): no reference model. The
    loss is that of the margin beta * (log-probability of the chosen answer - that of the rejected one), plus alpha
    times the mean negative log-probability of the chosen answers' tokens. `ipo` and `simpo` take the mean
    log-probability of an answer's tokens."""

    algorithm: Literal["cpo", "simpo"] = "cpo"
    beta: float = Field(0.1, gt=0)
    loss_type: CpoLoss = "sigmoid"
    alpha: float = Field(1.0, ge=0)
    gamma: float = Field(0.0, ge=0)
    """`simpo`: the margin that is aimed at."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """`sigmoid` and `simpo`: the probability with which a preference is taken to be the wrong way round."""


class RewardSpec(MethodParameters):
    """A reward model on pairs (Bradley-Terry): -log sigmoid(reward of the chosen answer - that of the rejected one). A
    head with one number takes the place of the vocabulary's; the reward is that of an answer's last token."""

    algorithm: Literal["reward"] = "reward"
    center_rewards_coefficient: float = Field(0.0, ge=0)
    """Weight of the squared sum of both rewards (arXiv:2312.09244), which keeps their mean near 0."""
    margin: bool = False
    """The chosen answer's reward is to be higher by the margin of its pair (arXiv:2307.09288): -log sigmoid(chosen -
    rejected - margin)."""

    @property
    def has_margins(self) -> bool:
        return self.margin


class VllmSpec(Frozen):
    """How vLLM answers the prompts of a job that trains, with the names of TRL's GRPOConfig. Its log-probabilities of
    the tokens that it chose differ from those of training; a ratio of both corrects the loss of each token."""

    python: Path | None = None
    """The interpreter that has it; None: it is not known yet."""
    mode: VllmMode = "colocate"
    """colocate: on the devices that train, and as many vLLMs as there are devices for. server: one on devices of its
    own, which answers for all ranks."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Devices of one vLLM, which divide its weights."""
    gpu_memory_utilization: float = Field(0.3, gt=0, lt=1)
    """Share of a GPU's memory that it takes while it answers, its weights included."""
    sync: VllmSync = "weights"
    """What it gets in each optimizer step. adapter: the adapter alone, for the base model that it has loaded. weights:
    every weight, with adapters merged."""
    importance_sampling_correction: bool = True
    importance_sampling_mode: VllmCorrection = "sequence_mask"
    """token: the ratio of each token; sequence: the product of those of an answer. truncate: it is limited to the
    bounds; mask: beyond them it is 0."""
    importance_sampling_clip_max: float = Field(3.0, gt=0)
    importance_sampling_clip_min: float | None = Field(None, ge=0)
    """None: no lower bound."""

    @property
    def own_devices(self) -> int:
        """Devices that no rank trains on."""
        return self.tensor_parallel_size if self.mode == "server" else 0

    def ranks_of_one(self, ranks: int) -> int:
        """How many of a job's ranks a vLLM answers for."""
        return ranks if self.mode == "server" else self.tensor_parallel_size


class GrpoSpec(MethodParameters):
    """Group relative policy optimization (arXiv:2402.03300): the model answers each prompt several times, and an
    answer's advantage is its reward compared with those of its group. Each answer is trained on once, with the weights
    that gave it: the ratio of both policies is 1, and nothing is clipped."""

    algorithm: Literal["grpo"] = "grpo"
    rewards: tuple[RewardSource, ...] = Field(min_length=1)
    """An answer's reward is their weighted sum."""
    num_generations: int = Field(8, gt=1)
    """Answers to each prompt."""
    max_completion_length: int = Field(256, gt=0)
    """Tokens of an answer at most."""
    temperature: float = Field(1.0, gt=0)
    """Divides the logits before a token is chosen, and where answers are scored."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Each token is chosen among the most likely ones whose probabilities together reach this."""
    beta: float = Field(0.0, ge=0)
    """Weight of the KL divergence from the model as it began; 0: no reference is loaded."""
    loss_type: GrpoLoss = "dapo"
    """How the tokens' losses are averaged. grpo: over the tokens of an answer, then the answers. dapo: over all of the
    whole optimizer step (arXiv:2503.14476)."""
    scale_rewards: RewardScale = "group"
    """Standard deviation of the rewards that divides an advantage: of the prompt's answers, of all of the optimizer
    step, or none."""
    vllm: VllmSpec | None = None
    """vLLM computes the answers; None: transformers in the process that trains."""

    @property
    def answer_tokens(self) -> int:
        return self.max_completion_length

    @property
    def answers_per_prompt(self) -> int:
        return self.num_generations

    @property
    def temperature_of_scores(self) -> float:
        return self.temperature

    @property
    def kl_weight(self) -> float:
        return self.beta

    @property
    def answered_by_vllm(self) -> VllmSpec | None:
        return self.vllm

    @property
    def rewards_of_answers(self) -> tuple[RewardSource, ...]:
        return self.rewards

    @property
    def grading_models(self) -> tuple[FurtherModel, ...]:
        return grading_models_of(self.rewards)


class UldSpec(Frozen):
    """How a model is compared with a teacher of another vocabulary: universal logit distillation (arXiv:2402.12030) of
    spans of text, with the names of TRL's GOLDConfig. A span ends where a token of each ends at the same byte; its
    distributions are those of its last tokens, times the probabilities of its earlier ones. The loss of an answer is
    the mean over its spans, that of an optimizer step the mean over its answers."""

    student_temperature: float = Field(1.0, gt=0)
    """Divides the model's logits where they are compared."""
    teacher_temperature: float = Field(1.0, gt=0)
    distillation_weight: float = Field(1.0, gt=0)
    """Multiplies the loss."""
    hybrid: bool = False
    """Tokens of both vocabularies are compared as they are, and only the others by their rank."""
    matched_weight: float | None = Field(None, ge=0)
    """Of the tokens of both vocabularies; None: their share of the teacher's vocabulary, and the rest for the others.
    """
    unmatched_weight: float | None = Field(None, ge=0)
    skip_end: bool = True
    """The ends of answers are not compared."""


class DistillationSpec(MethodParameters):
    """On-policy distillation (arXiv:2306.13649): the model answers each prompt, and learns a teacher's distribution of
    each token of its own answer. The loss is the mean over the tokens of the whole optimizer step."""

    has_teacher: ClassVar[bool] = True
    algorithm: Literal["distillation"] = "distillation"
    reference: ReferenceSpec
    """The teacher, whose `source` is never None: it may be the base model itself."""
    max_completion_length: int = Field(256, gt=0)
    """Tokens of an answer at most."""
    temperature: float = Field(1.0, gt=0)
    """Divides the logits before a token is chosen, and those of both models where they are compared."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Each token is chosen among the most likely ones whose probabilities together reach this."""
    beta: float = Field(1.0, ge=0, le=1)
    """The divergence. 1: KL(model || teacher), the reverse one. 0: KL(teacher || model). Between: the generalized
    Jensen-Shannon divergence, with the mixture beta * teacher + (1 - beta) * model."""
    uld: UldSpec | None = None
    """Of a teacher with another vocabulary; `beta` is then that of `hybrid`. None: both have the same."""

    @property
    def teacher(self) -> ModelSource:
        """Where the teacher is read from."""
        assert self.reference.source is not None
        return self.reference.source

    @property
    def answer_tokens(self) -> int:
        return self.max_completion_length

    @property
    def other_vocabulary(self) -> UldSpec | None:
        return self.uld


class KtoSpec(MethodParameters):
    """KTO on unpaired rows (arXiv:2402.01306): an answer is desirable or not. The loss of a row is its weight times
    1 - sigmoid(beta * (log-ratio - KL)), of an undesirable one 1 - sigmoid(beta * (KL - log-ratio)), where KL is the
    mean log-ratio, at least 0, of the step's prompts with answers of other rows. `apo_zero_unpaired`
    (arXiv:2408.06266) has no KL."""

    algorithm: Literal["kto"] = "kto"
    beta: float = Field(0.1, gt=0)
    loss_type: KtoLoss = "kto"
    desirable_weight: float = Field(1.0, ge=0)
    undesirable_weight: float = Field(1.0, ge=0)
    reference: ReferenceSpec = ReferenceSpec()

    @property
    def estimates_kl(self) -> bool:
        return self.loss_type == "kto"


class CustomSpec(MethodParameters):
    """A method of an installed package. It has all that processes need to know which lack that package."""

    algorithm: Literal["custom_pairs", "custom_rows"]
    """By the rows that it reads."""
    type: str
    """Name of its entry point, which the request has in `algorithm_config.type`."""
    package: str
    """Distribution that has it, where the request was checked."""
    version: str
    """Of that distribution."""
    parameters: dict[str, JsonValue] = Field(default={})
    """Its fields, as its own model has read them, defaults included."""

    @property
    def installed(self) -> CustomSpec:
        return self


MethodSpec = Annotated[
    SftSpec | DpoSpec | OrpoSpec | CpoSpec | RewardSpec | KtoSpec | GrpoSpec | DistillationSpec | CustomSpec,
    Field(discriminator="algorithm"),
]
"""The parameters of a method."""


@dataclass(frozen=True)
class Method:
    """What the parts of the engine need to know of a method."""

    title: str
    """Its name in messages."""
    call: Call
    rows: Literal["sft", "dpo", "kto", "prompts"]
    """The method whose rows it reads: conversations or texts, preference pairs, or labelled answers; or prompts."""
    learning_rates: tuple[float, float]
    """Defaults: every weight, and adapters."""
    metrics: tuple[str, ...]
    """Of the evaluations, that `best_checkpoint` and `early_stopping` accept."""
    padded_because: str = ""
    """Why its batches have padding; empty: that depends on the model."""
    trains_reward: bool = False
    """Its result is a reward model, which writes no text."""
    has_reference: bool = False
    """It compares the model with a reference."""
    reads_images: bool = False
    """Its rows may have images."""
    averages: bool = False
    """Its loss has no means over all ranks, so that workers may train apart and average their weights."""

    @property
    def has_pairs(self) -> bool:
        return self.rows == "dpo"

    @property
    def lora_field(self) -> str:
        """The field of a request that has the settings of adapters."""
        return "algorithm_config" if self.call == "sft" else "provider_options.lora"

    @property
    def unit(self) -> str:
        """What one of its rows is called in messages."""
        return "pair" if self.has_pairs else "prompt" if self.rows == "prompts" else "row"


_PAIR_METRICS = ("eval_loss", "eval_rewards/accuracies", "eval_rewards/margins")
# TRL's defaults for full fine-tuning; adapters start from zero and take ten times as much (TRL's documentation).
_PREFERENCE_RATES = (1e-6, 1e-5)
_ANSWERS = "it trains on answers that differ in each step"
METHODS: dict[Algorithm, Method] = {
    "sft": Method(
        "SFT", "sft", "sft", (2e-5, 2e-4), ("eval_loss", "eval_mean_token_accuracy"), reads_images=True, averages=True
    ),
    "dpo": Method(
        "DPO", "dpo", "dpo", _PREFERENCE_RATES, _PAIR_METRICS, has_reference=True, reads_images=True, averages=True
    ),
    "orpo": Method("ORPO", "dpo", "dpo", _PREFERENCE_RATES, _PAIR_METRICS, "ORPO's loss covers prompts too"),
    "cpo": Method("CPO", "dpo", "dpo", _PREFERENCE_RATES, _PAIR_METRICS, reads_images=True),
    "simpo": Method("SimPO", "dpo", "dpo", _PREFERENCE_RATES, _PAIR_METRICS, reads_images=True),
    "reward": Method(
        "a reward model", "dpo", "dpo", (1e-4, 1e-3), _PAIR_METRICS, "a reward is read at the end of a row", True
    ),
    "kto": Method("KTO", "dpo", "kto", _PREFERENCE_RATES, ("eval_loss", "eval_rewards/margins"), has_reference=True),
    "custom_pairs": Method("a custom method on pairs", "dpo", "dpo", _PREFERENCE_RATES, _PAIR_METRICS),
    "custom_rows": Method(
        "a custom method on conversations", "dpo", "sft", (2e-5, 2e-4), ("eval_loss", "eval_mean_token_accuracy")
    ),
    "grpo": Method("GRPO", "dpo", "prompts", _PREFERENCE_RATES, ()),
    "distillation": Method("distillation", "dpo", "prompts", _PREFERENCE_RATES, (), _ANSWERS),
}
