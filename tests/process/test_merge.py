"""`trl-remote merge`: merged models and adapters, against PEFT and computations written out here."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.checkpoint import merge as merging
from llama_stack_provider_trl.recipes.checkpoint.merge import merge
from llama_stack_provider_trl.recipes.checkpoint.merge_methods import seeded, slerp
from llama_stack_provider_trl.specs.merge import (
    ADAPTER_METHODS,
    MODEL_METHODS,
    PRUNING_METHODS,
    MergeInput,
    MergeSpec,
)
from llama_stack_provider_trl.specs.model_source import ModelSource
from llama_stack_provider_trl.system.files import MANIFEST, write_manifest
from llama_stack_provider_trl_remote.cli.main import main
from tests.process.forked_recipes import fork_recipes
from tests.required import IN_FULL
from tests.tiny import tiny_model

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
Weights = dict[str, torch.Tensor]
MODELS = 3


@pytest.fixture(scope="module")
def base() -> Path:
    return tiny_model()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, base: Path) -> list[Path]:
    """Models with the weights of `base`, changed at random."""
    made = []
    for number in range(MODELS):
        torch.manual_seed(number)
        path = tmp_path_factory.mktemp("models") / f"model-{number}"
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        with torch.no_grad():
            for weight in model.parameters():
                weight += torch.randn_like(weight) * 0.1
        model.save_pretrained(path)
        AutoTokenizer.from_pretrained(base).save_pretrained(path)
        made.append(path)
    return made


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, base: Path) -> list[Path]:
    made = []
    for number in range(MODELS):
        torch.manual_seed(number)
        modules = ["q_proj", "v_proj"] if number < 2 else ["q_proj"]
        config = LoraConfig(
            r=4, lora_alpha=4 * (number + 1), target_modules=modules, task_type="CAUSAL_LM", use_rslora=number == 1
        )
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_" in name:
                    weight.normal_()
        path = tmp_path_factory.mktemp("adapters") / f"adapter-{number}"
        model.save_pretrained(path)
        made.append(path)
    return made


def spec(inputs: list[Path], weights: list[float], output: Path, base: str | None = None, **given: Any) -> MergeSpec:
    source = None if base is None else ModelSource(model=base)
    named = tuple(MergeInput(model=str(path), weight=weight) for path, weight in zip(inputs, weights, strict=True))
    return MergeSpec(inputs=named, output=output, base=source, **given)


def values(path: Path, name: str = "model.safetensors") -> Weights:
    return load_file(path / name)


def largest(tensor: torch.Tensor, density: float) -> torch.Tensor:
    """The tensor with its largest values only."""
    kept = tensor.abs().flatten().argsort(descending=True)[: int(density * tensor.numel())]
    mask = torch.zeros(tensor.numel())
    mask[kept] = 1
    return tensor * mask.view(tensor.shape)


def elected(differences: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    """TIES after its pruning: the weighted mean of those that have the sign of the sum."""
    stacked = torch.stack(differences)
    sign = torch.where(stacked.sum(dim=0) >= 0, 1.0, -1.0)
    agree = (stacked.sign() == sign).float()
    weighted = stacked * torch.tensor(weights).view(-1, *[1] * (stacked.dim() - 1))
    return (weighted * agree).sum(dim=0) / agree.sum(dim=0).clamp(min=1)


def expected_of(method: str, name: str, tensors: list[torch.Tensor], of_base: torch.Tensor) -> torch.Tensor:
    weights = [0.5, 1.5, 2.0]
    if method == "linear":
        return sum((tensor * weight / 4 for tensor, weight in zip(tensors, weights, strict=True)), of_base * 0)
    differences = [tensor - of_base for tensor in tensors]
    if method == "ties":
        return of_base + elected([largest(one, 0.3) for one in differences], weights)
    with seeded(7, name):
        masks = [torch.bernoulli(torch.full_like(one, 0.3)) for one in differences]
    dropped = [one * mask / 0.3 for one, mask in zip(differences, masks, strict=True)]
    if method == "dare_ties":
        return of_base + elected(dropped, weights)
    return of_base + sum((one * weight for one, weight in zip(dropped, weights, strict=True)), of_base * 0)


@pytest.mark.parametrize("method", ["linear", "ties", "dare_linear", "dare_ties"])
def test_merged_models_have_the_weights_of_the_papers_formulas(
    method: str, models: list[Path], base: Path, tmp_path: Path
) -> None:
    given: dict[str, Any] = {} if method == "linear" else {"base": str(base), "density": 0.3, "seed": 7}
    found = merge(spec(models, [0.5, 1.5, 2.0], tmp_path / "merged", method=method, **given))
    merged, before, read = values(tmp_path / "merged"), values(base), [values(path) for path in models]
    assert merged.keys() == before.keys()
    for name, weight in merged.items():
        expected = expected_of(method, name, [one[name] for one in read], before[name])
        assert (weight - expected).abs().max() < 1e-6, name
    assert found == {
        "kind": "model",
        "tensors": len(merged),
        "parameters": sum(weight.numel() for weight in merged.values()),
        "bytes": sum(weight.nbytes for weight in merged.values()),
    }
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert loaded(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
    record = json.loads((tmp_path / "merged" / "merge.json").read_text())
    assert [one["weight"] for one in record["inputs"]] == [0.5, 1.5, 2.0]


def test_slerp_goes_along_the_arc(models: list[Path], tmp_path: Path) -> None:
    merge(spec(models[:2], [1, 3], tmp_path / "merged", method="slerp"))
    one, other, merged = values(models[0]), values(models[1]), values(tmp_path / "merged")
    for name, weight in merged.items():
        a, b = one[name].double().flatten(), other[name].double().flatten()
        angle = math.acos(float(a @ b / (a.norm() * b.norm())))
        expected = (math.sin(0.25 * angle) * a + math.sin(0.75 * angle) * b) / math.sin(angle)
        assert (weight.flatten() - expected).abs().max() < 1e-6, name
    parallel = torch.tensor([1.0, 2.0])
    assert torch.equal(slerp(parallel, 3 * parallel, 0.5), 2 * parallel)
    assert torch.equal(slerp(parallel, 0 * parallel, 0.5), parallel / 2)


@pytest.mark.parametrize("method", ["linear", "cat", "ties", "dare_linear"])
def test_merged_adapters_equal_pefts(method: str, adapters: list[Path], base: Path, tmp_path: Path) -> None:
    density = 0.5 if method == "ties" else 1.0  # of 1, DARE chooses all
    given = {} if method in ("linear", "cat") else {"density": density}
    weights = [0.7, -0.4, 1.1]
    merge(spec(adapters, weights, tmp_path / "merged", method=method, **given))
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapters[0], adapter_name="a")
    for name, path in zip("bc", adapters[1:], strict=True):
        model.load_adapter(path, adapter_name=name)
    with pytest.warns(match="density") if method == "dare_linear" else _nothing():
        model.add_weighted_adapter(list("abc"), weights, "merged", method, density=given.get("density"))
    found = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "merged")
    compared = 0
    for name, module in model.named_modules():
        if "merged" not in getattr(module, "lora_A", {}):
            continue
        other = found.get_submodule(name)
        expected, merged = module.get_delta_weight("merged"), other.get_delta_weight("default")
        assert (merged - expected).abs().max() < 1e-6 * max(1, float(expected.abs().max())), name
        compared += 1
    assert compared == 4


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_dare_of_adapters_has_the_matrices_of_the_papers_formula(
    method: str, adapters: list[Path], tmp_path: Path
) -> None:
    merge(spec(adapters[:2], [0.7, 1.1], tmp_path / "merged", method=method, density=0.5, seed=7))
    file = "adapter_model.safetensors"
    merged, read = values(tmp_path / "merged", file), [values(path, file) for path in adapters[:2]]
    roots = [
        math.sqrt(0.7 * 4 / 4),
        math.sqrt(1.1 * 8 / math.sqrt(4)),
    ]  # with the scales; the second is rank-stabilized
    modules = [name.removesuffix(".lora_A.weight") for name in merged if "lora_A" in name]
    assert len(modules) == 4
    for module in modules:
        with seeded(7, module):
            for part in (".lora_A.weight", ".lora_B.weight"):
                tensors = [one[module + part] for one in read]
                masks = [torch.bernoulli(torch.full_like(one, 0.5)) for one in tensors]
                dropped = [one * mask / 0.5 for one, mask in zip(tensors, masks, strict=True)]
                summed = sum((one * root for one, root in zip(dropped, roots, strict=True)), 0 * tensors[0])
                expected = elected(dropped, roots) if method == "dare_ties" else summed
                largest = max(1.0, float(expected.abs().max()))
                assert (merged[module + part] - expected).abs().max() < 1e-6 * largest, module + part


@pytest.mark.parametrize("second", [1, 2], ids=["the same modules", "a module less"])
def test_slerp_of_adapters_goes_along_the_arc_of_what_they_change(
    second: int, adapters: list[Path], base: Path, tmp_path: Path
) -> None:
    named = [adapters[0], adapters[second]]
    merge(spec(named, [1, 3], tmp_path / "merged", method="slerp"))
    loaded = [
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), path)
        for path in (*named, tmp_path / "merged")
    ]
    compared = 0
    for name, module in loaded[2].named_modules():
        if "default" not in getattr(module, "lora_A", {}):
            continue
        found = module.get_delta_weight("default")
        one, other = (getattr(model.get_submodule(name), "get_delta_weight", None) for model in loaded[:2])
        a = one("default").double() if one else 0 * found.double()
        b = other("default").double() if other else 0 * found.double()
        angle = math.acos(float((a * b).sum() / (a.norm() * b.norm()))) if other else 0.0
        factors = [math.sin(share * angle) / math.sin(angle) if angle else share for share in (0.25, 0.75)]
        expected = factors[0] * a + factors[1] * b
        assert (found - expected).abs().max() < 1e-6 * max(1, float(expected.abs().max())), name
        compared += 1
    assert compared == 4


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *args: object) -> None: ...


def test_the_random_choice_of_dare_follows_the_seed(models: list[Path], base: Path, tmp_path: Path) -> None:
    found = []
    for number, seed in enumerate((1, 1, 2)):
        output = tmp_path / str(number)
        merge(spec(models, [1, 1, 1], output, method="dare_ties", base=str(base), density=0.2, seed=seed))
        found.append((output / "model.safetensors").read_bytes())
    assert found[0] == found[1] != found[2]
    with seeded(1, "one"):
        one = torch.rand(4)
    with seeded(1, "other"):
        assert not torch.equal(torch.rand(4), one)


def test_the_result_has_the_dtype_that_was_chosen(models: list[Path], tmp_path: Path) -> None:
    first = changed(models[0], tmp_path, "config.json", lambda config: config.update(torch_dtype="float32"))
    merge(spec([first, *models[1:]], [1, 1, 1], tmp_path / "merged", dtype="bf16"))
    assert {weight.dtype for weight in values(tmp_path / "merged").values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype is torch.bfloat16


def test_files_in_parts_are_read_as_one_model(models: list[Path], base: Path, tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    AutoModelForCausalLM.from_pretrained(models[0]).save_pretrained(parts, max_shard_size="200KB")
    AutoTokenizer.from_pretrained(base).save_pretrained(parts)
    assert len(list(parts.glob("*.safetensors"))) > 1
    merge(spec([parts, models[1]], [1, 1], tmp_path / "merged"))
    merge(spec([models[0], models[1]], [1, 1], tmp_path / "same"))
    assert (tmp_path / "merged/model.safetensors").read_bytes() == (tmp_path / "same/model.safetensors").read_bytes()
    assert not (tmp_path / "merged" / "model.safetensors.index.json").exists()


def test_the_manifest_of_an_input_is_not_one_of_the_result(models: list[Path], tmp_path: Path) -> None:
    checkpoint = tmp_path / "final"
    shutil.copytree(models[0], checkpoint)
    write_manifest(checkpoint)
    merge(spec([checkpoint, models[1]], [1, 1], tmp_path / "out"))
    assert not (tmp_path / "out" / MANIFEST).exists()


def test_each_method_reads_one_weight_of_each_model_at_a_time(
    models: list[Path], adapters: list[Path], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[str, weakref.ref[torch.Tensor]]] = []
    real = merging._Weights.get

    def get(self: Any, name: str) -> torch.Tensor:
        weight = name.replace(".lora_B.", ".lora_A.")
        others = {one for one, tensor in read if one != weight and tensor() is not None}
        assert not others, f"{others} are in memory while {name} is read"
        found = real(self, name)
        read.append((weight, weakref.ref(found)))
        return found

    monkeypatch.setattr(merging._Weights, "get", get)
    for method in MODEL_METHODS:
        given = {"base": str(base), "density": 0.5} if method in PRUNING_METHODS else {}
        merge(spec(models[:2], [1, 1], tmp_path / f"model-{method}", method=method, **given))
    for method in ADAPTER_METHODS:
        given = {"density": 0.5} if method in PRUNING_METHODS else {}
        merge(spec(adapters[:2], [1, 1], tmp_path / f"adapter-{method}", method=method, **given))
    assert len({name for name, _ in read}) == len(values(base)) + 4


def changed(path: Path, tmp_path: Path, file: str, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a model, or adapter, with another JSON file."""
    copied = tmp_path / "changed"
    shutil.copytree(path, copied)
    content = json.loads((copied / file).read_text())
    change(content)
    (copied / file).write_text(json.dumps(content))
    return copied


