"""LoRA layers as one operation, the head's gradients in the forward pass with kernels, networks in tiles of tokens,
attention that is not computed again.

Each has the numbers of what it replaces, and the memory estimate knows it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from trl.kernels import ChunkedLogProbFunction

from llama_stack_provider_trl.recipes.fast import head, kept_attention, lora, mlp
from llama_stack_provider_trl.recipes.fast.support import with_batches
from llama_stack_provider_trl.recipes.memory.estimate import estimate
from llama_stack_provider_trl.recipes.memory.nearest import Capacity
from llama_stack_provider_trl.recipes.memory.trace import Batch
from llama_stack_provider_trl.recipes.model.loading import load_config
from llama_stack_provider_trl.recipes.preflight import check, choose_kept_attention
from llama_stack_provider_trl.recipes.trainer import trl_patches
from llama_stack_provider_trl.recipes.trainer.trl_patches import TrlKernels
from llama_stack_provider_trl.specs.events import Event, Failed, Prepared
from llama_stack_provider_trl.specs.job import DpoSpec, LoraSpec, ReferenceSpec
from tests.process.supervised import UNPAIRED
from tests.required import in_full
from tests.tiny import tiny_decoder, tiny_model
from tests.training import LORA, job_spec, losses, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]


def effective(events: list[Event]) -> dict[str, Any]:
    return of_kind(events, Prepared)[0].effective


class Calls(TorchDispatchMode):
    """Counts operations by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    @property
    def products(self) -> int:
        return sum(name in ("mm", "addmm", "addmm_", "_addmm_activation") for name in self.names)


# --- LoRA layers ------------------------------------------------------------------------------------------------------


