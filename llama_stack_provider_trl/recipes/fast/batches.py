"""Batches in one sequence, without padding: rows one after another, of pairs the prompt once and then both answers.

The last token of a row is not computed, since it predicts nothing, and the head computes only what the loss covers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from datasets import Dataset

from ..data.lengths import list_lengths
from ..data.tables import IGNORED
from .layout import Group, Layout, moved

Inputs = dict[str, Any]
_ANSWERS = ("chosen_ids", "rejected_ids")


def collate_rows(rows: Sequence[Mapping[str, Any]]) -> Inputs:
    """The inputs of a batch of rows with the columns input_ids and labels, packed ones also with seq_lengths."""
    sequence, tokens = _Sequence(), 0
    for row in rows:
        ids, labels = row["input_ids"], row["labels"]
        bounds = [0, *accumulate(row.get("seq_lengths", [len(ids)]))]
        for start, end in pairwise(bounds):
            sequence.add((), [(ids[start:end], labels[start:end])])
        tokens += len(ids) if any(label != IGNORED for label in labels) else 0
    inputs = sequence.inputs()
    # Trainer counts the tokens of a step by shift_labels, in batches that have labels.
    return {**inputs, "labels": inputs["shift_labels"], "num_tokens": torch.tensor(tokens)}


class _Flat:
    def forward_arguments(self, model: torch.nn.Module, inputs: Inputs) -> Inputs:
        """Arguments of a forward of `model` that scores the answers."""
        return forward_arguments(inputs)


class FlatAnswers(_Flat):
    """Batches of prompts with one answer each, in one sequence; `recipes.trainer.kto` has padded ones."""

    def collate(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Inputs:
        """The inputs of a batch of prompts and answers, and `counts`, the scored tokens of each answer."""
        sequence = _Sequence()
        for prompt, answer in rows:
            sequence.add((), [([*prompt, *answer], [*([IGNORED] * len(prompt)), *answer])])
        return {**sequence.inputs(), "counts": tuple(sequence.counts)}

    def log_probs(self, outputs: Any, inputs: Inputs) -> torch.Tensor:
        """Log-probabilities of whole answers, shape (rows,)."""
        scored = outputs.log_probs[0, : sum(inputs["counts"])]
        return torch.stack([part.sum() for part in scored.split(inputs["counts"])])


class FlatGroups(_Flat):
    """Batches of prompts with several answers each, in one sequence: a prompt is computed once for all its answers."""

    def collate(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], filler: list[int]) -> Inputs:
        """The inputs of a batch.

        Beside those of a forward: `completion_mask`, 1 for the tokens of each answer, shape (answers, tokens of the
        longest); `places`, where its scored tokens are in such a table; `row_tokens`, those of each prompt and answer.

        Args:
            answers: to each prompt, as many.
            filler: a prompt without an answer, for a batch without prompts.
        """
        sequence, count = _Sequence(), len(answers) // max(1, len(prompts))
        for number, prompt in enumerate(prompts):
            sequence.add(prompt, [(ids, ids) for ids in answers[number * count : (number + 1) * count]])
        if not prompts:
            sequence.add(filler, [((), ())])
        sizes = torch.tensor(sequence.counts)
        mask = torch.arange(max(1, int(sizes.max()))) < sizes[:, None]
        tokens = [len(prompts[number // count]) + len(ids) for number, ids in enumerate(answers)]
        return {
            **sequence.inputs(),
            "counts": tuple(sequence.counts),
            "completion_mask": mask.long(),
            "places": mask.flatten().nonzero()[:, 0],
            "row_tokens": torch.tensor(tokens or [0]),
        }

    def log_probs(self, outputs: Any, inputs: Inputs) -> torch.Tensor:
        """Log-probabilities of the tokens of each answer, 0 behind them, shape (answers, tokens of the longest)."""
        mask, scored = inputs["completion_mask"], outputs.log_probs[0, : sum(inputs["counts"])]
        # Indices that are known, and no mask, for which Python would wait for the GPU.
        table: torch.Tensor = scored.new_zeros(mask.numel()).index_copy(0, inputs["places"], scored)
        return table.view(mask.shape)


def forward_arguments(inputs: Inputs) -> Inputs:
    """Arguments of a forward that scores a batch: log-probabilities have shape (1, scored)."""
    names = ("input_ids", "position_ids", "scored", "shift_labels", "layout")
    return {**{name: inputs[name] for name in names}, "use_cache": False, "fused_lm_head": True}


class FlatPairs(_Flat):
    """Batches of pairs in one sequence; `recipes.trainer.pairs` has padded ones."""

    def collate(self, pairs: Sequence[Mapping[str, Any]]) -> Inputs:
        """The inputs of a batch of pairs with the columns prompt_ids, chosen_ids and rejected_ids.

        Beside those of a forward: `counts`, the scored tokens of each answer; `num_tokens` of each pair, shape
        (pairs,), where the prompt counts twice, as in padded batches; and the reference's log-probabilities where
        they are columns.
        """
        sequence = _Sequence()
        for pair in pairs:
            sequence.add(pair["prompt_ids"], [(pair[column], pair[column]) for column in _ANSWERS])
        tokens = [2 * len(pair["prompt_ids"]) + sum(len(pair[column]) for column in _ANSWERS) for pair in pairs]
        given = [name for name in ("ref_chosen_logps", "ref_rejected_logps") if name in pairs[0]]
        return {
            **sequence.inputs(),
            "counts": tuple(sequence.counts),
            "num_tokens": torch.tensor(tokens),
            **{name: torch.tensor([pair[name] for pair in pairs]) for name in given},
        }

    def log_probs(self, outputs: Any, inputs: Inputs) -> torch.Tensor:
        """Log-probabilities of whole answers, chosen then rejected, shape (2 * pairs,)."""
        scored = outputs.log_probs[0, : sum(inputs["counts"])]
        return _chosen_first(torch.stack([part.sum() for part in scored.split(inputs["counts"])]))

    def lengths(self, inputs: Inputs) -> torch.Tensor:
        """Scored tokens of each answer, chosen then rejected, shape (2 * pairs,)."""
        return _chosen_first(moved(torch.tensor(inputs["counts"]), inputs["input_ids"].device))

    def num_tokens(self, inputs: Inputs) -> torch.Tensor:
        """Tokens of both sequences of each pair, shape (pairs,)."""
        return inputs["num_tokens"]


def largest_groups(dataset: Dataset, rows: int, repeats: int = 1) -> tuple[tuple[Group, ...], int]:
    """The groups of a batch of the `rows` rows (pairs, or prompts without their answers) with the most tokens, and its
    scored tokens.

    Args:
        repeats: how often a row may be in an epoch.
    """
    columns = [
        name for name in ("input_ids", "prompt_ids", *_ANSWERS, "completion_ids") if name in dataset.column_names
    ]
    tokens = torch.stack([list_lengths(dataset, name) for name in columns]).sum(dim=0)
    largest = first_largest(tokens, rows)
    batch = [dataset[number] for number in largest for _ in range(repeats)][:rows]
    if columns == ["prompt_ids"]:
        inputs = FlatAnswers().collate([((), row["prompt_ids"]) for row in batch])
    elif "completion_ids" in columns:
        inputs = FlatAnswers().collate([(row["prompt_ids"], row["completion_ids"]) for row in batch])
    else:
        inputs = collate_rows(batch) if columns == ["input_ids"] else FlatPairs().collate(batch)
    return inputs["layout"].groups, len(inputs["scored"])


def first_largest(values: torch.Tensor, count: int) -> list[int]:
    """Indices of the largest values, at most `count` of them, the largest first; of equal ones the first."""
    least = values.topk(min(count, len(values))).values[-1]
    candidates = (values >= least).nonzero().flatten()
    order = values[candidates].argsort(descending=True, stable=True)
    return candidates[order][:count].tolist()


def _chosen_first(values: torch.Tensor) -> torch.Tensor:
    """Values of chosen and rejected answers in turn as those of all chosen answers, then of all rejected ones."""
    return values.view(-1, 2).T.reshape(-1)


class _Sequence:
    """The sequence of a batch, while it is put together."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.scored: list[int] = []
        """The indices of the tokens that predict those which the loss covers."""
        self.labels: list[int] = []
        """What they predict."""
        self.counts: list[int] = []
        """Scored tokens of each row."""
        self.groups: list[Group] = []

    def add(self, prefix: Sequence[int], rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Add a group."""
        last = len(self.ids) + len(prefix) - 1
        self._extend(prefix, 0)
        computed = []
        for ids, labels in rows:
            before, begin = len(self.scored), len(self.ids)
            for number, label in enumerate(labels):
                if label != IGNORED and (number or prefix):
                    self.scored.append(begin + number - 1 if number else last)
                    self.labels.append(label)
            self.counts.append(len(self.scored) - before)
            kept = ids[:-1] if prefix or len(ids) > 1 else ids
            self._extend(kept, len(prefix))
            computed.append(len(kept))
        if prefix or any(computed):
            self.groups.append((len(prefix), tuple(computed)))

    def _extend(self, ids: Sequence[int], position: int) -> None:
        self.ids.extend(ids)
        self.positions.extend(range(position, position + len(ids)))

    def inputs(self) -> Inputs:
        """`input_ids` and `position_ids` of shape (1, tokens), `scored` (scored,), `shift_labels` (1, scored), and the
        `layout`. Something is always scored: where the loss covers nothing, the first token, with the label -100."""
        return {
            "input_ids": torch.tensor([self.ids]),
            "position_ids": torch.tensor([self.positions]),
            "scored": torch.tensor(self.scored or [0]),
            "shift_labels": torch.tensor([self.labels or [IGNORED]]),
            "layout": Layout(self.groups),
        }
