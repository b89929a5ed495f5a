"""Blocks that torch's compiler turns into few kernels: the losses of eager ones, the same graphs for all batches, and
the same bits after a resume. On a CPU Inductor compiles C++."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from llama_stack_provider_trl.recipes.evaluation.evaluate import evaluate
from llama_stack_provider_trl.recipes.fast import compiled, float8
from llama_stack_provider_trl.recipes.fast.cpu_attention import attend_on_cpu
from llama_stack_provider_trl.recipes.fast.layout import Group, Layout, decoded
from llama_stack_provider_trl.recipes.trainer.base import RecipeTrainer
from llama_stack_provider_trl.specs.averaging import AveragingSpec
from llama_stack_provider_trl.specs.events import Evaluated, Event, Failed, Prepared, Progress, Reason
from llama_stack_provider_trl.specs.job import JobSpec, LoraSpec, ShardingSpec
from llama_stack_provider_trl.specs.methods import CpoSpec, DpoSpec, GrpoSpec, SftSpec
from llama_stack_provider_trl.specs.model_source import ReferenceSpec
from tests.process.grpo_jobs import DIGITS, LETTER
from tests.process.rank_numbers import spec_of
from tests.ranks import Ranks
from tests.required import in_full
from tests.tiny import tiny_decoder, tiny_model
from tests.training import LORA, job_spec, of_kind, reference_to, run

# Warnings are errors here, and torch's compiler warns of its own code.
pytestmark = [pytest.mark.process, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="without a C++ compiler no block is compiled on a CPU"
)
GROUPS: dict[str, list[Group]] = {
    "rows": [(0, (3,)), (0, (5,)), (0, (1,))],
    "pairs": [(4, (3, 2)), (1, (1, 6))],
    "both": [(0, (3,)), (2, (4, 1)), (0, (2,))],
}
ROWS = [{"prompt": f"Count to {n}", "completion": " ".join(map(str, range(1 + n * n % 23)))} for n in range(1, 19)]
PAIRS = [
    {"prompt": row["prompt"], "chosen": row["completion"], "rejected": f"{n} or {'more ' * (n * n % 17)}"}
    for n, row in enumerate(ROWS)
]
ROWS_OF: dict[str, list[dict[str, Any]]] = {
    "sft": ROWS,
    "kto": [{**row, "label": bool(n % 3)} for n, row in enumerate(ROWS)],
    "grpo": [{"prompt": row["prompt"]} for row in ROWS],
}
"""By method; of the others: pairs."""
QLORA = LORA.model_copy(update={"quantize_base": True})
IA3 = LoraSpec(method="ia3", target_modules=("k_proj", "v_proj", "down_proj"), rank=1, alpha=1)
VERA = LoraSpec(method="vera", target_modules=("q_proj", "v_proj"), rank=8, alpha=1)
ROUNDING = 1e-7
"""Of losses: the first one of GRPO is 0, and all others are above 0.01."""
FLOAT8: dict[str, Any] = {"float8": "always"}
GRPO = GrpoSpec(rewards=(DIGITS, LETTER), num_generations=3, max_completion_length=8, beta=0.1)


def with_other_reference() -> DpoSpec:
    """DPO whose reference is a model of another architecture and another number of blocks."""
    return DpoSpec(reference=reference_to(tiny_decoder("qwen2")))


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_attention_as_one_operator_has_the_bits_of_attention_in_rows(groups: Sequence[Group], key_heads: int) -> None:
    layout, tokens = Layout(groups), sum(prefix + sum(sizes) for prefix, sizes in groups)
    assert decoded(layout.encoded).groups == layout.groups
    torch.manual_seed(0)
    tensors = [torch.randn(1, tokens, heads, 8).transpose(1, 2).requires_grad_() for heads in (4, key_heads, key_heads)]
    found = []
    for attend, given in ((attend_on_cpu, layout), (compiled.attend_as_operator, layout.encoded)):
        output, _ = attend(torch.nn.Module(), *tensors, None, layout=given, scaling=0.3)  # type: ignore[operator]
        found.append([output, *torch.autograd.grad(output.square().sum(), tensors)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("first", ["tokens", "heads"])
def test_the_compiler_is_told_the_shapes_and_gradients_of_attention_as_one_operator(first: str) -> None:
    layout = Layout(GROUPS["both"])
    made = [torch.randn(1, 12, 4, 8).transpose(1, 2) for _ in range(3)]
    given = [(one if first == "tokens" else one.contiguous()).detach().requires_grad_() for one in made]
    torch.library.opcheck(compiled._attend, (*given, layout.encoded, 0.3))


def test_attention_on_a_gpu_has_the_strides_that_the_compiler_is_told_whatever_the_kernel_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kernel(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(query[0].transpose(0, 1)), torch.empty(query.shape[1:3], device="meta")

    monkeypatch.setattr(compiled, "attend_in_one_kernel", kernel)
    monkeypatch.setattr(compiled, "has_kernel_of_rows", lambda *_: True)
    # Concatenated after the rotation of positions, as in Phi and GLM.
    tensors = [torch.empty(1, 4, 12, 8, device="meta") for _ in range(3)]
    given = (*tensors, Layout(GROUPS["both"]).encoded, 0.3)
    computed, told = compiled._attend._init_fn(*given), compiled._shapes(*given)
    assert [(one.shape, one.stride()) for one in computed] == [(one.shape, one.stride()) for one in told]


@pytest.mark.parametrize(
    ("lengths", "tokens", "rows"),
    [
        ([2000, 90, 80], 2039, 2),
        ([33] * 8, 251, 8),
        ([33, 33, 33], 61, 2),
        ([30, 29, 28, 27, 26], 127, 6),
        ([5, 4, 3], 17, 6),
        ([2, 2], 18, 18),
    ],
)
def test_the_first_batch_has_no_row_longer_than_those_of_the_job(
    lengths: list[int], tokens: int, rows: int, tmp_path: Path
) -> None:
    found = [{"input_ids": [1] * length, "labels": [1] * length} for length in lengths]
    spec = job_spec(tmp_path, "model", batch_size=len(lengths))
    layout = compiled.first_batch(spec, Dataset.from_list(found))["layout"]
    sizes = layout.sizes()
    assert (sum(sizes), len(sizes)) == (tokens, rows)
    assert 0 < min(sizes) <= layout.longest < max(lengths)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many there are once a training's first batch is computed; each attempt begins as a process of its own."""
    found, original = list[int](), RecipeTrainer._compile

    def compiling(*arguments: Any) -> None:
        torch._dynamo.reset()
        counters.clear()
        original(*arguments)
        found.append(counters["stats"]["unique_graphs"])

    monkeypatch.setattr(RecipeTrainer, "_compile", compiling)
    yield found
    torch._dynamo.reset()