def refusal(one: MergeSpec) -> str:
    with pytest.raises(JobFailure) as caught:
        merge(one)
    assert not one.output.exists() or one.output.is_file()
    assert not list(one.output.parent.glob(".*merging*"))
    return str(caught.value)


def test_what_cannot_be_merged_is_refused_by_name(
    models: list[Path], adapters: list[Path], base: Path, tmp_path: Path
) -> None:
    output, two = tmp_path / "merged", [1.0, 1.0]
    assert "is an adapter, and others are whole models" in refusal(spec([models[0], adapters[0]], two, output))
    assert "needs a base" in refusal(spec(models[:2], two, output, method="ties", density=0.5))
    assert "needs density" in refusal(spec(models[:2], two, output, method="ties", base=str(base)))
    assert "has no density" in refusal(spec(models[:2], two, output, density=0.5))
    assert "has no base" in refusal(spec(models[:2], two, output, base=str(base)))
    assert "slerp merges two models, 3 were named" in refusal(spec(models, [1, 1, 1], output, method="slerp"))
    assert "add up to 0 or less" in refusal(spec(models[:2], [1, -1], output))
    assert "method cat does not merge whole models" in refusal(spec(models[:2], two, output, method="cat"))
    assert "slerp merges two adapters, 3 were named" in refusal(spec(adapters, [1, 1, 1], output, method="slerp"))
    assert "merged without a base" in refusal(spec(adapters[:2], two, output, base=str(base)))
    assert "neither a directory nor in the local cache" in refusal(spec([models[0], Path("no/such")], two, output))
    (tmp_path / "taken").mkdir()
    with pytest.raises(JobFailure, match="exists: name a new directory"):
        merge(spec(models[:2], two, tmp_path / "taken"))