def layer_of(bias: bool = True, base: torch.nn.Module | None = None, **settings: Any) -> Any:
    """A LoRA layer over 24 inputs and 40 outputs, whose update is not 0."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(base or torch.nn.Linear(24, 40, bias=bias))
    given = {"r": 4, "lora_alpha": 12, "target_modules": ["0"], **settings}
    layer = get_peft_model(model, LoraConfig(**given)).base_model.model[0]
    for up in layer.lora_B.values():
        torch.nn.init.normal_(up.weight, std=0.3)
    return layer


def step(layer: Any, states: torch.Tensor, kept: list[tuple[int, ...]] | None = None) -> list[torch.Tensor]:
    """Output and gradients of a layer, in the order of states, A and B."""
    states = states.clone().requires_grad_()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if kept is not None:
            kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = layer(states)
    weights = [weight for weight in layer.parameters() if weight.requires_grad]
    factors = torch.linspace(-1, 2, found.numel()).view(found.shape).to(found.dtype)
    return [found.detach(), *torch.autograd.grad(found, [states, *weights], factors)]


def fused(layer: Any, tmp_path: Path, **changes: Any) -> str:
    spec = job_spec(tmp_path, tmp_path, lora=LORA, **{"fuse_lora": "always", **changes})
    return lora.fuse_lora(torch.nn.ModuleList([layer]), spec, "cpu")


def apart(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("bias", [True, False])
def test_a_lora_layer_as_one_operation_has_the_numbers_of_pefts(bias: bool, tmp_path: Path) -> None:
    layer, states, kept = layer_of(bias), torch.randn(2, 7, 24), list[tuple[int, ...]]()
    with Calls() as plain:
        expected = step(layer, states)
    assert fused(layer, tmp_path) == "used in 1 of 1 layers"
    with Calls() as calls:
        found = step(layer, states, kept)
    assert apart(found, expected) < 1e-6
    assert len(calls.names) < len(plain.names)
    assert sorted(kept) == [(4, 24), (14, 24), (40, 4), (40, 24)]  # the input, and no product of it


def test_in_bf16_it_is_as_near_to_the_exact_numbers_as_pefts(tmp_path: Path) -> None:
    layer, states = layer_of(), torch.randn(64, 24).bfloat16()
    layer.base_layer.to(torch.bfloat16)
    exact = step(layer_with(layer, torch.float64), states.double())
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(layer, states)
        fused(layer, tmp_path)
        found = step(layer, states)
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    assert apart(found, exact) <= 1.1 * apart(expected, exact) < 0.02


def layer_with(layer: Any, dtype: torch.dtype) -> Any:
    copied = layer_of()
    copied.load_state_dict(layer.state_dict())
    return copied.to(dtype)


def with_two_adapters() -> Any:
    layer = layer_of()
    layer.update_layer("other", 2, 4, LoraConfig(r=2))
    layer.set_adapter(["default", "other"])
    return layer


def switched_off() -> Any:
    layer = layer_of()
    layer.enable_adapters(False)
    return layer


def with_base_in_bf16() -> Any:
    """Outside of autocast."""
    layer = layer_of()
    layer.base_layer.to(torch.bfloat16)
    return layer


def with_hook() -> Any:
    layer = layer_of()
    layer.base_layer.register_forward_hook(lambda module, args, output: output * 2)
    return layer


@pytest.mark.parametrize(
    "made",
    [
        with_two_adapters,
        switched_off,
        with_hook,
        lambda: layer_of(use_dora=True),
        lambda: layer_of(lora_bias=True),
        lambda: layer_of(lora_dropout=0.5),
        with_base_in_bf16,
    ],
    ids=["two adapters", "switched off", "a hook", "DoRA", "a bias", "dropout", "other dtypes"],
)
def test_layers_that_are_more_than_two_products_compute_as_peft_has_them(
    made: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = made()
    states = torch.randn(5, 24).to(layer.base_layer.weight.dtype)
    torch.manual_seed(1)
    expected = layer(states)
    monkeypatch.setattr(lora.LoraProduct, "apply", None)
    fused(layer, tmp_path)
    torch.manual_seed(1)
    assert torch.equal(layer(states), expected)


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({}, "cuda", ""),
        ({}, "cpu", "fuse_lora is 'auto' and the device is cpu"),
        ({"fuse_lora": "never"}, "cuda", "fuse_lora is 'never'"),
        ({"fuse_lora": "always"}, "mps", ""),
        ({"lora": LORA.model_copy(update={"dropout": 0.1})}, "cuda", "dropout is between input and update"),
        ({"lora": LORA.model_copy(update={"use_dora": True})}, "cuda", "DoRA scales the base product"),
        ({"lora": LORA.model_copy(update={"quantize_base": True})}, "cuda", "the base model is quantized"),
        ({"lora": LORA.model_copy(update={"method": "ia3"})}, "cuda", "its adapters are not LoRA"),
    ],
)
def test_jobs_fuse_lora_layers_by_themselves_on_gpus(
    changes: dict[str, Any], device: str, reason: str, tmp_path: Path
) -> None:
    assert lora.why_as_peft(job_spec(tmp_path, tmp_path, **{"lora": LORA, **changes}), device) == reason


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("sft", {"gradient_checkpointing": True}),
        *in_full(("sft", {"dtype": "bf16"}), ("dpo", {"method": DpoSpec(reference=ReferenceSpec())})),
    ],
)
def test_a_training_with_fused_lora_layers_has_the_losses_of_one_without(
    algorithm: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    made = {}
    for option in ("always", "never"):
        spec = job_spec(tmp_path / option, tiny_model(), algorithm, lora=LORA, fuse_lora=option, n_epochs=2, **changes)
        status, made[option] = run(tmp_path / option, spec)
        assert status == 0
    assert losses(made["always"]) == pytest.approx(losses(made["never"]), rel=2e-2 if "dtype" in changes else 1e-5)
    assert effective(made["always"])["fused_lora"] == "used in 10 of 10 layers"
    assert effective(made["never"])["fused_lora"] == "not used: fuse_lora is 'never'"


def test_the_memory_estimate_counts_fused_lora_layers(tmp_path: Path) -> None:
    spec = job_spec(tmp_path, tiny_model(), lora=LoraSpec(target_modules=("q_proj", "v_proj"), rank=32, alpha=32))
    of = {
        option: estimate(spec.changed(fuse_lora=option), Batch(4, 128), "cpu").activations
        for option in ("always", "never")
    }
    assert of["always"] < of["never"]  # the inputs times A are not kept


# --- The head ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 3 tokens."""
    monkeypatch.setattr(head, "TILE_BYTES", 3 * 4 * 50)


def head_inputs(trained: bool) -> list[Any]:
    torch.manual_seed(0)
    weight, bias = (torch.randn(50, 8).requires_grad_(trained), torch.randn(50).requires_grad_(trained))
    return [torch.randn(10, 8, requires_grad=True), weight, bias, torch.randint(50, (10,))]


