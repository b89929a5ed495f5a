"""What a job leaves behind is the model that was trained, and a fault on the way is found before it is announced."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel

from llama_stack_provider_trl import faults
from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.build import load_policy
from llama_stack_provider_trl.recipes.checkpoint import export as exporting
from llama_stack_provider_trl.recipes.checkpoint import step as checkpoints
from llama_stack_provider_trl.recipes.checkpoint import weights
from llama_stack_provider_trl.recipes.checkpoint.export import export, take_sample
from llama_stack_provider_trl.recipes.model.loading import DTYPES, load_adapter
from llama_stack_provider_trl.recipes.model.saving import try_exports
from llama_stack_provider_trl.specs.events import CheckpointSaved, Failed, Progress, Reason, Warned
from llama_stack_provider_trl.specs.job import Dtype, JobSpec, OptimizerSpec, QatSpec, ShardingSpec
from tests.process.architectures import ARCHITECTURES, SIZES
from tests.process.waiting import until
from tests.ranks import Ranks
from tests.required import in_full
from tests.tiny import VOCABULARY, tiny_model, tiny_tokenizer
from tests.training import LORA, job_spec, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
DORA = LORA.model_copy(update={"use_dora": True})
IDS = torch.arange(3, 23)[None]


def built(architecture: str, path: Path) -> PreTrainedModel:
    """A random model of an architecture, loaded from a directory as every model is that we train."""
    config = AutoConfig.for_model(architecture, **ARCHITECTURES[architecture])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():  # fresh norms and biases are all alike: a mixed-up one would not show
            weight += 0.05 * torch.randn_like(weight)
    return model


def exported(model: Any, kind: Any, spec: JobSpec) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(spec.source.model)
    saved = export(kind, model, tokenizer, spec, take_sample(model, tokenizer, torch.device("cpu"), spec))
    assert saved is not None
    assert saved.logits_difference is not None
    assert saved.logits_difference <= 0.1 * exporting.ROUNDING[spec.compute.dtype]
    return saved.path


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float()


def state(path: Path) -> dict[str, torch.Tensor]:
    return {name: weight for file in sorted(path.glob("*.safetensors")) for name, weight in load_file(file).items()}


def test_weights_are_hashed_by_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together, digest = threading.Barrier(2, timeout=20), weights.digest

    def in_pairs(weight: torch.Tensor) -> weights.Weight:
        together.wait()
        return digest(weight)

    model: Any = LlamaForCausalLM(AutoConfig.for_model("llama", **SIZES, tie_word_embeddings=True))
    assert len(list(model.parameters())) % 2 == 0  # every one of them meets another
    monkeypatch.setattr(weights, "digest", in_pairs)
    written = weights.write_weights(model, tmp_path, torch.float32)
    assert weights.differences(written, tmp_path, "model.safetensors") == []


@pytest.mark.parametrize("architecture", sorted({"gpt2", "qwen2", "deepseek_v3", *in_full(*ARCHITECTURES)}))
def test_the_files_are_those_of_save_pretrained_and_load_into_equal_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    monkeypatch.setattr(weights, "FILE_BYTES", 20_000)
    model = built(architecture, tmp_path / "base")
    found = exported(model, "final", job_spec(tmp_path, tmp_path / "base"))
    assert len(list(found.glob("*.safetensors"))) > 2
    model.save_pretrained(tmp_path / "plain")
    expected = state(tmp_path / "plain")
    assert state(found).keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in state(found).items())
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(found)), logits(model))


@pytest.mark.parametrize("kind", ["final", "merged"])
def test_a_head_that_differs_from_the_embeddings_is_exported_as_untied(tmp_path: Path, kind: Any) -> None:
    base = Path(shutil.copytree(tiny_model(tied=True), tmp_path / "base"))
    weights = load_file(base / "model.safetensors")
    weights["lm_head.weight"] = torch.randn_like(weights["model.embed_tokens.weight"])
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    assert json.loads((base / "config.json").read_text())["tie_word_embeddings"] is True
    spec = job_spec(tmp_path, base, lora=LORA if kind == "merged" else None)
    warnings: list[str] = []
    policy = load_policy(spec, torch.device("cpu"), warnings.append)
    (warning,) = warnings
    assert "has tie_word_embeddings true, and in its files lm_head.weight differs from model.embed_tokens" in warning
    model: Any = policy.model if policy.adapters is None else get_peft_model(policy.model, policy.adapters)
    model.tie_weights()  # as accelerate does
    found = exported(model, kind, spec)
    assert json.loads((found / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(state(found)["lm_head.weight"], weights["lm_head.weight"])
    again = AutoModelForCausalLM.from_pretrained(found)
    again.tie_weights()  # as its configuration has it
    assert torch.equal(again.lm_head.weight, weights["lm_head.weight"])
    assert torch.allclose(logits(again), logits(model), atol=1e-5)
    if kind == "merged":
        assert load_adapter(spec, exported(model, "final", spec)).get_base_model().config.tie_word_embeddings is False


@pytest.mark.parametrize("equal", [True, False], ids=["an equal head in the files", "no head in the files"])
def test_a_tied_head_stays_tied(tmp_path: Path, equal: bool) -> None:
    base = Path(shutil.copytree(tiny_model(tied=True), tmp_path / "base"))
    weights = load_file(base / "model.safetensors")
    head = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()} if equal else {}
    save_file({**weights, **head}, base / "model.safetensors", {"format": "pt"})
    spec = job_spec(tmp_path, base)
    policy = load_policy(spec, torch.device("cpu"), pytest.fail)
    found = exported(policy.model, "final", spec)
    assert json.loads((found / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in state(found)


@pytest.mark.parametrize("architecture", ["mixtral", "deepseek_v3"])
def test_in_bf16_it_is_half_the_size_and_reports_it_in_its_configuration(tmp_path: Path, architecture: str) -> None:
    model = built(architecture, tmp_path / "base")
    found = exported(model, "final", job_spec(tmp_path, tmp_path / "base", dtype="bf16"))
    assert not (found / "model.safetensors.index.json").exists()
    kept = [name for name, weight in state(found).items() if weight.dtype != torch.bfloat16]
    assert all("e_score_correction_bias" in name for name in kept)  # what the architecture keeps in fp32
    assert bool(kept) == (architecture == "deepseek_v3")
    assert AutoModelForCausalLM.from_pretrained(found).dtype == torch.bfloat16


@pytest.mark.parametrize("of_base", ["bf16", "fp16", "fp32"])
def test_a_merged_model_is_written_in_the_numbers_of_its_base_and_its_adapter_says_what_it_is(
    tmp_path: Path, of_base: Dtype
) -> None:
    base = built("qwen2", tmp_path / "base").to(DTYPES[of_base])
    base.save_pretrained(tmp_path / "base")
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])
    model = get_peft_model(base.float(), config)
    spec = job_spec(tmp_path, tmp_path / "base", lora=LORA, merge_adapter=True, dtype="fp32")
    tokenizer = AutoTokenizer.from_pretrained(spec.source.model)
    sample = take_sample(model, tokenizer, torch.device("cpu"), spec)
    merged, final = (export(kind, model, tokenizer, spec, sample) for kind in ("merged", "final"))
    assert merged is not None
    assert final is not None
    assert {weight.dtype for weight in state(merged.path).values()} == {DTYPES[of_base]}
    assert AutoModelForCausalLM.from_pretrained(merged.path).dtype == DTYPES[of_base]
    card = (final.path / "README.md").read_text()
    assert "[More Information Needed]" not in card
    assert f"An adapter of `{'/'.join((tmp_path / 'base').parts[-2:])}`" in card
    assert str(tmp_path) not in card
    assert f"| rank | `{LORA.rank}` |" in card


@pytest.mark.parametrize(
    ("architecture", "modules", "use_dora"),
    [
        ("qwen2", ["q_proj", "v_proj", "up_proj"], True),
        ("gpt2", ["c_attn", "c_fc"], False),
        ("gpt2", ["c_attn", "c_fc"], True),
        ("mixtral", ["q_proj", "o_proj"], False),
    ],
)
def test_adapters_are_merged_as_peft_merges_them(
    tmp_path: Path, architecture: str, modules: list[str], use_dora: bool
) -> None:
    base = built(architecture, tmp_path / "base")
    base.save_pretrained(tmp_path / "base")
    config = LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=modules, use_dora=use_dora, fan_in_fan_out=architecture == "gpt2"
    )
    model = get_peft_model(base, config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    spec = job_spec(tmp_path, tmp_path / "base", lora=LORA, merge_adapter=True)
    final, merged = exported(model, "final", spec), exported(model, "merged", spec)
    assert {path.name for path in final.iterdir()} >= {"adapter_model.safetensors", "adapter_config.json"}
    found = AutoModelForCausalLM.from_pretrained(merged)
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), final)
    assert torch.equal(logits(plain), logits(model))
    expected = plain.merge_and_unload().state_dict()
    assert all(torch.allclose(weight, expected[name], atol=1e-6) for name, weight in found.state_dict().items())


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2"])
def test_factors_of_outputs_are_merged_into_biases_too(tmp_path: Path, architecture: str) -> None:
    base = built(architecture, tmp_path / "base")
    base.save_pretrained(tmp_path / "base")
    modules = ["q_proj", "v_proj", "down_proj"] if architecture == "qwen2" else ["c_attn", "c_fc"]
    model = get_peft_model(
        base,
        IA3Config(
            task_type="CAUSAL_LM",
            target_modules=modules,
            feedforward_modules=modules[-1:],
            fan_in_fan_out=architecture == "gpt2",
        ),
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "ia3_l" in name:
                weight.normal_(mean=1.0, std=0.3)
    spec = job_spec(tmp_path, tmp_path / "base", lora=LORA, merge_adapter=True)
    final, merged = exported(model, "final", spec), exported(model, "merged", spec)
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), final)
    assert torch.equal(logits(plain), logits(model))
    expected = plain.merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(merged).state_dict()
    assert all(torch.allclose(weight, expected[name], atol=1e-6) for name, weight in found.items())


# Faults


def flipped(path: Path) -> None:
    file = next(path.glob("*.safetensors"))
    with open(file, "r+b") as data:
        data.seek(-2, 2)
        (byte,) = data.read(1)
        data.seek(-2, 2)
        data.write(bytes([byte ^ 1]))


def truncated(path: Path) -> None:
    file = next(path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


def without_a_weight(path: Path) -> None:
    file = next(path.glob("*.safetensors"))
    save_file(dict(list(load_file(file).items())[1:]), file, metadata={"format": "pt"})


def in_another_dtype(path: Path) -> None:
    file = next(path.glob("*.safetensors"))
    save_file({name: weight.half() for name, weight in load_file(file).items()}, file, metadata={"format": "pt"})


def with_a_head_of_its_own(path: Path) -> None:
    file = next(path.glob("*.safetensors"))
    found = load_file(file)
    head = torch.randn_like(found["model.embed_tokens.weight"])
    save_file({**found, "lm_head.weight": head}, file, metadata={"format": "pt"})


def configured(name: str, **changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        config = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps({**config, **changes}))

    return change


def without_chat_template(path: Path) -> None:
    (path / "chat_template.jinja").unlink()


def without_configuration(path: Path) -> None:
    (path / "config.json").unlink()


def with_swapped_words(path: Path) -> None:
    text = (path / "tokenizer.json").read_text()
    (path / "tokenizer.json").write_text(text.replace('"e":', '"?":').replace('"x":', '"e":').replace('"?":', '"x":'))


FAULTS: list[Any] = [
    pytest.param(flipped, "1 of 20 weights are not what was trained: .* has other values", {}, id="flipped"),
    pytest.param(flipped, "weights are not what was trained: .* has other values", {"lora": LORA}, id="adapter"),
    pytest.param(truncated, "cannot be read", {}, id="truncated"),
    pytest.param(without_a_weight, "is not there", {}, id="missing"),
    pytest.param(in_another_dtype, "is torch.float16 .* and not torch.float32", {}, id="dtype"),
    pytest.param(with_a_head_of_its_own, "lm_head.weight is there and should not be", {}, id="head"),
    pytest.param(
        configured("config.json", tie_word_embeddings=False), "other weights than .* lm_head.weight", {}, id="untied"
    ),
    pytest.param(configured("config.json", rms_norm_eps=3.0), "gives other logits than", {}, id="configuration"),
    pytest.param(configured("config.json", hidden_size=32), "cannot be loaded", {}, id="sizes"),
    pytest.param(without_configuration, "cannot be loaded", {}, id="no-configuration"),
    pytest.param(
        configured("adapter_config.json", lora_alpha=4000), "gives other logits than", {"lora": LORA}, id="alpha"
    ),
    pytest.param(without_chat_template, "its chat template is not the one", {}, id="template"),
    pytest.param(with_swapped_words, "its tokenizer gives other tokens", {}, id="tokenizer"),
]


@pytest.mark.parametrize(("fault", "reported", "changes"), FAULTS)
def test_a_fault_in_what_was_written_is_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Path], None],
    reported: str,
    changes: dict[str, Any],
) -> None:
    spec = job_spec(tmp_path, tiny_model(), **changes)
    policy = load_policy(spec, torch.device("cpu"), pytest.fail)
    model: Any = policy.model if policy.adapters is None else get_peft_model(policy.model, policy.adapters)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    with_fault(monkeypatch, spec, fault)
    with pytest.raises(JobFailure, match=reported) as failed:
        exported(model, "final", spec)
    assert failed.value.reason is Reason.export_failed


def with_fault(monkeypatch: pytest.MonkeyPatch, spec: JobSpec, fault: Callable[[Path], None]) -> None:
    """Have something happen to an export when it is written."""

    def reach(point: str) -> None:
        if point == "written-final":
            fault(spec.checkpoint_dir / "final.tmp")

    monkeypatch.setattr(faults, "reach", reach)


def test_an_export_with_a_fault_fails_the_job_and_is_not_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = job_spec(tmp_path, tiny_model(), max_steps_per_epoch=2, save_steps=1)
    with_fault(monkeypatch, spec, flipped)
    status, events = run(tmp_path, spec)
    (failed,) = of_kind(events, Failed)
    assert (status, failed.reason) == (1, Reason.export_failed)
    assert "1 of 20 weights are not what was trained" in failed.message
    assert [event.kind for event in of_kind(events, CheckpointSaved)] == ["step"]
    assert {path.name for path in spec.checkpoint_dir.iterdir()} == {"checkpoint-1", "latest"}


def test_a_fault_of_our_own_in_gathering_the_head_shows_in_the_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(weight: torch.Tensor, dtype: Any = None) -> torch.Tensor:
        return weight.detach().roll(1, 0) if len(weight) == VOCABULARY else weight.detach()

    monkeypatch.setattr(weights, "gather", gather)
    _, events = run(tmp_path, job_spec(tmp_path, tiny_model(tied=False), max_steps_per_epoch=1))
    (failed,) = of_kind(events, Failed)
    assert failed.reason is Reason.export_failed
    assert "gives other logits than the trained model: they differ by 1." in failed.message


def test_a_model_that_the_last_step_ruined_is_not_exported(tmp_path: Path) -> None:
    optimizer = OptimizerSpec(learning_rate=1e38, max_grad_norm=0.0)
    _, events = run(tmp_path, job_spec(tmp_path, tiny_model(), max_steps_per_epoch=1, optimizer=optimizer))
    (failed,) = of_kind(events, Failed)
    assert failed.reason is Reason.diverged
    assert "nothing worth exporting" in failed.message
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_model_too_large_to_be_loaded_again_has_its_weights_compared_and_the_record_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "available_memory", lambda: 1000)
    status, events = run(tmp_path, job_spec(tmp_path, tiny_model(), max_steps_per_epoch=1))
    assert status == 0
    (saved,) = of_kind(events, CheckpointSaved)
    assert (saved.verified, saved.logits_difference) == ("weights", None)
    assert any("its logits were not" in warning.message for warning in of_kind(events, Warned))


@pytest.mark.parametrize("merge_adapter", [False, True])
def test_room_for_the_exports_is_looked_for_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merge_adapter: bool
) -> None:
    spec = job_spec(tmp_path, tiny_model(), lora=LORA, merge_adapter=merge_adapter, max_steps_per_epoch=1)
    # The adapter, its moments and the adapter again take 0.2 MB, the merged model 0.5 MB.
    monkeypatch.setattr(checkpoints, "free_bytes", lambda path: 400_000)
    _, events = run(tmp_path, spec)
    assert [event.reason for event in of_kind(events, Failed)] == ([Reason.disk_full] if merge_adapter else [])
    assert bool(of_kind(events, Progress)) != merge_adapter


def test_a_tokenizer_that_does_not_survive_being_saved_is_refused_before_training(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model(), model)
    config = json.loads((model / "config.json").read_text())
    kinds = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (model / "config.json").write_text(json.dumps({**config, **kinds}))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{{ messages }}"
    try_exports(job_spec(tmp_path, tiny_model()), tokenizer, pytest.fail)
    with pytest.raises(JobFailure, match="loaded again, as at the end of a job, and its tokenizer gives other tokens"):
        try_exports(job_spec(tmp_path, model), tiny_tokenizer(), pytest.fail)


# Several ranks


SHARDED = [
    pytest.param("FULL_SHARD", {"tied": True}, ["final"], id="tied"),
    pytest.param("SHARD_GRAD_OP", {"tied": False, "dtype": "bf16"}, ["final"], id="untied-bf16"),
    pytest.param("FULL_SHARD", {"lora": DORA, "merge_adapter": True}, ["final", "merged"], id="dora"),
    *in_full(
        pytest.param("NO_SHARD", {"tied": True}, ["final"], id="ddp"),
        pytest.param(
            "FULL_SHARD", {"lora": LORA, "merge_adapter": True, "dtype": "bf16"}, ["final", "merged"], id="lora"
        ),
    ),
]


def shared_job(root: Path, strategy: str, **changes: Any) -> JobSpec:
    model = tiny_model(tied=changes.pop("tied", True))
    return job_spec(
        root, model, ranks=2, sharding=ShardingSpec(strategy=strategy), batch_size=2, max_steps_per_epoch=2, **changes
    )


@pytest.mark.parametrize(("strategy", "changes", "kinds"), SHARDED)
def test_what_two_ranks_trained_is_written_in_parts_and_loads_into_equal_logits(
    ranks: Ranks, tmp_path: Path, strategy: str, changes: dict[str, Any], kinds: list[str]
) -> None:
    spec = shared_job(tmp_path, strategy, **changes)
    codes, events = ranks.run(tmp_path / "run", spec, constants={"checkpoint.weights.FILE_BYTES": 100_000})
    assert codes == [0, 0], [event.message for event in of_kind(events, Failed)]
    saved = of_kind(events, CheckpointSaved)
    assert [(event.kind, event.verified) for event in saved] == [(kind, "logits") for kind in kinds]
    assert all((event.logits_difference or 0.0) < (2e-6 if spec.compute.dtype == "fp32" else 0.02) for event in saved)
    whole = spec.checkpoint_dir / kinds[-1]
    assert len(list(whole.glob("model-*-of-*.safetensors"))) > 2
    found = AutoModelForCausalLM.from_pretrained(whole)
    assert found.config.use_cache
    tied = found.get_output_embeddings().weight is found.get_input_embeddings().weight
    assert tied == found.config.tie_word_embeddings == changes.get("tied", True)
    assert ("lm_head.weight" in state(whole)) != tied
    assert AutoTokenizer.from_pretrained(whole).chat_template == tiny_tokenizer().chat_template


def test_a_weight_that_is_flipped_on_the_disk_fails_a_job_of_two_ranks(
    ranks: Ranks, armed: Path, tmp_path: Path
) -> None:
    spec = shared_job(tmp_path, "FULL_SHARD", save_steps=1)

    def flip() -> None:
        until(lambda: (armed / "written-final.taken").exists(), 60)
        flipped(spec.checkpoint_dir / "final.tmp")
        (armed / "written-final.go").touch()

    (armed / "written-final").write_text("hold")
    thread = threading.Thread(target=flip)
    thread.start()
    codes, events = ranks.run(tmp_path / "run", spec)
    thread.join()
    assert codes[0] == 1
    assert of_kind(events, Failed)[0].reason is Reason.export_failed
    assert "1 of 20 weights are not what was trained" in of_kind(events, Failed)[0].message
    assert {path.name for path in spec.checkpoint_dir.iterdir()} == {"checkpoint-1", "latest"}


def test_quantization_aware_training_has_a_tolerance_of_its_own(tmp_path: Path) -> None:
    plain = job_spec(tmp_path, tiny_model(), dtype="bf16")
    quantizer = QatSpec(quantizer_name="Int8DynActInt4WeightQATQuantizer", group_size=32)
    assert exporting.explained_by_rounding(plain, "final") == 0.1
    assert exporting.explained_by_rounding(plain.changed(qat=quantizer), "final") == pytest.approx(0.3)