def with_head(model: Path, path: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """A copy of a model that its configuration ties, with a head beside its embeddings in the files."""
    shutil.copytree(model, path)
    weights = values(path)
    weights["lm_head.weight"] = change(weights["model.embed_tokens.weight"]).contiguous()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("method", ["linear", "dare_linear"])
def test_models_with_heads_of_their_own_that_are_configured_as_tied_are_merged_into_an_untied_one(
    models: list[Path], tmp_path: Path, method: str
) -> None:
    own = [with_head(model, tmp_path / model.name, lambda weight: weight.flip(0)) for model in models]
    given = {"base": str(own[2]), "density": 0.9} if method != "linear" else {}
    merge(spec(own[:2], [1, 1], tmp_path / "merged", method=method, **given))
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is False
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    loaded.tie_weights()  # as its configuration has it
    assert torch.equal(loaded.lm_head.weight, values(tmp_path / "merged")["lm_head.weight"])
    if method == "linear":
        first, second = (values(model)["lm_head.weight"] for model in own[:2])
        torch.testing.assert_close(loaded.lm_head.weight.data, (first + second) / 2)
    lacking = refusal(spec([own[0], models[1]], [1, 1], tmp_path / "other"))
    assert "different weights: 1, such as lm_head.weight" in lacking


def test_heads_that_are_copies_of_the_embeddings_stay_tied(models: list[Path], tmp_path: Path) -> None:
    copied = with_head(models[0], tmp_path / "copied", torch.clone)
    drawn = {"method": "dare_linear", "base": str(models[2]), "density": 0.5}  # for each weight by its name
    merge(spec([copied, models[1]], [1, 1], tmp_path / "merged", **drawn))
    merge(spec(models[:2], [1, 1], tmp_path / "expected", **drawn))
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is True
    found, expected = values(tmp_path / "merged"), values(tmp_path / "expected")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_models_that_do_not_fit_together_are_refused_by_name(models: list[Path], base: Path, tmp_path: Path) -> None:
    output = tmp_path / "merged"
    untied = tiny_model(tied=False)
    assert "different weights: 1, such as lm_head.weight" in refusal(spec([models[0], untied], [1, 1], output))

    def swap(tokenizer: dict[str, Any]) -> None:
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    other = changed(models[1], tmp_path, "tokenizer.json", swap)
    assert "different vocabularies" in refusal(spec([models[0], other], [1, 1], output))
    narrow = tmp_path / "narrow"
    shutil.copytree(base, narrow)
    weights = values(narrow)
    name = sorted(weights)[0]
    weights[name] = weights[name][:-1].clone()
    save_file(weights, narrow / "model.safetensors")
    assert f"{name} has the shapes" in refusal(spec([models[0], narrow], [1, 1], output))
    (narrow / "model.safetensors").write_bytes(b"no weights")
    assert "model.safetensors is no safetensors file" in refusal(spec([models[0], narrow], [1, 1], output))
    (narrow / "model.safetensors").unlink()
    assert "it has no file of weights, expected one of model.safetensors" in refusal(
        spec([models[0], narrow], [1, 1], output)
    )
    (narrow / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    assert "'../secret.safetensors' as a file of weights" in refusal(spec([models[0], narrow], [1, 1], output))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "only LoRA is merged"),
        ({"use_dora": True}, "its use_dora is True"),
        ({"rank_pattern": {"q_proj": 8}}, "its rank_pattern is"),
        ({"r": 8}, "of ranks [4, 8] are merged by the methods cat and slerp only"),
        ({"base_model_name_or_path": "another"}, "base_model_name_or_path of"),
    ],
)
def test_adapters_that_do_not_fit_together_are_refused_by_name(
    change: dict[str, Any], message: str, adapters: list[Path], tmp_path: Path
) -> None:
    other = changed(adapters[1], tmp_path, "adapter_config.json", lambda config: config.update(change))
    assert message in refusal(spec([adapters[0], other], [1, 1], tmp_path / "merged"))


