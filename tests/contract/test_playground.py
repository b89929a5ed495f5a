"""The playground: two models answer beside each other, votes become rows, and a DPO job trains on them.

What a browser does needs playwright and Debian's chromium (or TRL_CHROMIUM).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
import requests

from llama_stack_provider_trl.specs.rows import check_rows
from tests.contract import browser
from tests.contract.browser import Window
from tests.contract.payloads import LORA, PAIRS, QUESTIONS, promised, sft
from tests.contract.service import running
from tests.contract.stack import DPO, SFT, Json, poll
from tests.security.dashboard_browser import Browser
from tests.security.guarded import TOKENS, Guarded
from tests.tiny import tiny_model

pytestmark = [pytest.mark.contract, pytest.mark.timeout(240)]

HTML = "<img src=x onerror=alert(1)><b>What</b>?"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 plus 2?"}]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A service with a job that has trained an adapter."""
    with running(Guarded(tmp_path_factory.mktemp("playground"))) as service:
        service.register("rows", QUESTIONS)
        service.register(
            "odd", [{"prompt": HTML}, {"text": "no prompt"}, {"chosen": turns("a"), "rejected": turns("b")}]
        )
        body = sft("tuned", "rows", algorithm_config=LORA)
        body["training_config"]["n_epochs"] = 10
        body["training_config"]["optimizer_config"]["lr"] = 5e-3
        service.submit(SFT, body, options={"save_steps": 10})
        service.wait("tuned", "completed")
        yield service


@pytest.fixture
def user(service: Guarded) -> Browser:
    found = Browser(service)
    assert found.login("submit").status_code == 303
    return found


def turns(answer: str) -> list[Json]:
    return [*MESSAGES, {"role": "assistant", "content": answer}]


def vote_of(dataset: str, chosen: str = "4", rejected: str = "5", **changes: Any) -> Json:
    return {"dataset_id": dataset, "messages": MESSAGES, "chosen": chosen, "rejected": rejected, **changes}


def send_vote(user: Browser, vote: Json) -> requests.Response:
    return user.send("/playground/votes", form_token=user.form_token(), vote=json.dumps(vote))


def rows_of(service: Guarded, dataset: str) -> list[Json]:
    """The rows of a dataset as they are stored, which DPO can train on."""
    found = service.get(f"/datasets/{dataset}").json()["metadata"]
    lines = service.get(f"/blobs/{found['sha256']}").content.splitlines()
    assert found["num_rows"] == len(lines)
    rows = [json.loads(line) for line in lines]
    assert check_rows(rows, "dpo").warnings == []
    return rows


def test_two_answers_stream_a_vote_lands_in_the_dataset_and_a_dpo_job_trains_on_it(service: Guarded) -> None:
    with browser.chromium() as chromium, browser.window(chromium, service) as window:
        page = window.page
        window.login("submit")
        window.open("/jobs/tuned")
        page.click("text=Talk to it")
        page.wait_for_selector("h1:has-text('Playground')")
        assert page.input_value("#model_a") == str(tiny_model())
        assert page.input_value("#model_b") == "ft:tuned"
        assert page.input_value("#dataset") == "rows"
        names = page.eval_on_selector_all("#models option", "all => all.map((one) => one.value)")
        assert "job:tuned/checkpoint-10" in names
        page.wait_for_selector("#count:has-text('no votes yet')")

        page.click("#next")
        poll(lambda: page.input_value("#prompt") == QUESTIONS[0]["prompt"], "the row's prompt is there", timeout=20)
        assert page.input_value("#row") == "1"
        window.fill(system="Be brief.", temperature="1", seed="1", max_tokens="12")
        page.focus("#prompt")
        page.keyboard.press("Control+Enter")
        first = answers(window, 1)
        assert first[0] != first[1], "the tuned model answers otherwise"
        assert window.faults() == []
        page.set_viewport_size({"width": 390, "height": 800})
        poll(lambda: window.width() <= 390, "the page is as wide as the window", timeout=10)

        page.focus("#vote-b")
        page.keyboard.press("Enter")
        poll(lambda: page.inner_text("#vote-state"), "the vote is answered", timeout=20)
        assert page.inner_text("#vote-state") == "Stored: B is better."
        page.wait_for_selector("#count:has-text('It has 1 vote.')")
        asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTIONS[0]["prompt"]}]
        expected = {
            "prompt": asked,
            "chosen": [{"role": "assistant", "content": first[1]}],
            "rejected": [{"role": "assistant", "content": first[0]}],
        }
        assert rows_of(service, "votes-tuned") == [expected]

        # Both continue with the better answer, so that the next vote has the same messages before both answers.
        page.fill("#prompt", HTML)
        page.click("#send")
        second = answers(window, 2)
        assert page.locator("main img, main b").count() == 0
        assert page.locator("#turns-a .text >> nth=2").inner_text() == HTML
        if second[0] != second[1]:
            page.click("#vote-a")
            page.wait_for_selector("#count:has-text('It has 2 votes.')")
            last = rows_of(service, "votes-tuned")[-1]["prompt"]
            assert last == [*asked, {"role": "assistant", "content": first[1]}, {"role": "user", "content": HTML}]

        page.click("#retry")
        poll(lambda: answers(window, 2) == second, "the same questions are answered again", timeout=30)
        page.click("#train")
        page.wait_for_selector("h1:has-text('New job')")
        assert (page.input_value("#dataset"), page.input_value("#method")) == ("votes-tuned", "dpo")
        assert page.input_value("#model") == "job:tuned"
        window.fill(job="voted", batch_size="1")
        page.click("text=Queue the job")
        page.wait_for_selector("h1:has-text('voted')")
    service.wait("voted", "completed")
    found = service.status("voted")["resources_allocated"]["effective_config"]
    assert found["dataset"]["dataset_id"] == "votes-tuned"


