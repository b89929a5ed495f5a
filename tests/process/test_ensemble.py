"""The measures of an ensemble, against the mean of probabilities that plain transformers and PEFT compute."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.evaluation.evaluate import evaluate
from llama_stack_provider_trl.recipes.fast import head
from llama_stack_provider_trl.specs.events import Evaluated, Finished, Prepared
from llama_stack_provider_trl.specs.job import JobSpec, LoraSpec
from llama_stack_provider_trl.specs.work import EvaluateSpec
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training import SFT_ROWS, job_spec, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


def other_model(root: Path) -> Path:
    """A model of another size with the same tokenizer, and embeddings for 40 tokens more than that has."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        **{"vocab_size": 1064, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256},
    )
    path = root / "other"
    made = LlamaForCausalLM(config)
    for weight in made.parameters():
        weight.data.mul_(4)  # as initialized, it would find nearly all tokens equally probable
    made.save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_model()).save_pretrained(path)
    return path


def adapter(root: Path, name: str, lora: LoraSpec) -> Path:
    """An adapter of the tiny model, as PEFT saves it, that changes what it computes."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(lora.rank)
    config = LoraConfig(
        **{"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": list(lora.target_modules)},
        init_lora_weights=False,
    )
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model()), config).save_pretrained(root / name)
    return root / name


LORAS = {
    "one": LoraSpec(target_modules=("q_proj", "v_proj"), rank=4, alpha=8, dropout=0.5),
    "two": LoraSpec(target_modules=("q_proj", "down_proj"), rank=2, alpha=16, dropout=0.5),
}


def member(model: Path, weight: float, trained: Path | None = None) -> dict[str, Any]:
    has = {"adapter": {"model": str(trained), "use": "continue"}, "lora": LORAS[trained.name]} if trained else {}
    return {"model": str(model), "weight": weight, **has}


def spec(root: Path, *members: dict[str, Any], **changes: Any) -> JobSpec:
    """The evaluation of an ensemble as the service resolves it: the job's own model is the first member."""
    work = EvaluateSpec.model_validate({"members": members})
    first = work.members[0]
    own = {"adapter": first.adapter, "lora": first.lora, "work": work}
    return job_spec(root, first.model, validation_rows=SFT_ROWS, **{**own, **changes})


@cache
def rows() -> list[tuple[list[int], int]]:
    """Token ids of each row, and where its answer begins."""
    from transformers import AutoTokenizer

    tokenizer, found = AutoTokenizer.from_pretrained(tiny_model()), []
    for row in SFT_ROWS:
        turn = [{"role": "user", "content": row["prompt"]}]
        prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(f"{prompt}{row['completion']}<|im_end|>\n")["input_ids"]
        found.append((ids, len(tokenizer(prompt)["input_ids"])))
    return found


