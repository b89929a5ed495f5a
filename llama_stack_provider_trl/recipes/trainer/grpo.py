"""Group relative policy optimization (arXiv:2402.03300): the model answers prompts, and its rewarded answers train it.

TRL's GRPOTrainer keeps batches in a buffer of its own and repeats rows by a sampler of its own, neither of which a
checkpoint holds. Here an optimizer step answers the prompts of its rows, and the random numbers of an answer follow
from the seed, the step, the row and the number of the answer: a resumed job trains on the same answers, and so do any
number of ranks. The losses are TRL's, on given answers (tests/process/test_grpo.py).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import is_peft_model
from peft import PeftConfig
from torch.nn.utils.rnn import pad_sequence
from trl import DPOTrainer

from ... import faults
from ...specs.answer_rows import CheckedRow, read_checked_rows
from ...specs.events import Warned
from ...specs.job import JobSpec
from ...specs.methods import GrpoSpec
from ...specs.rewards import checks_of
from ..distributed import ranks
from ..model.fsdp import is_sharded, reshard
from ..model.generation import Sampler, answer_ends, answer_ids
from .pairs import PaddedPairs, set_adapter_dropout
from .reference import NoReference, is_needed, load_reference
from .rewards import Rewards, Scores
from .samples import undisturbed
from .scoring import ScoresReference
from .trl_patches import PreparedDatasets, fuse_head

_EPSILON = 1e-4
"""Added to a standard deviation of rewards, as TRL does."""


def advantages_of(rewards: torch.Tensor, spec: GrpoSpec) -> torch.Tensor:
    """How much better each answer is than its group, shape (prompts, num_generations).

    Args:
        rewards: of the answers of an optimizer step, same shape.
    """
    differences = rewards - rewards.mean(dim=1, keepdim=True)
    if spec.scale_rewards == "none":
        return differences
    deviation = rewards.std(dim=1, keepdim=True) if spec.scale_rewards == "group" else rewards.std()
    return differences / (deviation + _EPSILON)


def kl_divergence(log_probs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """An estimate per token, at least 0 (http://joschu.net/blog/kl-approx.html, k3)."""
    difference = reference - log_probs
    return torch.exp(difference) - difference - 1


def collate_prompts(prompts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Prompts as they are, without fillers: they are answered before they become tensors."""
    real = [prompt for prompt in prompts if prompt["row"]]
    return {"prompts": [list(prompt["prompt_ids"]) for prompt in real], "rows": [prompt["row"][0] for prompt in real]}


class Group(NamedTuple):
    """What the ranks exchange of the answers to a prompt."""

    row: int
    rewards: list[list[float]]
    """Of each answer, of each source."""
    tokens: int
    unended: int
    """Answers without a token that ends them."""
    timed_out: list[int]
    """Answers of which a check could not be decided in time, of each source."""


class GrpoRecipe(PreparedDatasets, ScoresReference, DPOTrainer):
    """Trains on answers to prompts, which ranks divide. Datasets have the columns prompt_ids and row."""

    head_outputs = ()  # its head has a temperature

    def __init__(self, *, spec: JobSpec, peft_config: PeftConfig | None = None, **arguments: Any) -> None:
        if not isinstance(spec.method, GrpoSpec):
            raise AssertionError("a GRPO job without a GrpoSpec")
        self._grpo = spec.method
        self._rewards = Rewards(spec.method)
        self._rows = _Rows(spec.dataset.path, spec.method)
        self._batches = PaddedPairs(spec)
        super().__init__(
            spec=spec,
            ref_model=None if peft_config else NoReference(),
            peft_config=peft_config,
            data_collator=collate_prompts,
            **arguments,
        )
        policy = self.model.get_base_model() if is_peft_model(self.model) else self.model
        fuse_head(policy, outputs=("log_probs",), temperature=spec.method.temperature)
        self.ref_model = load_reference(spec, self.args.device, self.accelerator) if is_needed(spec) else None
        self._rewards.load_models(spec.dtype, self.args.device)
        if spec.lora:
            set_adapter_dropout(self.model, spec.lora.dropout)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Trainer's, which sees all batches of an optimizer step before the first of them is computed: they are
        answered here, by the weights that the step changes. A collective."""
        self.model.train()  # as in the step itself: metrics of the first one would count as an evaluation's
        answers = [self.answer(inputs["prompts"], inputs["rows"]) for inputs in batch_samples]
        faults.reach(f"answered-{self.state.global_step + 1}")
        own = [
            group
            for inputs, ids in zip(batch_samples, answers, strict=True)
            for group in self._groups(inputs["rows"], ids)
        ]
        groups = sorted(chain.from_iterable(ranks.gather_all(own)))  # by row: no number depends on the ranks
        rewards = torch.tensor([group.rewards for group in groups], dtype=torch.float32)
        weighted = rewards @ self._rewards.weights
        self._note_rewards(groups, rewards, weighted)
        advantages = dict(zip((group.row for group in groups), advantages_of(weighted, self._grpo), strict=True))
        for inputs, ids in zip(batch_samples, answers, strict=True):
            prompts = [prompt for prompt in inputs["prompts"] for _ in range(self._grpo.num_generations)]
            of_rows = [advantages[row] for row in inputs["rows"]]
            inputs.clear()
            inputs.update(self._collated(prompts, ids), advantages=torch.cat(of_rows or [torch.zeros(1)]))
        self._tokens_of_step = sum(group.tokens for group in groups)
        self._micro_steps = len(batch_samples)
        return None

    def answer(self, prompts: list[list[int]], rows: list[int]) -> list[list[int]]:
        """Token ids of `num_generations` answers to each prompt, by the weights as they are. A collective where ranks
        shard the model: those without prompts compute with the others. FSDP2 gathers weights in `generate`, with which
        Trainer registers it."""
        sharded = is_sharded(self.spec)
        if not prompts and not sharded:
            return []
        model, count = self.accelerator.unwrap_model(self.model), self._grpo.num_generations
        seeds = [f"{self.spec.seed}/{self.state.global_step}/{row}/{number}" for row in rows for number in range(count)]
        given = [prompt for prompt in prompts for _ in range(count)]
        with undisturbed(model, self.args.device), self._precision(), self._alive_at_each_forward(model):
            found = answer_ids(
                model,
                given or [self._filler],
                Sampler(self._grpo, [random.Random(seed) for seed in seeds or [""]], lambda: None),
                most=self._grpo.max_completion_length,
                ends=self._ends(),
                pad=self.processing_class.pad_token_id,
                device=self.args.device,
                synced=sharded,
            )
            if sharded:
                reshard(model)
        return found if given else []

    @contextmanager
    def _alive_at_each_forward(self, model: Any) -> Iterator[None]:
        """While this is open, a forward counts as progress. A rank whose answers have ended chooses no more tokens."""
        plain = model.get_base_model() if is_peft_model(model) else model
        hook = plain.register_forward_pre_hook(lambda *_: self._writer.heartbeat())
        try:
            yield
        finally:
            hook.remove()

    @property
    def _filler(self) -> list[int]:
        """What a rank without prompts computes with."""
        return [self.processing_class.pad_token_id] * 2

    def _ends(self) -> list[int]:
        return answer_ends(self.accelerator.unwrap_model(self.model), self.processing_class)

    def _groups(self, rows: list[int], answers: list[list[int]]) -> list[Group]:
        """The prompts of a micro batch, with the rewards of their answers."""
        count, ends = self._grpo.num_generations, self._ends()
        scores = self._score(rows, answers) if rows else Scores([], [])
        groups = []
        for number, row in enumerate(rows):
            of_row = slice(number * count, (number + 1) * count)
            tokens = sum(map(len, answers[of_row]))
            unended = sum(ids[-1] not in ends for ids in answers[of_row])
            timed_out = [sum(of_source) for of_source in zip(*scores.timed_out[of_row], strict=True)]
            groups.append(Group(row, scores.values[of_row], tokens, unended, timed_out))
        return groups

    def _score(self, rows: list[int], answers: list[list[int]]) -> Scores:
        numbers = [row for row in rows for _ in range(self._grpo.num_generations)]
        texts = [self.processing_class.decode(ids, skip_special_tokens=True) for ids in answers]
        checked = [self._rows.checked[number] for number in numbers]
        return self._rewards.score(
            checked, texts, [self._rows.columns(number) for number in numbers], self._writer.heartbeat
        )

    def _collated(self, prompts: list[list[int]], answers: list[list[int]]) -> dict[str, torch.Tensor]:
        """Prompts with their answers, padded behind; `completion_mask` is 1 for the answers' tokens. Of none: one
        filler without an answer."""
        pairs = list(zip(prompts, answers, strict=True)) or [(self._filler, [])]
        pad = self.processing_class.pad_token_id
        ids = [torch.tensor(prompt + answer) for prompt, answer in pairs]
        scored = [torch.tensor([0] * len(prompt) + [1] * len(answer)) for prompt, answer in pairs]
        return {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad),
            "attention_mask": pad_sequence([torch.ones_like(one) for one in ids], batch_first=True),
            "completion_mask": pad_sequence(scored, batch_first=True),
        }

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The policy gradient of a micro batch, divided so that Trainer's mean over micro steps and ranks is the
        step's."""
        router = {"output_router_logits": True} if self.aux_loss_enabled else {}
        outputs = model(**self._batches.forward_arguments(self.model, inputs), **router)
        # After the policy's forward: PEFT switches adapters off by the parameters that a module has at the moment, and
        # on again. Under FSDP2 both have to meet the same ones, whole or sharded.
        reference = self._reference_log_probs(inputs) if self._grpo.beta else None
        log_probs, mask = outputs.log_probs.float(), inputs["completion_mask"][:, 1:]
        # The weights gave these answers: the ratio is 1, and its gradient that of the log-probability.
        ratio = torch.exp(log_probs - log_probs.detach())
        losses = -ratio * inputs["advantages"].to(log_probs)[:, None]
        if reference is not None:
            kl = kl_divergence(log_probs, reference)
            # With the ratio its gradient is that of the reverse KL divergence, without a bias (arXiv:2512.02556).
            losses = losses + self._grpo.beta * kl * ratio
            total, count = self.accelerator.reduce(torch.stack([(kl.detach() * mask).sum(), mask.sum().float()]))
            self.add_metrics({"kl": total}, count)
        loss = self._mean(losses * mask, mask)
        if self.aux_loss_enabled:  # mixture of experts: keeps the router balanced
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss
        is_real = mask.any(dim=1)
        self._total_train_tokens += self.accelerator.reduce((inputs["attention_mask"].sum(dim=1) * is_real).sum())
        return loss

    def _mean(self, losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The mean of the tokens' losses by `loss_type`, as a part of the mean over all micro steps and ranks.

        Args:
            losses: 0 where `mask` is, shape (answers, tokens).
        """
        kind, of_answers = self._grpo.loss_type, self.rows_of_step * self._grpo.num_generations
        parts = self._micro_steps * self.accelerator.num_processes
        if kind == "grpo":
            return (losses.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).sum() * parts / of_answers
        return losses.sum() * parts / max(1, self._tokens_of_step)

    def _reference_log_probs(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Of each token of the answers, by the model as it began; shape (answers, tokens)."""
        with self.as_reference() as model:
            found: torch.Tensor = model(**self._batches.forward_arguments(model, inputs)).log_probs
        return found.float()

    def _note_rewards(self, groups: Sequence[Group], rewards: torch.Tensor, weighted: torch.Tensor) -> None:
        """Add the answers of an optimizer step, of all ranks, to the metrics, under TRL's names.

        Args:
            rewards: shape (prompts, answers, sources).
            weighted: shape (prompts, answers).
        """
        deviations, device = weighted.std(dim=1), self.args.device
        timed_out = [sum(counts) for counts in zip(*(group.timed_out for group in groups), strict=True)]
        for message in self._rewards.warnings(timed_out):
            self._writer.write(Warned(message=message))
        means = {f"rewards/{name}/mean": rewards[..., number].sum() for number, name in enumerate(self._rewards.names)}
        of_answers = {
            "reward": weighted.sum(),
            **means,
            **{
                f"rewards/{name}/timed_out": torch.tensor(float(count))
                for name, count in zip(self._rewards.names, timed_out, strict=True)
                if count
            },
            "completions/mean_length": torch.tensor(float(sum(group.tokens for group in groups))),
            "completions/clipped_ratio": torch.tensor(float(sum(group.unended for group in groups))),
        }
        of_prompts = {"reward_std": deviations.sum(), "frac_reward_zero_std": (deviations < 1e-8).float().sum()}
        for sums, number in ((of_answers, weighted.numel()), (of_prompts, len(weighted))):
            moved = {name: value.to(device) for name, value in sums.items()}
            self.add_metrics(moved, torch.tensor(float(number), device=device))


class _Rows:
    """The rows of a dataset as rewards read them: with all columns, and with what checks compare answers with."""

    def __init__(self, path: Path, method: GrpoSpec) -> None:
        self.checked: list[CheckedRow] = list(read_checked_rows(path, checks_of(method.rewards)))
        with open(path, encoding="utf-8") as file:
            self._lines = file.readlines()

    def columns(self, number: int) -> dict[str, Any]:
        row: dict[str, Any] = json.loads(self._lines[number])
        return row
