"""What a request may name as the beginning of its job: a job's checkpoint, or an adapter."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, JobConflict, JobNotFound
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.inputs.bases import check_checkpoints, find_base, find_served
from llama_stack_provider_trl.jobs.store.records import CheckpointRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.supervision.step_checkpoints import delete_superfluous
from llama_stack_provider_trl.requests.bases import model_of, served_job_of
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.paths import resolve_base_model
from llama_stack_provider_trl.requests.resolve import resolve
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.bases import BaseJob
from llama_stack_provider_trl.specs.events import CheckpointSaved, Finished
from llama_stack_provider_trl.specs.job import JobSpec, ResourcesSpec, ShardingSpec
from llama_stack_provider_trl.specs.methods import RewardSpec
from llama_stack_provider_trl.specs.model_source import AdapterSpec
from llama_stack_provider_trl.system.files import write_manifest
from tests.fakes import job_spec
from tests.unit.based_jobs import LORA, ROWS, add, complete, request

SAME = {
    **{"type": "LoRA", "lora_attn_modules": ["q_proj", "v_proj"], "apply_lora_to_mlp": False},
    **{"apply_lora_to_output": False, "rank": 4, "alpha": 8},
}
CONFIG = {
    **{"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 4, "lora_alpha": 8},
    **{"target_modules": ["v_proj", "q_proj"], "bias": "none", "modules_to_save": None},
}


def spec_of(body: Any, store: Store, settings: Settings, **options: Any) -> JobSpec:
    return resolve(body, ProviderOptions.parse(options), settings, find_base(model_of(body), store)).spec(ROWS, None)


def refused(body: Any, store: Store, settings: Settings, **options: Any) -> str:
    with pytest.raises(InvalidRequest) as error:
        spec_of(body, store, settings, **options)
    return f"{error.value.field}: {error.value.hint}"


def test_a_name_without_a_slash_that_is_nothing_here_is_refused_where_the_hub_is_not_used(
    store: Store, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    named = model_of(request("gpt2"))
    with pytest.raises(InvalidRequest) as error:
        find_base(named, store, settings)
    assert (error.value.field, error.value.hint) == (
        "model",
        "there is no such directory, and no such model in the cache here, no such job, and the hub is not used "
        "(HF_HUB_OFFLINE): name a directory, job:NAME, or a model id such as org/name",
    )
    assert find_base(named, store, settings.model_copy(update={"max_nodes": 2})) is None
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert find_base(named, store, settings) is None
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert find_base(model_of(request("org/name")), store, settings) is None
    commit = "0" * 40
    (tmp_path / "hub" / "models--gpt2" / "snapshots" / commit).mkdir(parents=True)
    (tmp_path / "hub" / "models--gpt2" / "refs").mkdir()
    (tmp_path / "hub" / "models--gpt2" / "refs" / "main").write_text(commit)
    assert find_base(named, store, settings) is None


def test_a_job_that_trains_every_weight_gives_its_final_and_comes_before(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    add(store, "a", tmp_path)
    spec = spec_of(request("job:a"), store, settings)
    assert (spec.source.model, spec.after) == (str(tmp_path / "checkpoints" / "a" / "final"), ("a",))
    assert (spec.bases, spec.adapter) == ((BaseJob(job_uuid="a", checkpoint="final"),), None)
    for named in ("job:a/checkpoint-6", "job:a/a-checkpoint-6"):
        spec = spec_of(request(named, "dpo"), store, settings)
        assert (spec.source.model, spec.bases[0].checkpoint) == (
            str(tmp_path / "checkpoints" / "a" / "checkpoint-6"),
            "checkpoint-6",
        )


def test_a_job_that_merges_gives_merged_and_its_adapter_where_that_is_requested(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    first = add(store, "a", tmp_path, lora=LORA, merge_adapter=True)
    assert spec_of(request("job:a"), store, settings).source.model == str(first.checkpoint_dir / "merged")
    spec = spec_of(request("job:a", "dpo"), store, settings, adapter="continue")
    assert (spec.source.model, spec.lora) == ("org/base", LORA)
    assert spec.adapter == AdapterSpec(
        model=str(first.checkpoint_dir / "final"),
        use="continue",
        made_by=BaseJob(job_uuid="a", checkpoint="final"),
    )
    merged = spec_of(request("job:a"), store, settings, adapter="merge")
    assert (merged.source.model, merged.lora, merged.adapter and merged.adapter.use) == ("org/base", None, "merge")


def test_a_chain_of_adapters_keeps_every_job_below_it(store: Store, settings: Settings, tmp_path: Path) -> None:
    add(store, "a", tmp_path)
    second = spec_of(request("job:a", name="b", algorithm_config=SAME), store, settings)
    store.add_job(second, "digest")
    third = spec_of(request("job:b", name="c"), store, settings, adapter="continue")
    assert (third.source.model, third.after) == (second.source.model, ("b", "a"))
    store.add_job(third, "digest")
    merging = spec_of(request("job:c", name="d", algorithm_config=SAME), store, settings, adapter="merge")
    store.add_job(merging, "digest")
    last = spec_of(request("job:d", name="e"), store, settings, adapter="continue")
    assert (last.source.model, last.after) == (str(merging.checkpoint_dir / "merged-base"), ("d",))
    for name in "ab":
        complete(store, name)
    with pytest.raises(JobConflict, match="c, d wait for it or use its checkpoint"):
        store.delete("a")


@pytest.mark.parametrize(
    ("model", "options", "why"),
    [
        ("job:typo", {}, "model: there is no such job here"),
        ("job:next", {}, "model: a job cannot begin with its own result"),
        ("a", {}, "model: there is no such directory, and no such model in the cache here; was job:a meant?"),
        ("job:", {}, "model: send job:NAME"),
        ("job:../x", {}, "model: send job:NAME"),
        ("job:a/", {}, "model: send job:NAME"),
        ("job:a/best", {}, "model: 'best' is no checkpoint"),
        ("job:a/../b", {}, "model: '../b' is no checkpoint"),
        ("job:a/merged", {}, "model: job 'a' writes no checkpoint 'merged': it has final"),
        ("job:a", {"adapter": "continue"}, "provider_options.adapter: job:a is a whole model and no adapter"),
        ("org/base", {"adapter": "merge"}, "provider_options.adapter: model is a model and no adapter"),
        ("job:r", {}, "model: job 'r' trains a reward model, which writes no text"),
        ("job:l", {}, "model: job 'l' trains an adapter: set the provider option adapter"),
        ("job:l", {"adapter": "continue", "use_rslora": True}, "provider_options.use_rslora: the adapter that is"),
        (
            "job:l",
            {"adapter": "merge", "resources": {"cpus": 2}},
            "provider_options.resources: adapter 'merge' merges model 'job:l' on the service's machine",
        ),
        (
            "org/base",
            {"reference_model": "job:a"},
            "provider_options.reference_model: a job is taken as the base model",
        ),
    ],
)
def test_what_cannot_be_begun_with_is_refused_by_name(
    store: Store, settings: Settings, tmp_path: Path, model: str, options: Any, why: str
) -> None:
    add(store, "a", tmp_path)
    add(store, "l", tmp_path, lora=LORA)
    add(store, "r", tmp_path, algorithm="reward")
    settings = settings.model_copy(update={"max_nodes": 4, "sharding": ShardingSpec()})
    algorithm = "dpo" if "reference_model" in options else "sft"
    assert refused(request(model, algorithm), store, settings, **options).startswith(why)


def test_a_job_that_begins_with_the_result_of_another_one_runs_on_any_machine_but_where_it_merges_an_adapter(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    add(store, "a", tmp_path)
    add(store, "l", tmp_path, lora=LORA)
    joined = settings.model_copy(update={"max_nodes": 4, "sharding": ShardingSpec()})
    anywhere = ResourcesSpec()
    assert spec_of(request("job:a"), store, joined).resources == anywhere
    assert spec_of(request("job:l"), store, joined, adapter="continue").resources == anywhere
    assert spec_of(request("job:a"), store, joined, resources={"nodes": 2}).nodes == 2
    assert spec_of(request("job:l"), store, joined, adapter="merge").resources is None
    several = joined.model_copy(update={"nodes": 2})
    assert spec_of(request("job:a"), store, several).nodes == 2
    why = refused(request("job:l"), store, several, adapter="merge")
    assert why.startswith("provider_options.resources.nodes: adapter 'merge' merges model 'job:l'")
    assert spec_of(request("job:l"), store, several, adapter="merge", resources={"nodes": 1}).resources is None


def test_settings_of_a_continued_adapter_may_be_repeated_and_not_changed(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    add(store, "a", tmp_path, lora=LORA)
    same = spec_of(request("job:a", algorithm_config=SAME), store, settings, adapter="continue", lora_dropout=0.1)
    assert same.lora == LORA.model_copy(update={"dropout": 0.1})
    other = request("job:a", algorithm_config={**SAME, "rank": 8})
    assert refused(other, store, settings, adapter="continue") == (
        "algorithm_config: the adapter that is continued has rank 4, not 8: leave these settings out"
    )
    quantizing = {"type": "QAT", "quantizer_name": "Int8DynActInt4WeightQATQuantizer", "group_size": 32}
    body = request("job:a", algorithm_config=quantizing)
    assert refused(body, store, settings, adapter="continue").startswith("algorithm_config.type: QAT trains")


def test_a_checkpoint_that_a_completed_job_lacks_is_refused(store: Store, settings: Settings, tmp_path: Path) -> None:
    spec = add(store, "a", tmp_path)
    store.launch("a", 1, "cpu", Path("/run"))
    saved = CheckpointSaved(kind="final", step=4, epoch=1, train_loss=1.0, path=spec.checkpoint_dir / "final")
    store.apply_events("a", 1, [saved, Finished(step=4)], 1)
    store.transition("a", 1, JobState.launching, JobState.completed)
    assert refused(request("job:a/checkpoint-2"), store, settings) == (
        "model: job 'a' has no checkpoint 'checkpoint-2': it has final"
    )


# --- adapters on disk -------------------------------------------------------------------------------------------------


def adapter(root: Path, **changes: Any) -> Path:
    directory = root / "adapter"
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({**CONFIG, **changes}))
    return directory


def test_a_directory_of_peft_gives_its_base_model_and_settings(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    directory = adapter(tmp_path, use_rslora=True)
    spec = spec_of(request(str(directory)), store, settings, adapter="continue")
    assert (spec.source.model, spec.lora) == ("org/base", LORA.model_copy(update={"use_rslora": True}))
    assert (spec.adapter and spec.adapter.directory, spec.after, spec.resources) == (directory, (), None)
    assert spec_of(request(str(directory)), store, settings, adapter="merge").lora is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"peft_type": "LOHA"}, "its peft_type is 'LOHA', expected 'LORA'"),
        ({"task_type": "SEQ_CLS"}, "its adapter_config.json has task_type 'SEQ_CLS', expected 'CAUSAL_LM'"),
        ({"bias": "all"}, "its adapter_config.json has bias 'all', expected 'none'"),
        ({"init_lora_weights": "pissa"}, "its adapter_config.json has init_lora_weights 'pissa'"),
        ({"modules_to_save": ["lm_head"]}, "its adapter_config.json sets modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "its adapter_config.json sets rank_pattern"),
        ({"target_modules": "all-linear"}, "target_modules in its adapter_config.json is no list"),
        ({"r": 0}, "r, lora_alpha or lora_dropout in its adapter_config.json is out of range"),
        ({"base_model_name_or_path": None}, "its adapter_config.json names no base model"),
        (
            {"base_model_name_or_path": "/nowhere"},
            "its base model '/nowhere' cannot be used: there is no such directory",
        ),
        ({"revision": "main"}, "its adapter_config.json names no base model without a revision"),
    ],
)
def test_an_adapter_that_no_job_could_train_is_refused_by_name(
    store: Store, settings: Settings, tmp_path: Path, changes: Any, why: str
) -> None:
    body = request(str(adapter(tmp_path, **changes)))
    assert refused(body, store, settings, adapter="continue").startswith(f"model: {why}")


@pytest.mark.parametrize("text", ["no JSON", "[]", "[" * 100_000])
def test_a_damaged_configuration_is_refused(store: Store, settings: Settings, tmp_path: Path, text: str) -> None:
    directory = adapter(tmp_path)
    (directory / "adapter_config.json").write_text(text)
    assert "its adapter_config.json cannot be read" in refused(
        request(str(directory)), store, settings, adapter="merge"
    )


def test_an_adapter_and_its_base_lie_below_the_model_roots(store: Store, settings: Settings, tmp_path: Path) -> None:
    roots = tmp_path / "models"
    roots.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "config.json").write_text("{}")
    data_dir = tmp_path / "data"
    settings = settings.model_copy(update={"data_dir": data_dir, "model_roots": (roots,)})
    inside = adapter(roots, base_model_name_or_path=str(elsewhere))
    assert "must lie below one of the configured model_roots" in refused(
        request(str(inside)), store, settings, adapter="merge"
    )
    outside = adapter(elsewhere)
    assert "must lie below one of the configured model_roots" in refused(
        request(str(outside)), store, settings, adapter="merge"
    )


# --- while the job waits, and when it starts --------------------------------------------------------------------------


def test_a_checkpoint_that_a_waiting_job_names_is_kept(store: Store, settings: Settings, tmp_path: Path) -> None:
    spec = add(store, "a", tmp_path, keep_last=1)
    store.add_job(spec_of(request("job:a/checkpoint-1"), store, settings), "digest")
    store.launch("a", 1, "cpu", Path("/run"))
    for step in (1, 2, 3):
        path = spec.checkpoint_dir / f"checkpoint-{step}"
        saved = CheckpointSaved(kind="step", step=step, epoch=1, train_loss=1.0, path=path)
        store.apply_events("a", 1, [saved], step)
        delete_superfluous(store, store.get("a"))
    kept: list[CheckpointRecord] = list(store.checkpoints("a"))
    assert [checkpoint.step for checkpoint in kept] == [1, 3]
    store.request_cancel("next")
    delete_superfluous(store, store.get("a"))
    assert [checkpoint.step for checkpoint in store.checkpoints("a")] == [3]


def test_a_base_job_is_not_deleted_before_the_last_job_that_uses_it_has_ended(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    add(store, "a", tmp_path)
    store.add_job(spec_of(request("job:a"), store, settings), "digest")
    complete(store, "a")
    store.chains.advance(lambda *job: None)
    assert [job.job_uuid for job in store.queue()] == ["next"]  # it waits for a device only
    with pytest.raises(JobConflict, match="next wait for it or use its checkpoint"):
        store.delete("a")
    complete(store, "next")
    store.delete("a")


def test_a_checkpoint_that_is_gone_when_the_job_starts_fails_it_by_name(tmp_path: Path) -> None:
    final = tmp_path / "final"
    spec = job_spec("b", model=str(final), made_by=BaseJob(job_uuid="a", checkpoint="final"))
    with pytest.raises(InvalidRequest, match=r"job:a/final.*is damaged or gone: train job 'a' again"):
        check_checkpoints(spec)
    final.mkdir()
    (final / "model.safetensors").write_text("weights")
    write_manifest(final)
    check_checkpoints(spec)
    check_checkpoints(job_spec("c"))


def test_an_adapter_that_is_continued_twice_starts(store: Store, settings: Settings, tmp_path: Path) -> None:
    add(store, "a", tmp_path, lora=LORA)
    for name, before in ("b", "a"), ("c", "b"), ("d", "c"):
        spec = spec_of(request(f"job:{before}", name=name), store, settings, adapter="continue")
        assert (spec.source.model, spec.after) == ("org/base", (before,))
        store.add_job(spec, "digest")
        assert spec.adapter is not None
        final = spec.adapter.directory
        final.mkdir(parents=True)
        (final / "adapter_model.safetensors").write_text("weights")
        write_manifest(final)
        check_checkpoints(spec)


# What a chat names


def write_checkpoint(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    write_manifest(directory)


def test_a_chat_with_a_job_names_its_adapter_on_the_base_model_or_all_its_weights(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    adapted = add(store, "a", tmp_path, lora=LORA, merge_adapter=True)
    whole = add(store, "b", tmp_path)
    for directory in (adapted.checkpoint_dir, whole.checkpoint_dir):
        for name in ("final", "merged", "checkpoint-2"):
            write_checkpoint(directory / name)
    for name, checkpoint in (("ft:a", "final"), ("job:a", "final"), ("job:a/checkpoint-2", "checkpoint-2")):
        base = find_served("model", name, settings, store)
        assert base.adapter is not None
        assert (base.source.model, base.adapter.model) == ("org/base", str(adapted.checkpoint_dir / checkpoint))
    for name, directory in (
        ("job:a/merged", adapted.checkpoint_dir / "merged"),
        ("ft:b", whole.checkpoint_dir / "final"),
        ("job:b/b-checkpoint-2", whole.checkpoint_dir / "checkpoint-2"),
    ):
        base = find_served("model", name, settings, store)
        assert (base.source.model, base.adapter) == (str(directory), None)
    assert find_served("model", "org/base", settings, store).source.model == "org/base"


def test_the_newest_checkpoint_of_a_job_is_the_last_one_that_it_has_written(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    job = add(store, "a", tmp_path)
    with pytest.raises(InvalidRequest, match="job 'a' has no checkpoint yet: send this again when it has saved one"):
        find_served("model", "job:a/newest", settings, store)
    assert store.launch("a", 1, "cpu", tmp_path / "run", None)

    offsets = count(1)

    def newest(*names: str) -> str:
        for step, name in enumerate(names, 10):
            write_checkpoint(job.checkpoint_dir / name)
            kind = "step" if name.startswith("checkpoint") else name
            saved = CheckpointSaved(kind=kind, step=step, epoch=1, path=job.checkpoint_dir / name, train_loss=None)
            store.apply_events("a", 1, [saved], next(offsets))
        return find_served("model", "job:a/newest", settings, store).source.model

    assert newest("checkpoint-9", "checkpoint-10") == str(job.checkpoint_dir / "checkpoint-10")
    with pytest.raises(InvalidRequest, match="job:a/newest is the newest"):
        find_served("model", "ft:a", settings, store)
    assert newest("final") == str(job.checkpoint_dir / "final")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("ft:waiting", "job 'waiting' has no whole checkpoint 'final': it has none yet"),
        ("job:waiting/checkpoint-7", "job 'waiting' has no whole checkpoint 'checkpoint-7'"),
        ("job:waiting/merged", "job 'waiting' writes no checkpoint 'merged'"),
        ("ft:judge", "job 'judge' trains a reward model, which writes no text"),
        ("ft:waiting/final", "send ft:NAME"),
        ("job:", "send ft:NAME"),
        ("job:waiting/", "send ft:NAME"),
        ("/etc", "the directory has no config.json"),
    ],
)
def test_what_cannot_answer_a_chat_is_refused_by_its_name(
    store: Store, settings: Settings, tmp_path: Path, name: str, sentence: str
) -> None:
    add(store, "waiting", tmp_path)
    add(store, "judge", tmp_path, method=RewardSpec())
    with pytest.raises(InvalidRequest) as error:
        find_served("model", name, settings, store)
    assert str(error.value).startswith(f"model={name!r} is not supported: ")
    assert sentence in error.value.hint


def test_a_chat_with_a_job_that_is_not_here_names_it(store: Store, settings: Settings) -> None:
    with pytest.raises(JobNotFound, match="job 'gone' not found"):
        find_served("model", "ft:gone", settings, store)


def test_only_the_canonical_name_of_a_checkpoint_names_it() -> None:
    named = "ft:small:trl:tutor:ftjob-1:ckpt-step-"
    assert served_job_of("model", f"{named}5") == ("ftjob-1", "job:ftjob-1/checkpoint-5")
    assert served_job_of("model", f"{named}005") == ("ckpt-step-005", "job:ckpt-step-005")  # a name that no job has
    with pytest.raises(InvalidRequest):
        served_job_of("model", f"{named}\u0665")


def test_a_file_is_no_model(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    with pytest.raises(InvalidRequest, match="this is a file: name the directory that has the model's"):
        resolve_base_model("model", str(tmp_path / "rows.jsonl"), settings)
    with pytest.raises(InvalidRequest, match="no such directory on the machine that trains: correct the path"):
        resolve_base_model("model", str(tmp_path / "gone"), settings)
