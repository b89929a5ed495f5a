"""Batches in one sequence: the numbers of padded ones, on every architecture that allows it, and what they save."""

from __future__ import annotations

import pickle
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from trl.kernels import ChunkedLogProbFunction
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from llama_stack_provider_trl.recipes.data.packing import pack
from llama_stack_provider_trl.recipes.data.sampling import BatchPlan
from llama_stack_provider_trl.recipes.data.tables import IGNORED
from llama_stack_provider_trl.recipes.fast import attention, cpu_attention, head, smaller_batches, support
from llama_stack_provider_trl.recipes.fast.batches import FlatPairs, collate_rows, forward_arguments, largest_groups
from llama_stack_provider_trl.recipes.fast.layout import Layout
from llama_stack_provider_trl.recipes.fast.model import use_rows
from llama_stack_provider_trl.recipes.memory.estimate import estimate
from llama_stack_provider_trl.recipes.memory.trace import Batch
from llama_stack_provider_trl.recipes.trainer.pairs import PaddedPairs
from llama_stack_provider_trl.recipes.trainer.trl_patches import fast_head, fuse_head
from llama_stack_provider_trl.specs.events import Prepared, Progress
from llama_stack_provider_trl.specs.job import DpoSpec, LoraSpec, ReferenceSpec, ShardingSpec
from tests.required import FULL
from tests.tiny import tiny_model
from tests.training import DPO_ROWS, SFT_ROWS, job_spec, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

