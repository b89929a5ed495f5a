"""A trace is kept on disk by all that it depends on, and found again. Whatever happens to its file, none is wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_stack_provider_trl.recipes.fast import mlp
from llama_stack_provider_trl.recipes.memory import trace as memory
from llama_stack_provider_trl.recipes.memory import trace_cache
from llama_stack_provider_trl.recipes.memory.estimate import estimate
from llama_stack_provider_trl.recipes.memory.trace import Batch, Traced, trace_model
from llama_stack_provider_trl.recipes.memory.trace_cache import key_of, trace
from llama_stack_provider_trl.recipes.model.fsdp import num_shards
from llama_stack_provider_trl.recipes.trainer import trl_patches
from llama_stack_provider_trl.specs.answer_checks import AnswerCheck
from llama_stack_provider_trl.specs.bases import Frozen
from llama_stack_provider_trl.specs.events import CheckpointSaved, Prepared
from llama_stack_provider_trl.specs.job import (
    DpoSpec,
    JobSpec,
    OptimizerSpec,
    QatSpec,
    ResourcesSpec,
    ShardingSpec,
)
from llama_stack_provider_trl.specs.methods import GrpoSpec, KtoSpec, OrpoSpec, RewardSpec
from llama_stack_provider_trl.specs.model_source import AdapterSpec, ReferenceSpec
from llama_stack_provider_trl.specs.rewards import RewardSource
from llama_stack_provider_trl.system.texts import json_digest
from tests import training
from tests.required import in_full
from tests.tiny import tiny_model
from tests.training import LORA, dataset, job_spec, of_kind, reference_to, run

pytestmark = pytest.mark.process
BATCH = Batch(4, 24)
QAT = QatSpec(quantizer_name="Int8DynActInt4WeightQATQuantizer", group_size=32)
FULL = ShardingSpec()
GRPO = GrpoSpec(rewards=(RewardSource(name="digits", check=AnswerCheck(type="regex", pattern="[0-9]")),))


def recording(part: Frozen, **known: Any) -> Any:
    """A copy of a job, or of a part of one, that notes which of its fields are read.

    Args:
        known: attributes whose values are in the key.
    """
    kind: Any = type(part)

    class Recording(kind):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name in known:
                return known[name]
            if name in kind.model_fields:
                READ.add(name)
            return super().__getattribute__(name)

    return Recording.model_construct(**dict(part))


READ: set[str] = set()


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_cache, "_TRACES", {})


def forget() -> None:
    """As in another process."""
    trace_cache._TRACES.clear()


def refuse(*arguments: Any) -> Traced:
    raise AssertionError("it is traced again")


def files(spec: JobSpec) -> list[Path]:
    assert spec.data.token_cache is not None
    return sorted((spec.data.token_cache / "traces").glob("*.json"))


def other_model(root: Path, **changes: Any) -> Path:
    """The tiny model, with other values in its configuration."""
    shutil.copytree(tiny_model(), root)
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps({**config, **changes}))
    return root


def stored_in_bf16(root: Path) -> Path:
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_model(), root)
    weights = load_file(root / "model.safetensors")
    halved = {name: weight.bfloat16() for name, weight in weights.items()}
    save_file(halved, root / "model.safetensors", metadata={"format": "pt"})
    return root


JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {}),
    "bf16": ("sft", {"dtype": "bf16"}),
    "padded": ("sft", {"padding_free": False}),
    "padded with masks": ("sft", {"padding_free": False, "attention_mask": "always"}),
    "packed": ("sft", {"packed": True}),
    "eager": ("sft", {"attn_implementation": "eager", "padding_free": False}),
    "QAT": ("sft", {"qat": QAT}),
    "LoRA": ("sft", {"lora": LORA}),
    "LoRA of another rank": ("sft", {"lora": LORA.model_copy(update={"rank": 2})}),
    "QLoRA": ("sft", {"lora": LORA.model_copy(update={"quantize_base": True})}),
    "recomputed": ("sft", {"gradient_checkpointing": True}),
    "every second recomputed": ("sft", {"gradient_checkpointing": True, "checkpoint_every": 2}),
    "offloaded": ("sft", {"activation_offloading": True}),
    "accumulating": ("sft", {"gradient_accumulation_steps": 2}),
    "sharded": ("sft", {"ranks": 2, "sharding": FULL}),
    "in halves": ("sft", {"ranks": 2, "sharding": FULL, "dtype": "bf16"}),
    "sharded and accumulating": ("sft", {"ranks": 2, "sharding": FULL, "gradient_accumulation_steps": 2}),
    "DDP": ("sft", {"ranks": 2, "sharding": ShardingSpec(strategy="NO_SHARD")}),
    "within nodes": (
        "sft",
        {"ranks": 4, "resources": ResourcesSpec(nodes=2), "sharding": ShardingSpec(strategy="HYBRID_SHARD")},
    ),
    "DPO": ("dpo", {}),
    "DPO with LoRA": ("dpo", {"lora": LORA}),
    "DPO on an adapter": (
        "dpo",
        {"lora": LORA, "adapter": AdapterSpec(model=str(Path("/adapter")), use="continue")},
    ),
    "DPO with another reference": (
        "dpo",
        {"method": DpoSpec(reference=reference_to(str(tiny_model(tied=False))))},
    ),
    "precomputed": ("dpo", {"method": DpoSpec(reference=ReferenceSpec(precompute=True))}),
    "precomputed by another": (
        "dpo",
        {"method": DpoSpec(reference=reference_to(str(tiny_model(tied=False)), precompute=True))},
    ),
    "ORPO": ("orpo", {"method": OrpoSpec()}),
    "KTO": ("kto", {"method": KtoSpec()}),
    "a reward model": ("reward", {"method": RewardSpec(), "padding_free": False}),
    "GRPO": ("grpo", {"method": GRPO}),
    "GRPO with a KL divergence": ("grpo", {"method": GRPO.model_copy(update={"beta": 0.1})}),
    "GRPO with fewer answers": ("grpo", {"method": GRPO.model_copy(update={"num_generations": 2})}),
}
"""Each with a key of its own, but for DDP."""
FAMILIES = ("bf16", "padded", "packed", "QAT", "QLoRA", "sharded", "DPO with another reference", "KTO", "GRPO")
"""In CI: rows, pairs and answers of the model; what each way to save memory reads."""


def job(root: Path, name: str) -> JobSpec:
    algorithm, changes = JOBS[name]
    return job_spec(root, tiny_model(), algorithm, **changes)


@pytest.fixture(scope="module")
def one_block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return other_model(tmp_path_factory.mktemp("models") / "one", num_hidden_layers=1)


@pytest.mark.parametrize("name", FAMILIES + in_full(*sorted(JOBS.keys() - FAMILIES)))
def test_a_trace_reads_no_field_that_its_key_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, one_block: Path
) -> None:
    plain = job(tmp_path, name).changed(model=str(one_block))
    parts = {name: recording(getattr(plain, name)) for name in JobSpec.parts()}
    spec = recording(plain.model_copy(update=parts), is_sharded=plain.is_sharded)
    kind = "cuda" if name in ("bf16", "padded") else "cpu"
    shards, why = num_shards(plain), mlp.why_whole(plain, kind)  # which are in the key
    monkeypatch.setattr(memory, "num_shards", lambda _: shards)
    monkeypatch.setattr(mlp, "why_whole", lambda *_: why)
    READ.clear()
    trace_model(spec, BATCH, kind)
    assert JobSpec.parts().keys() - {"lifecycle"} < READ
    assert not READ & (trace_cache._UNREAD | {"ranks", "sharding"})
    assert plain.flat().keys() >= trace_cache._UNREAD | trace_cache._IN_PART


def test_of_the_longest_rows_a_key_has_only_whether_networks_compute_in_tiles(tmp_path: Path) -> None:
    lengths = (512, mlp.LONG, mlp.LONG + 1)
    of = [key_of(job(tmp_path, "sft").changed(max_seq_length=length), BATCH, "cuda") for length in lengths]
    assert of[0] == of[1] != of[2]


def test_jobs_with_other_traces_have_other_keys(tmp_path: Path) -> None:
    keys = {name: key_of(job(tmp_path, name), BATCH, "cpu") for name in JOBS}
    assert keys.pop("DDP") == keys["sft"]  # whose ranks trace what one process does
    assert len(set(keys.values())) == len(keys), keys


def test_whole_gradients_and_their_shards_have_one_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = job(tmp_path, "sharded and accumulating")
    whole = spec.changed(gradient_sync="step")
    assert key_of(whole, BATCH, "cpu") == key_of(spec, BATCH, "cpu")
    of_shards = estimate(spec, BATCH, "cpu")
    monkeypatch.setattr(trace_cache, "trace_model", refuse)
    assert estimate(whole, BATCH, "cpu").gradients > of_shards.gradients
    found = trace(spec, BATCH, "cpu")
    assert [window.gradients for window in found.windows] == [4 * found.trainable] * 2  # all, throughout


def test_parts_in_cpu_memory_and_their_prefetching_are_not_traced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = job(tmp_path, "sharded")
    on_device = estimate(spec, BATCH, "cuda")
    monkeypatch.setattr(trace_cache, "trace_model", refuse)
    changes: list[dict[str, Any]] = [
        {"cpu_offload": True},
        {"forward_prefetch": True},
        {"backward_prefetch": "BACKWARD_PRE"},
        {"strategy": "SHARD_GRAD_OP"},
    ]
    found = [
        estimate(spec.model_copy(update={"sharding": FULL.model_copy(update=one)}), BATCH, "cuda") for one in changes
    ]
    assert found[0].total < on_device.total
    assert {one.activations for one in found} == {on_device.activations}
    with pytest.raises(AssertionError, match="traced again"):
        estimate(spec.model_copy(update={"ranks": 3}), BATCH, "cuda")


@pytest.mark.parametrize(
    "batch", [Batch(5, 24), Batch(4, 25), Batch(4, 24, ((0, (24,)), (3, (9, 8)))), Batch(4, 24, (), 7)]
)
def test_another_batch_has_another_key(tmp_path: Path, batch: Batch) -> None:
    spec = job(tmp_path, "sft")
    assert key_of(spec, batch, "cpu") != key_of(spec, BATCH, "cpu")


@pytest.mark.parametrize(
    "make",
    [
        lambda root: other_model(root, num_hidden_layers=3),
        lambda root: other_model(root, intermediate_size=64),
        lambda root: other_model(root, tie_word_embeddings=False),
        lambda root: other_model(root, sliding_window=8),
        lambda root: other_model(root, dtype="bfloat16"),
        stored_in_bf16,
    ],
)
def test_another_model_under_the_same_name_has_another_key(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    path = shutil.copytree(tiny_model(), tmp_path / "model")
    trained = job_spec(tmp_path, path)
    compared = job_spec(tmp_path, tiny_model(), "dpo", method=DpoSpec(reference=reference_to(str(path))))
    before = [key_of(spec, BATCH, "cpu") for spec in (trained, compared)]
    shutil.rmtree(path)
    make(path)
    after = [key_of(spec, BATCH, "cpu") for spec in (trained, compared)]
    assert len({*before, *after}) == 4


def test_devices_on_which_attention_is_kept_and_computed_again_have_two_keys(tmp_path: Path) -> None:
    spec = job(tmp_path, "recomputed")
    for option, expected in (("always", 2), ("never", 1)):
        kept = spec.changed(keep_attention=option)
        assert len({key_of(kept, BATCH, device) for device in ("cpu", "mps")}) == expected


def test_another_device_kernel_package_release_or_variable_has_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = job(tmp_path, "sft")
    keys = [key_of(spec, BATCH, device) for device in ("cpu", "cuda:1")]
    assert key_of(spec, BATCH, "cuda:0") == keys[1]
    for place, name, value in (
        (trace_cache, "_CODE", "another release"),
        (trace_cache, "_PACKAGES", [*trace_cache._PACKAGES, "kernels-0.11.1.dist-info 0"]),
        (trace_cache, "num_shards", lambda spec: 7),
        (trl_patches, "choose_head_kernels", None),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(place, name, value)
            if value is None:
                import trl.kernels.chunked_logprob as kernels

                changed.setattr(kernels, "_use_triton", trl_patches._never)
            keys.append(key_of(spec, BATCH, "cpu"))
    monkeypatch.setenv("USE_HUB_KERNELS", "1")
    keys.append(key_of(spec, BATCH, "cpu"))
    assert len(set(keys)) == 7


def test_what_the_key_knows_of_the_installation_is_its_files() -> None:
    assert any(entry.startswith("torch-") for entry in trace_cache._PACKAGES)
    assert any(entry.startswith("transformers-") for entry in trace_cache._PACKAGES)
    assert trace_cache._digest_of_code() == trace_cache._CODE


def test_a_visible_gpu_has_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, keys = job(tmp_path, "sft"), []
    for sees in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda sees=sees: sees)
        keys.append(key_of(spec, BATCH, "cpu"))
    assert keys[0] != keys[1]


def test_what_the_key_knows_of_an_editable_package_are_its_python_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, site = tmp_path / "a checkout", tmp_path / "site"
    (site / "edited-1.0.dist-info").mkdir(parents=True)
    for place in ("src/edited", ".git", "env/lib"):
        (source / place).mkdir(parents=True)
        (source / place / "module.py").write_text("a = 1")
    (source / "env" / "pyvenv.cfg").touch()
    file = site / "edited-1.0.dist-info" / "direct_url.json"
    given = {"url": source.as_uri(), "dir_info": {"editable": True}}
    file.write_text(json.dumps(given))
    monkeypatch.syspath_prepend(site)
    first = trace_cache._installed()
    for name in (".git/module.py", "env/lib/module.py", "src/edited/notes.txt"):
        (source / name).write_text("another one")
    assert trace_cache._installed() == first
    (source / "src" / "edited" / "module.py").write_text("a = 12")
    second = trace_cache._installed()
    os.utime(source / "src" / "edited" / "module.py", (0, 0))
    third = trace_cache._installed()
    (source / "src" / "edited" / "other.py").touch()
    found = [first, second, third, trace_cache._installed()]
    assert len({json.dumps(one) for one in found}) == 4
    again = importlib.util.spec_from_file_location(f"{trace_cache.__name__}_again", trace_cache.__file__)
    assert again is not None
    assert again.loader is not None
    imported = importlib.util.module_from_spec(again)
    again.loader.exec_module(imported)  # as a training does where there is such a package
    assert found[-1] == imported._PACKAGES
    for text in ("", "[]", json.dumps({**given, "dir_info": {}}), json.dumps({**given, "url": "https://a/b"})):
        file.write_text(text)
        assert not any(one.startswith("edited-1.0.dist-info") and len(one) > 80 for one in trace_cache._installed())


def test_a_later_job_and_the_same_model_elsewhere_have_the_same_key(tmp_path: Path) -> None:
    copied = shutil.copytree(tiny_model(), tmp_path / "elsewhere")
    later = job_spec(
        tmp_path,
        copied,
        job_uuid="later",
        output_name="later",
        seed=7,
        n_epochs=3,
        save_steps=1,
        optimizer=OptimizerSpec(learning_rate=0.1, name="sgd"),
        rows=[{"prompt": "a", "completion": "b"}],
    )
    assert key_of(later, BATCH, "cpu") == key_of(job(tmp_path, "sft"), BATCH, "cpu") is not None


@pytest.mark.parametrize("name", ["sft", "LoRA", "sharded", "precomputed by another"])
def test_what_is_found_is_what_was_traced(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = job(tmp_path, name)
    traced, estimated = trace(spec, BATCH, "cpu"), estimate(spec, BATCH, "cpu")
    assert traced == trace_model(spec, BATCH, "cpu")
    forget()
    monkeypatch.setattr(trace_cache, "trace_model", refuse)
    assert (trace(spec, BATCH, "cpu"), estimate(spec, BATCH, "cpu")) == (traced, estimated)


def test_a_model_with_code_of_its_own_is_traced_each_time(tmp_path: Path) -> None:
    spec = job(tmp_path, "sft").changed(trust_remote_code=True)
    trace(spec, BATCH, "cpu")
    assert (key_of(spec, BATCH, "cpu"), files(spec)) == (None, [])


def test_nothing_is_kept_where_the_job_keeps_no_rows(tmp_path: Path) -> None:
    trace(job(tmp_path, "sft").changed(token_cache=None), BATCH, "cpu")
    assert not list(tmp_path.rglob("traces"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def change_a_number(path: Path) -> None:
    path.write_text(path.read_text().replace('"trainable": 1', '"trainable": 2'))


def sign_another_form(path: Path) -> None:
    path.write_text(json.dumps({"trace": {"trainable": "many"}, "sha256": json_digest({"trainable": "many"})}))


def _sign(path: Path, trainable: int) -> None:
    values = {**json.loads(path.read_text())["trace"], "trainable": trainable}
    path.write_text(json.dumps({"trace": values, "sha256": json_digest(values)}))


def sign_fewer_than_none(path: Path) -> None:
    _sign(path, -5)


def sign_no_number(path: Path) -> None:
    values = json.loads(path.read_text())["trace"]
    values["windows"][0]["activations"] = float("nan")
    path.write_text(json.dumps({"trace": values, "sha256": json_digest(values)}))


def nest(path: Path) -> None:
    path.write_text('{"trace": ' + "[" * 20_000)


def link(path: Path) -> None:
    path.rename(path.with_suffix(".away"))
    path.symlink_to(path.with_suffix(".away"))


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "damage", [truncate, change_a_number, sign_another_form, sign_fewer_than_none, sign_no_number, nest, link, fifo]
)
def test_a_damaged_file_is_replaced(
    tmp_path: Path, damage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = job(tmp_path, "sft")
    traced = trace(spec, BATCH, "cpu")
    (kept,) = files(spec)
    damage(kept)
    forget()
    assert trace(spec, BATCH, "cpu") == traced
    assert kept.is_file()
    assert not kept.is_symlink()
    forget()
    monkeypatch.setattr(trace_cache, "trace_model", refuse)
    assert trace(spec, BATCH, "cpu") == traced


@pytest.mark.parametrize("in_the_way", ["tokens", "tokens/traces"])
def test_a_directory_that_cannot_be_used_is_done_without(tmp_path: Path, in_the_way: str) -> None:
    spec = job(tmp_path, "sft")
    (tmp_path / in_the_way).parent.mkdir(exist_ok=True)
    (tmp_path / in_the_way).write_text("a file")
    assert trace(spec, BATCH, "cpu") == trace_model(spec, BATCH, "cpu")


def test_a_writer_that_is_killed_leaves_no_part_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = job(tmp_path, "sft")
    traced = trace(spec, BATCH, "cpu")
    (kept,) = files(spec)
    kept.unlink()
    pid = os.fork()
    if pid == 0:
        # Between two writes of the file, and before it has its name.
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        trace_cache._write(kept, traced)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    (part,) = kept.parent.iterdir()
    part.write_bytes(part.read_bytes()[:50])
    forget()
    assert trace(spec, BATCH, "cpu") == traced
    assert sorted(kept.parent.iterdir()) == sorted([part, kept])
    os.utime(part, (0, 0))
    trace(spec, replace(BATCH, tokens=30), "cpu")
    assert not part.exists()


def test_the_files_that_were_not_used_for_longest_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_cache, "KEEP_FILES", 3)
    traced = trace_model(job(tmp_path, "sft"), BATCH, "cpu")
    paths = [tmp_path / "traces" / f"{number}.json" for number in range(5)]
    for age, path in enumerate(paths[:3]):
        trace_cache._write(path, traced)
        os.utime(path, (1000 + age, 1000 + age))
    assert trace_cache._read(paths[0]) == traced  # which now was used last
    for path in paths[3:]:
        trace_cache._write(path, traced)
    assert sorted((tmp_path / "traces").iterdir()) == [paths[0], *paths[3:]]


def test_a_resumed_attempt_and_a_later_job_trace_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Batch] = []

    def counting(spec: JobSpec, batch: Batch, kind: str) -> Traced:
        traced.append(batch)
        return trace_model(spec, batch, kind)

    monkeypatch.setattr(trace_cache, "trace_model", counting)
    monkeypatch.setattr(training, "shared_traces", nullcontext)
    spec = job_spec(tmp_path, tiny_model(), save_steps=1)
    status, events = run(tmp_path / "first", spec, estimates=True)
    assert (status, len(traced)) == (0, 1)
    forget()
    saved = of_kind(events, CheckpointSaved)[0].path
    status, resumed = run(tmp_path / "second", spec, resume_from=saved, estimates=True)
    forget()
    later = spec.changed(job_uuid="later", checkpoint_dir=tmp_path / "later", dataset=dataset(tmp_path, _shuffled()))
    last = run(tmp_path / "third", later, estimates=True)
    assert (status, last[0], len(traced)) == (0, 0, 1)
    memory = [of_kind(one, Prepared)[0].effective["memory"] for one in (events, resumed, last[1])]
    assert [one["largest_batch"] for one in memory] == [memory[0]["largest_batch"]] * 3
    assert [one["activations_bytes"] for one in memory] == [memory[0]["activations_bytes"]] * 3


def _shuffled() -> list[dict[str, Any]]:
    from tests.training import SFT_ROWS

    return SFT_ROWS[::-1]
