"""`trl-remote dashboard` beside a real Llama Stack: the pages of the inline provider's jobs, and their buttons."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import requests

from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.system.data_dir import DATABASE, DataDir
from llama_stack_provider_trl.system.process import FileLock
from tests.contract.dashboard import COMMAND, dashboard
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.stack import SFT, LlamaStack

pytestmark = pytest.mark.contract


def form_token(page: str) -> str:
    found = re.search(r'name="form_token" value="([^"]+)"', page)
    assert found is not None
    return found[1]


def test_jobs_of_the_inline_provider_have_pages_and_buttons(stack: LlamaStack) -> None:
    stack.register("shown-rows", QUESTIONS)
    stack.arm("step-2", "hold")
    samples = {"prompts": ["What is 3 times two?"], "max_new_tokens": 4}
    name = stack.submit(SFT, sft("shown-inline", "shown-rows"), options={"samples": samples})
    stack.wait_taken("step-2")
    with dashboard(stack.data_dir) as address:
        session = requests.Session()
        jobs = session.get(f"{address}/").text
        assert f"/jobs/{name}" in jobs
        links = re.findall(r'href="(/[a-z]*)"', jobs[: jobs.index("</nav>")])
        assert links == ["/", "/", "/compare"]  # the brand's, and no page that needs a service
        assert {session.get(f"{address}{link}").status_code for link in links} == {200}
        page = session.get(f"{address}/jobs/{name}")
        assert page.status_code == 200
        assert "in_progress" in page.text
        assert "Talk to it" not in page.text
        series = session.get(f"{address}/v1/post-training/jobs/{name}/series").json()
        assert "loss" in series["train"]
        assert session.get(f"{address}/v1/post-training/jobs/{name}/logs").status_code == 200
        assert session.get(f"{address}/v1/post-training/jobs/{name}/samples").json()["data"][0]["kind"] == "before"
        assert "before, step 0" in session.get(f"{address}/jobs/{name}/samples").text
        assert session.get(f"{address}/v1/post-training/jobs").status_code == 404  # the API is Llama Stack's

        form = {"form_token": form_token(page.text)}
        own = {"Origin": address}
        sent = session.post(f"{address}/jobs/{name}/cancel", data=form, headers=own, allow_redirects=False)
        assert sent.status_code == 303
        stack.wait(name, "cancelled")
        assert "cancelled" in session.get(f"{address}/jobs/{name}").text
        sent = session.post(f"{address}/jobs/{name}/delete", data=form, headers=own, allow_redirects=False)
        assert sent.status_code == 303
        assert name not in stack.jobs()


def test_a_token_of_the_environment_is_required(tmp_path: Path) -> None:
    Store(tmp_path / DATABASE).close()
    with dashboard(tmp_path, TRL_SERVICE_TOKEN="right") as address:
        session, own = requests.Session(), {"Origin": address}
        assert session.get(f"{address}/").status_code == 401
        assert session.post(f"{address}/login", data={"token": "wrong"}, headers=own).status_code == 401
        assert session.post(f"{address}/login", data={"token": "right"}, headers=own).status_code == 200
        assert "Log out" in session.get(f"{address}/").text


def refused(*arguments: str) -> str:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_a_directory_of_others_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file of another program")
    assert "it has no jobs.sqlite3: name the data directory" in refused(str(tmp_path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["logs"]


def test_what_it_cannot_show_is_refused_in_a_sentence(tmp_path: Path) -> None:
    Store(tmp_path / DATABASE).close()
    lock = FileLock(DataDir(tmp_path).service_lock)
    assert lock.acquire("pid 7, http://127.0.0.1:8322")
    assert "its jobs have a dashboard: pid 7, http://127.0.0.1:8322" in refused(str(tmp_path))
    lock.release()
    with dashboard(tmp_path) as address:
        port = address.rpartition(":")[2]
        assert f"port {port}: Address already in use" in refused(str(tmp_path), "--port", port)