def points(events: list[Event]) -> list[Progress | Evaluated]:
    return [*of_kind(events, Progress), *of_kind(events, Evaluated)]


def losses(events: list[Event]) -> list[float]:
    return [point.metrics["loss" if isinstance(point, Progress) else "eval_loss"] for point in points(events)]


CASES = [
    pytest.param("sft", {"lora": LORA, "fuse_lora": "always", "validation_rows": 5}, 3, id="lora"),
    pytest.param("grpo", {"method": GRPO}, 2, id="grpo"),
    pytest.param("sft", FLOAT8, 1, id="float8"),
    *in_full(
        pytest.param("dpo", {**FLOAT8, "validation_rows": 5}, 3, id="dpo-float8"),
        pytest.param("sft", {**FLOAT8, "gradient_checkpointing": True}, 1, id="float8-checkpointing"),
        pytest.param("sft", {"lora": QLORA, "validation_rows": 5}, 3, id="qlora"),
        pytest.param("kto", {}, 3, id="kto"),
        pytest.param("dpo", {"method": with_other_reference}, 2, id="dpo-other-reference"),
        pytest.param("sft", {"gradient_checkpointing": True}, 1, id="checkpointing"),
        pytest.param("dpo", {"lora": QLORA, "validation_rows": 5}, 5, id="dpo-qlora"),
        pytest.param("kto", {"lora": LORA, "validation_rows": 5}, 5, id="kto-lora"),
        pytest.param("grpo", {"method": GRPO, "lora": LORA}, 3, id="grpo-lora"),
        pytest.param("grpo", {"method": GRPO.model_copy(update={"beta": 0.0})}, 1, id="grpo-alone"),
        pytest.param("simpo", {}, 1, id="simpo"),
        pytest.param("cpo", {"method": CpoSpec(loss_type="ipo"), "lora": LORA, "validation_rows": 5}, 3, id="cpo"),
        pytest.param("dpo", {"method": with_other_reference, "lora": LORA}, 3, id="dpo-other-reference-lora"),
        pytest.param("sft", {"lora": IA3, "validation_rows": 5}, 3, id="ia3"),
        pytest.param("sft", {"lora": VERA, "validation_rows": 5}, 3, id="vera"),
        pytest.param("dpo", {"validation_rows": 5}, 3, id="dpo"),
        pytest.param("dpo", {"lora": LORA, "fuse_lora": "always", "validation_rows": 5}, 5, id="dpo-lora"),
        pytest.param("sft", {}, 1, id="sft"),
        pytest.param("sft", {"validation_rows": 5}, 2, id="sft-evaluated"),
        pytest.param("sft", {"lora": LORA, "fuse_lora": "never", "validation_rows": 5}, 3, id="lora-of-peft"),
    ),
]
"""Method, its changes, and the graphs of its blocks: for training, under LoRA also of the first block, whose input has
no gradient; for evaluations; for the reference in both."""


