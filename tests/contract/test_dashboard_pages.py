"""The dashboard's pages and what they read while jobs run: a real service, a real training, and many jobs."""

from __future__ import annotations

import html
import json
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests

from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl_remote.cli.main import parser
from tests.contract.ended import add_ended_job
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import JOBS, TrainingService, refusal, running_service
from tests.contract.stack import SFT
from tests.contract.stored_jobs import MANY, SPIKE, add_long, add_many, add_search, add_verbose
from tests.required import lacking

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    root = tmp_path_factory.mktemp("pages")
    add_ended_job(root / "data")
    add_many(root / "data")
    add_long(root / "data")
    add_verbose(root / "data")
    add_search(root / "data", "searched", JobState.completed)
    with running_service(root) as service:
        service.register("questions", QUESTIONS)
        yield service


class Message(NamedTuple):
    event: str
    id: str
    data: Any


def follow(service: TrainingService, *jobs: str, **headers: str) -> Iterator[Message]:
    """The messages of one stream, until it ends or the caller has enough."""
    answer = requests.get(
        f"{service.url}/v1/post-training/events",
        params={"job": jobs},
        headers={"Accept": "text/event-stream", **headers},
        stream=True,
        timeout=30,
    )
    with answer:
        assert answer.status_code == 200, answer.text
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        for block in blocks(answer):
            fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
            if fields:
                yield Message(fields.get("event", "message"), fields.get("id", ""), json.loads(fields["data"]))


def blocks(answer: requests.Response) -> Iterator[str]:
    text = ""
    for piece in answer.iter_content(None):
        text += piece.decode()
        *whole, text = text.split("\n\n")
        yield from whole


def test_a_stream_of_several_jobs_has_every_event_once_over_a_break_and_ends_with_the_last_job(
    service: TrainingService,
) -> None:
    names = [service.submit(SFT, sft(name, "questions")) for name in ("first", "second")]
    found: list[Message] = []
    for message in follow(service, "ended", *names):
        found.append(message)
        if message.event == "message" and message.data["event"]["type"] == "prepared":
            break
    last = [message.id for message in found if message.id][-1]
    for message in follow(service, "ended", *names, **{"Last-Event-ID": last}):
        found.append(message)
    assert found[-1].event == "end"
    for name in ("ended", *names):
        followed = [one.data["event"] for one in found if one.event == "message" and one.data["job"] == name]
        lines = service.get(f"{JOBS}/{name}/events").json()["data"]
        assert followed == [line["event"] for line in lines]
        states = [one.data["state"] for one in found if one.event == "state" and one.data["job"] == name]
        assert states[-1] == "completed"
    assert last.count("~") == 2


