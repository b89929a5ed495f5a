"""A tuned model answers at once: chats over a real service, with adapters and models that it has trained itself."""

from __future__ import annotations

import http.client
import importlib.util
import io
import json
import os
import re
import select
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import requests

from llama_stack_provider_trl.system.process import FileLock, tasks_below
from llama_stack_provider_trl_remote.cli.main import main
from tests.contract.payloads import LORA, PAIRS, QUESTIONS, sft
from tests.contract.service import TrainingService, running_service
from tests.contract.stack import DPO, SFT, Json, poll
from tests.required import FULL, IN_FULL, in_full
from tests.tiny import REPOSITORY, tiny_model

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]
LIMIT_GB = 1
CHAT, COMPLETIONS = "/chat/completions", "/completions"
HAS_SCHEMAS = importlib.util.find_spec("llguidance") is not None


def within(schema: Json) -> Json:
    """The form of an answer that a schema describes."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def in_schemas(*case: Any) -> list[Any]:
    return [case] if HAS_SCHEMAS else []


SCHEMA = within(
    {
        "type": "object",
        "properties": {"kind": {"enum": ["capital", "harbour"]}, "people": {"type": "integer", "maximum": 99}},
        "required": ["kind", "people"],
        "additionalProperties": False,
    }
)
PREFERENCE = {"type": "dpo", "beta": 0.1}
REWARDS = {
    "type": "grpo",
    "num_generations": 2,
    "max_completion_length": 8,
    "rewards": [{"check": {"type": "regex", "pattern": "[ea]"}}],
}
PROMPTS = [f"What is {n} times two?" for n in range(50 if FULL else 8)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    """A service with completed jobs: an adapter and all weights by SFT; with TRL_TESTS=full also by DPO and GRPO."""
    with running_service(tmp_path_factory.mktemp("chats")) as service:
        service.register("rows", QUESTIONS)
        options = {"save_steps": 20, "keep_last": 20}
        for name, changes in (("adapter", {"algorithm_config": LORA}), ("whole", {})):
            body = sft(name, "rows", **changes)
            body["training_config"]["n_epochs"] = 20
            body["training_config"]["optimizer_config"]["lr"] = 5e-3
            service.submit(SFT, body, options=options)
            service.wait_state(name, "completed", timeout=120)
        if FULL:
            service.register("pairs", PAIRS, dataset_type="preference")
            service.register("prompts", [{"prompt": row["prompt"]} for row in QUESTIONS])
            for name, rows, method in (("preferring", "pairs", PREFERENCE), ("rewarded", "prompts", REWARDS)):
                for kind, options in (("adapter", {"lora": LORA}), ("whole", {})):
                    body = sft(f"{name}-{kind}", rows, algorithm_config=method)
                    del body["training_config"]["data_config"]["data_format"]
                    body["training_config"]["optimizer_config"]["lr"] = 5e-3
                    service.submit(DPO, body, options=options)
                    service.wait_state(f"{name}-{kind}", "completed", timeout=120)
        yield service


def chat_body(model: str, text: str, **changes: Any) -> Json:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 24}
    return {**body, **changes}


def post(service: TrainingService, path: str, body: Json) -> requests.Response:
    return service.post(path, body, prefix="/openai/v1")


def chat(service: TrainingService, model: str, text: str, **changes: Any) -> str:
    answer = post(service, CHAT, chat_body(model, text, **changes))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def streamed(service: TrainingService, path: str, body: Json) -> list[Json]:
    """The events of a stream, which ends properly."""
    answer = post(service, path, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.content.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]", lines
    return [json.loads(line) for line in lines[:-1]]


def directory_of(service: TrainingService, job: str, checkpoint: str = "final") -> Path:
    found = service.status(job)["checkpoints"]
    return next(Path(one["path"]) for one in found if one["path"].endswith(f"/{checkpoint}"))


class Greedy(NamedTuple):
    """A greedy answer."""

    text: str
    logprobs: list[float]
    """Of its tokens, without the one that ends it."""


def served(service: TrainingService, model: str, text: str) -> Greedy:
    (choice,) = post(service, CHAT, chat_body(model, text, logprobs=True)).json()["choices"]
    return Greedy(choice["message"]["content"], [token["logprob"] for token in choice["logprobs"]["content"]])


def generated(directory: Path, prompts: list[str], tokens: int = 24) -> list[Greedy]:
    """The answers of transformers, or PEFT, with the files in an exported directory."""
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    is_adapter = (directory / "adapter_config.json").is_file()
    model = (AutoPeftModelForCausalLM if is_adapter else AutoModelForCausalLM).from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    answers = []
    for prompt in prompts:
        turns = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            found = model.generate(
                **inputs, max_new_tokens=tokens, do_sample=False, output_logits=True, return_dict_in_generate=True
            )
        ids = found.sequences[0, inputs["input_ids"].shape[1] :]
        pairs = [(token, logits) for token, logits in zip(ids.tolist(), found.logits, strict=True)]
        logprobs = [float(torch.log_softmax(logits[0].float(), -1)[token]) for token, logits in pairs]
        kept = len(logprobs) - int(ids[-1] == tokenizer.eos_token_id)
        answers.append(Greedy(tokenizer.decode(ids, skip_special_tokens=True), logprobs[:kept]))
    return answers


def serving_processes(service: TrainingService) -> list[Path]:
    return [run_dir for run_dir, left in tasks_below(service.data_dir / "serving").items() if left]


@pytest.mark.timeout(900 if FULL else 300)
@pytest.mark.parametrize(
    ("model", "job", "checkpoint"),
    [
        ("ft:adapter", "adapter", "final"),
        ("job:whole/checkpoint-20", "whole", "checkpoint-20"),
        *in_full(
            ("job:adapter/checkpoint-20", "adapter", "checkpoint-20"),
            ("ft:whole", "whole", "final"),
            *(
                (f"ft:{job}", job, "final")
                for job in ("preferring-adapter", "preferring-whole", "rewarded-adapter", "rewarded-whole")
            ),
        ),
    ],
)
def test_greedy_answers_are_those_of_transformers_with_the_exported_files(
    service: TrainingService, model: str, job: str, checkpoint: str
) -> None:
    expected = generated(directory_of(service, job, checkpoint), PROMPTS)
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        found = served(service, model, prompt)
        assert found.text == answer.text
        assert found.logprobs == pytest.approx(answer.logprobs, abs=1e-4)
    for prompt, answer in [*zip(PROMPTS, expected, strict=True)][: None if FULL else 1]:
        parts = streamed(service, CHAT, chat_body(model, prompt))
        assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == answer.text
    untrained = served(service, str(tiny_model()), PROMPTS[0])
    assert untrained.logprobs[0] != pytest.approx(expected[0].logprobs[0], abs=1e-2)


def test_an_adapter_answers_by_its_directory_and_a_merged_model_by_its_name(service: TrainingService) -> None:
    directory = directory_of(service, "adapter")
    assert served(service, str(directory), PROMPTS[0]) == served(service, "ft:adapter", PROMPTS[0])
    body = sft("both", "rows", algorithm_config=LORA)
    service.submit(SFT, body, options={"merge_adapter": True})
    service.wait_state("both", "completed", timeout=120)
    adapted, merged = (served(service, name, PROMPTS[0]) for name in ("ft:both", "job:both/merged"))
    assert adapted.logprobs[:4] == pytest.approx(merged.logprobs[:4], abs=0.05)
    expected = generated(directory_of(service, "both", "merged"), PROMPTS[:1])[0]
    assert merged.text == expected.text


def test_a_damaged_adapter_is_refused_by_the_name_that_the_chat_gave_it(
    service: TrainingService, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(directory_of(service, "adapter"), damaged)
    (damaged / "adapter_model.safetensors").write_bytes(b"x")
    answer = post(service, CHAT, chat_body(str(damaged), "Tell me."))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(f"adapter '{damaged}': adapter_model.safetensors is cut off")
    assert chat(service, "ft:adapter", "Tell me.")


def test_adapters_of_one_base_share_a_process_and_answer_beside_each_other(service: TrainingService) -> None:
    models = [str(tiny_model()), "ft:adapter", "job:adapter/checkpoint-20"]
    alone = {model: [served(service, model, prompt) for prompt in PROMPTS[:6]] for model in models}
    wanted = [(model, number) for number in range(6) for model in models]
    with ThreadPoolExecutor(len(wanted)) as pool:
        found = list(pool.map(lambda one: served(service, one[0], PROMPTS[one[1]]), wanted))
    for (model, number), answer in zip(wanted, found, strict=True):
        assert answer.text == alone[model][number].text
        assert answer.logprobs == pytest.approx(alone[model][number].logprobs, abs=1e-5)
    assert len({answers[0].logprobs[0] for answers in alone.values()}) == 3
    specs = [json.loads((path / "spec.json").read_text()) for path in serving_processes(service)]
    assert [spec["source"]["model"] for spec in specs].count(str(tiny_model())) == 1


def test_several_answers_are_choices_each_with_random_numbers_of_its_own(service: TrainingService) -> None:
    hot = {"temperature": 1.5, "max_tokens": 16, "seed": 3, "response_format": {"type": "text"}}
    alone = chat(service, "ft:whole", "Tell me.", **hot)
    body = chat_body("ft:whole", "Tell me.", n=4, **hot)
    whole = post(service, CHAT, body).json()
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert texts[0] == alone
    assert len({*texts}) > 1
    assert whole["usage"]["completion_tokens"] > whole["usage"]["prompt_tokens"] / 100
    events = streamed(service, CHAT, {**body, "stream_options": {"include_usage": True}})
    assert events.pop()["usage"] == whole["usage"]
    parts = ["", "", "", ""]
    for event in events:
        (choice,) = event["choices"]
        parts[choice["index"]] += choice["delta"].get("content", "")
    assert parts == texts
    assert {event["id"] for event in events} == {events[0]["id"]}


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.9, "seed": 11}, {"stop": "?"}])
def test_a_stream_has_the_parts_of_the_whole_answer(service: TrainingService, changes: Json) -> None:
    body = chat_body("ft:adapter", "Tell me.", logprobs=True, top_logprobs=3, **changes)
    stop = ""
    if "stop" in body:
        unstopped = chat(service, "ft:adapter", "Tell me.")
        body["stop"] = [stop := unstopped[1:3], "not in the answer"]
    whole = post(service, CHAT, body).json()
    events = streamed(service, CHAT, {**body, "stream_options": {"include_usage": True}})
    *parts, usage = events
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
    assert text == whole["choices"][0]["message"]["content"]
    logprobs = [one for part in parts for one in (part["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert logprobs == whole["choices"][0]["logprobs"]["content"]
    assert all(len(one["top_logprobs"]) == 3 for one in logprobs)
    assert parts[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert (usage["usage"], usage["choices"]) == (whole["usage"], [])
    if stop:
        assert text == unstopped[: unstopped.index(stop)]
        assert whole["choices"][0]["finish_reason"] == "stop"


def test_the_same_seed_gives_the_same_answer(service: TrainingService) -> None:
    hot = {"temperature": 1.5, "max_tokens": 16}
    found = [chat(service, "ft:whole", "Tell me.", seed=seed, **hot) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


def test_completions_continue_a_text_without_a_template(service: TrainingService) -> None:
    body = {"model": "ft:whole", "prompt": "The capital of", "temperature": 0, "max_tokens": 5, "logprobs": 2}
    answer = post(service, COMPLETIONS, body).json()
    assert answer["object"] == "text_completion"
    (choice,) = answer["choices"]
    assert choice["finish_reason"] in ("length", "stop")
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"]) <= 5
    assert choice["logprobs"]["text_offset"][0] == 0
    text = "".join(event["choices"][0]["text"] for event in streamed(service, COMPLETIONS, body))
    assert text == choice["text"]
    assert answer["usage"]["prompt_tokens"] > 0


def test_openais_own_client_reads_the_answers(service: TrainingService) -> None:
    from openai import NotFoundError, OpenAI

    with OpenAI(base_url=f"{service.url}/openai/v1", api_key="none", max_retries=0) as client:
        listed = [model.id for model in client.models.list()]
        assert {"ft:adapter", "ft:whole", str(tiny_model())} <= set(listed)
        assert client.models.retrieve("ft:adapter").object == "model"
        turns: Any = [{"role": "user", "content": "Tell me."}]
        answer = client.chat.completions.create(model="ft:adapter", messages=turns, temperature=0, max_tokens=8)
        parts = client.chat.completions.create(
            model="ft:adapter", messages=turns, temperature=0, max_tokens=8, stream=True
        )
        assert "".join(part.choices[0].delta.content or "" for part in parts) == answer.choices[0].message.content
        with pytest.raises(NotFoundError, match="job 'gone' not found"):
            client.chat.completions.create(model="ft:gone", messages=turns)


@pytest.mark.parametrize(
    ("changes", "status", "sentence"),
    [
        ({"model": "ft:gone"}, 404, "job 'gone' not found"),
        ({"model": "job:adapter/checkpoint-999"}, 400, "has no checkpoint 'checkpoint-999'"),
        ({"model": "ft:adapter/final"}, 400, "send ft:NAME"),
        ({"model": "/no/such/model"}, 400, "there is no such directory"),
        ({"presence_penalty": 1}, 400, "presence_penalty"),
        ({"n": 5}, 400, "n="),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "a", "name": "me"}]}, 400, "messages.0.name"),
        ({"messages": [{"role": "robot", "content": "a"}]}, 400, "messages, turn 0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "found images, expected"),
        ({"max_tokens": 5000}, 400, "positions of the model"),
        ({"top_logprobs": 2}, 400, "it needs logprobs"),
        ({"stream_options": {"include_usage": True}}, 400, "it needs stream"),
        ({"stop": ["a"] * 5}, 400, "stop"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "writes no tools"),
        ({"response_format": {"type": "grammar"}}, 400, "response_format.type"),
        ({"response_format": {**SCHEMA, "type": "json_object"}}, 400, "needs type json_schema"),
        ({"response_format": {"type": "json_schema"}}, 400, "type json_schema needs it: {name, schema}"),
        ({"response_format": {"type": "text", "json_schema": {"name": "x", "schema": {}}}}, 400, "needs type json_sch"),
        (
            {"response_format": SCHEMA, "tools": [{"type": "function", "function": {"name": "f"}}]},
            400,
            "tool_choice no",
        ),
        ({"response_format": within({"const": "x" * (1 << 16)})}, 400, "at most 65536 are read"),
        *in_schemas({"response_format": within({"dependentSchemas": {}})}, 400, "dependentSchemas"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    service: TrainingService, changes: Json, status: int, sentence: str
) -> None:
    answer = post(service, CHAT, {**chat_body("ft:adapter", "Tell me."), **changes})
    assert answer.status_code == status, answer.text
    assert sentence in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.skipif(not HAS_SCHEMAS, reason="the extra `schemas`")
def test_an_answer_within_a_schema_is_such_json_and_streamed_the_same(service: TrainingService) -> None:
    body = chat_body("ft:adapter", "Tell me.", response_format=SCHEMA, temperature=1.5, seed=4, max_tokens=200)
    (choice,) = post(service, CHAT, body).json()["choices"]
    answer = json.loads(choice["message"]["content"])
    assert (choice["finish_reason"], answer.keys()) == ("stop", {"kind", "people"})
    assert answer["kind"] in ("capital", "harbour")
    assert isinstance(answer["people"], int)
    parts = streamed(service, CHAT, body)
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == choice["message"]["content"]


@pytest.mark.skipif(not HAS_SCHEMAS, reason="the extra `schemas`")
def test_json_object_is_any_object_of_chats_and_of_completions_streamed_the_same(service: TrainingService) -> None:
    """A model that was not trained for it opens texts and objects without an end: max_tokens ends the answer."""
    more = {"response_format": {"type": "json_object"}, "temperature": 1.5, "seed": 4, "max_tokens": 40}
    begin = re.compile(r"\{[ \t\r\n]*[\"}]")
    body = chat_body("ft:adapter", "Tell me.", **more)
    (choice,) = post(service, CHAT, body).json()["choices"]
    assert begin.match(choice["message"]["content"])
    assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["message"]["content"]), dict)
    parts = streamed(service, CHAT, body)
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == choice["message"]["content"]
    body = {"model": "ft:adapter", "prompt": "An object: ", **more}
    (choice,) = post(service, COMPLETIONS, body).json()["choices"]
    assert begin.match(choice["text"])
    assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["text"]), dict)
    assert "".join(event["choices"][0]["text"] for event in streamed(service, COMPLETIONS, body)) == choice["text"]


def test_a_training_takes_the_device_and_the_next_chat_reports_it(service: TrainingService) -> None:
    chat(service, "ft:adapter", "Tell me.")
    assert serving_processes(service)
    service.arm("started", "hold")
    service.submit(SFT, sft("first", "rows"))
    service.wait_taken("started", 60)
    poll(lambda: not serving_processes(service), "nothing serves any more", 5)
    answer = post(service, CHAT, chat_body("ft:adapter", "Tell me."))
    assert answer.status_code == 503, answer.text
    assert "a training comes first: job 'first' has cpu" in answer.json()["error"]["message"]
    assert int(answer.headers["Retry-After"]) > 0
    service.go("started")
    service.wait_state("first", "completed", timeout=60)
    assert chat(service, "ft:first", "Tell me.")


def test_a_checkpoint_of_a_running_training_answers_beside_it(service: TrainingService) -> None:
    body = sft("running", "rows", algorithm_config=LORA)
    body["training_config"]["n_epochs"] = 3
    service.arm("step-5", "hold")
    service.submit(SFT, body, options={"save_steps": 2, "keep_last": 20})
    service.wait_taken("step-5", 60)
    poll(lambda: len(service.status("running")["checkpoints"]) == 2, "two checkpoints are listed", 20)
    named, newest = (served(service, f"job:running/{one}", PROMPTS[0]) for one in ("checkpoint-4", "newest"))
    assert newest == named
    assert newest != served(service, "job:running/checkpoint-2", PROMPTS[0])
    assert chat(service, str(tiny_model()), "Tell me.")  # the same process has it
    assert post(service, CHAT, chat_body("ft:whole", "Tell me.")).status_code == 503
    (run_dir,) = serving_processes(service)
    assert 19 in {psutil.Process(process.pid).nice() for process in tasks_below(run_dir.parent)[run_dir]}
    service.go("step-5")
    service.wait_state("running", "completed", timeout=60)
    assert service.status("running")["resources_allocated"]["attempt"] == 1
    assert served(service, "job:running/newest", PROMPTS[0]) == served(service, "ft:running", PROMPTS[0])


def test_an_answer_that_is_being_streamed_ends_with_the_reason_when_a_training_comes(service: TrainingService) -> None:
    body = chat_body(str(tiny_model()), "Tell me.", max_tokens=1900, stream=True)
    answer = service.session.post(f"{service.url}/openai/v1{CHAT}", json=body, stream=True, timeout=60)
    lines = answer.iter_lines()
    assert next(lines).startswith(b"data: ")
    service.submit(SFT, sft("second", "rows"))
    last = [line for line in lines if line][-1]
    assert "a training comes first: job 'second' has cpu" in json.loads(last[6:])["error"]["message"]
    service.wait_state("second", "completed", timeout=60)


def test_a_question_in_a_shell_is_answered_by_both_models(
    service: TrainingService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRL_SERVICE_URL", service.url)
    base, greedy = str(tiny_model()), ["--temperature", "0", "--max-tokens", "8"]
    tuned, plain = (chat(service, model, "Tell me.", max_tokens=8) for model in ("ft:adapter", base))
    assert main(["chat", "adapter", "-m", "Tell me.", *greedy]) == 0
    assert capsys.readouterr().out.startswith(tuned.partition("\n")[0])
    assert main(["chat", "adapter", "--against", base, "-m", "Tell me.", "--json", *greedy]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["model"], one["text"]) for one in found] == [("ft:adapter", tuned), (base, plain)]
    # The second turn has the first one and its answer before it.
    monkeypatch.setattr("sys.stdin", io.StringIO("Tell me.\n\nAnd now?\n"))
    assert main(["chat", "adapter", "--json", *greedy]) == 0
    first, second = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert first == tuned
    turns = [("user", "Tell me."), ("assistant", tuned), ("user", "And now?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert second == chat(service, "ft:adapter", "", messages=messages, max_tokens=8)
    assert main(["chat", "gone", "-m", "Tell me."]) == 1
    assert "job 'gone' not found" in capsys.readouterr().err


def test_the_quickstart_asks_the_base_and_the_tuned_model_the_same(
    service: TrainingService, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("quickstart", REPOSITORY / "examples" / "quickstart.py")
    assert spec is not None
    assert spec.loader is not None
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    directory = directory_of(service, "whole")
    quickstart.ask_both(service.url, {"base": str(tiny_model()), "tuned": str(directory)})
    lines = capsys.readouterr().out.splitlines()
    assert [sum(line.startswith(f"  {title} ") for line in lines) for title in ("base", "tuned")] == [3, 3]


@IN_FULL
def test_a_hundred_chats_at_once_stay_within_the_memory_limit(tmp_path: Path) -> None:
    """A process with this model and without chats takes half of the limit. -rP prints the numbers."""
    with running_service(tmp_path, max_training_memory_gb=LIMIT_GB) as service:
        chat(service, str(tiny_model()), PROMPTS[0])
        (run_dir,) = serving_processes(service)
        alone = peak = memory_of(run_dir)
        begun = time.monotonic()
        with ThreadPoolExecutor(101) as pool:
            waits = [
                pool.submit(
                    requests.post,
                    f"{service.url}/openai/v1{CHAT}",
                    json=chat_body(str(tiny_model()), PROMPTS[number % 50], max_tokens=64),
                    timeout=240,
                )
                for number in range(100)
            ]
            while not all(wait.done() for wait in waits):
                peak = max(peak, memory_of(run_dir))
                time.sleep(0.02)
        seconds = time.monotonic() - begun
        codes = [wait.result().status_code for wait in waits]
        tokens = sum(wait.result().json()["usage"]["completion_tokens"] for wait in waits)
        print(f"100 chats, {tokens} tokens in {seconds:.1f} s; {alone:.0f} MiB before, {peak:.0f} MiB at most")
        assert codes == [200] * 100
        assert serving_processes(service) == [run_dir]
        assert peak < LIMIT_GB * 1024


def memory_of(run_dir: Path) -> float:
    """MiB of all processes that serve in a run directory, shared pages in part."""
    found = 0
    for process in tasks_below(run_dir.parent)[run_dir]:
        with suppress(psutil.NoSuchProcess):
            found += psutil.Process(process.pid).memory_full_info().pss
    return found / (1 << 20)


def test_an_answer_whose_client_has_left_is_not_computed_further(service: TrainingService) -> None:
    """Answers advance token by token in turn: where all are as long, the first one would end first."""
    base = str(tiny_model())
    chat(service, base, "Tell me.")  # the model is in memory then
    (run_dir,) = (path for path in serving_processes(service) if model_of(path) == base)
    server = next(
        psutil.Process(one.pid) for one in tasks_below(run_dir.parent)[run_dir] if "serve" in command(one.pid)
    )

    def asked() -> int:
        """Questions that the model has: connections to its socket without the listening one and the lease."""
        return sum(bool(one.laddr) for one in server.net_connections("unix")) - 2

    poll(lambda: asked() == 0, "the first question is put away", 20)
    clients = [http.client.HTTPConnection("127.0.0.1", service.port) for _ in range(4)]
    for number, client in enumerate(clients):
        body = chat_body(base, "Tell me.", max_tokens=1900, stream=number > 1)
        client.request("POST", f"/openai/v1{CHAT}", json.dumps(body), {"Content-Type": "application/json"})
        poll(lambda opened=number + 1: asked() == opened, "the model has the question", 20)
    for client in clients[1:]:
        client.close()
    poll(lambda: asked() == 1, "what nobody reads has ended", 60)
    assert not select.select([clients[0].sock], [], [], 0)[0], "the first answer has ended before"
    clients[0].close()


def model_of(run_dir: Path) -> str:
    return str(json.loads((run_dir / "spec.json").read_text())["source"]["model"])


def command(pid: int) -> str:
    return " ".join(psutil.Process(pid).cmdline())


def test_nothing_is_left_of_a_process_that_is_killed_and_the_next_chat_starts_another(
    service: TrainingService,
) -> None:
    expected = chat(service, "ft:adapter", "Tell me.")
    for which in ("server", "runner"):
        run_dir, processes = next(
            (run_dir, left) for run_dir, left in tasks_below(service.data_dir / "serving").items() if left
        )
        names = {process.pid: command(process.pid) for process in processes}
        marker = "recipes.serve" if which == "server" else "launch.runner"
        killed = [pid for pid, name in names.items() if marker in name]
        assert killed, names
        os.kill(killed[-1], signal.SIGKILL)
        poll(lambda run_dir=run_dir: run_dir not in serving_processes(service), "its processes have ended", 10)
        assert chat(service, "ft:adapter", "Tell me.") == expected
    service.submit(SFT, sft("third", "rows"))
    service.wait_state("third", "completed", timeout=60)


def test_nothing_serves_after_the_service_was_killed(tmp_path: Path) -> None:
    with running_service(tmp_path) as service:
        assert chat(service, str(tiny_model()), "Tell me.")
        assert serving_processes(service)
        service.kill()
        poll(lambda: not serving_processes(service), "its processes have ended", 10)
        service.launch()
        service.wait_until_it_answers()
        assert not list((service.data_dir / "serving").iterdir())
        assert chat(service, str(tiny_model()), "Tell me.")


def test_of_more_models_than_may_answer_the_oldest_one_that_answers_nothing_ends(
    service: TrainingService, tmp_path: Path
) -> None:
    whole = [str(directory_of(service, "whole", name)) for name in ("final", "checkpoint-20")]
    with running_service(tmp_path, serving_processes=1, max_chats=2) as other:
        for model in (*whole, *whole):
            assert chat(other, model, "Tell me.")
            assert len(serving_processes(other)) == 1
        body = chat_body(str(tiny_model()), "Tell me.", max_tokens=1900, stream=True)
        streams = []
        for status, sentence in ((503, "as many as serving_processes allows"), (429, "as many as max_chats allows")):
            streams.append(requests.post(f"{other.url}/openai/v1{CHAT}", json=body, stream=True, timeout=60))
            refused = post(other, CHAT, chat_body(whole[0], "Tell me."))
            assert refused.status_code == status, refused.text
            assert sentence in refused.json()["error"]["message"]
            assert int(refused.headers["Retry-After"]) > 0
        for stream in streams:
            stream.close()
        poll(lambda: post(other, CHAT, chat_body(whole[0], "Tell me.")).ok, "the model gets its place", 20)


def test_a_training_of_another_program_on_the_machine_comes_first_too(service: TrainingService) -> None:
    assert chat(service, "ft:adapter", "Tell me.")
    claim, device = (
        FileLock(service.root / "locks" / f"cpu.{name}", shared=name == "claim") for name in ("claim", "lock")
    )
    poll(lambda: claim.acquire("another program"), "the claim is taken", 5)
    poll(lambda: device.acquire("another program"), "the device is given up", 5)
    answer = post(service, CHAT, chat_body("ft:adapter", "Tell me."))
    assert answer.status_code == 503, answer.text
    assert "a training of another program has cpu" in answer.json()["error"]["message"]
    device.release()
    claim.release()
    assert chat(service, "ft:adapter", "Tell me.")


def test_an_idle_process_ends(tmp_path: Path) -> None:
    with running_service(tmp_path, serving_idle_seconds=1.0) as service:
        assert chat(service, str(tiny_model()), "Tell me.")
        poll(lambda: not serving_processes(service), "its processes have ended", 10)
        poll(lambda: not list((service.data_dir / "serving").iterdir()), "its files are removed", 10)
        assert chat(service, str(tiny_model()), "Tell me.")
