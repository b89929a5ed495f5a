"""Paths of GPU training whose faults show on a CPU: dtypes under FSDP2, timeouts, timing, the padding mask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, LlamaConfig, MambaConfig
from trl.trainer import utils as trl_utils

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes import build, session
from llama_stack_provider_trl.recipes.checkpoint.step import Saver
from llama_stack_provider_trl.recipes.distributed import ranks
from llama_stack_provider_trl.recipes.distributed.peers import backend_of
from llama_stack_provider_trl.recipes.fast.batches import collate_rows, forward_arguments
from llama_stack_provider_trl.recipes.fast.model import use_rows
from llama_stack_provider_trl.recipes.model.attention import passes_padding_mask, set_attention
from llama_stack_provider_trl.recipes.model.fsdp import mixed_precision
from llama_stack_provider_trl.recipes.model.loading import choose_device
from llama_stack_provider_trl.recipes.trainer import callbacks
from llama_stack_provider_trl.recipes.trainer.later_metrics import DeviceClock
from llama_stack_provider_trl.recipes.trainer.sft import in_one_sequence
from llama_stack_provider_trl.recipes.trainer.trl_patches import every_position, fuse_head, keep_allocator_cache
from llama_stack_provider_trl.specs.events import NullEventWriter, Progress
from tests.process.architectures import ARCHITECTURES
from tests.required import in_full
from tests.tiny import tiny_model
from tests.training import job_spec, of_kind, run

pytestmark = pytest.mark.process

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def small_llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, intermediate_size=48, num_key_value_heads=1)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def test_sharded_units_compute_in_bf16_and_give_log_probabilities_in_fp32(group: None) -> None:
    model = small_llama()
    fuse_head(model, outputs=("log_probs",))
    dtypes: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        if name.startswith("model.layers.") and name.count(".") == 2:
            fully_shard(module, mp_policy=mixed_precision(torch.bfloat16))
            module.register_forward_hook(lambda _, __, out, name=name: dtypes.update({name: out.dtype}))
    fully_shard(model, mp_policy=mixed_precision(torch.bfloat16))
    ids = torch.arange(8)[None]
    log_probs = model(input_ids=ids, labels=ids, use_cache=False, fused_lm_head=True).log_probs
    assert dtypes == {f"model.layers.{number}": torch.bfloat16 for number in range(2)}
    assert log_probs.dtype == torch.float32
    assert (log_probs != log_probs.bfloat16()).any()  # they were not rounded on their way


def test_groups_that_others_open_get_the_jobs_timeout(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = dist.new_group([0])
    backend = opened._get_backend(torch.device("cpu"))
    assert backend.options._timeout < timedelta(hours=1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    ranks.extend_timeouts()
    assert backend.options._timeout == ranks.COLLECTIVE_TIMEOUT


def test_gpu_ranks_have_a_backend_for_tensors_in_cpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend_of(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"
    monkeypatch.setenv("TRL_CUDA_BACKEND", "gloo")
    assert backend_of(torch.device("cuda", 1)) == "cpu:gloo,cuda:gloo"
    assert backend_of(torch.device("cpu")) == "gloo"


def test_a_checkpoint_is_written_by_a_thread_on_its_ranks_own_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[torch.device] = []
    saver = Saver(job_spec(tmp_path, tmp_path), torch.device("cpu"), NullEventWriter())
    saver._device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(saver, "_write", lambda *_: None)
    monkeypatch.setattr(saver, "_finish", lambda *_: None)
    model: Any = torch.nn.Linear(2, 2)
    tokenizer: Any = None
    saver.save(model, torch.optim.SGD(model.parameters()), tokenizer, {}, tmp_path / ".saving" / "checkpoint-2", print)
    saver.wait()
    assert used == [torch.device("cuda", 1)]


def test_the_clock_of_a_step_stops_when_the_loss_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: clock.now)
    callback: Any = object.__new__(callbacks.JobCallback)
    callback.trainer = SimpleNamespace(clock=DeviceClock(torch.device("cpu")))
    callback._busy_since, callback._tokens, callback._parallel = None, 0.0, None

    def step(device_seconds: float, tokens: float) -> float:
        callback.on_step_begin(None, None, None)
        clock.now += device_seconds  # the device computes: Trainer reads the loss before it logs
        return float(callback._tokens_per_second({"num_tokens": tokens}, clock.now))

    assert step(2.0, 100.0) == 50.0
    assert step(4.0, 200.0) == 25.0
    callback._busy_since = None  # an evaluation or a save has followed
    clock.now += 1000.0
    assert step(1.0, 250.0) == 50.0


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_padding_on_the_right_changes_nothing_in_causal_attention(name: str, tmp_path: Path) -> None:
    spec = job_spec(tmp_path, tmp_path, padding_free=False)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **ARCHITECTURES[name]), dtype=torch.float32)
    assert passes_padding_mask(spec.changed(attention_mask="always"), model, "cpu")
    assert not passes_padding_mask(spec, model, "cpu")
    ids = torch.arange(3, 27).view(2, 12)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    losses, gradients = [], []
    for arguments in ({"attention_mask": mask}, {}):
        model.eval().zero_grad()
        loss = model(input_ids=ids, labels=labels, use_cache=False, **arguments).loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]))
    assert torch.allclose(losses[0], losses[1], rtol=1e-6)
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(BertConfig(**SIZES, intermediate_size=48), id="attention in both directions"),
        pytest.param(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2), id="no attention"),
    ],
)
def test_a_model_whose_attention_is_not_known_to_be_causal_gets_the_mask(config: Any, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(config)
    assert passes_padding_mask(job_spec(tmp_path, tmp_path, padding_free=False), model, "cpu")


def test_grouped_queries_get_the_mask_on_gpus_in_fp32_where_torch_would_hold_all_scores(tmp_path: Path) -> None:
    grouped, spec = small_llama(), job_spec(tmp_path, tmp_path, padding_free=False)
    assert passes_padding_mask(spec, grouped, "cuda")
    assert not passes_padding_mask(spec.changed(dtype="bf16"), grouped, "cuda")
    plain = LlamaConfig(**SIZES, intermediate_size=48)
    assert not passes_padding_mask(spec, AutoModelForCausalLM.from_config(plain), "cuda")


def test_experts_whose_load_is_balanced_over_tokens_get_the_mask(tmp_path: Path) -> None:
    model = small_llama()
    model.config.output_router_logits = True
    assert passes_padding_mask(job_spec(tmp_path, tmp_path, padding_free=False), model, "cpu")


@pytest.mark.parametrize("algorithm", ["dpo", *in_full("sft")])
def test_a_job_without_the_mask_learns_what_it_learns_with_it(algorithm: str, tmp_path: Path) -> None:
    losses = {}
    for mask in ("auto", "always"):
        spec = job_spec(tmp_path / mask, tiny_model(), algorithm=algorithm, attention_mask=mask, padding_free=False)
        status, events = run(tmp_path / mask / "run", spec)
        assert status == 0
        losses[mask] = [event.metrics["loss"] for event in of_kind(events, Progress)]
    assert losses["auto"] == pytest.approx(losses["always"], rel=1e-6)


def test_adapters_compute_the_same_without_casts_of_their_inputs() -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(small_llama(), config)
    found = []
    for active in (False, True):
        spec = SimpleNamespace(lora=SimpleNamespace(method="lora", use_dora=not active, dropout=0.0))
        attempt: Any = SimpleNamespace(spec=spec, trainer=SimpleNamespace(model=model))
        model.zero_grad()
        with session._without_casts(attempt), torch.autocast("cpu", torch.bfloat16):
            casts = {module.cast_input_dtype_enabled for module in model.modules() if hasattr(module, "lora_A")}
            output = model(input_ids=torch.arange(16)[None]).logits
        output.float().sum().backward()
        assert casts == {not active}
        found.append((output, *(w.grad for w in model.parameters() if w.requires_grad)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_kernel_that_is_not_installed_is_refused_and_not_fetched(tmp_path: Path) -> None:
    spec = job_spec(tmp_path, tmp_path, attn_implementation="flash_attention_2", dtype="bf16")
    with pytest.raises(JobFailure, match="flash-attn is not installed"):
        set_attention(spec, small_llama())


def test_packed_sequences_give_the_same_loss_as_one_sequence(tmp_path: Path) -> None:
    model = small_llama()
    positions = torch.arange(6).repeat(2, 4)  # two sequences of four rows
    ids = torch.arange(48).view(2, 24)
    inputs = {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}
    losses = [model(**found, use_cache=False).loss for found in (inputs, in_one_sequence(inputs))]
    together = in_one_sequence(inputs)
    assert together["input_ids"].shape == (1, 48)
    assert together["cu_seq_lens_q"].tolist() == list(range(0, 49, 6))
    assert together["max_length_k"] == 6
    assert torch.allclose(losses[0], losses[1], rtol=1e-6)


def test_a_model_with_an_attention_of_its_own_is_refused_another(tmp_path: Path) -> None:
    config = AutoConfig.for_model("bloom", vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    spec = job_spec(tmp_path, tmp_path, attn_implementation="sdpa")
    with pytest.raises(JobFailure, match="cannot use it here"):
        set_attention(spec, AutoModelForCausalLM.from_config(config))


def test_the_isolation_of_flash_kernels_is_checked_on_the_device_in_the_jobs_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[tuple[Any, int]] = []
    monkeypatch.setattr(build, "set_attention", lambda *_: None)
    monkeypatch.setattr(build, "check_isolation", lambda model, sequences=2: checked.append((model, sequences)))
    flash = {"packed": True, "dtype": "bf16", "attn_implementation": "flash_attention_2", "lora": None}
    state = torch.random.get_rng_state()
    spec = job_spec(tmp_path, tiny_model(), **flash, padding_free=False)
    policy = build.load_policy(spec, torch.device("cpu"))
    (model, sequences), *others = checked
    assert (others, sequences, model.dtype, policy.model.dtype) == ([], 1, torch.bfloat16, torch.float32)
    assert len(model.model.layers) <= 2
    assert torch.equal(state, torch.random.get_rng_state())


class Waits(TorchDispatchMode):
    """Counts operations whose result has a size, or whose value Python reads: for these it waits for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        selects = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            one is not None and one.dtype == torch.bool for one in args[1]
        )
        if selects or name in ("nonzero", "masked_select", "_local_scalar_dense", "item"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_a_batch_without_padding_is_scored_with_no_wait_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_utils, "_use_triton", lambda device: True)  # with which TRL selects what has a label
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}, {"input_ids": [5, 9], "labels": [5, 9]}]
    unscored = [{"input_ids": [5, 6], "labels": [-100, -100]}]

    def step(rows: list[dict[str, Any]], scoring: Any) -> tuple[list[str], list[torch.Tensor]]:
        model = small_llama()
        use_rows(model, "cpu")
        fuse_head(model, outputs=("log_probs", "is_top1"))
        inputs = forward_arguments(collate_rows(rows))
        with Waits() as waits, scoring:
            outputs = model(**inputs)
            outputs.log_probs.sum().backward()
        gradients = [weight.grad for weight in model.parameters()]
        return waits.names, [outputs.log_probs.detach(), outputs.is_top1, *gradients]

    for batch in (rows, unscored):
        waits, expected = step(batch, nullcontext())
        assert len(waits) >= 2
        waits, found = step(batch, every_position())
        assert waits == []
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_offloading_leaves_the_allocators_cache_alone() -> None:
    emptied: list[int] = []
    module = SimpleNamespace(empty_cache=lambda: emptied.append(1), Stream="stream")
    trainer = SimpleNamespace(maybe_activation_offload_context=SimpleNamespace(device_module=module))
    keep_allocator_cache(trainer)
    device_module: Any = trainer.maybe_activation_offload_context.device_module
    device_module.empty_cache()
    assert (emptied, device_module.Stream) == ([], "stream")
    keep_allocator_cache(SimpleNamespace(maybe_activation_offload_context=nullcontext()))


@pytest.mark.parametrize("name", ["cuda", "cpu"])
def test_attention_is_not_computed_by_cudnn_on_gpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        assert choose_device(name).type == name
        monkeypatch.setenv("LOCAL_RANK", "1")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        assert choose_device(name).index == (1 if name == "cuda" else None)
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        assert choose_device(name).index == (0 if name == "cuda" else None)
        assert torch.backends.cuda.cudnn_sdp_enabled() == (name == "cpu")
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