def test_fifty_streams_of_one_job_get_the_same_and_the_service_reads_it_once(service: TrainingService) -> None:
    service.submit(SFT, sft("watched", "questions"))
    seen: list[list[Message]] = []

    def watch() -> None:
        seen.append([message for message in follow(service, "watched", "ended") if message.event != "state"])

    threads = [threading.Thread(target=watch) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert len(seen) == 50
    assert all([one.data for one in each] == [one.data for one in seen[0]] for each in seen)
    kinds = [one.data["event"]["type"] for one in seen[0] if one.event == "message" and one.data["job"] == "watched"]
    assert kinds[0] == "started"
    assert kinds[-1] == "finished"


def test_states_of_jobs_come_with_the_cursor_at_which_a_stream_continues(service: TrainingService) -> None:
    answer = service.get("/post-training/events", job=["ended", "paused-low"]).json()
    assert answer["data"] == [
        {"job_uuid": "ended", "state": "completed"},
        {"job_uuid": "paused-low", "state": "paused"},
    ]
    after = service.get("/post-training/events", job=["ended"]).json()["next"]
    messages = list(follow(service, "ended", **{"Last-Event-ID": after}))
    assert [message.event for message in messages] == ["state", "end"]


def test_a_stream_that_cannot_be_is_refused_before_it_begins(service: TrainingService) -> None:
    def refused(status_code: int, **params: Any) -> str:
        streams = {"Accept": "text/event-stream"}
        return refusal(service.get("/post-training/events", headers=streams, **params), status_code)

    assert "each job once" in refused(400, job=["ended", "ended"])
    assert "job is missing" in refused(400)
    assert "nobody" in refused(404, job=["ended", "nobody"])
    assert "the cursors of 2 jobs" in refused(400, job=["ended", "long"], after="1-0")
    assert "expected the end of an event" in refused(400, job=["ended"], after="1-3")
    assert refused(400, job=[f"job-{number}" for number in range(101)])


def test_curves_are_the_metrics_and_reach_as_far_as_their_cursor(service: TrainingService) -> None:
    options = {"samples": {"prompts": ["What is 3 times two?"], "max_new_tokens": 4}, "save_steps": 2}
    name = service.submit(SFT, sft("curved", "questions"), options=options)
    service.wait_state(name, "completed", timeout=90)
    series = service.get(f"{JOBS}/{name}/series").json()
    points = [point for point in service.get(f"{JOBS}/{name}/metrics").json()["data"] if point["kind"] == "train"]
    assert series["exact"]
    assert series["train"]["loss"]["step"] == [point["step"] for point in points]
    assert series["train"]["loss"]["value"] == [point["metrics"]["loss"] for point in points]
    assert min(series["train"]["peak_memory_bytes"]["value"]) > 1 << 20
    assert [message.event for message in follow(service, name, **{"Last-Event-ID": series["next"]})] == ["state", "end"]
    refusal(service.get(f"{JOBS}/nobody/series"), 404)
    refusal(service.get(f"{JOBS}/{name}/series", points=1), 400)


def test_samples_of_a_training_are_listed_and_shown_side_by_side(service: TrainingService) -> None:
    """Of the job of the test before."""
    service.wait_state("curved", "completed", timeout=90)
    found = service.get(f"{JOBS}/curved/samples").json()
    assert found["prompts"] == [[{"role": "user", "content": "What is 3 times two?"}]]
    kinds = [(one["kind"], one["step"]) for one in found["data"]]
    assert (kinds[0], kinds[-1][0], found["total"]) == (("before", 0), "after", len(kinds))
    words = [sys.executable, "-m", "llama_stack_provider_trl_remote", "jobs", "samples", "curved", "--url", service.url]
    printed = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert printed[0] == "prompt user: 'What is 3 times two?'"
    assert printed[1].startswith(f"  before, step 0: {found['data'][0]['answers'][0]['text']!r}")
    assert len(printed) == 1 + len(kinds)
    assert all(one["answers"][0]["tokens"] > 0 for one in found["data"])
    part = service.get(f"{JOBS}/curved/samples", limit=1, offset=1).json()
    assert part["data"] == found["data"][1:2]
    page = service.get("/jobs/curved/samples", prefix="").text
    assert "What is 3 times two?" in page
    assert re.findall(r'<th scope="col">(before, |after, |)step (\d+)', page)[0] == ("before, ", "0")
    assert '<a class="button" href="/jobs/curved/samples">Answers</a>' in service.get("/jobs/curved", prefix="").text
    assert ">samples</a>" not in service.get("/jobs/ended", prefix="").text
    assert "It has no prompts" in service.get("/jobs/ended/samples", prefix="").text
    assert service.get(f"{JOBS}/ended/samples").json() == {"prompts": [], "data": [], "total": 0}
    for path in (f"{JOBS}/nobody/samples", f"{JOBS}/ended/samples?limit=101", f"{JOBS}/ended/samples?offset=-1"):
        refusal(service.get(path), 404 if "nobody" in path else 400)
    assert service.get("/jobs/nobody/samples", prefix="").status_code == 404


def test_a_job_with_200_000_points_opens_with_its_extremes_and_is_exact_where_it_is_enlarged(
    service: TrainingService,
) -> None:
    assert service.get("/jobs/long", prefix="").status_code == 200
    series = service.get(f"{JOBS}/long/series").json()
    loss = series["train"]["loss"]
    assert not series["exact"]
    assert len(loss["step"]) <= 1000
    assert loss["value"][loss["step"].index(SPIKE)] == 1000.0
    part = service.get(f"{JOBS}/long/series", metric="loss", begin=123_000, end=123_999).json()
    assert part["exact"]
    assert part["train"]["loss"]["step"] == list(range(123_000, 124_000))


def test_a_log_of_2_gb_with_a_line_of_50_mb_is_shown_by_its_end(service: TrainingService) -> None:
    before = service.rss_mib()
    for path in ("/jobs/verbose", "/jobs/verbose/logs"):
        read = service.read_bytes()
        answer = service.get(path, prefix="")
        assert answer.status_code == 200
        assert "the end" in answer.text
        assert len(answer.content) < 100_000
        assert service.read_bytes() - read < 10 << 20
    assert len(service.get(f"{JOBS}/verbose/logs", size=1000).content) <= 1001
    assert service.rss_mib() - before < 30


def test_the_list_has_every_job_once_in_the_order_in_which_they_run(service: TrainingService) -> None:
    first = service.get("/", prefix="").text
    pages = int(re.findall(r"page 1 of (\d+)", first)[0])
    parts = [service.get("/post-training/queue", limit=1000, offset=1000 * part).json()["data"] for part in range(12)]
    names = [job["job_uuid"] for part in parts for job in part]
    assert len(names) == len(set(names)) == len(service.jobs()) > MANY
    assert names[:2] == ["paused-high", "paused-low"]
    for number in (1, 2, pages // 2, pages):
        assert rows(service, page=number) == names[100 * (number - 1) : 100 * number]
    assert rows(service, page=pages + 1) == []


def test_the_list_is_filtered_by_state_and_name(service: TrainingService) -> None:
    assert sorted(rows(service, search="MANY-0024")) == [f"many-{number:05}" for number in range(240, 250)]
    assert set(rows(service, state="paused")) == {"paused-low", "paused-high"}
    assert rows(service, search="%") == []
    assert "There is none" in service.get("/", prefix="", search="none of this name").text
    queue = service.get("/post-training/queue", search="many-", limit=3, offset=4).json()
    assert (queue["matching"], len(queue["data"])) == (MANY, 3)
    assert queue["counts"]["cancelled"] == MANY
    assert service.get("/", prefix="", state="no such state").status_code == 400


def rows(service: TrainingService, **query: Any) -> list[str]:
    return re.findall(r'<tr data-job="([^"]+)"', service.get("/", prefix="", **query).text)


def test_a_job_page_has_its_parts_without_scripts(service: TrainingService) -> None:
    page = service.get("/jobs/ended", prefix="").text
    assert "the job completed" in page
    assert "something the user should know" in page
    assert 'href="/jobs/ended/checkpoints/tiny-tuned-final"' in page
    assert "another line" in page
    assert "optimizer.learning_rate" in page
    files = service.get("/jobs/ended/checkpoints/tiny-tuned-final", prefix="").text
    (link,) = re.findall(r'download href="([^"]+)"', files)
    assert len(service.get(link, prefix="").content) == 1000
    assert service.get("/jobs/nobody", prefix="").status_code == 404
    assert "not found" in service.get("/jobs/nobody", prefix="").text


def test_pages_of_jobs_that_have_ended_say_nothing_of_what_may_come(service: TrainingService) -> None:
    for name, found in (
        ("many-00000", "job &#39;many-00000&#39; is cancelled and was never started: there is no log"),
        ("searched", "is a search, which trains nothing itself (its trials have logs): there is no log"),
    ):
        page = service.get(f"/jobs/{name}", prefix="").text
        assert found in page
        assert not re.search(r"\byet\b|so far", page)
        assert refusal(service.get(f"{JOBS}/{name}/logs"), 404) in html.unescape(page)
    assert "not been started yet" in service.get("/jobs/paused-low", prefix="").text


def test_the_command_for_a_checkpoint_is_one_that_the_command_line_takes(service: TrainingService) -> None:
    page = service.get("/jobs/ended/checkpoints/tiny-tuned-final", prefix="").text
    (command,) = re.findall(r"<code>(trl-remote [^<]+)</code>", page)
    words = shlex.split(html.unescape(command))
    options = parser().parse_args(words[1:])
    assert (options.job_uuid, options.checkpoint, options.directory) == ("ended", *["tiny-tuned-final"] * 2)
    assert options.url == service.url


def test_without_tokens_no_login_is_needed_and_forms_still_need_their_page(service: TrainingService) -> None:
    page = service.get("/jobs/paused-low", prefix="").text
    assert "Log out" not in page
    token = re.findall(r'name="form_token" value="(\w+)"', page)[0]
    url = f"{service.url}/jobs/paused-low/cancel"
    assert requests.post(url, {"form_token": token}, timeout=30).status_code == 403
    foreign = {"Origin": "http://127.0.0.1:1"}
    assert requests.post(url, {"form_token": token}, headers=foreign, timeout=30).status_code == 403
    own = {"Origin": service.url}
    assert requests.post(url, {"form_token": "x"}, headers=own, timeout=30).status_code == 403
    assert service.state("paused-low") == "paused"
    done = requests.post(url, {"form_token": token}, headers=own, timeout=30)
    assert done.status_code == 200  # of the page that follows
    assert service.state("paused-low") == "cancelled"
    delete = f"{service.url}/jobs/paused-low/delete"
    assert (
        requests.post(delete, {"form_token": token, "checkpoints": "yes"}, headers=own, timeout=30).status_code == 200
    )
    assert service.get(f"{JOBS}/paused-low/status").status_code == 404


def require_plotly() -> None:
    if find_spec("plotly") is None:
        lacking("the extra dashboard is not installed: scripts/prepare-env.sh installs it")


def test_plotly_is_served_from_its_package_and_kept_by_the_browser(service: TrainingService) -> None:
    require_plotly()
    address = re.findall(r'src="(/static/plotly.min.js\?v=[^"]+)"', service.get("/jobs/ended", prefix="").text)[0]
    answer = service.get(address, prefix="")
    assert len(answer.content) > 1 << 20
    assert "immutable" in answer.headers["Cache-Control"]
    again = service.get(address, prefix="", headers={"If-None-Match": answer.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_plotly_makes_no_code_from_text_and_inserts_no_style_sheet_on_the_pages(service: TrainingService) -> None:
    """What a new release of plotly must be checked for, before the constraints name it."""
    require_plotly()
    page = service.get("/jobs/ended", prefix="").text
    script = service.get("/static/plotly.min.js", prefix="").text
    # Of these, browsers reach none: a polyfill of bind, one of globalThis, WebGL and maps.
    code = re.findall(r"(?:\bnew )?\bFunction\(|\bFunction\.apply\(|\beval\(", script)
    assert sorted(code) == ["Function(", "Function.apply(", "eval(", "new Function("]
    # Its own sheet, and those of its libraries.
    assert script.count('createElement("style")') == 1 + len(re.findall(r'<div id="\w{20,}" hidden>', page))
    assert 'id="plotly.js-style-global" class="no-inline-styles"' in page


def test_where_the_extra_is_not_installed_the_page_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "jinja2.py").write_text("raise ImportError('not installed')\n")
    bare = TrainingService(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).resolve().parents[2]}")
        bare.start()
    try:
        answer = bare.get("/", prefix="")
        assert answer.status_code == 501
        assert "pip install 'llama_stack_provider_trl[dashboard]'" in answer.text
        assert bare.get("/health").status_code == 200
    finally:
        bare.stop()
        bare.session.close()