def answers(window: Window, number: int) -> list[str]:
    """The last answers of both models, when both have ended."""
    page = window.page
    page.wait_for_selector("#live:has-text('Both models have answered.')", timeout=60_000)
    found = [page.locator(f"#turns-{side} .assistant .text") for side in "ab"]
    assert [one.count() for one in found] == [number, number]
    texts = [one.last.text_content() for one in found]
    assert all(text.strip() for text in texts)
    return [str(text) for text in texts]


def test_a_training_that_has_the_device_and_a_wrong_model_are_named_and_a_stop_ends_both(service: Guarded) -> None:
    with browser.chromium() as chromium, browser.window(chromium, service) as window:
        page = window.page
        window.login("submit")
        window.open(f"/playground?model_a=ft:gone&model_b=ft:tuned&dataset=odd&votes={HTML}")
        page.click("#next")
        page.wait_for_selector("#live:has-text('row 0')")
        assert page.input_value("#prompt") == HTML
        page.click("#send")
        page.wait_for_selector("#state-a:has-text('gone')")
        page.wait_for_selector("#live:has-text('No whole answer of A.')", timeout=60_000)
        assert page.locator("#turns-a .assistant").count() == 0, "an answer that is none is not shown"
        assert page.is_disabled("#vote-a")
        page.click("#next")
        page.wait_for_selector("#live:has-text('row 1: found the columns text')")
        page.fill("#row", "7")
        page.click("#next")
        page.wait_for_selector("#live:has-text('has 3 rows')")

        # Without a seed 2 of 25 answers ended before they were stopped, with fewer than 20 characters. A busy machine
        # takes longer for the click than for the whole answer: it arrives in a minute here.
        window.fill(model_a="ft:tuned", max_tokens="900", temperature="1.5", seed="4", prompt="Go on.")
        window.receive(bytes_per_second=4000)
        page.click("#send")
        answer = page.locator("#turns-b .assistant .text").last
        poll(lambda: len(answer.text_content()) > 20, "a part of the answer is there", timeout=60)
        page.click("#stop")
        page.wait_for_selector("#state-b:has-text('Stopped.')")
        window.receive()
        assert page.is_enabled("#retry")

        body = promised("busy", "pairs")
        body["training_config"]["n_epochs"] = 500
        service.register("pairs", PAIRS * 10)
        service.submit(DPO, body, options={"save_steps": 1, "keep_last": 1})
        service.wait_state("busy", "in_progress")
        page.click("#retry")
        page.wait_for_selector("#state-b:has-text('a training comes first: job \\'busy\\' has cpu')", timeout=60_000)
        assert page.inner_text("#state-b a") == "Jobs"
        assert "GET /v1" not in page.inner_text("main")
        other = window.context.new_page()
        other.goto(f"{service.url}/playground")
        assert "A training comes first: job busy has cpu. Send" in other.inner_text("#busy")
        poll(lambda: service.status("busy")["checkpoints"], "the job has a checkpoint", timeout=60)
        other.goto(f"{service.url}/playground?job=busy")
        assert other.input_value("#model_a").startswith("job:busy/checkpoint-")
        assert other.input_value("#model_b") == ""
        assert "answer beside it" in other.inner_text("#busy")
        other.close()
        service.post("/post-training/jobs/busy/cancel")
        service.wait("busy", "cancelled")

        window.context.set_offline(True)
        page.click("#retry")
        page.wait_for_selector("#state-b:has-text('The service does not answer: retry it.')")
        window.context.set_offline(False)
        window.fill(max_tokens="8", prompt="And now?")
        page.click("#send")
        page.wait_for_selector("#live:has-text('Both models have answered.')", timeout=60_000)
        page.fill("#model_b", "")
        poll(lambda: "name a model B" in page.inner_text("#vote-state"), "a vote needs two models", timeout=10)
        page.click("#retry")
        page.wait_for_selector("#live:has-text('The model has answered.')", timeout=60_000)
        assert page.get_attribute("#vote-a", "aria-disabled") == "true"
        shown = [page.locator(f"#turns-{side} .user .text").all_text_contents() for side in "ab"]
        assert shown == [["And now?"], [HTML, "And now?"]], "what was not answered is not shown as if it were"


