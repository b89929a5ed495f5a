"""`trl-remote evaluate`: the measures of real models, against a computation of their own."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llama_stack_provider_trl.recipes.evaluation.evaluate import evaluate
from llama_stack_provider_trl.specs.job import DpoSpec, OptimizerSpec
from llama_stack_provider_trl_remote.cli.main import main
from llama_stack_provider_trl_remote.cli.terminal import evaluation_lines
from tests.process.forked_recipes import fork_recipes
from tests.required import IN_FULL
from tests.tiny import tiny_model
from tests.training import DPO_ROWS, SFT_ROWS, job_spec, reference_to, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def trl_remote(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    # No service is called.
    monkeypatch.setenv("TRL_SERVICE_URL", "http://127.0.0.1:1")

    def run(*words: object) -> tuple[int, str, str]:
        exit_status = main([str(word) for word in words])
        captured = capsys.readouterr()
        return exit_status, captured.out, captured.err

    return run


def written(file: Path, rows: list[dict[str, str]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_the_loss_is_the_mean_over_all_trained_tokens(tmp_path: Path, trl_remote: Run) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model()), AutoTokenizer.from_pretrained(tiny_model())
    total, hits, count = 0.0, 0, 0
    for row in SFT_ROWS:
        turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        prompt = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
        begin = len(tokenizer(prompt)["input_ids"])
        ids = torch.tensor(tokenizer(f"{prompt}{row['completion']}<|im_end|>\n")["input_ids"])
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0, begin - 1 : -1].log_softmax(-1)
        total -= float(log_probs.gather(1, ids[begin:, None]).sum())
        hits += int((log_probs.argmax(-1) == ids[begin:]).sum())
        count += len(ids) - begin
    rows = written(tmp_path / "rows.jsonl", SFT_ROWS)
    words = ("--device", "cpu", "--batch-size", 5, "--json")
    exit_status, output, errors = trl_remote("evaluate", tiny_model(), rows, *words)
    assert exit_status == 0, errors
    found = json.loads(output)
    assert (found["method"], found["rows"], found["trained_tokens"]) == ("sft", len(SFT_ROWS), count)
    alone = evaluate(job_spec(tmp_path, tiny_model(), batch_size=1, validation_rows=SFT_ROWS))
    for measured in (found, alone):
        assert measured["loss"] == pytest.approx(total / count, rel=1e-5)
        assert measured["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
        assert measured["token_accuracy"] == pytest.approx(hits / count, abs=1e-6)
    first, *measures = evaluation_lines(found)
    assert first.startswith(f"{len(SFT_ROWS)} rows, ")
    assert [line.rsplit(maxsplit=1)[0] for line in measures[:3]] == ["loss", "perplexity", "token accuracy"]


def test_a_model_that_was_trained_on_pairs_prefers_their_chosen_answers(tmp_path: Path) -> None:
    training = job_spec(
        tmp_path, tiny_model(), "dpo", n_epochs=8, optimizer=OptimizerSpec(learning_rate=3e-3, scheduler="constant")
    )
    assert run(tmp_path / "run", training)[0] == 0
    held_out = [{**row, "prompt": row["prompt"].replace("plus", "and")} for row in DPO_ROWS]

    def compared(model: Path | str, reference: Path | str) -> dict[str, float]:
        dpo = DpoSpec(reference=reference_to(str(reference)))
        return evaluate(job_spec(tmp_path, model, "dpo", method=dpo, rows=held_out, validation_rows=held_out))

    found = compared(training.checkpoint_dir / "final", tiny_model())
    assert found["preference_accuracy"] == 1.0
    assert found["margin"] > 0
    assert found["loss"] < math.log(2)
    swapped = compared(tiny_model(), training.checkpoint_dir / "final")
    assert swapped["preference_accuracy"] == 0.0
    assert swapped["margin"] == pytest.approx(-found["margin"], rel=1e-4)


@IN_FULL  # CI: merged weights in test_merge.py, the command with a model above
def test_an_adapter_is_evaluated_as_it_is_and_merged_into_its_base(
    tmp_path: Path, trl_remote: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    fork_recipes(monkeypatch, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model())
    adapted = get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    rows, merged = written(tmp_path / "rows.jsonl", SFT_ROWS), tmp_path / "merged"
    status, output, errors = trl_remote("adapter", "merge", tmp_path / "adapter", "-o", merged, "--json")
    assert status == 0, errors
    found = AutoModelForCausalLM.from_pretrained(merged)
    assert json.loads(output)["parameters"] == sum(one.numel() for one in found.parameters())
    templates = [AutoTokenizer.from_pretrained(one).chat_template for one in (merged, tiny_model())]
    assert templates[0] == templates[1]
    expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model()), tmp_path / "adapter")
    weights = expected.merge_and_unload().state_dict()
    assert all(torch.allclose(one, weights[name], atol=1e-6) for name, one in found.state_dict().items())
    measured = []
    for model in (tmp_path / "adapter", merged, tiny_model()):
        status, output, errors = trl_remote("evaluate", model, rows, "--device", "cpu", "--json")
        assert status == 0, errors
        measured.append(json.loads(output)["loss"])
    assert measured[0] == pytest.approx(measured[1], rel=1e-4)
    assert measured[0] != pytest.approx(measured[2], rel=1e-4)


def test_an_adapter_that_cannot_be_merged_is_one_sentence(
    tmp_path: Path, trl_remote: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_recipes(monkeypatch, tmp_path)
    config = tmp_path / "adapter_config.json"
    for content, words, message in (
        (None, (), "it has no adapter_config.json"),
        ("[]", (), "is no JSON object"),
        ("{}", (), "--base is missing: the adapter's adapter_config.json names no base model"),
        ('{"base_model_name_or_path": "/on/another"}', (), "was trained on /on/another, which this machine lacks"),
        ("{}", ("--base", tiny_model()), str(tmp_path)),
    ):
        config.unlink(missing_ok=True)
        if content is not None:
            config.write_text(content)
        status, output, errors = trl_remote("adapter", "merge", tmp_path, "-o", tmp_path / "new", *words)
        assert (status, output, errors.count("\n")) == (1, "", 1), errors
        assert message in errors
    assert not (tmp_path / "new").exists()


def test_what_cannot_be_evaluated_is_one_sentence(
    tmp_path: Path, trl_remote: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_recipes(monkeypatch, tmp_path)
    rows, pairs = written(tmp_path / "rows.jsonl", SFT_ROWS), written(tmp_path / "pairs.jsonl", DPO_ROWS)
    other = written(tmp_path / "other.jsonl", [{"colour": "red"}])
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    model = tiny_model()
    for words, message in (
        ((tmp_path / "none", rows), "there is no such directory"),
        ((adapter, rows), "trl-remote adapter merge DIR"),
        ((adapter, pairs, "--reference", model), "trl-remote adapter merge DIR -o MODEL makes one"),
        ((model, tmp_path / "none.jsonl"), "no such file"),
        ((model, written(tmp_path / "empty.jsonl", [])), "it has no rows"),
        ((model, other), "row 0"),
        ((model, pairs), "name the one before training"),
        ((model, pairs, "--reference", model), "it is the model itself"),
        ((model, rows, "--reference", model), "leave it out"),
        ((model, rows, "--dtype", "fp16"), "fp16"),
        (("org/no-such-model", rows), "org/no-such-model"),
    ):
        exit_status, output, errors = trl_remote("evaluate", *words, "--device", "cpu")
        assert (exit_status, output, errors.count("\n")) == (1, "", 1), errors
        assert errors.startswith("trl-remote: ")
        assert message in errors
