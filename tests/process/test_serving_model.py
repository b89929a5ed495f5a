"""Answers that advance in turns are those of transformers for each on its own, whatever the architecture."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.model.loading import linear_modules
from llama_stack_provider_trl.recipes.serving import model as serving_model
from llama_stack_provider_trl.recipes.serving.model import ServedModel
from llama_stack_provider_trl.specs.model_source import ModelSource
from llama_stack_provider_trl.specs.serving import (
    AnswerBegun,
    AnswerEnd,
    AnswerPart,
    AnswerReading,
    ServeRequest,
    ServeSpec,
)
from tests.process.stored_models import ARCHITECTURES, whole
from tests.required import in_full
from tests.tiny import CHATML, tiny_model

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
USUAL = ("qwen3", "gemma3_text", "mamba")
OTHERS = tuple(sorted(ARCHITECTURES.keys() - {*USUAL}))
TEXTS = ["One two three", "The quick brown fox jumps over", "a"]
TOKENS = 12


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def serve(model: Path, adapters: Path) -> ServedModel:
    torch.set_num_threads(1)
    spec = ServeSpec(source=ModelSource(model=str(model)), device="cpu", adapters=adapters, idle_seconds=1.0)
    return ServedModel(spec)


def ask(served: ServedModel, prompt: str, adapter: str | None = None, **changes: Any) -> tuple[str, list[float]]:
    """The text of an answer, and the log-probabilities of its tokens."""
    request = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0.0, "seed": "1", "logprobs": 0, **changes}
    messages: list[Any] = []
    served.answer(ServeRequest(adapter=adapter, **request), messages.append, lambda: None)
    assert isinstance(messages[-1], AnswerEnd)
    parts = [message for message in messages if isinstance(message, AnswerPart)]
    logprobs = [token.logprob for part in parts for token in part.tokens]
    return "".join(part.text for part in parts), logprobs


def expected(model: Any, tokenizer: Any, prompt: str) -> tuple[str, list[float]]:
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        found = model.eval().generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            output_logits=True,
            return_dict_in_generate=True,
        )
    ids = found.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    kept = [token for token in ids if token != tokenizer.eos_token_id]
    logprobs = [
        float(torch.log_softmax(logits[0].float(), -1)[token])
        for token, logits in zip(kept, found.logits, strict=False)
    ]
    return tokenizer.decode(kept, skip_special_tokens=True), logprobs


def assert_equal(found: tuple[str, list[float]], wanted: tuple[str, list[float]]) -> None:
    assert found[0] == wanted[0]
    assert found[1] == pytest.approx(wanted[1], abs=1e-4)


@pytest.mark.parametrize("architecture", [*USUAL, *in_full(*OTHERS)])
def test_answers_in_turns_are_those_of_generate(models: Path, tmp_path: Path, architecture: str) -> None:
    path = whole(models, architecture)
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    wanted = [expected(plain, tokenizer, text) for text in TEXTS]
    served = serve(path, tmp_path)
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        for found, answer in zip(pool.map(lambda text: ask(served, text), TEXTS), wanted, strict=True):
            assert_equal(found, answer)


def adapter(base: Path, path: Path, config: Callable[[list[str]], Any], seed: int) -> Path:
    """A random adapter that changes the model."""
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    tuned: Any = get_peft_model(model, config(sorted({name.rpartition(".")[2] for name in linear_modules(model)[0]})))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in tuned.named_parameters():
            if weight.requires_grad:
                weight += 0.3 * torch.randn_like(weight)
                assert "lora" in name or "ia3" in name
    tuned.save_pretrained(path)
    return path


def lora(modules: list[str]) -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.5, target_modules=modules)


def test_adapters_answer_in_turns_each_with_its_own_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are kept in memory: those without an answer are removed, and loaded again."""
    monkeypatch.setattr(serving_model, "MOST_ADAPTERS", 2)
    base = tiny_model()
    names = [None, "one", "two", "three"]
    tokenizer = AutoTokenizer.from_pretrained(base)
    wanted = {}
    for number, name in enumerate(names):
        model: Any = AutoModelForCausalLM.from_pretrained(base)
        if name is not None:
            model = PeftModel.from_pretrained(model, adapter(base, tmp_path / name, lora, number))
        wanted[name] = [expected(model, tokenizer, text) for text in TEXTS]
    assert len({answers[0][0] for answers in wanted.values()}) == len(names)
    served = serve(base, tmp_path)
    asked = [(name, number) for number in range(len(TEXTS)) for name in names]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = pool.map(lambda one: ask(served, TEXTS[one[1]], one[0]), asked)
        for (name, number), answer in zip(asked, answers, strict=True):
            assert_equal(answer, wanted[name][number])
    assert len(served._voices) <= len(names)