def head_step(compute: Callable[..., Any], inputs: list[Any], factors: torch.Tensor) -> tuple[int, list[Any]]:
    """Products with the weight, and log-probabilities, hits and gradients."""
    with Calls() as calls:
        log_probs, hits = compute(*inputs)
        wanted = [one for one in inputs[:3] if one.requires_grad]
        gradients = torch.autograd.grad(log_probs, wanted, factors)
    assert not {"item", "_local_scalar_dense", "nonzero"} & set(calls.names)  # for which a GPU would be waited for
    return calls.products, [log_probs.detach(), hits.float(), *gradients]


@pytest.mark.parametrize(("trained", "alike"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("cap", [None, *in_full(3.0)])
def test_the_head_with_kernels_computes_no_logits_again(
    trained: bool, alike: bool, cap: float | None, small_tiles: None
) -> None:
    inputs = head_inputs(trained)
    factors = torch.full((10,), -0.25) if alike else torch.linspace(-1, 2, 10)

    def trls(*given: Any) -> Any:
        found = ChunkedLogProbFunction.apply(*given, 0.7, 32, cap, 0.3, ("is_top1",))
        return found[0], found[4]

    def ours(*given: Any) -> Any:
        return head.LogProbs.apply(*given, 0.3 / 0.7, True, True, alike, TrlKernels(0.3, cap, 0.7))

    _, expected = head_step(trls, inputs, factors)
    products, found = head_step(ours, inputs, factors)
    assert apart([one + 1 for one in found], [one + 1 for one in expected]) < 1e-6
    assert apart(found[2:], expected[2:]) < 1e-6
    assert products == 4 * (3 if trained else 2)  # of 4 tiles: logits, and the gradients of both inputs


def test_a_head_whose_tokens_are_not_alike_has_no_gradient_that_could_be_taken_for_right(small_tiles: None) -> None:
    inputs = head_inputs(trained=True)
    compute = lambda *given: head.LogProbs.apply(*given, 1.0, True, True, True, TrlKernels(1.0, None, 1.0))  # noqa: E731
    _, found = head_step(compute, inputs, torch.linspace(-1, 2, 10))
    assert [bool(one.isnan().all()) for one in found] == [False, False, False, True, True]


def test_a_second_backward_pass_computes_the_tiles_again(small_tiles: None) -> None:
    inputs, factors = head_inputs(trained=True), torch.full((10,), 0.5)
    log_probs, _ = head.LogProbs.apply(*inputs, 1.0, True, True, True, TrlKernels(1.0, None, 1.0))
    first = torch.autograd.grad(log_probs, inputs[:3], factors, retain_graph=True)
    assert apart(list(torch.autograd.grad(log_probs, inputs[:3], factors)), list(first)) < 1e-6


@pytest.mark.parametrize(
    ("algorithm", "changes", "device", "when"),
    [
        ("sft", {}, "cuda", "in the forward pass"),
        ("dpo", {"lora": LORA}, "cuda", "in the forward pass"),
        ("dpo", {}, "cuda", f"in the backward pass: {trl_patches._OF_THEIR_OWN}"),
        ("sft", {"head_gradients": "backward"}, "cpu", "in the backward pass: head_gradients is 'backward'"),
        ("sft", {"padding_free": False}, "cuda", "in the backward pass: batches have padding"),
        ("sft", {"dtype": "fp16"}, "cuda", "in the backward pass: dtype is 'fp16'"),
        ("dpo", {"dtype": "fp16", "lora": LORA}, "cuda", "in the backward pass: dtype is 'fp16'"),
    ],
)
def test_a_jobs_record_says_when_the_gradients_of_its_head_are_computed(
    algorithm: str, changes: dict[str, Any], device: str, when: str, tmp_path: Path
) -> None:
    spec = job_spec(tmp_path, tmp_path, algorithm, **changes)
    assert trl_patches.gradients_of_head(spec, device, capped=False) == when
    is_trls = when.startswith("in the backward pass")
    assert trl_patches.has_fast_head(spec, device) == (not is_trls)
    if not is_trls:
        capped = [trl_patches.gradients_of_head(spec, kind, capped=True) for kind in ("cpu", "cuda")]
        assert capped == ["in the backward pass: the logits are capped", when]


def test_a_training_with_the_heads_gradients_in_either_pass_has_the_same_losses(tmp_path: Path) -> None:
    made = {}
    for option in ("forward", "backward"):
        status, made[option] = run(
            tmp_path / option, job_spec(tmp_path / option, tiny_model(), head_gradients=option, n_epochs=2)
        )
        assert status == 0
    assert losses(made["forward"]) == pytest.approx(losses(made["backward"]), rel=1e-5)
    assert effective(made["forward"])["head_gradients"] == "in the forward pass"


def test_the_memory_estimate_counts_the_tiles_of_the_heads_kernels(tmp_path: Path) -> None:
    spec, batch = job_spec(tmp_path, tiny_model(), dtype="bf16", lora=LORA), Batch(8, 1024)
    of = {
        option: estimate(spec.changed(head_gradients=option), batch, "cuda").logits
        for option in ("forward", "backward")
    }
    assert 8 * 1024 * 1024 * 2 <= of["forward"] < 1.5 * 8 * 1024 * 1024 * 2  # all tokens fit into one tile


# --- Networks in tiles ------------------------------------------------------------------------------------------------


@pytest.fixture
def short_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp, "LONG", 20)
    monkeypatch.setattr(mlp, "TILE", 8)


def small_llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, num_key_value_heads=2, **sizes))