def test_a_row_that_ends_in_the_result_of_a_tool_is_shown_and_sent_as_it_is(service: Guarded) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "double", "parameters": schema}}]
    call = {"type": "function", "function": {"name": "double", "arguments": {"a": 2}}, "id": "1"}
    asked = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [call]}]
    result = {"role": "tool", "content": "4", "tool_call_id": "1"}
    service.register("tools", [{"prompt": [*asked, result], "tools": tools}])
    with browser.chromium() as chromium, browser.window(chromium, service) as window:
        page = window.page
        window.login("submit")
        window.open("/playground?model_a=ft:tuned&model_b=ft:tuned&dataset=tools")
        page.click("#next")
        page.wait_for_selector("#live:has-text('with its tools ends in a turn of tool: send it as it is.')")
        assert (page.input_value("#system"), page.input_value("#prompt")) == ("Be brief.", "")
        shown = page.locator("#turns-a .text")
        assert (shown.nth(0).inner_text(), shown.nth(2).inner_text()) == (MESSAGES[1]["content"], "4")
        assert json.loads(shown.nth(1).inner_text())[0]["name"] == "double"
        with page.expect_request("**/playground/answers") as sent:
            page.click("#send")
        (request,) = parse_qs(sent.value.post_data)["request"]
        body = json.loads(request)
        assert (body["messages"][0], body["messages"][-1], body["tools"]) == (MESSAGES[0], result, tools)
        (calls,) = [message["tool_calls"] for message in body["messages"] if "tool_calls" in message]
        assert calls[0]["name"] == "double"
        assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "tool"]
        page.wait_for_selector("#live:has-text('No whole answer of A and B.')", timeout=60_000)
        assert shown.count() == 3, "the turn of the tool is there once, and no answer"


def test_prompts_of_rows_are_those_that_a_job_reads(user: Browser, service: Guarded) -> None:
    service.register("renamed", [{"frage": "Wo 2?"}])
    body = sft("reads", "renamed")
    found = user.get("/playground/prompt?dataset=odd&row=2").json()
    assert found == {"row": 2, "messages": MESSAGES, "tools": None}
    answer = user.get("/playground/prompt?dataset=renamed&row=0")
    assert (answer.status_code, "found the columns frage" in answer.json()["detail"]) == (400, True)
    assert user.get("/playground/prompt?dataset=nobody").status_code == 400
    assert user.get("/playground/prompt?dataset=odd&row=3").status_code == 404
    assert user.get("/playground/prompt?dataset=odd&row=-1").status_code == 400
    assert user.get("/playground/prompt?dataset=odd&job=nobody").status_code in (400, 404)
    service.register("named", [{"frage": "Wo 2?", "antwort": "2"}])
    body = sft("reads", "named")
    service.submit(SFT, body, options={"columns": {"prompt": "frage", "completion": "antwort"}})
    found = user.get("/playground/prompt?dataset=named&job=reads").json()
    assert found["messages"] == [{"role": "user", "content": "Wo 2?"}]
    service.wait("reads", "completed")


