"""Group relative policy optimization (arXiv:2402.03300): the model answers prompts, and its rewarded answers train it.

TRL's GRPOTrainer keeps batches in a buffer of its own and repeats rows by a sampler of its own, neither of which a
checkpoint holds. Here an optimizer step answers the prompts of its rows (`recipes.trainer.answering`). The losses are
TRL's, on given answers (tests/process/test_grpo.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from ...specs.answer_rows import RowsOnDemand
from ...specs.event_fields import MAX_REWARDS
from ...specs.events import RolloutAnswer, Warned
from ...specs.grading.grading import Replied
from ...specs.job import JobSpec
from ...specs.methods import GrpoSpec
from ...specs.rewards import checks_of
from ..distributed import ranks
from ..fast.batches import FlatGroups
from .answering import AnswersPrompts
from .importance import Correction
from .reference import is_needed, load_reference
from .rewards import Rewards, Scores
from .rollouts import is_reported, rolled_out
from .trl_patches import fuse_head
from .vllm_policy import VllmPolicy

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


def _behind_prompts(values: Sequence[list[float]], mask: torch.Tensor) -> torch.Tensor:
    """A number for each token of answers, 0 for all other tokens.

    Args:
        mask: 1 for the answers' tokens, shape (answers, tokens).
    """
    of_tokens = torch.zeros(mask.shape)
    of_tokens[mask.bool()] = torch.tensor([value for of_answer in values for value in of_answer])
    return of_tokens


class Group(NamedTuple):
    """What the ranks exchange of the answers to a prompt."""

    row: int
    rewards: list[list[float]]
    """Of each answer, of each source."""
    tokens: int
    unended: int
    """Answers without a token that ends them."""
    timed_out: list[int]
    """Answers of which a check could not be decided, or a grader had not ended, in time, of each source."""
    without_room: list[int]
    """Answers of which a reward model reads no token, of each source."""
    errors: list[list[str]]
    """Why graders gave answers no reward, of each source."""


class GrpoRecipe(AnswersPrompts):
    """Trains on answers to prompts, which ranks divide. Datasets have the columns prompt_ids and row."""

    def __init__(self, *, spec: JobSpec, **arguments: Any) -> None:
        assert isinstance(spec.method, GrpoSpec)
        self._grpo = spec.method
        self._rewards = Rewards(spec.method)
        self._rows = RowsOnDemand(spec.data.dataset.path, checks_of(spec.method.rewards), spec.data.dataset.names)
        super().__init__(spec=spec, sampling=spec.method, **arguments)
        if spec.compute.padding_free:
            self._batches = FlatGroups()
        fuse_head(self.policy, outputs=("log_probs",), temperature=spec.method.temperature)
        self.ref_model = load_reference(self) if is_needed(spec) else None
        self._rewards.load_models(spec, self.args.device)
        self._correction: Correction | None = None
        self._sampling_log_probs: dict[int, list[list[float]]] = {}
        """Of the tokens of the optimizer step's answers, by row, where vLLM chose them."""
        self._vllm: VllmPolicy | None = None
        if spec.method.vllm is not None:
            self._vllm = VllmPolicy(
                spec,
                spec.method.vllm,
                spec.method,
                most=self._most,
                at_once=-(-self.batch_plan.rows_per_step // spec.ranks) * spec.method.num_generations,
                device=self.args.device,
                writer=self._writer,
            )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, with vLLM beside it where that answers."""
        if self._vllm is None:
            return super().train(*args, **kwargs)
        with self._vllm:
            return super().train(*args, **kwargs)

    def answer_batches(self, batches: list[dict[str, Any]]) -> list[list[list[int]]]:
        """As AnswersPrompts. vLLM answers all prompts that this rank has of the optimizer step together: they do not
        depend on the micro batches, which an attempt after a lack of memory has others of."""
        if self._vllm is None:
            return super().answer_batches(batches)
        self._vllm.start(self.accelerator.unwrap_model(self.model))
        count = self._grpo.num_generations
        rows = [row for inputs in batches for row in inputs["rows"]]
        prompts = [prompt for inputs in batches for prompt in inputs["prompts"] for _ in range(count)]
        sampled = self._vllm.answer(prompts, self._seeds(rows), self._ends(), self.alive)
        of_rows = {row: sampled[number * count : (number + 1) * count] for number, row in enumerate(rows)}
        self._sampling_log_probs = {row: [answer.log_probs for answer in answers] for row, answers in of_rows.items()}
        return [[answer.ids for row in inputs["rows"] for answer in of_rows[row]] for inputs in batches]

    def collate_answers(self, batches: list[dict[str, Any]], answers: list[list[list[int]]]) -> int:
        replied = self._ask(batches, answers)
        own = [
            group
            for inputs, ids in zip(batches, answers, strict=True)
            for group in self._groups(inputs["rows"], ids, replied)
        ]
        # By row: from equal answers and rewards follow equal numbers, however the rows are divided among ranks.
        groups = sorted(chain.from_iterable(ranks.gather_all(own)))
        rewards = torch.tensor([group.rewards for group in groups], dtype=torch.float32)
        weighted = rewards @ self._rewards.weights
        self._note_rewards(groups, rewards, weighted)
        vllm = self._grpo.vllm
        self._correction = Correction(vllm) if vllm is not None and vllm.importance_sampling_correction else None
        advantages = dict(zip((group.row for group in groups), advantages_of(weighted, self._grpo), strict=True))
        self._report_rollout(batches, answers, own, advantages)
        for inputs, ids in zip(batches, answers, strict=True):
            prompts = inputs["prompts"]
            of_rows = [advantages[row] for row in inputs["rows"]]
            sampling = [of_answer for row in inputs["rows"] for of_answer in self._sampling_log_probs.get(row, ())]
            inputs.clear()
            inputs.update(self._groups_of(prompts, ids), advantages=torch.cat(of_rows or [torch.zeros(1)]))
            if self._correction is not None:
                inputs["sampling_log_probs"] = _behind_prompts(sampling, inputs["completion_mask"])
        return sum(group.tokens for group in groups)

    def _groups_of(self, prompts: list[list[int]], answers: list[list[int]]) -> dict[str, Any]:
        if isinstance(self._batches, FlatGroups):
            return self._batches.collate(prompts, answers, self._filler)
        return self._collated([prompt for prompt in prompts for _ in range(self._grpo.num_generations)], answers)

    def _ask(
        self, batches: Sequence[dict[str, Any]], answers: Sequence[list[list[int]]]
    ) -> dict[int, list[dict[str, Replied]]]:
        """What the models of graders write of the answers of an optimizer step, by the row of each: about those of
        this rank together, whatever its micro batches are. In bf16 a reply may depend on the questions beside it, and
        so on the number of ranks."""
        rows = [row for inputs in batches for row in inputs["rows"]]
        if not self._rewards.asks_models or not rows:
            return {}
        count = self._grpo.num_generations
        numbers = [row for row in rows for _ in range(count)]
        texts = self._texts([ids for of_batch in answers for ids in of_batch])
        columns = [self._rows.columns(number) for number in numbers]
        found = self._rewards.ask(texts, columns, numbers, self.alive)
        return {row: found[number * count : (number + 1) * count] for number, row in enumerate(rows)}

    def _groups(
        self, rows: list[int], answers: list[list[int]], replied: Mapping[int, list[dict[str, Replied]]]
    ) -> list[Group]:
        count, ends = self._grpo.num_generations, self._ends()
        of_rows = [one for row in rows for one in replied.get(row, ())]
        scores = self._score(rows, answers, of_rows) if rows else Scores([], [], [], [])
        groups = []
        for number, row in enumerate(rows):
            of_row = slice(number * count, (number + 1) * count)
            tokens = sum(map(len, answers[of_row]))
            unended = sum(ids[-1] not in ends for ids in answers[of_row])
            timed_out = [sum(of_source) for of_source in zip(*scores.timed_out[of_row], strict=True)]
            without_room = [sum(of_source) for of_source in zip(*scores.without_room[of_row], strict=True)]
            errors = [[*filter(None, of_source)] for of_source in zip(*scores.errors[of_row], strict=True)]
            groups.append(Group(row, scores.values[of_row], tokens, unended, timed_out, without_room, errors))
        return groups

    def _texts(self, answers: Sequence[list[int]]) -> list[str]:
        return [self.processing_class.decode(ids, skip_special_tokens=True) for ids in answers]

    def _score(self, rows: list[int], answers: list[list[int]], replied: list[dict[str, Replied]]) -> Scores:
        numbers = [row for row in rows for _ in range(self._grpo.num_generations)]
        texts = self._texts(answers)
        known = {number: self._rows.checked(number) for number in rows}
        columns = [self._rows.columns(number) for number in numbers]
        checked = [known[number] for number in numbers]
        return self._rewards.score(checked, texts, columns, numbers, self.alive, replied)

    def _report_rollout(
        self,
        batches: Sequence[dict[str, Any]],
        answers: Sequence[list[list[int]]],
        groups: Sequence[Group],
        advantages: Mapping[int, torch.Tensor],
    ) -> None:
        """Report the answers to the first prompt that this rank has of the optimizer step, at some of the steps.

        Args:
            groups: of this rank, in the order of its prompts.
        """
        step, total = self.state.global_step + 1, self.state.max_steps
        if not groups or not is_reported(step, total):
            return
        group, ends = groups[0], self._ends()
        ids = next(of_batch for inputs, of_batch in zip(batches, answers, strict=True) if inputs["rows"])
        of_group = ids[: self._grpo.num_generations]
        weighted = torch.tensor(group.rewards, dtype=torch.float32) @ self._rewards.weights
        found = [
            RolloutAnswer(
                text=text,
                tokens=len(tokens),
                complete=tokens[-1] in ends,
                reward=float(reward),
                advantage=float(advantage),
                rewards=dict([*zip(self._rewards.names, rewards, strict=True)][:MAX_REWARDS]),
            )
            for text, tokens, reward, advantage, rewards in zip(
                self._texts(of_group), of_group, weighted, advantages[group.row], group.rewards, strict=True
            )
        ]
        messages = self._rows.checked(group.row).messages
        self._writer.write(rolled_out(step, step * self.spec.train.n_epochs / total, group.row, messages, found))

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The policy gradient of a micro batch, divided so that Trainer's mean over micro steps and ranks is the
        step's."""
        with self.scoring():
            outputs = model(**self._batches.forward_arguments(self.model, inputs), **self.router_arguments())
        # After the policy's forward: PEFT switches adapters off by the parameters that a module has at the moment, and
        # on again. Under FSDP2 both have to meet the same ones, whole or sharded.
        reference = self._reference_log_probs(inputs) if self._grpo.beta else None
        log_probs, mask = self._of_tokens(outputs, inputs), self._predicted(inputs["completion_mask"])
        # The weights gave these answers: the ratio is 1, and its gradient that of the log-probability.
        ratio = torch.exp(log_probs - log_probs.detach())
        losses = -ratio * inputs["advantages"].to(log_probs)[:, None]
        if self._correction is not None:
            losses = losses * self._correction.ratios(log_probs, self._predicted(inputs["sampling_log_probs"]), mask)
            if self._correction.micro_batches == self._micro_steps:
                self.add_metrics(self._correction.metrics(), torch.ones((), device=log_probs.device))
        if reference is not None:
            kl = kl_divergence(log_probs, reference)
            # With the ratio its gradient is that of the reverse KL divergence, without a bias (arXiv:2512.02556).
            losses = losses + self._grpo.beta * kl * ratio
            total, count = self.accelerator.reduce(torch.stack([(kl.detach() * mask).sum(), mask.sum().float()]))
            self.add_metrics({"kl": total}, count)
        loss = self._mean(losses * mask, mask)
        self._count_tokens(inputs, mask)
        return self.balanced(loss, outputs)

    def _mean(self, losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The mean of the tokens' losses by `loss_type`, as a part of the mean over all micro steps and ranks.

        Args:
            losses: 0 where `mask` is, shape (answers, tokens).
        """
        kind, of_answers = self._grpo.loss_type, self.rows_of_step * self._grpo.num_generations
        if kind == "grpo":
            return (losses.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).sum() * self._parts / of_answers
        return losses.sum() * self._parts / max(1, self._tokens_of_step)

    def _reference_log_probs(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Of each token of the answers, by the model as it began; shape (answers, tokens)."""
        with self.as_reference() as model, self.scoring():
            outputs = model(**self._batches.forward_arguments(model, inputs))
        return self._of_tokens(outputs, inputs)

    def _of_tokens(self, outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Log-probabilities of the tokens that a batch predicts, shape (answers, tokens)."""
        is_flat = isinstance(self._batches, FlatGroups)
        found: torch.Tensor = self._batches.log_probs(outputs, inputs) if is_flat else outputs.log_probs
        return found.float()

    def _predicted(self, values: torch.Tensor) -> torch.Tensor:
        """Of what a batch has for each token: what belongs to those that are predicted."""
        return values if isinstance(self._batches, FlatGroups) else values[:, 1:]

    def _note_rewards(self, groups: Sequence[Group], rewards: torch.Tensor, weighted: torch.Tensor) -> None:
        """Add the answers of an optimizer step, of all ranks, to the metrics, under TRL's names.

        Args:
            rewards: shape (prompts, answers, sources).
            weighted: shape (prompts, answers).
        """
        deviations, device = weighted.std(dim=1), self.args.device
        timed_out = [sum(counts) for counts in zip(*(group.timed_out for group in groups), strict=True)]
        unread = [
            [group.row for group in groups if group.without_room[number]] for number in range(len(self._rewards.names))
        ]
        errors = [
            [*chain.from_iterable(of_groups)] for of_groups in zip(*(group.errors for group in groups), strict=True)
        ]
        messages = [*self._rewards.warnings(timed_out), *self._rewards.room_warnings(unread)]
        messages += self._rewards.model_warnings()
        for message in [*messages, *self._rewards.error_warnings(errors)]:
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
            **{
                f"rewards/{name}/errors": torch.tensor(float(len(sentences)))
                for name, sentences in zip(self._rewards.names, errors, strict=True)
                if sentences
            },
            "completions/mean_length": torch.tensor(float(sum(group.tokens for group in groups))),
            "completions/clipped_ratio": torch.tensor(float(sum(group.unended for group in groups))),
        }
        of_prompts = {"reward_std": deviations.sum(), "frac_reward_zero_std": (deviations < 1e-8).float().sum()}
        for sums, number in ((of_answers, weighted.numel()), (of_prompts, len(weighted))):
            moved = {name: value.to(device) for name, value in sums.items()}
            self.add_metrics(moved, torch.tensor(float(number), device=device))