VOCABULARY = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOW = {"sliding_window": 6}
"""Tokens: the rows below are longer."""
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SIZES),
    "qwen2": ("qwen2", {**SIZES, **WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("qwen3", {**SIZES, "head_dim": 8}),
    "gemma2 without softcap": ("gemma2", {**SIZES, **WINDOW, "head_dim": 8, "attn_logit_softcapping": None}),
    "gemma3": (
        "gemma3_text",
        {**SIZES, **WINDOW, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "mistral": ("mistral", {**SIZES, **WINDOW}),
    "phi3": ("phi3", {**SIZES, **WINDOW}),
    "phi3 with partial rotation": ("phi3", {**SIZES, "rope_parameters": PARTIAL}),
    "gpt_neox": ("gpt_neox", SIZES),  # whose rotation is partial, too
    "gpt2": ("gpt2", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
}


def model_of(architecture: str, *, lora: bool = False) -> Any:
    name, sizes = ARCHITECTURES[architecture]
    torch.manual_seed(0)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) if name == "gpt2" else {}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes, **dropout), dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():  # as initialized, attention would be nearly uniform
            weight += torch.randn_like(weight) * (weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.05)
    fuse_head(model, outputs=("log_probs", "is_top1"))
    if not lora:
        return model
    adapted = get_peft_model(
        model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", fan_in_fan_out=name == "gpt2")
    )
    with torch.no_grad():
        for parameter_name, weight in adapted.named_parameters():
            if "lora_B" in parameter_name:
                weight.normal_(std=0.1)
    return adapted


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def pair(prompt: int, chosen: int, rejected: int, seed: int = 0) -> dict[str, list[int]]:
    ids = tokens(prompt + chosen + rejected, seed)
    return {
        "prompt_ids": ids[:prompt],
        "chosen_ids": ids[prompt : prompt + chosen],
        "rejected_ids": ids[prompt + chosen :],
    }


PAIRS = [pair(11, 9, 4, 1), pair(3, 1, 14, 2), pair(20, 6, 6, 3), pair(1, 2, 1, 4)]


def gradients(model: Any, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


def pair_loss(sums: torch.Tensor) -> torch.Tensor:
    chosen, rejected = sums.chunk(2)
    return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()


@pytest.mark.parametrize(
    ("architecture", "lora"),
    [
        pytest.param(architecture, lora, id=f"{architecture}-{'lora' if lora else 'full'}")
        # The others are compared by the product itself: test_these_architectures_are_trained_without_padding.
        for architecture in (ARCHITECTURES if FULL else ("llama", "mistral", "gpt2"))
        # An adapter is on linear layers, or on those of GPT-2, in every architecture.
        for lora in ([False, True] if FULL or architecture in ("llama", "gpt2") else [False])
    ],
)
def test_pairs_in_one_sequence_have_the_numbers_of_padded_ones(architecture: str, lora: bool, tmp_path: Path) -> None:
    model = model_of(architecture, lora=lora)
    spec = job_spec(tmp_path, tmp_path, "dpo", padding_free=False, attention_mask="always")
    padded, flat = PaddedPairs(spec), FlatPairs()
    inputs = DataCollatorForPreference(pad_token_id=0)(PAIRS)
    outputs = model(**padded.forward_arguments(model, inputs))
    expected, each = (
        padded.log_probs(outputs, inputs),
        outputs.log_probs[inputs["completion_mask"][:, 1:] == 1].detach(),
    )
    expected_gradients = gradients(model, pair_loss(expected))
    use_rows(model.get_base_model() if lora else model, "cpu")
    together = flat.collate(PAIRS)
    with fast_head():
        outputs = model(**flat.forward_arguments(model, together))
    found = flat.log_probs(outputs, together)
    assert torch.allclose(found, expected, rtol=1e-5)
    sides = outputs.log_probs[0].detach().split(together["counts"])
    assert (torch.cat([*sides[::2], *sides[1::2]]) - each).abs().max() < 1e-4
    difference = gradients(model, pair_loss(found)) - expected_gradients
    assert difference.norm() < 1e-4 * expected_gradients.norm()
    assert torch.equal(flat.lengths(together), padded.lengths(inputs))
    assert torch.equal(flat.num_tokens(together), padded.num_tokens(inputs))


ROWS = [
    {"input_ids": tokens(17, 5), "labels": [IGNORED] * 6 + tokens(17, 5)[6:]},
    {"input_ids": tokens(9, 6), "labels": tokens(9, 6)},
    {"input_ids": tokens(2, 7), "labels": tokens(2, 7)},
]


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2"])
def test_rows_in_one_sequence_have_the_loss_of_padded_ones(architecture: str) -> None:
    model = model_of(architecture)
    padded = DataCollatorForLanguageModeling(pad_token_id=0)(ROWS)
    expected = model(**padded, use_cache=False, fused_lm_head=True)
    expected_gradients = gradients(model, expected.loss)
    use_rows(model, "cpu")
    flat = collate_rows(ROWS)
    with fast_head():
        found = model(**forward_arguments(flat))
    assert torch.allclose(found.loss, expected.loss, rtol=1e-6)
    assert found.is_top1.sum() == expected.is_top1.sum()
    assert (gradients(model, found.loss) - expected_gradients).norm() < 1e-4 * expected_gradients.norm()
    assert int(flat["num_tokens"]) == 28


def test_packed_rows_in_one_sequence_are_the_rows_themselves() -> None:
    packed = pack(Dataset.from_list(ROWS), 26)
    sequences = collate_rows([packed[number] for number in range(len(packed))])
    alone = collate_rows(ROWS)
    assert sorted(sequences["layout"].groups) == sorted(alone["layout"].groups) == [(0, (1,)), (0, (8,)), (0, (16,))]
    assert sorted(sequences["shift_labels"][0].tolist()) == sorted(alone["shift_labels"][0].tolist())


@pytest.mark.parametrize(
    ("rows", "groups", "scored"),
    [
        # Both answers begin behind the last token of the prompt.
        (pair(4, 3, 1), ((4, (2, 0)),), [3, 4, 5, 3]),
        (pair(4, 1, 3), ((4, (0, 2)),), [3, 3, 4, 5]),
        (pair(0, 3, 2), ((0, (2, 1)),), [0, 1, 2]),  # nothing predicts a first token
        (pair(2, 0, 0), ((2, (0, 0)),), [0]),  # a filler
        (pair(0, 1, 1), ((0, (1, 1)),), [0]),
    ],
)
def test_a_pair_is_its_prompt_and_what_its_answers_predict(
    rows: dict[str, list[int]], groups: tuple[Any, ...], scored: list[int]
) -> None:
    inputs = FlatPairs().collate([rows])
    assert inputs["layout"].groups == groups
    assert inputs["scored"].tolist() == scored
    assert len(inputs["input_ids"][0]) == len(inputs["position_ids"][0]) == sum(inputs["layout"].sizes())
    assert (inputs["shift_labels"] != IGNORED).sum() == sum(inputs["counts"])


def test_a_row_without_a_loss_counts_no_token() -> None:
    inputs = collate_rows([{"input_ids": [1, 2], "labels": [IGNORED, IGNORED]}])
    assert inputs["shift_labels"].tolist() == [[IGNORED]]
    assert int(inputs["num_tokens"]) == 0


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_model_has_the_attention_of_its_device(kind: str) -> None:
    model = model_of("llama")
    use_rows(model, kind)
    assert model.config._attn_implementation == (cpu_attention.NAME_ON_CPU if kind == "cpu" else attention.NAME)


def test_a_batch_of_fillers_has_no_loss_and_a_gradient_of_zero() -> None:
    model, flat = model_of("llama"), FlatPairs()
    use_rows(model, "cpu")
    inputs = flat.collate([pair(2, 0, 0), pair(2, 0, 0)])
    sums = flat.log_probs(model(**flat.forward_arguments(model, inputs)), inputs)
    assert sums.tolist() == [0.0] * 4
    assert not gradients(model, sums.sum() + 0 * model.lm_head.weight.sum()).any()


def test_processes_that_load_batches_send_where_the_rows_are() -> None:
    inputs = FlatPairs().collate(PAIRS)
    inputs["layout"].mask(torch.zeros(1, 1, 2, 8), 4, 4)
    received = pickle.loads(pickle.dumps(inputs))
    assert received["layout"].groups == inputs["layout"].groups
    assert not received["layout"]._masks


def test_a_mask_hides_what_follows_and_what_is_behind_the_window() -> None:
    mask = Layout([]).mask(torch.zeros(1, 1, 3, 8), 5, 2)
    assert (mask == 0).int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]


# --- the head ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "computed again"])
@pytest.mark.parametrize(("alike", "expected"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize(
    ("scale", "with_bias", "trains_head"), [(1.0, False, True), (0.5, True, True), (1.0, False, False)]
)
def test_the_head_has_the_numbers_of_trls(
    kept: bool,
    alike: bool,
    expected: bool,
    scale: float,
    with_bias: bool,
    trains_head: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where gradients are expected to be alike, and are not."""
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * 50 * 3)  # three tokens
    monkeypatch.setattr(head, "KEPT_BYTES", 4 * 50 * 7 if kept else 0)
    torch.manual_seed(0)
    targets, gradient = torch.randint(50, (11,)), torch.full((11,), -0.3) if alike else torch.randn(11)
    hidden, weight, bias = torch.randn(11, 8), torch.randn(50, 8), torch.randn(50) if with_bias else None
    found = []
    for function in ("ours", "trl"):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_(trains_head)]
        given = None if bias is None else bias.clone().requires_grad_()
        if function == "ours":
            log_probs, top1 = head.LogProbs.apply(*leaves, given, targets, scale, True, True, expected)
        else:
            arguments = (targets, 1.0, 16, None, scale, ("log_probs", "is_top1"))
            log_probs, _, _, _, top1 = ChunkedLogProbFunction.apply(*leaves, given, *arguments)
        log_probs.backward(gradient)
        gradients = [leaf.grad for leaf in (*leaves, given) if leaf is not None]
        found.append((log_probs.detach(), top1, gradients))
    (ours, hits, gradients), (theirs, expected_hits, expected_gradients) = found
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert torch.equal(hits, expected_hits)
    for one, other in zip(gradients, expected_gradients, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("trains_head", "alike"), [(True, True), (False, False)], ids=["alike", "frozen"])
def test_the_head_computes_each_logit_once_where_it_knows_the_gradients_but_for_a_factor(
    trains_head: bool, alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * 50 * 3)
    computed, original = [], head._log_softmax

    def counting(hidden: torch.Tensor, *arguments: Any) -> torch.Tensor:
        computed.append(len(hidden))
        return original(hidden, *arguments)

    monkeypatch.setattr(head, "_log_softmax", counting)
    hidden, weight = torch.randn(11, 8, requires_grad=True), torch.randn(50, 8, requires_grad=trains_head)
    log_probs, _ = head.LogProbs.apply(hidden, weight, None, torch.arange(11), 1.0, False, True, alike)
    assert log_probs.grad_fn.kept == [None] * 4
    gradient = torch.ones(11) if alike else torch.randn(11)
    first = torch.autograd.grad(log_probs, hidden, gradient, retain_graph=True)
    assert computed == [3, 3, 3, 2]
    second = torch.autograd.grad(log_probs, hidden, gradient)
    assert len(computed) == 8
    assert torch.allclose(first[0], second[0], rtol=1e-5, atol=1e-6)


def test_the_head_of_no_tokens_has_gradients_of_zero() -> None:
    hidden, weight = torch.randn(0, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    targets = torch.zeros(0, dtype=torch.long)
    log_probs, _ = head.LogProbs.apply(hidden, weight, None, targets, 1.0, True, True, True)
    log_probs.sum().backward()
    assert torch.equal(weight.grad, torch.zeros(50, 8))
    assert hidden.grad.shape == (0, 8)
    for keep, alike in ((False, False), (True, True)):
        log_probs, _ = head.LogProbs.apply(hidden, weight, None, targets, 1.0, False, keep, alike)
        assert log_probs.grad_fn.kept == [None]


def test_gradients_of_the_forward_pass_are_gone_before_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = torch.randn(11, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    log_probs, _ = head.LogProbs.apply(hidden, weight, None, torch.arange(11), 1.0, False, True, True)
    first, begin, alive = weakref.ref(log_probs.grad_fn.unscaled), head._Gradients.begin, []

    def recorded(*arguments: Any) -> Any:
        alive.append(first() is not None)
        return begin(*arguments)

    monkeypatch.setattr(head._Gradients, "begin", recorded)
    log_probs.backward(torch.randn(11))
    assert alive == [False]


def test_gradients_of_the_forward_pass_are_rounded_once_under_autocast() -> None:
    torch.manual_seed(0)
    hidden, weight, found = torch.randn(11, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True), []
    for factor in (1.0, 1 / 61):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            log_probs, _ = head.LogProbs.apply(hidden, weight, None, torch.arange(11), 1.0, False, True, True)
        found.append(torch.autograd.grad(log_probs, hidden, torch.full((11,), factor))[0])
    assert torch.equal(found[1], found[0] * torch.tensor(1 / 61))


def test_the_head_has_no_second_derivative() -> None:
    hidden, weight = torch.randn(11, 8, requires_grad=True), torch.randn(50, 8)
    log_probs, _ = head.LogProbs.apply(hidden, weight, None, torch.arange(11), 1.0, False, True, True)
    (gradient,) = torch.autograd.grad((log_probs**2).sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def test_tokens_of_sft_are_expected_to_be_alike_and_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled, original = [], head._Gradients.multiply

    def recorded(found: Any, *factors: Any) -> None:
        scaled.append(found.of_weight is not None)
        original(found, *factors)

    monkeypatch.setattr(head._Gradients, "multiply", recorded)
    spec = job_spec(tmp_path, tiny_model(), "sft", rows=SFT_ROWS[:4], batch_size=4, n_epochs=1)
    assert run(tmp_path / "run", spec)[0] == 0
    assert scaled == [True]


def test_the_head_scales_logits_of_bf16_in_fp32() -> None:
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(64, 8).bfloat16(), torch.randn(50, 8).bfloat16(), torch.randint(50, (64,))
    ours, _ = head.LogProbs.apply(hidden, weight, None, targets, 0.3, False, False)
    logits = (hidden @ weight.t()).float() * 0.3
    assert torch.allclose(ours, torch.log_softmax(logits, dim=1).gather(1, targets[:, None])[:, 0], atol=1e-6)


@pytest.mark.parametrize("keep", [True, False])
def test_the_head_keeps_logits_only_for_a_backward_pass(keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, original = [], head.LogProbs

    class Recorded(original):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            outputs = original.forward(ctx, *arguments)
            kept.extend(ctx.kept)
            return outputs

    monkeypatch.setattr(head, "LogProbs", Recorded)
    model, flat = model_of("llama"), FlatPairs()
    use_rows(model, "cpu")
    with fast_head(), torch.set_grad_enabled(keep):
        model(**flat.forward_arguments(model, flat.collate(PAIRS)))
    assert [one is not None for one in kept] == [keep]


def test_capped_logits_are_left_to_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    model, flat = model_of("gemma2 without softcap"), FlatPairs()
    assert model.config.final_logit_softcapping
    use_rows(model, "cpu")
    monkeypatch.setattr(head.LogProbs, "apply", None)
    with fast_head():
        assert model(**flat.forward_arguments(model, flat.collate(PAIRS))).log_probs.isfinite().all()


# --- on which models --------------------------------------------------------------------------------------------------


def reason(monkeypatch: pytest.MonkeyPatch, config: Any, max_seq_length: int = 64) -> str:
    monkeypatch.setattr(support, "load_config", lambda source: config)
    source: Any = SimpleNamespace(model="model", trust_remote_code=False)
    return support._unsupported.__wrapped__(source, max_seq_length)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "starcoder2"])
def test_a_small_copy_has_few_experts_and_small_heads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_LARGEST", 20_000_000)
    assert reason(monkeypatch, AutoConfig.for_model(name)) == ""


def test_a_model_whose_small_copy_is_large_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_LARGEST", 1_000)
    assert "million parameters, too many to try it out" in reason(monkeypatch, AutoConfig.for_model("llama", **SIZES))


@pytest.mark.parametrize("name", [attention.NAME, cpu_attention.NAME_ON_CPU])
def test_what_cpus_compute_and_what_others_do_are_both_tried_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = AttentionInterface._global_mapping[name]

    def broken(*arguments: Any, **options: Any) -> Any:
        attended, weights = attend(*arguments, **options)
        return 1.5 * attended, weights

    monkeypatch.setitem(AttentionInterface._global_mapping, name, broken)
    assert "its logits differ by" in reason(monkeypatch, AutoConfig.for_model("llama", **SIZES))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_these_architectures_are_trained_without_padding(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, sizes = ARCHITECTURES[architecture]
    assert reason(monkeypatch, AutoConfig.for_model(name, **sizes)) == ""


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("gemma2", {}, "its attention has softcap"),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}, "its attention has s_aux"),
        ("mamba", {}, "it has blocks of kind linear_attention"),
        ("opt", {}, "its attention cannot be tried out"),
        ("llama", {"layer_types": ["full_attention", "chunked_attention"]}, "blocks of kind chunked_attention"),
        ("bloom", {}, "not every block is known to have causal attention"),
        ("mixtral", {"num_local_experts": 2, "output_router_logits": True}, "a mean over padded batches"),
        ("stablelm", {"num_key_value_heads": 4}, "its logits differ"),
        (
            "llama",
            {
                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
                "max_position_embeddings": 32,
            },
            "its dynamic rotary embeddings depend on the longest row of a batch",
        ),
    ],
)
def test_others_are_padded_and_the_record_states_the_reason(
    name: str, changes: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert expected in reason(monkeypatch, AutoConfig.for_model(name, **{**SIZES, **changes}))


def test_what_the_user_sets_comes_first(tmp_path: Path) -> None:
    spec = job_spec(tmp_path, tiny_model(), "dpo")
    assert support.why_padded(spec) == ""
    assert support.why_padded(spec.changed(attn_implementation="sdpa")) == ""
    eager = spec.changed(attn_implementation="eager")
    assert support.why_padded(eager) == "attn_implementation is 'eager'"
    assert support.why_padded(spec.changed(attention_mask="always")) == "attention_mask is 'always'"


def test_trying_out_a_model_uses_up_no_random_numbers(tmp_path: Path) -> None:
    support._unsupported.cache_clear()
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    support.why_padded(job_spec(tmp_path, tiny_model()))
    assert torch.rand(1) == expected


# --- whole jobs -------------------------------------------------------------------------------------------------------

LORA = LoraSpec(target_modules=("q_proj", "v_proj"), rank=4, alpha=8)
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {"gradient_accumulation_steps": 2, "batch_size": 2}),
    "dpo": ("dpo", {"lora": LORA}),
}


@pytest.mark.parametrize("job", JOBS)
def test_the_loss_curve_is_that_of_padded_batches(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, changes = JOBS[job]
    if job == "dpo":
        monkeypatch.setattr(smaller_batches, "TOKENS", 1)
    steps = 51 if FULL else 12
    rows = steps // 3 * {"sft": SFT_ROWS, "dpo": DPO_ROWS}[algorithm]  # of one epoch, since each ends in a checkpoint
    curves, records, batches = [], [], []
    for padding_free in (False, True):
        root = tmp_path / str(padding_free)
        spec = job_spec(root, tiny_model(), algorithm, **changes, rows=rows, padding_free=padding_free)
        status, events = run(root, spec)
        assert status == 0
        progress = of_kind(events, Progress)
        curves.append([[event.metrics[name] for event in progress] for name in ("loss", "grad_norm", "num_tokens")])
        effective = of_kind(events, Prepared)[0].effective
        records.append(effective.get("padding_free"))
        batches.append(tuple(effective["batches"].values()))
    assert records == [None, "used"]
    assert batches == {"sft": [(2, 2), (2, 2)], "dpo": [(4, 1), (1, 4)]}[job]
    assert len(curves[0][0]) == steps
    for expected, found in zip(*curves, strict=True):
        assert found == pytest.approx(expected, rel=1e-3)


def pretend_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have a call each, as on a GPU without a kernel for all of them."""
    monkeypatch.setattr(attention, "_is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(attention, "largest_head", lambda device: 0)
    monkeypatch.setattr(attention, "_multiprocessors", lambda device: 132)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_the_kernels_of_gpus_get_queries_keys_and_values_of_one_dtype(
    lora: LoraSpec | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_a_gpu(monkeypatch)  # whose lower right mask refuses others
    spec = job_spec(tmp_path, tiny_model(), "dpo", lora=lora, dtype="bf16", rows=DPO_ROWS[:4])
    status, events = run(tmp_path, spec)
    assert status == 0
    assert of_kind(events, Prepared)[0].effective["padding_free"] == "used"


def test_shared_heads_are_repeated_on_gpus_where_a_mask_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_gpu(monkeypatch)
    heads: list[tuple[bool, int]] = []
    original = torch.nn.functional.scaled_dot_product_attention

    def seen(query: Any, key: Any, value: Any, attn_mask: Any = None, **arguments: Any) -> Any:
        heads.append((type(attn_mask) is torch.Tensor, key.shape[1]))
        return original(query, key, value, attn_mask=attn_mask, **arguments)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", seen)
    model, flat = model_of("mistral").bfloat16(), FlatPairs()
    use_rows(model, "cpu")
    model(**flat.forward_arguments(model, flat.collate(PAIRS)))
    assert {(True, 4), (False, 2)} == set(heads)  # of four heads of queries, two share one of keys


KTO_PAIR = DpoSpec(loss_type="kto_pair", reference=ReferenceSpec())


@pytest.mark.parametrize(
    ("device", "changes", "expected"),
    [
        ("cpu", {}, (2, 6, 6)),
        ("cpu", {"batch_size": 3, "gradient_accumulation_steps": 1}, (1, 3, 9)),  # an odd number has no half
        ("cpu", {"ranks": 2}, (2, 6, 6)),
        ("cpu", {"ranks": 2, "sharding": ShardingSpec()}, (4, 3, 3)),
        ("cuda", {}, (4, 3, 3)),
        ("cpu", {"padding_free": False}, (4, 3, 3)),
        ("cpu", {"oom_retry": True}, (4, 3, 3)),
        ("cpu", {"method": KTO_PAIR}, (4, 3, 3)),
    ],
)
def test_batches_on_a_cpu_are_divided_by_their_tokens(
    device: str, changes: dict[str, Any], expected: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smaller_batches, "TOKENS", 80)
    rows = Dataset.from_list([pair(20, 12, 7), pair(10, 5, 6)])  # 30 tokens on average
    values = {"batch_size": 4, "gradient_accumulation_steps": 3, "max_validation_steps": 3, **changes}
    spec = job_spec(tmp_path, tiny_model(), "dpo", **values)
    plan = BatchPlan.of_job(spec)
    divided, found = smaller_batches.in_parts(spec, plan, rows, device)
    assert (
        divided.data.batch_size,
        divided.train.gradient_accumulation_steps,
        divided.data.max_validation_steps,
    ) == expected
    assert divided.rows_per_step == found.rows_per_step == spec.rows_per_step
    assert BatchPlan.of_job(divided) == found


# --- what it takes ----------------------------------------------------------------------------------------------------


def test_the_estimate_counts_the_tokens_of_the_largest_batch(tmp_path: Path) -> None:
    rows = Dataset.from_list([pair(40, 10, 5), pair(2, 3, 4), pair(30, 2, 30)])
    groups, scored = largest_groups(rows, 2)
    assert groups == ((30, (1, 29)), (40, (9, 4)))
    assert scored == 47
    spec = job_spec(tmp_path, tiny_model(), "dpo", max_seq_length=64)
    flat = estimate(spec, Batch(4, 60, groups, scored), "cpu")
    padded = estimate(spec.changed(padding_free=False), Batch(4, 60), "cpu")
    assert flat.activations + flat.logits < 0.7 * (padded.activations + padded.logits)


def test_a_smaller_batch_has_fewer_and_shorter_groups() -> None:
    batch = Batch(4, 60, ((30, (1, 29)), (40, (9, 4))), 43)
    assert batch.reduced(2, 60).groups == ((30, (1, 29)),)
    assert batch.reduced(4, 35).groups == ((30, (1, 5)), (35, (0, 0)))
    assert batch.reduced(4, 60) == batch