def test_a_full_disk_leaves_nothing(models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merging, "write", full)
    assert "cannot be written (No space left on device)" in refusal(spec(models[:2], [1, 1], tmp_path / "merged"))


def test_the_command_merges_and_reports(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_recipes(monkeypatch, tmp_path)
    words = ["merge", f"{models[0]}=3", str(models[1]), "-o", str(tmp_path / "merged")]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "model"
    assert found["output"] == str(tmp_path / "merged")
    one, other, merged = values(models[0]), values(models[1]), values(tmp_path / "merged")
    assert all((merged[name] - (3 * one[name] + other[name]) / 4).abs().max() < 1e-6 for name in merged)
    ties = [*words[:-1], str(tmp_path / "ties"), "--method", "ties", "--base", str(models[2]), "--density", "0.5"]
    assert main([*ties, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "model"
    assert main(words) == 1
    assert capsys.readouterr().err == (
        f"trl-remote: invalid_request: {tmp_path / 'merged'} exists: name a new directory.\n"
    )


_MEMORY = """
import resource, sys
from pathlib import Path
import torch
from llama_stack_provider_trl.recipes.checkpoint.merge import merge
from llama_stack_provider_trl.specs.merge import MergeSpec
def private():
    fields = dict(line.split(":") for line in open("/proc/self/status") if ":" in line)
    return int(fields["RssAnon"].split()[0]) / 1024
small, large = (MergeSpec.model_validate_json(Path(path).read_text()) for path in sys.argv[1:])
merge(small)  # imports what a merge needs
before = private()
import threading
peak, done = [before], threading.Event()
def watch():
    while not done.wait(0.002):
        peak.append(private())
watching = threading.Thread(target=watch); watching.start()
merge(large)
done.set(); watching.join()
print(max(peak) - before)
"""


@IN_FULL  # CI: that no method reads more than one weight of each model at a time
def test_no_model_is_in_memory_as_a_whole(base: Path, tmp_path: Path) -> None:
    paths = []
    for number in range(2):
        path = tmp_path / str(number)
        shutil.copytree(base, path)
        large = {f"block.{layer}.weight": torch.full((1024, 1024), float(layer + number)) for layer in range(24)}
        save_file(large, path / "model.safetensors", metadata={"format": "pt"})
        paths.append(path)
    given = []
    for name, models in (("small", [base, base]), ("merged", paths)):
        given.append(tmp_path / f"{name}.json")
        given[-1].write_text(spec(models, [1, 1], tmp_path / name).model_dump_json())
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, *map(str, given)],
        capture_output=True,
        text=True,
        check=True,
        # glibc keeps freed blocks of these sizes by default: 64 to 109 MiB, another number in each run.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(256 << 10)},
    )
    assert float(done.stdout) < 48  # MiB: 24 measured; each model has 96, and each weight 4
    assert values(tmp_path / "merged")["block.7.weight"].unique().tolist() == [7.5]