def test_a_damaged_adapter_is_refused_and_one_of_another_kind_takes_the_place_of_those_in_memory(
    tmp_path: Path,
) -> None:
    base = tiny_model()
    adapter(base, tmp_path / "one", lora, 1)
    adapter(base, tmp_path / "factors", lambda modules: IA3Config(target_modules=modules, feedforward_modules=[]), 2)
    adapter(base, tmp_path / "damaged", lora, 3)
    (tmp_path / "damaged" / "adapter_model.safetensors").write_bytes(b"x")
    served = serve(base, tmp_path)
    plain, tuned = ask(served, TEXTS[0]), ask(served, TEXTS[0], "one")
    assert plain != tuned
    with pytest.raises(JobFailure, match="is cut off"):
        ask(served, TEXTS[0], "damaged")
    assert_equal(ask(served, TEXTS[0]), plain)
    assert_equal(ask(served, TEXTS[0], "one"), tuned)
    factors = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "factors")
    assert_equal(ask(served, TEXTS[0], "factors"), expected(factors, AutoTokenizer.from_pretrained(base), TEXTS[0]))
    assert_equal(ask(served, TEXTS[0]), plain)
    assert_equal(ask(served, TEXTS[0], "one"), tuned)
    begun: list[Any] = []

    def meanwhile(message: Any) -> None:
        if not begun and isinstance(message, AnswerBegun):
            begun.append(message)
            with pytest.raises(JobFailure, match="an adapter of another kind is answering"):
                ask(served, TEXTS[0], "factors")
            assert_equal(ask(served, TEXTS[0]), plain)

    request = ServeRequest(adapter="one", prompt=TEXTS[0], max_tokens=2, seed="1")
    served.answer(request, meanwhile, lambda: None)
    assert begun
    with pytest.raises(JobFailure, match="more than the 2048 positions of the model"):
        ask(served, TEXTS[0], max_tokens=2048)


def test_a_thought_that_the_chat_template_opens_is_reported(tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model(), tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    opened: list[bool] = []
    for behind in ("", "<think>\n", "<think>\n\n</think>\n\n"):
        tokenizer.chat_template = CHATML.replace("assistant\n' }}", f"assistant\n{behind}' }}}}")
        tokenizer.save_pretrained(model)
        messages: list[Any] = []
        request = ServeRequest(messages=[{"role": "user", "content": "One"}], max_tokens=1, seed="1")
        serve(model, tmp_path).answer(request, messages.append, lambda: None)
        assert isinstance(messages[0], AnswerReading)
        assert isinstance(messages[1], AnswerBegun)
        opened.append(messages[1].opens_thought)
    assert opened == [False, True, False]


def test_tools_are_written_by_the_chat_template_of_the_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model(), model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}" + CHATML
    tokenizer.save_pretrained(model)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    turn = {"role": "user", "content": "What is two and two?"}
    served = serve(model, tmp_path)
    for given in (None, tools):
        ids = tokenizer.apply_chat_template([turn], tools=given, add_generation_prompt=True)["input_ids"]
        messages: list[Any] = []
        request = ServeRequest(messages=[{**turn, **({"tools": given} if given else {})}], max_tokens=1, seed="1")
        served.answer(request, messages.append, lambda: None)
        assert (messages[1].prompt_tokens, messages[1].has_call_tags) == (len(ids), True)