def largest_kept(model: Any, ids: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
    """The most elements that the graph keeps in one tensor of intermediate size, and the loss with its gradients."""
    kept = [0]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 3 and tensor.shape[-1] == 64:
            kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return max(kept), [loss.detach(), *torch.autograd.grad(loss, weights)]


@pytest.mark.parametrize("with_lora", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
def test_networks_in_tiles_have_the_numbers_of_whole_ones(
    with_lora: bool, recomputed: bool, tmp_path: Path, short_is_long: None
) -> None:
    spec, ids = job_spec(tmp_path, tmp_path, tile_mlp="always"), torch.arange(1, 43).remainder(90).view(1, -1)

    def made(tiled: bool) -> Any:
        model = small_llama()
        if tiled:
            assert mlp.tile_mlp(model, spec, "cpu") == "used in 2 of 2 blocks for batches of more than 20 tokens"
        if recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        return get_peft_model(model, LoraConfig(target_modules=["down_proj", "q_proj"])) if with_lora else model

    torch.manual_seed(1)
    whole = made(False).train()
    _, expected = largest_kept(whole, ids)
    torch.manual_seed(1)
    tiled = made(True).train()
    kept, found = largest_kept(tiled, ids)
    nonzero = [number for number, one in enumerate(expected) if one.norm() > 0]  # those of A are 0 in the beginning
    assert apart([found[number] for number in nonzero], [expected[number] for number in nonzero]) < 1e-6
    assert kept == 0
    short = ids[:, :20]
    assert torch.equal(tiled(input_ids=short, use_cache=False).logits, whole(input_ids=short, use_cache=False).logits)
    if not recomputed:
        assert largest_kept(tiled, short)[0] == 20 * 64  # a short batch is computed whole


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({"max_seq_length": 16_385}, "cuda", ""),
        ({"max_seq_length": 16_384}, "cuda", "rows have at most 16,384 tokens"),
        ({"max_seq_length": 32_768}, "cpu", "tile_mlp is 'auto' and the device is cpu"),
        ({"max_seq_length": 32_768, "tile_mlp": "never"}, "cuda", "tile_mlp is 'never'"),
        ({"tile_mlp": "always"}, "cpu", ""),
    ],
)
def test_jobs_with_long_rows_compute_networks_in_tiles_by_themselves_on_gpus(
    changes: dict[str, Any], device: str, reason: str, tmp_path: Path
) -> None:
    assert mlp.why_whole(job_spec(tmp_path, tmp_path, **changes), device) == reason


def test_networks_of_experts_stay_whole(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=96, num_key_value_heads=2, **sizes))
    spec = job_spec(tmp_path, tmp_path, tile_mlp="always")
    assert mlp.tile_mlp(model, spec, "cpu") == "not used: no block has an mlp of linear layers alone"