def expected(*members: dict[str, Any]) -> dict[str, float]:
    """Loss and accuracy under the mean of the probabilities, in fp64, one row at a time."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    models = []
    for one in members:
        model = AutoModelForCausalLM.from_pretrained(one["model"])
        models.append(PeftModel.from_pretrained(model, one["adapter"]["model"]) if "adapter" in one else model)
    total, hits, count = 0.0, 0, 0
    for ids, begin in rows():
        mean = torch.zeros(len(ids) - begin, 1064, dtype=torch.float64)
        for model, one in zip(models, members, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, begin - 1 : -1].double()
            mean[:, : logits.shape[1]] += one["weight"] * logits.softmax(-1)
        targets = torch.tensor(ids[begin:])
        total -= float(mean.gather(1, targets[:, None]).log().sum())
        hits += int((mean.argmax(-1) == targets).sum())
        count += len(targets)
    return {"loss": total / count, "token_accuracy": hits / count, "trained_tokens": count}


def agrees(found: dict[str, Any], wanted: dict[str, float], tolerance: float = 1e-5) -> None:
    assert (found["rows"], found["truncated"], found["dropped"]) == (len(SFT_ROWS), 0, 0)
    assert found["trained_tokens"] == wanted["trained_tokens"]
    assert found["loss"] == pytest.approx(wanted["loss"], rel=tolerance)
    assert found["perplexity"] == pytest.approx(math.exp(wanted["loss"]), rel=10 * tolerance)
    assert found["token_accuracy"] == pytest.approx(wanted["token_accuracy"], abs=1e-6)


def test_an_ensemble_has_the_mean_of_its_members_probabilities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * 1064 * 7)  # 7 tokens at a time: a batch has several chunks
    other = other_model(tmp_path)
    two = member(tiny_model(), 0.25), member(other, 0.75)
    wanted = expected(*two)
    alone = [expected(member(model, 1.0)) for model in (tiny_model(), other)]
    assert min(abs(wanted["loss"] - one["loss"]) for one in alone) > 0.01
    by_default = {"max_seq_length_is_default": True}  # lowered to the fewest positions of a member
    status, events = run(tmp_path / "run", spec(tmp_path, *two, **by_default))
    assert status == 0, events
    (ended,), (prepared,) = of_kind(events, Finished), of_kind(events, Prepared)
    assert ended.result is not None
    agrees(ended.result, wanted)
    assert of_kind(events, Evaluated)[0].metrics["eval_loss"] == ended.result["loss"]
    sizes = [size_of(model) for model in (tiny_model(), other)]
    assert prepared.total_parameters == sum(sizes)
    assert prepared.effective["padding_free"] == "used"
    padded = {"padding_free": False, "attention_mask": "always", "batch_size": 5, **by_default}
    agrees(evaluate(spec(tmp_path, *two, **padded)), wanted)
    # The first member is the one with fewer embeddings above, and the one with more here.
    agrees(evaluate(spec(tmp_path, *reversed(two), max_seq_length=256)), wanted)


def size_of(model: Path) -> int:
    from transformers import AutoModelForCausalLM

    return sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(model).parameters())


def test_one_member_is_the_plain_job_and_adapters_on_one_base_do_not_change_each_other(tmp_path: Path) -> None:
    plain = evaluate(job_spec(tmp_path, tiny_model(), validation_rows=SFT_ROWS))
    single = evaluate(spec(tmp_path, member(tiny_model(), 1.0)))
    assert single == {**plain, **{name: pytest.approx(plain[name], abs=1e-6) for name in ("loss", "perplexity")}}
    one, two = (adapter(tmp_path, name, lora) for name, lora in LORAS.items())
    three = member(tiny_model(), 0.5, one), member(tiny_model(), 0.375, two), member(tiny_model(), 0.125)
    status, events = run(tmp_path / "run", spec(tmp_path, *three))
    assert status == 0, events
    (ended,), (prepared,) = of_kind(events, Finished), of_kind(events, Prepared)
    assert ended.result is not None
    agrees(ended.result, expected(*three))
    # Adapters on the same base share it; the third member has its own.
    assert 2 * size_of(tiny_model()) < prepared.total_parameters < 2.2 * size_of(tiny_model())
    agrees(evaluate(spec(tmp_path, *reversed(three))), expected(*three))
    # A member of weight 0 changes nothing, whichever it is.
    for weights in ((1.0, 0.0), (0.0, 1.0)):
        pair = [member(tiny_model(), weight, path) for weight, path in zip(weights, (one, two), strict=True)]
        agrees(evaluate(spec(tmp_path, *pair)), expected(member(tiny_model(), 1.0, one if weights[0] else two)))


def test_members_with_another_vocabulary_fail_by_both_names(tmp_path: Path) -> None:
    other = other_model(tmp_path)
    tiny_tokenizer(vocabulary=300).save_pretrained(other)
    with pytest.raises(JobFailure, match=r"does not fit .*, the first one: .* tokens have another number") as caught:
        evaluate(spec(tmp_path, member(tiny_model(), 0.5), member(other, 0.5)))
    assert caught.value.reason == "invalid_model"
    assert all(repr(str(model)) in str(caught.value) for model in (tiny_model(), other))


def test_a_head_scales_and_bounds_its_logits() -> None:
    torch.manual_seed(1)
    hidden, weight, bias = torch.randn(5, 8), torch.randn(11, 8), torch.randn(11)
    targets = torch.tensor([0, 3, 10, 10, 7])
    made = head.Head(hidden, weight, bias, 0.5, 2.0, torch.float32)
    found, top1 = head.averaged([made], [0.0], targets)
    logits = 2 * torch.tanh(0.5 * (hidden @ weight.t() + bias) / 2)
    assert torch.allclose(found, logits.log_softmax(1)[range(5), targets], atol=1e-6)
    assert torch.equal(top1, logits.argmax(1) == targets)
    larger = head.Head(torch.randn(5, 4), torch.randn(13, 4), None, 1.0, None, torch.float32)
    found, top1 = head.averaged([made, larger], [math.log(0.25), math.log(0.75)], torch.tensor([0, 3, 12, 10, 7]))
    mean = 0.75 * (larger.hidden @ larger.weight.t()).softmax(1)
    mean[:, :11] += 0.25 * logits.softmax(1)
    assert torch.allclose(found, mean.log()[range(5), [0, 3, 12, 10, 7]], atol=1e-6)
    assert torch.equal(top1, mean.argmax(1) == torch.tensor([0, 3, 12, 10, 7]))
    none = head.Head(hidden[:0], weight, bias, 1.0, None, torch.float32)
    assert [len(one) for one in head.averaged([none], [0.0], targets[:0])] == [0, 0]