@pytest.mark.parametrize("backend", ["aot_eager", *in_full(pytest.param("inductor", marks=needs_compiler))])
@pytest.mark.parametrize(("algorithm", "changes", "count"), CASES)
def test_compiled_blocks_have_eager_losses_no_graph_per_shape_and_the_same_bits_after_a_resume(
    algorithm: str,
    changes: dict[str, Any],
    count: int,
    backend: str,
    graphs: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = ROWS_OF.get(algorithm, PAIRS)
    changes = {"rows": rows, "batch_size": 3, "n_epochs": 2, "save_steps": 3, **changes}
    if evaluated := changes.get("validation_rows"):
        changes["validation_rows"] = rows[:evaluated]
    if callable(method := changes.get("method")):
        changes["method"] = method()
    eager = job_spec(tmp_path, tiny_decoder("llama", num_hidden_layers=3), algorithm, **changes)
    _, expected = run(tmp_path / "eager", eager.changed(checkpoint_dir=tmp_path / "eager" / "checkpoints"))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    spec = eager.changed(compile_blocks="always")
    status, events = run(tmp_path / "attempts" / "1", spec)
    assert status == 0, [failed.message for failed in of_kind(events, Failed)]
    found = losses(events)
    if is_in_8_bits := spec.compute.float8 == "always":
        # The largest differences that were measured are 0.6 % (SFT) and 0.0065 (DPO): a number of 8 bits has 4 digits.
        assert found == pytest.approx(losses(expected), rel=0.02, abs=0.01)
        assert found != pytest.approx(losses(expected), rel=1e-4)
    else:
        assert found == pytest.approx(losses(expected), rel=1e-5, abs=ROUNDING)
    if algorithm == "dpo" and is_in_8_bits:
        assert found[0] == pytest.approx(math.log(2), abs=1e-5)  # the reference's numbers are the policy's
    shown = of_kind(events, Prepared)[0].effective
    assert (shown["compiled_blocks"], shown["attention"]) == ("used in 3 of 3 blocks", compiled.NAME)
    assert shown["float8"].startswith("used in 21 of 21 linear layers") is is_in_8_bits
    assert shown["compile_seconds"] > 0
    assert counters["stats"]["unique_graphs"] == graphs[0] == count
    weights = {path.name: path.read_bytes() for path in (spec.checkpoint_dir / "final").glob("*.safetensors")}
    status, resumed = run(tmp_path / "attempts" / "2", spec, spec.checkpoint_dir / "checkpoint-3")
    assert status == 0, [failed.message for failed in of_kind(resumed, Failed)]
    assert losses(resumed) == [loss for event, loss in zip(points(events), found, strict=True) if event.step > 3]
    assert weights == {path.name: path.read_bytes() for path in (spec.checkpoint_dir / "final").glob("*.safetensors")}
    if backend == "inductor":
        assert counters["inductor"]["fxgraph_cache_miss"] == 0  # the code of the first attempt
        assert [path.name for path in tmp_path.glob("**/compiled")] == ["compiled"]


@pytest.mark.parametrize(
    "before", ["compile_once_to_eager_kernels", *in_full(pytest.param("compile_once", marks=needs_compiler))]
)
@pytest.mark.parametrize(
    ("algorithm", "strategy", "changes"),
    [
        pytest.param(
            "dpo",
            "FULL_SHARD",
            {"lora": LORA, "fuse_lora": "always", "gradient_checkpointing": True, "n_epochs": 1},
            id="dpo-full-checkpointing",
        ),
        pytest.param("sft", "NO_SHARD", {"gradient_accumulation_steps": 2}, id="sft-ddp"),
        pytest.param("sft", "FULL_SHARD", FLOAT8, id="float8-full"),
        *in_full(
            pytest.param("dpo", "NO_SHARD", {"lora": LORA, "fuse_lora": "always"}, id="dpo-ddp-lora"),
            pytest.param("sft", "NO_SHARD", {"averaging": AveragingSpec(interval=3)}, id="sft-averaging"),
            pytest.param("sft", "HYBRID_SHARD", {}, id="sft-hybrid"),
            pytest.param("sft", "NO_SHARD", FLOAT8, id="float8-ddp"),
            pytest.param("sft", "HYBRID_SHARD", FLOAT8, id="float8-hybrid"),
            pytest.param(
                "sft", "FULL_SHARD", {**FLOAT8, "sharding": ShardingSpec(cpu_offload=True)}, id="float8-cpu-offload"
            ),
            pytest.param(
                "dpo",
                "FULL_SHARD",
                {**FLOAT8, "method": DpoSpec(reference=ReferenceSpec(precompute=True))},
                id="float8-dpo-precomputed",
            ),
            pytest.param("sft", "FULL_SHARD", {"sharding": ShardingSpec(cpu_offload=True)}, id="sft-cpu-offload"),
            pytest.param("sft", "FULL_SHARD", {"lora": QLORA}, id="sft-full-qlora"),
            pytest.param("dpo", "FULL_SHARD", {}, id="dpo-full"),
            pytest.param("dpo", "NO_SHARD", {}, id="dpo-ddp"),
            pytest.param("dpo", "FULL_SHARD", {"method": with_other_reference}, id="dpo-full-other-reference"),
            pytest.param("kto", "FULL_SHARD", {}, id="kto-full"),
            pytest.param("grpo", "FULL_SHARD", {"method": GRPO}, id="grpo-full"),
            pytest.param("dpo", "SHARD_GRAD_OP", {"lora": LORA, "fuse_lora": "always"}, id="dpo-grad-op"),
            pytest.param("sft", "FULL_SHARD", {"lora": LORA, "fuse_lora": "always"}, id="sft-full-lora"),
            pytest.param("sft", "FULL_SHARD", {"gradient_accumulation_steps": 2}, id="sft-full"),
            pytest.param("sft", "SHARD_GRAD_OP", {}, id="sft-grad-op"),
            pytest.param("sft", "SHARD_GRAD_OP", {"lora": LORA, "fuse_lora": "never"}, id="sft-grad-op-lora"),
        ),
    ],
)
def test_ranks_compile_blocks_once_and_have_eager_losses_and_the_same_bits_after_a_resume(
    algorithm: str, strategy: str, changes: dict[str, Any], before: str, ranks: Ranks, tmp_path: Path
) -> None:
    rows, model = ROWS_OF.get(algorithm, PAIRS), tiny_decoder("llama", num_hidden_layers=3)
    evaluated = {} if algorithm == "grpo" else {"validation_rows": rows[:5]}
    changes = {"rows": rows, "save_steps": 3, "model": model, **evaluated, **changes}
    if callable(method := changes.get("method")):
        changes["method"] = method()
    eager = spec_of(tmp_path, algorithm, 4 if strategy == "HYBRID_SHARD" else 2, strategy, **changes)
    spec, found = eager.changed(compile_blocks="always"), []

    def attempt(run_dir: Path, job: JobSpec, checkpoint: Path | None = None, **options: str) -> list[Event]:
        codes, events = ranks.run(run_dir, job, checkpoint, per_node=2, **options)
        assert codes == [0] * job.ranks, [failed.message for failed in of_kind(events, Failed)]
        return events

    compiling, within = {"before": f"tests.process.compiling.{before}"}, {"rel": 1e-5, "abs": ROUNDING}
    if spec.compute.float8 == "always":
        # Those of one process, until the last bit of a norm that ranks sum moves a number over a border of 8 bits, and
        # with it what is computed from it: after three steps of ranks that shard, of which 0.2 % were measured then.
        one = spec_of(tmp_path, algorithm, 1, **changes | {"sharding": None, "compile_blocks": "always"})
        expected = attempt(tmp_path / "run", one.changed(checkpoint_dir=tmp_path / "one"), **compiling)
        within = {"rel": 0.01, "abs": 1e-3}
    else:
        expected = attempt(tmp_path / "run", eager.changed(checkpoint_dir=tmp_path / "eager"))
    for number, checkpoint in (("1", None), ("2", spec.checkpoint_dir / "checkpoint-3")):
        run_dir = tmp_path / "attempts" / number
        events = attempt(run_dir, spec, checkpoint, **compiling)
        assert of_kind(events, Prepared)[0].effective["compiled_blocks"] == "used in 3 of 3 blocks"
        weights = {path.name: path.read_bytes() for path in (spec.checkpoint_dir / "final").glob("*.safetensors")}
        found.append((events, weights))
    (events, weights), (resumed, weights_of_resumed) = found
    assert losses(events)[:2] == pytest.approx(losses(expected)[:2], rel=1e-4, abs=ROUNDING)
    assert losses(events) == pytest.approx(losses(expected), **within)
    assert losses(resumed) == [
        loss for event, loss in zip(points(events), losses(events), strict=True) if event.step > 3
    ]
    assert weights == weights_of_resumed


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({"compile_blocks": "auto"}, "cuda", "compile_blocks is 'auto'"),
        ({"compile_blocks": "never"}, "cuda", "compile_blocks is 'never'"),
        ({}, "cpu", ""),
        ({}, "cuda", "attention in fp32 on cuda is several operations"),
        ({"dtype": "bf16"}, "cuda", ""),
        ({"dtype": "bf16"}, "cpu", "attention in bf16 on cpu is several operations"),
        ({}, "mps", "attention in fp32 on mps is several operations"),
        ({"algorithm": "dpo", "lora": LORA}, "cpu", ""),
        ({"algorithm": "dpo"}, "cpu", ""),
        ({"algorithm": "dpo", "ranks": 2, "sharding": ShardingSpec()}, "cpu", ""),
        ({"algorithm": "simpo"}, "cpu", ""),
        ({"algorithm": "orpo"}, "cpu", "batches have padding: ORPO's loss covers prompts too"),
        ({"algorithm": "reward"}, "cpu", "batches have padding: a reward is read at the end of a row"),
        ({"lora": LORA}, "cpu", ""),
        ({"lora": LORA.model_copy(update={"use_dora": True})}, "cpu", "torch's compiler cannot trace PEFT's DoRA"),
        ({"lora": LORA.model_copy(update={"dropout": 0.1})}, "cpu", "dropout would leave out other units"),
        ({"ranks": 2, "sharding": ShardingSpec(strategy="SHARD_GRAD_OP")}, "cpu", ""),
        ({"ranks": 2}, "cpu", ""),
        ({"ranks": 2, "context_parallel_size": 2}, "cpu", "ranks divide the tokens of a row"),
        ({"gradient_checkpointing": True}, "cpu", ""),
        ({"padding_free": False}, "cpu", "batches have padding"),
        ({"tile_mlp": "always"}, "cpu", "networks compute in tiles"),
        ({"activation_offloading": True}, "cpu", "activations wait in CPU memory"),
    ],
)
def test_a_job_whose_blocks_are_not_compiled_has_the_reason(
    changes: dict[str, Any], device: str, reason: str, tmp_path: Path
) -> None:
    algorithm = changes.get("algorithm", "sft")
    given = {"compile_blocks": "always", **{name: one for name, one in changes.items() if name != "algorithm"}}
    spec = job_spec(tmp_path, tiny_model(), algorithm, **given)
    assert compiled.why_eager(spec, device) == reason