def test_a_training_in_tiles_has_the_losses_of_one_without(tmp_path: Path, short_is_long: None) -> None:
    made = {}
    for option in ("always", "never"):
        spec = job_spec(tmp_path / option, tiny_model(), tile_mlp=option, lora=LORA, gradient_checkpointing=True)
        status, made[option] = run(tmp_path / option, spec)
        assert status == 0
    assert losses(made["always"]) == pytest.approx(losses(made["never"]), rel=1e-5)
    assert effective(made["always"])["mlp_tiles"] == "used in 2 of 2 blocks for batches of more than 20 tokens"
    assert effective(made["never"])["repeats"] == "bit for bit"
    assert effective(made["never"])["mlp_tiles"] == "not used: tile_mlp is 'never'"


@pytest.mark.parametrize(
    ("intermediate_size", "dtype", "most"),
    [(4096, "fp32", 0.3), (16, "bf16", 0.9)],
    ids=["networks", "norms"],  # which hold tensors in fp32
)
def test_the_memory_estimate_counts_the_activations_of_one_tile(
    intermediate_size: int, dtype: str, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlp, "LONG", 1024)
    monkeypatch.setattr(mlp, "TILE", 256)
    model = tiny_decoder("llama", intermediate_size=intermediate_size)
    spec = job_spec(tmp_path, model, dtype=dtype, lora=LORA, gradient_checkpointing=True)
    of = {
        option: estimate(spec.changed(tile_mlp=option), Batch(1, 2048), "cpu").activations
        for option in ("always", "never")
    }
    assert of["always"] < most * of["never"]


# --- Attention that is not computed again -----------------------------------------------------------------------------


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("sft", {"tile_mlp": "always", "dtype": "bf16", "lora": LORA}),
        ("dpo", {}),  # whose calls for shared prompts are merged
        ("kto", {"rows": UNPAIRED, "dtype": "bf16", "checkpoint_every": 2}),
        *in_full(
            ("sft", {"padding_free": False}),
            ("sft", {"padding_free": False, "dtype": "bf16"}),
            ("reward", {}),
            ("dpo", {"lora": LORA, "method": DpoSpec(reference=ReferenceSpec(precompute=False))}),
        ),
    ],
)
def test_a_training_that_keeps_outputs_of_attention_has_the_bits_of_one_that_does_not(
    algorithm: str, changes: dict[str, Any], tmp_path: Path, short_is_long: None
) -> None:
    made, calls, weights = {}, {}, {}
    for option in ("always", "never"):
        root = tmp_path / option
        spec = job_spec(root, tiny_model(), algorithm, keep_attention=option, gradient_checkpointing=True, **changes)
        with_batches(spec)  # tries the architecture out, once per process
        with Calls() as counted:
            status, made[option] = run(root, spec)
        assert status == 0, [failed.message for failed in of_kind(made[option], Failed)]
        calls[option] = counted.names.count(ATTENTION)
        weights[option] = [path.read_bytes() for path in sorted((spec.checkpoint_dir / "final").glob("*.safetensors"))]
    assert losses(made["always"]) == losses(made["never"])
    assert weights["always"] == weights["never"] != []
    assert 0 < calls["always"] < calls["never"]
    assert effective(made["always"])["kept_attention"] == "used"
    assert effective(made["never"])["kept_attention"] == "not used: keep_attention is 'never'"


def test_a_model_whose_own_attention_is_not_torchs_operator_keeps_no_outputs_of_it(tmp_path: Path) -> None:
    changes = {"keep_attention": "always", "gradient_checkpointing": True, "max_steps_per_epoch": 1}
    status, events = run(tmp_path, job_spec(tmp_path, tiny_decoder("gpt_oss"), **changes))
    assert status == 0, [failed.message for failed in of_kind(events, Failed)]
    assert effective(events)["attention"] == "eager"
    assert effective(events)["kept_attention"] == "not used: the attention of the model is 'eager'"


def test_a_second_forward_in_a_step_finds_weights_that_are_cast_already(tmp_path: Path) -> None:
    spec = job_spec(tmp_path, tmp_path, gradient_checkpointing=True, keep_attention="always")
    layer = torch.nn.Linear(16, 16)

    def attend(states: torch.Tensor) -> torch.Tensor:
        heads = layer(states).unflatten(-1, (2, 8)).transpose(1, 2)
        attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return layer(attended.transpose(1, 2).flatten(-2))

    gradients = []
    for arguments in (kept_attention.checkpoint_arguments(spec, "cpu"), {"use_reentrant": False}):
        torch.manual_seed(0)
        states = torch.randn(2, 1, 8, 16, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):  # casts each weight once
            outputs = [checkpoint(attend, one, **arguments) for one in states]
        gradients.append(torch.autograd.grad(sum(output.float().sum() for output in outputs), states)[0])
    assert torch.equal(*gradients)


