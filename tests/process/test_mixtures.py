"""Mixtures of datasets: what an epoch takes of each, on any number of ranks and after a resume, and their losses."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.data.mixture import Mixture, apportioned, mixture_of
from llama_stack_provider_trl.recipes.data.sampling import BatchPlan, EpochSampler, MismatchingSampler, pair_of_number
from llama_stack_provider_trl.recipes.preview import examined
from llama_stack_provider_trl.specs.events import Evaluated, Failed, Prepared, Progress, Warned
from llama_stack_provider_trl.specs.job import (
    DatasetRef,
    DpoSpec,
    JobSpec,
    MixedDataset,
    OptimizerSpec,
    ShardingSpec,
    ShareSpec,
)
from llama_stack_provider_trl.specs.model_source import ReferenceSpec
from llama_stack_provider_trl.specs.preflight import PreviewSpec
from tests.process.rank_numbers import numbers
from tests.ranks import Ranks
from tests.required import in_full
from tests.tiny import tiny_model
from tests.training import DPO_ROWS, SFT_ROWS, dataset, job_spec, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
sizes = st.lists(st.integers(1, 40), min_size=1, max_size=5)
LABELLED = [{**row, "label": number % 3 > 0} for number, row in enumerate(SFT_ROWS)]
LONG = [{**row, "completion": row["completion"] + " That is all there is to it." * 3} for row in SFT_ROWS]


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=6), st.integers(0, 5000))
def test_parts_are_exact_to_one_row(weights: list[float], total: int) -> None:
    parts = apportioned(weights, total)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - weight / sum(weights) * total) < 1 + 1e-9


@given(sizes, st.lists(st.integers(1, 100), min_size=5, max_size=5), st.integers(0, 2**31 - 1), st.booleans())
def test_no_row_is_taken_again_before_all_of_its_dataset_were(
    sizes: list[int], counts: list[int], seed: int, shuffle: bool
) -> None:
    mixture = Mixture(tuple(sizes), tuple(counts[: len(sizes)]))
    taken: Counter[int] = Counter()
    for epoch in range(4):
        rows = mixture.rows(epoch, seed, shuffle=shuffle).tolist()
        assert len(rows) == mixture.rows_per_epoch
        taken.update(rows)
        begin = 0
        for size, count in zip(mixture.sizes, mixture.counts, strict=True):
            of_dataset = [taken[row] for row in range(begin, begin + size)]
            assert sum(of_dataset) == (epoch + 1) * count
            assert max(of_dataset) - min(of_dataset) <= 1
            begin += size


def test_an_epoch_with_weights_has_as_many_rows_as_all_datasets() -> None:
    shares = [ShareSpec(weight=weight) for weight in (3, 1, 1)]
    assert mixture_of(shares, [10, 200, 90]).counts == (180, 60, 60)
    assert mixture_of([ShareSpec(rows=4), ShareSpec()], [10, 7]).counts == (4, 7)
    # In sequences, of a packed job: as many passes.
    assert mixture_of([ShareSpec(rows=20), ShareSpec()], [10, 7], [3, 2]) == Mixture((3, 2), (6, 2))


def test_a_cap_keeps_the_shares() -> None:
    mixture = Mixture((10, 200), (300, 100))
    sampler = EpochSampler(210, 21, shuffle=True, seed=7, mixture=mixture)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        rows = list(sampler)
        assert len(rows) == 21
        assert sum(row < 10 for row in rows) == 16
    assert sampler.steps_per_epoch == 1


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_rows_of_a_step_do_not_depend_on_the_ranks(world: int) -> None:
    mixture = Mixture((5, 9), (12, 6))
    plan = BatchPlan.of(4, 2, world)
    lengths = [3 + number for number in range(14)]
    sampler = EpochSampler(14, None, shuffle=True, seed=3, multiple_of=2 * world, batch_plan=plan, mixture=mixture)
    grouped = EpochSampler(
        14, None, shuffle=True, seed=3, multiple_of=2 * world, batch_plan=plan, mixture=mixture, lengths=lengths
    )
    alone = EpochSampler(14, None, shuffle=True, seed=3, batch_plan=BatchPlan.of(4, 4, 1), mixture=mixture)
    for epoch in range(3):
        for one in (sampler, grouped, alone):
            one.set_epoch(epoch)
        expected = list(alone)
        found = [row for row in sampler if row < 14]
        assert found == expected
        in_steps = [row for row in grouped if row < 14]
        steps = range(0, 18, 4)
        assert [sorted(in_steps[n : n + 4]) for n in steps] == [sorted(expected[n : n + 4]) for n in steps]


def test_a_row_that_is_twice_in_a_step_is_not_paired_with_itself() -> None:
    mixture = Mixture((2, 2), (12, 2))
    sampler = MismatchingSampler(4, None, shuffle=True, seed=1, batch_plan=BatchPlan.of(14, 14, 1), mixture=mixture)
    pairs = [pair_of_number(number, 4) for number in sampler]
    assert Counter(row for row, _ in pairs) == Counter({0: 6, 1: 6, 2: 1, 3: 1})
    assert all(row != other for row, other in pairs)


def named(root: Path, dataset_id: str, rows: list[dict[str, Any]]) -> DatasetRef:
    return dataset(root, rows).model_copy(update={"dataset_id": dataset_id})


def mixed_spec(root: Path, algorithm: str, rows: dict[str, list[dict[str, Any]]], **changes: Any) -> JobSpec:
    """A job on datasets, each of which is its own validation dataset, too, with weights that do not change."""
    shares = changes.pop("shares", {})
    parts = [
        MixedDataset(
            dataset=named(root, name, of), validation=named(root, name, of), share=shares.get(name, ShareSpec())
        )
        for name, of in rows.items()
    ]
    fields: dict[str, Any] = {"optimizer": OptimizerSpec(learning_rate=1e-12), **changes}
    first, *others = parts
    own = {"dataset": first.dataset, "validation": first.validation, "share": first.share}
    return job_spec(root, tiny_model(), algorithm, **own, mixed_with=tuple(others), **fields)


def trained(root: Path, spec: JobSpec) -> list[Any]:
    status, events = run(root / "run", spec)
    assert status == 0, [event.message + event.traceback for event in of_kind(events, Failed)]
    return events


METHODS = [
    pytest.param("sft", {"packed": True, "max_seq_length": 128}, id="sft-packed"),
    pytest.param("sft", {"padding_free": False}, id="sft-padded"),
    pytest.param("kto", {}, id="kto"),
    *in_full(
        pytest.param("dpo", {}, id="dpo"),
        pytest.param("sft", {}, id="sft"),
        pytest.param("sft", {"padding_free": False, "packed": True, "max_seq_length": 128}, id="sft-packed-padded"),
        pytest.param("dpo", {"padding_free": False}, id="dpo-padded"),
        pytest.param("reward", {}, id="reward"),
    ),
]


@pytest.mark.parametrize(("algorithm", "changes"), METHODS)
def test_the_loss_of_each_dataset_is_that_of_a_job_on_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, changes: dict[str, Any]
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    rows: dict[str, list[dict[str, Any]]] = {"short": SFT_ROWS[:7], "long": LONG[7:]}
    if algorithm in ("dpo", "reward"):
        rows = {"few": DPO_ROWS[:4], "more": DPO_ROWS[4:11]}
    elif algorithm == "kto":
        rows = {"few": LABELLED[:5], "more": LABELLED[5:]}
    whole = {"batch_size": 16, "logging_steps": 1, **changes}
    events = trained(tmp_path / "both", mixed_spec(tmp_path / "both", algorithm, rows, **whole))
    (point,), evaluated = of_kind(events, Progress), of_kind(events, Evaluated)[-1]
    for name, of in rows.items():
        spec = mixed_spec(tmp_path / name, algorithm, {name: of}, **whole)
        alone = trained(tmp_path / name, spec)
        (expected,), own = of_kind(alone, Progress), of_kind(alone, Evaluated)[-1]
        assert not any(metric.startswith("loss/") for metric in expected.metrics)
        if algorithm == "kto":  # the KL divergence is that of the step and of all rows
            assert 0 < point.metrics[f"loss/{name}"] < 2
            assert 0 < evaluated.metrics[f"eval_loss/{name}"] < 2
            continue
        assert point.metrics[f"loss/{name}"] == pytest.approx(expected.metrics["loss"], rel=1e-4)
        assert evaluated.metrics[f"eval_loss/{name}"] == pytest.approx(own.metrics["eval_loss"], rel=1e-4)
    low, high = sorted(evaluated.metrics[f"eval_loss/{name}"] for name in rows)
    assert low - 1e-6 <= evaluated.metrics["eval_loss"] <= high + 1e-6
    assert low <= high


def test_shares_decide_the_steps_and_are_reported(tmp_path: Path) -> None:
    rows = {"few": SFT_ROWS[:3], "many": SFT_ROWS[3:]}
    shares = {"few": ShareSpec(weight=2), "many": ShareSpec(weight=1)}
    spec = mixed_spec(tmp_path, "sft", rows, shares=shares, n_epochs=2)
    events = trained(tmp_path, spec)
    (prepared,) = of_kind(events, Prepared)
    assert prepared.effective["mixture"] == [
        {"dataset_id": "few", "rows": 3, "rows_per_epoch": 8},
        {"dataset_id": "many", "rows": 9, "rows_per_epoch": 4},
    ]
    assert prepared.total_steps == 2 * 3
    assert prepared.effective["data"]["num_rows"] == 12
    assert prepared.effective["token_cache"] == {
        f"{use}_dataset {name}": found
        for use, found in (("train", "computed"), ("validation", "cache"))
        for name in rows
    }


def test_rows_of_one_dataset_per_epoch(tmp_path: Path) -> None:
    spec = mixed_spec(tmp_path, "sft", {"few": SFT_ROWS[:3]}, shares={"few": ShareSpec(rows=8)})
    (prepared,) = of_kind(trained(tmp_path, spec), Prepared)
    assert prepared.total_steps == 2
    assert prepared.effective["mixture"] == [{"dataset_id": "few", "rows": 3, "rows_per_epoch": 8}]


def test_a_shorter_epoch_is_reported_and_keeps_every_dataset(tmp_path: Path) -> None:
    rows = {"few": SFT_ROWS[:2], "many": SFT_ROWS[2:]}
    cap: dict[str, Any] = {"max_steps_per_epoch": 2, "batch_size": 3}
    spec = mixed_spec(tmp_path / "one", "sft", rows, **cap)
    (prepared,) = of_kind(trained(tmp_path / "one", spec), Prepared)
    assert [one["rows_per_epoch"] for one in prepared.effective["mixture"]] == [1, 5]
    assert prepared.total_steps == 2
    shares = {"few": ShareSpec(weight=1), "many": ShareSpec(weight=20)}
    status, events = run(
        tmp_path / "run", mixed_spec(tmp_path / "two", "sft", rows, shares=shares, **{**cap, "max_steps_per_epoch": 1})
    )
    assert status != 0
    assert "dataset 'few' has weight 1, and gets none of the 3 rows of an epoch" in of_kind(events, Failed)[0].message


def test_rows_that_an_epoch_repeats_are_in_the_largest_batch(tmp_path: Path) -> None:
    from llama_stack_provider_trl.recipes.data.prepare import tokenize
    from llama_stack_provider_trl.recipes.fast.batches import largest_groups
    from llama_stack_provider_trl.recipes.model.loading import load_tokenizer

    spec = job_spec(tmp_path, tiny_model(), rows=SFT_ROWS[:2])
    rows = tokenize(spec, spec.data.dataset, load_tokenizer(spec.source)).collect()[0]
    assert Mixture((2,), (7,)).most_repeats == 5
    assert Mixture((2, 3), (2, 1)).most_repeats == 1
    groups, _ = largest_groups(rows, 4, 3)
    assert len(groups) == 4
    assert groups[0] == groups[1] == groups[2]


def test_failures_and_repeated_passes_name_what_they_are_about(tmp_path: Path) -> None:
    bad = [{"messages": [{"role": "assistant", "content": "Hi."}]}, *SFT_ROWS[:2]]
    template = (
        "{% for m in messages %}{% if m['content'] == 'Hi.' %}{{ raise_exception('no') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    spec = mixed_spec(tmp_path / "a", "sft", {"good": SFT_ROWS[:3], "bad": bad}, chat_template=template)
    status, events = run(tmp_path / "run-a", spec)
    assert status != 0
    assert of_kind(events, Failed)[0].message.startswith("dataset 'bad': row 0: ")
    spec = mixed_spec(tmp_path / "b", "sft", {"few": SFT_ROWS[:1]}, shares={"few": ShareSpec(rows=20_000)})
    status, events = run(tmp_path / "run-b", spec)
    assert status != 0
    assert "would be gone through 20001 times in an epoch" in of_kind(events, Failed)[0].message


def test_warnings_name_their_dataset(tmp_path: Path) -> None:
    rows = {"short": SFT_ROWS[:6], "long": LONG[6:]}
    events = trained(tmp_path, mixed_spec(tmp_path, "sft", rows, max_seq_length=40))
    messages = [event.message for event in of_kind(events, Warned)]
    assert any(message.startswith("dataset 'long': ") and "were cut" in message for message in messages), messages
    assert not any(message.startswith("dataset 'short': ") and "were cut" in message for message in messages)


def test_a_dataset_of_which_an_epoch_takes_nothing_is_refused(tmp_path: Path) -> None:
    shares = {"few": ShareSpec(weight=1e-6), "many": ShareSpec(weight=1)}
    spec = mixed_spec(tmp_path, "sft", {"few": SFT_ROWS[:3], "many": SFT_ROWS[3:]}, shares=shares)
    status, events = run(tmp_path / "run", spec)
    (failed,) = of_kind(events, Failed)
    assert status != 0
    assert failed.message == (
        "dataset 'few' has weight 1e-06, and gets none of the 12 rows of an epoch: give it more, or leave it out"
    )


@pytest.mark.parametrize("algorithm", ["dpo", *in_full("sft")])
def test_two_ranks_and_a_resume_take_the_same_rows(ranks: Ranks, tmp_path: Path, algorithm: str) -> None:
    rows = (
        {"few": SFT_ROWS[:3], "many": LONG[3:]} if algorithm == "sft" else {"few": DPO_ROWS[:3], "many": DPO_ROWS[3:]}
    )
    shares = {"few": ShareSpec(weight=2), "many": ShareSpec(weight=1)}
    optimizer = OptimizerSpec(learning_rate=5e-3)
    same: dict[str, Any] = {"shares": shares, "n_epochs": 2, "optimizer": optimizer, "save_steps": 2}

    def spec_of(name: str, world: int) -> JobSpec:
        sharding = ShardingSpec(strategy="FULL_SHARD") if world > 1 else None
        return mixed_spec(
            tmp_path / name, algorithm, rows, **same, ranks=world, batch_size=4 // world, sharding=sharding
        )

    def of(spec: JobSpec, root: Path, resume_from: Path | None = None) -> list[Any]:
        codes, events = ranks.run(root / "run", spec, resume_from)
        assert codes == [0] * spec.ranks, [event.message for event in of_kind(events, Failed)]
        return events

    alone = numbers(of(spec_of("one", 1), tmp_path / "one"))
    spec = spec_of("two", 2)
    together = numbers(of(spec, tmp_path / "two"))
    assert len(alone) == len(together) > 6
    for one, other in zip(together, alone, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
    # On one process, in the middle of the second epoch, what two ranks have begun.
    (spec.checkpoint_dir / "final").rename(tmp_path / "first-final")
    continued = spec.changed(ranks=1, batch_size=4).model_copy(update={"sharding": None})
    resumed = numbers(of(continued, tmp_path / "again", spec.checkpoint_dir / "checkpoint-4"))
    assert any("loss/few" in point for point in resumed)
    expected = [point for point in together if "eval_loss" not in point][4:]
    found = [point for point in resumed if "eval_loss" not in point]
    assert len(found) == len(expected) == 2
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


def test_a_reference_is_precomputed_for_all_datasets(tmp_path: Path) -> None:
    rows = {"few": DPO_ROWS[:4], "more": DPO_ROWS[4:11]}
    shares = {"few": ShareSpec(rows=9)}
    optimizer = OptimizerSpec(learning_rate=5e-3)

    def losses(root: Path, *, precompute: bool) -> list[dict[str, float]]:
        method = DpoSpec(reference=ReferenceSpec(precompute=precompute, cache=tmp_path / "reference"))
        spec = mixed_spec(root, "dpo", rows, shares=shares, method=method, optimizer=optimizer)
        return numbers(trained(root, spec))

    found, expected = losses(tmp_path / "before", precompute=True), losses(tmp_path / "along", precompute=False)
    assert len(found) == len(expected) > 4
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


def test_a_row_that_cannot_be_rendered_is_named_by_its_dataset_and_its_number_there(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    talk = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2."}]
    rows = {"plain": SFT_ROWS[:3], "called": [SFT_ROWS[3], {"messages": talk, "tools": tools}]}
    spec = mixed_spec(tmp_path, "sft", rows)
    for first in (0, 2, 4):
        with pytest.raises(JobFailure, match=r"^dataset 'called': row 1: the model's chat template writes no tools"):
            examined(spec, PreviewSpec(first_row=first), lambda: None)
    status, events = run(tmp_path / "run", spec)
    assert status != 0
    assert "dataset 'called': row 1: the model's" in of_kind(events, Failed)[0].message