@pytest.mark.parametrize(
    ("kind", "changes", "reference", "record"),
    [
        ("mixtral", {}, {}, "not used: a block has no mlp of linear layers alone"),
        ("mistral", {"sliding_window": 16}, {}, "not used: its attention has a sliding window"),
        ("llama", {"attention_dropout": 0.1}, {}, "not used: dropout would leave out other units"),
        (
            "llama",
            {},
            {"sliding_window": 16},
            "used in 2 of 2 blocks; of the reference not used: its attention has a sliding window",
        ),
    ],
)
def test_a_training_of_a_model_whose_blocks_are_not_compiled_has_the_reason(
    kind: str,
    changes: dict[str, Any],
    reference: dict[str, Any],
    record: str,
    graphs: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    method = DpoSpec(reference=reference_to(tiny_decoder("mistral", **reference))) if reference else SftSpec()
    options = {"method": method, "compile_blocks": "always", "max_steps_per_epoch": 1}
    status, events = run(
        tmp_path / "run", job_spec(tmp_path, tiny_decoder(kind, **changes), method.algorithm, **options)
    )
    assert status == 0, [failed.message for failed in of_kind(events, Failed)]
    assert of_kind(events, Prepared)[0].effective["compiled_blocks"] == record


@pytest.mark.parametrize(
    ("changes", "model", "capability", "record"),
    [
        ({"float8": "never"}, {}, None, "not used: float8 is 'never'"),
        ({"compile_blocks": "never"}, {}, None, "not used: blocks are not compiled"),
        ({}, {}, (8, 6), "not used: a GPU has compute capability 8.6, and products in 8 bits need 8.9"),
        ({}, {}, (8, 9), "used in 14 of 14 linear layers of blocks"),
        ({}, {"intermediate_size": 72}, None, "used in 8 of 14 linear layers of blocks, emulated in fp32"),
        (
            {},
            {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 24},
            None,
            "not used: no linear layer of a block has sizes that are multiples of 16",
        ),
    ],
)
def test_a_job_records_which_layers_multiply_in_8_bits(
    changes: dict[str, Any],
    model: dict[str, Any],
    capability: tuple[int, int] | None,
    record: str,
    tmp_path: Path,
) -> None:
    spec = job_spec(tmp_path, "model", **{"compile_blocks": "always", **FLOAT8, **changes})
    made: Any = AutoModelForCausalLM.from_pretrained(tiny_decoder("llama", **model))
    device, is_compiled = torch.device("cuda" if capability else "cpu"), spec.compute.compile_blocks == "always"
    found = float8.use_float8(made, spec, device, is_compiled=is_compiled, capability=capability or ())
    assert found == record


def test_layers_multiply_in_8_bits_in_compiled_blocks_alone(tmp_path: Path) -> None:
    made: Any = AutoModelForCausalLM.from_pretrained(tiny_decoder("llama"))
    layer, states = made.model.layers[0].self_attn.q_proj, torch.randn(5, 64)
    weight, plain = layer.weight, layer(states)
    float8.use_float8(made, job_spec(tmp_path, "model", **FLOAT8), torch.device("cpu"), is_compiled=True)
    with float8.products_in_float8():
        product = layer(states)
    assert 0 < (product - plain).norm() / plain.norm() < 0.05
    assert torch.equal(layer(states), plain)
    assert layer.weight is weight


def test_jobs_that_compile_nothing_keep_the_operators_directory_of_compiled_code(
    graphs: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/srv/inductor")
    spec = job_spec(tmp_path, tiny_model(), max_steps_per_epoch=1, validation_rows=ROWS[:5])
    assert run(tmp_path / "run", spec)[0] == 0
    counters.clear()
    assert evaluate(spec.changed(compile_blocks="always"))["rows"] == 5
    assert counters["stats"]["unique_graphs"] == 0
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/srv/inductor"


def test_a_job_that_needs_more_graphs_later_than_its_model_may_have_is_refused(
    graphs: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_GRAPHS", 0)
    monkeypatch.setattr(RecipeTrainer, "_compile", lambda *_: None)
    status, events = run(tmp_path / "run", job_spec(tmp_path, tiny_model(), compile_blocks="always"))
    assert status != 0
    (failed,) = of_kind(events, Failed)
    assert failed.reason is Reason.invalid_request
    assert "compile_blocks is 'always'" in failed.message
    assert "recompile limit exceeded" in failed.message


def test_a_job_whose_blocks_cannot_be_compiled_is_refused_with_what_the_compiler_reports(
    graphs: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    status, events = run(tmp_path / "run", job_spec(tmp_path, tiny_model(), compile_blocks="always"))
    assert status != 0
    (failed,) = of_kind(events, Failed)
    assert failed.reason is Reason.invalid_request
    assert "compile_blocks is 'always'" in failed.message
    assert "Leave compile_blocks out" in failed.message
    assert not of_kind(events, Progress)