@pytest.mark.parametrize(("dropout", "computed"), [(0.0, 1), (0.1, 2)])
def test_attention_that_draws_random_numbers_is_computed_again(dropout: float, computed: int, tmp_path: Path) -> None:
    spec = job_spec(tmp_path, tmp_path, gradient_checkpointing=True, keep_attention="always")

    def attend(query: torch.Tensor) -> torch.Tensor:
        operator = torch.ops.aten._scaled_dot_product_efficient_attention.default
        attended: torch.Tensor = operator(query, query, query, None, True, dropout)[0]
        return attended * attended

    arguments = kept_attention.checkpoint_arguments(spec, "cuda")
    with Calls() as calls:
        query = torch.randn(1, 2, 8, 16, device="meta", requires_grad=True)
        checkpoint(attend, query, **arguments).sum().backward()
    assert calls.names.count("_scaled_dot_product_efficient_attention") == computed


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({"max_seq_length": 16_385}, "cuda", ""),
        ({"max_seq_length": 16_384}, "cuda", "rows have at most 16,384 tokens"),
        ({"max_seq_length": 32_768}, "cpu", "keep_attention is 'auto' and the device is cpu"),
        ({"keep_attention": "never"}, "cuda", "keep_attention is 'never'"),
        ({"keep_attention": "always"}, "cpu", ""),
        ({"keep_attention": "always"}, "mps", "attention on mps is several operations"),
        ({"keep_attention": "always", "attn_implementation": "eager"}, "cuda", "attn_implementation is 'eager'"),
    ],
)
def test_jobs_with_long_rows_keep_outputs_of_attention_by_themselves_on_gpus(
    changes: dict[str, Any], device: str, reason: str, tmp_path: Path
) -> None:
    spec = job_spec(tmp_path, tmp_path, gradient_checkpointing=True, **changes)
    assert kept_attention.why_not_kept(spec, device) == reason
    assert kept_attention.chooses_to_keep(spec, device) == (not reason and "keep_attention" not in changes)
    assert not kept_attention.chooses_to_keep(spec.changed(gradient_checkpointing=False), device)


def test_outputs_of_attention_are_counted_and_kept_where_they_fit(tmp_path: Path) -> None:
    spec = job_spec(
        tmp_path,
        tiny_decoder("llama", num_hidden_layers=8, max_position_embeddings=20_000),
        lora=LORA,
        gradient_checkpointing=True,
        max_seq_length=20_000,
        dtype="bf16",
        batch_size=1,
    )
    batch = Batch(1, 20_000)

    def of(option: str) -> Any:
        return spec.changed(keep_attention=option)

    dropped, kept = (estimate(of(option), batch, "cuda") for option in ("never", "always"))
    assert estimate(of("auto"), batch, "cuda") == dropped
    config = load_config(spec.source)
    outputs = 8 * 20_000 * config.num_attention_heads * (2 * config.hidden_size // config.num_attention_heads + 4)
    # Those of the block at hand are there either way.
    assert 0.7 * outputs < kept.activations - dropped.activations <= outputs
    enough, less = int(kept.total * 1.11), int(kept.total * 1.09)
    for option, limit, fits, keeps, chosen in (
        ("auto", enough, True, True, "always"),
        ("auto", less, True, False, "never"),
        ("never", enough, True, None, "never"),
        ("always", less, False, None, "always"),
    ):
        found = check(of(option), batch, "cuda", Capacity(limit))
        assert (found["fits"], found.get("kept_attention")) == (fits, keeps)
        assert choose_kept_attention(of(option), "cuda", found).compute.keep_attention == chosen
    assert found["nearest"]["changes"] == {"provider_options.keep_attention": "never"}
    unknown = choose_kept_attention(of("auto"), "cuda", None)
    assert (
        kept_attention.described(unknown, "cuda", of("auto"), "sdpa") == "not used: its device does not have the memory"
    )
    unchecked = [one.model_copy(update={"preflight": "off"}) for one in (unknown, of("auto"))]
    why = kept_attention.described(unchecked[0], "cuda", unchecked[1], "sdpa")
    assert why == "not used: the memory of the job is not estimated"