def test_votes_are_rows_that_are_stored_once_whoever_sends_them(user: Browser, service: Guarded) -> None:
    admin = Browser(service)
    assert admin.login("admin").status_code == 303
    for sender, vote, number in ((user, {}, 1), (admin, {"chosen": "four"}, 2), (user, {}, 2), (admin, {}, 2)):
        answer = send_vote(sender, vote_of("shared", **vote))
        assert answer.json() == {"dataset_id": "shared", "votes": number}
    assert [row["chosen"][0]["content"] for row in rows_of(service, "shared")] == ["4", "four"]
    assert user.get("/playground/votes?dataset=shared&model=ft:tuned").json() == {
        **{"dataset_id": "shared", "votes": 2},
        "train": "/new?dataset=shared&model=job%3Atuned&method=dpo&options=%7B%22adapter%22%3A+%22continue%22%7D",
    }
    assert [user.get(f"/playground/votes?dataset={name}").json()["votes"] for name in ("rows", "nobody")] == [0, 0]
    assert service.delete("/datasets/shared").status_code == 204
    assert send_vote(user, vote_of("shared")).json()["votes"] == 1


@pytest.mark.parametrize(
    ("vote", "status", "sentence"),
    [
        (vote_of("v", rejected="4"), 400, "no answer is better"),
        (vote_of("v", chosen=""), 400, "chosen"),
        (vote_of("v", rejected=" \n"), 400, "rejected"),
        (vote_of("v", messages=[]), 400, "messages"),
        (vote_of("v", messages=turns("x")), 400, "messages"),
        (vote_of("v", messages=[{"role": "robot", "content": "x"}]), 400, "messages"),
        (vote_of("a\x1b[2J"), 400, "dataset_id"),
        (vote_of("job:tuned"), 400, "choose another name"),
        (vote_of("rows"), 409, "has other rows"),
        (vote_of("v", more=1), 400, "more"),
        ([], 400, "dictionary"),
    ],
)
def test_what_is_no_vote_is_refused_by_name_and_nothing_is_stored(
    user: Browser, service: Guarded, vote: Any, status: int, sentence: str
) -> None:
    answer = send_vote(user, vote)
    assert (answer.status_code, sentence in answer.json()["detail"]) == (status, True), answer.text
    assert service.get("/datasets/v").status_code == 404


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("", "expected a JSON object"), ("{", "it is no JSON"), ("[" * 5000, "levels"), (f"[{'1,' * 30_000}1]", "values")],
)
def test_a_field_that_is_no_chat_is_refused(user: Browser, text: str, sentence: str) -> None:
    answer = user.send("/playground/answers", form_token=user.form_token(), request=text)
    assert (answer.status_code, sentence in answer.json()["detail"]) == (400, True), answer.text


def test_a_session_has_the_answers_of_the_api(user: Browser, service: Guarded) -> None:
    body = {"model": "ft:tuned", "messages": MESSAGES, "temperature": 0, "max_tokens": 8, "stream": True}
    answer = user.send("/playground/answers", form_token=user.form_token(), request=json.dumps(body))
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in answer.content.decode().split("\n\n") if line]
    assert events.pop() == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events)
    whole = service.post("/chat/completions", {**body, "stream": False}, prefix="/openai/v1").json()
    assert text == whole["choices"][0]["message"]["content"]
    body["stream"] = False
    answer = user.send("/playground/answers", form_token=user.form_token(), request=json.dumps(body))
    assert (answer.status_code, "stream" in answer.json()["detail"]) == (400, True)


def test_no_vote_that_was_answered_is_lost_when_the_service_is_killed(tmp_path: Path) -> None:
    stored: list[int] = []
    with running(Guarded(tmp_path)) as service:
        for number in range(3):
            user = Browser(service)
            assert user.login("submit").status_code == 303
            token = user.form_token()
            enough = threading.Event()

            def votes(first: int, user: Browser = user, token: str = token, enough: threading.Event = enough) -> None:
                for one in range(first, first + 10_000):
                    vote = json.dumps(vote_of("kept", chosen=f"answer {one}"))
                    if not user.send("/playground/votes", form_token=token, vote=vote).ok:
                        return
                    stored.append(one)
                    if one == first + 7:
                        enough.set()

            with ThreadPoolExecutor(1) as pool, suppress(requests.RequestException):
                future = pool.submit(votes, number * 10_000)
                assert enough.wait(60)
                service.kill()
                future.result()
            service.start()
        found = [row["chosen"][0]["content"] for row in rows_of(service, "kept")]
    assert len(found) == len({*found})
    assert {f"answer {one}" for one in stored} <= {*found}
    assert len(stored) >= 24


def test_a_caller_without_the_role_neither_asks_nor_votes(service: Guarded) -> None:
    for role in ("node", "metrics"):
        headers = {"Authorization": f"Bearer {TOKENS[role]}", "Origin": service.url}
        for path in ("answers", "votes"):
            answer = requests.post(f"{service.url}/playground/{path}", {"x": "y"}, headers=headers, timeout=30)
            assert answer.status_code == 403
