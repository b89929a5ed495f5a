"""The distance of spans of text is that of TRL's ULDLoss, in value and gradient, and of tiles as of a whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llama_stack_provider_trl.recipes.data.pieces import Pieces, pieces_of
from llama_stack_provider_trl.recipes.fast.head import Head
from llama_stack_provider_trl.recipes.trainer import uld
from llama_stack_provider_trl.recipes.trainer.alignment import align
from llama_stack_provider_trl.recipes.trainer.uld import Side, UniversalDistance, Vocabularies
from llama_stack_provider_trl.specs.methods import UldSpec
from tests.process.gold_jobs import teacher_tokenizer
from tests.tiny import tiny_tokenizer

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
TEXT = "Zwölf Boxkämpfer: The capital of France is Paris. 你好 😊\n\nprint(add(1, 2))"
CASES: dict[str, tuple[UldSpec, float]] = {
    "plain": (UldSpec(student_temperature=0.8, teacher_temperature=1.5), 1.0),
    "hybrid": (UldSpec(hybrid=True), 0.5),
    "weights": (UldSpec(hybrid=True, matched_weight=0.7, unmatched_weight=2.0), 0.3),
    "forward": (UldSpec(hybrid=True, matched_weight=1.0, unmatched_weight=0.0), 0.0),
    "reverse": (UldSpec(hybrid=True, matched_weight=1.0, unmatched_weight=1.0), 1.0),
}


def pieces(tokenizer: Any) -> Pieces:
    found = pieces_of(tokenizer)
    assert found is not None
    return found


def trl_loss(spec: UldSpec, beta: float, own: Any, theirs: Any, logits: list[torch.Tensor], ids: list[Any]) -> Any:
    """Of TRL's loss on one answer that ends, behind a prompt of two tokens."""
    from trl.experimental.gold.gold_trainer import ULDLoss, build_teacher_inputs_from_texts
    from trl.experimental.utils import piece_byte_len

    config = SimpleNamespace(
        uld_crossentropy_weight=0.0,
        uld_distillation_weight=1.0,
        uld_student_temperature=spec.student_temperature,
        uld_teacher_temperature=spec.teacher_temperature,
        uld_skip_student_eos=True,
        uld_skip_teacher_eos=True,
        use_extended_uld=True,
        uld_token_merge_strategy="bayesian",
        uld_use_hybrid_loss=spec.hybrid,
        uld_hybrid_matched_weight=spec.matched_weight,
        uld_hybrid_unmatched_weight=spec.unmatched_weight,
        beta=beta,
    )
    loss = ULDLoss(config, own, theirs)
    offsets, end = [(0, 0), (0, 0)], 0
    for piece in own.convert_ids_to_tokens(ids[0][2:]):
        offsets.append((end, end + piece_byte_len(piece)))
        end += piece_byte_len(piece)
    text = own.decode(ids[0][2:], skip_special_tokens=False)
    *_, their_offsets = build_teacher_inputs_from_texts(theirs, ["ab"], [text])
    rows = [torch.tensor([each]) for each in ids]
    labels = [torch.cat([torch.full((1, 2), -100), row[:, 2:]], dim=1) for row in rows]
    # TRL reads the end as a token of the text, and appends another one: its position is never compared.
    rows[1], labels[1] = (
        torch.cat([each, torch.tensor([[theirs.eos_token_id]])], dim=1) for each in (rows[1], labels[1])
    )
    more = torch.cat([logits[1], logits[1][-1:]])
    return loss(logits[0][None], more[None], *labels, *rows, torch.tensor([offsets]), their_offsets)


@pytest.mark.parametrize("tile", [1, 1 << 30])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_trl(monkeypatch: pytest.MonkeyPatch, name: str, tile: int) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setattr(uld, "TILE_BYTES", tile)
    spec, beta = CASES[name]
    own, theirs = tiny_tokenizer(), teacher_tokenizer()
    answer = own(TEXT)["input_ids"] + [own.eos_token_id]
    one, two = pieces(own), pieces(theirs)
    aligned = align(answer, one, two, lambda text: theirs(text)["input_ids"], most=10**6, has_ended=True, end=None)
    lengths = {(b - a, d - c) for a, b, c, d in aligned.spans}
    assert {(1, 1), (1, 2)} <= lengths  # compared as they are, and merged
    assert aligned.compared == len(answer) - 1
    ids = [[5, 6, *answer], [5, 6, *aligned.teacher_ids, theirs.eos_token_id]]
    torch.manual_seed(1)
    heads = []
    for each, tokens in zip((own, theirs), ids, strict=True):
        hidden, weight = torch.randn(len(tokens), 8, requires_grad=True), torch.randn(len(each), 8, requires_grad=True)
        heads.append((hidden, weight))
    (hidden, weight), (other, other_weight) = heads
    logits = [hidden @ weight.T, other.detach() @ other_weight.detach().T]
    expected = trl_loss(spec, beta, own, theirs, logits, ids)
    gradients = torch.autograd.grad(expected, (hidden, weight))

    def side(states: torch.Tensor, rows: torch.Tensor, tokens: list[int], temperature: float) -> Side:
        # The position before a token has its distribution.
        return Side(Head(states[1:-1], rows, None, 1.0, None, torch.float32), torch.tensor(tokens[2:]), temperature)

    vocabularies = Vocabularies((len(own), len(theirs)))
    if spec.hybrid:
        vocabularies = Vocabularies.of(vocabularies.sizes, one.shared_with(two), torch.device("cpu"))
        assert vocabularies.shared is not None
        assert vocabularies.rests is not None
        assert len(vocabularies.shared[0]) > 259
        assert min(map(len, vocabularies.rests)) > 20
    distance = UniversalDistance(spec, beta, vocabularies)
    found = distance.between(
        side(hidden, weight, ids[0], spec.student_temperature),
        side(other, other_weight, ids[1], spec.teacher_temperature),
        aligned.spans,
    )[0].mean()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    for ours, trls in zip(torch.autograd.grad(found, (hidden, weight)), gradients, strict=True):
        assert torch.allclose(ours, trls, rtol=1e-4, atol=1e-6 * trls.abs().max().item())
        assert trls.abs().max() > 1e-4


def test_without_a_span_nothing_is_learned_and_the_model_is_connected() -> None:
    hidden, weight = torch.randn(3, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    side = Side(Head(hidden, weight, None, 1.0, None, torch.float32), torch.zeros(3, dtype=torch.long), 1.0)
    total = UniversalDistance(UldSpec(), 1.0, Vocabularies((9, 9))).between(side, side, []).sum()
    total.backward()
    assert total.item() == 0.0
    for each in (hidden, weight):
        assert each.grad is not None
        assert not each.grad.any()
