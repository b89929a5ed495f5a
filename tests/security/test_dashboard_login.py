"""The dashboard with tokens: login, sessions, roles, forms, policy, and text that is shown as text."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

import pytest
from markupsafe import escape

from tests.contract.stack import poll
from tests.contract.stored_jobs import HOSTILE
from tests.security.dashboard_browser import Browser
from tests.security.dashboard_browser import service as service
from tests.security.guarded import TOKENS, Guarded, guarded_service
from tests.tiny import tiny_model

pytestmark = pytest.mark.contract

WAITS = ("scheduled", "launching")
"""States of a job whose device is locked."""
FORMS = (
    "/logout",
    *(f"/jobs/waiting/{name}" for name in ("cancel", "pause", "resume", "delete")),
    "/nodes/mine/uncordon",
    *("/data/tokens", "/data/delete", "/new", "/new/check", "/playground/answers", "/playground/votes"),
)
PAGES = (
    "/",
    "/jobs/ended",
    "/jobs/ended/logs",
    "/jobs/ended/checkpoints/final",
    "/jobs/waiting",
    "/jobs/hostile",
    "/jobs/hostile/samples",
    "/jobs/waiting/samples",
    "/nodes",
    "/playground?job=ended",
)


@pytest.fixture
def browser(service: Guarded) -> Browser:
    return Browser(service)


@pytest.fixture
def admin(browser: Browser) -> Browser:
    assert browser.login("admin").status_code == 303
    return browser


@pytest.fixture
def submit(browser: Browser) -> Browser:
    assert browser.login("submit").status_code == 303
    return browser


def test_a_page_without_a_login_is_the_form_to_log_in_and_leads_back(browser: Browser) -> None:
    answer = browser.get("/jobs/ended?axis=time")
    assert answer.status_code == 401
    assert 'name="token"' in answer.text
    assert 'name="back" value="/jobs/ended?axis=time"' in answer.text
    assert "hostile" not in answer.text
    after = browser.login("admin", back="/jobs/ended?axis=time")
    assert (after.status_code, after.headers["Location"]) == (303, "/jobs/ended?axis=time")


@pytest.mark.parametrize("back", ["//evil.example/", "/\\evil.example", "https://evil.example/", "", "/a\r\nX: y", "x"])
def test_a_login_leads_to_no_other_site(browser: Browser, back: str) -> None:
    assert browser.login("admin", back=back).headers["Location"] == "/"


def test_the_cookie_is_no_token_and_scripts_do_not_see_it(browser: Browser, service: Guarded) -> None:
    cookie = browser.login("submit").headers["Set-Cookie"]
    assert re.fullmatch(r"trl_session_\w{8}=[\w-]{43}; Path=/; Max-Age=43200; HttpOnly; SameSite=Strict", cookie)
    text = (service.data_dir / "sessions.json").read_text()
    assert not [token for token in (*TOKENS.values(), cookie.split("=")[1].split(";")[0]) if token in text]


@pytest.mark.parametrize("token", ["wrong", "", "x" * 5000, "ÿ\ud7ff"])
def test_a_wrong_token_opens_nothing_and_the_page_names_the_reason(browser: Browser, token: str) -> None:
    answer = browser.send("/login", token=token)
    assert answer.status_code == 401
    assert "does not know this token" in answer.text
    assert not browser.session.cookies
    assert browser.get("/").status_code == 401


def test_a_token_of_agents_has_no_pages(browser: Browser, service: Guarded) -> None:
    assert browser.send("/login", token=TOKENS["node"]).status_code == 403
    assert browser.send("/login", token=service.credentials["mine"]).status_code == 403
    assert not browser.session.cookies


def test_a_login_that_another_page_sends_is_refused(browser: Browser, service: Guarded) -> None:
    for origin in (None, "http://evil.example", "http://127.0.0.1:1", "null", f"{service.url}.evil.example"):
        assert browser.send("/login", origin, token=TOKENS["admin"]).status_code == 403
    assert not browser.session.cookies


def test_logins_and_logouts_are_in_the_audit_log_and_their_tokens_are_not(admin: Browser, service: Guarded) -> None:
    assert admin.send("/logout", form_token=admin.form_token()).status_code == 303
    lines = service.get("/audit", limit=1000).json()["data"]
    events = [(line["event"], line.get("caller"), line.get("role")) for line in lines]
    assert ("login", "operator", "admin") in events
    assert ("logout", "operator", "admin") in events
    log = "".join(path.read_text() for path in (service.data_dir / "audit").iterdir())
    assert not [token for token in TOKENS.values() if token in log]


def test_after_a_logout_the_cookie_is_worth_nothing(admin: Browser) -> None:
    cookies = dict(admin.session.cookies)
    answer = admin.send("/logout", form_token=admin.form_token())
    assert "Max-Age=0" in answer.headers["Set-Cookie"]
    assert admin.get("/").status_code == 401
    admin.session.cookies.update(cookies)
    assert admin.get("/").status_code == 401


def test_a_revoked_token_ends_its_sessions_at_once(browser: Browser, service: Guarded) -> None:
    token = service.post("/tokens", {"name": "brief"}).json()["token"]
    assert browser.send("/login", token=token).status_code == 303
    assert browser.get("/").status_code == 200
    stream = browser.session.get(
        f"{service.url}/v1/post-training/events?job=waiting",
        headers={"Accept": "text/event-stream"},
        stream=True,
        timeout=30,
    )
    assert stream.status_code == 200
    assert service.delete("/tokens/brief").status_code == 204
    assert browser.get("/").status_code == 401
    assert b"event: end" not in stream.content  # it ends: a stream of a waiting job would not


def test_every_form_needs_its_own_origin_and_the_form_token_of_its_session(admin: Browser, service: Guarded) -> None:
    other = Browser(service)
    assert other.login("admin").status_code == 303
    for path in FORMS:
        good = admin.form_token()
        assert admin.send(path, other="field").status_code == 403
        assert admin.send(path, form_token="x" * 64).status_code == 403
        assert admin.send(path, form_token=other.form_token()).status_code == 403
        for origin in (None, "http://127.0.0.1:1", "https://evil.example"):
            assert admin.send(path, origin, form_token=good).status_code == 403
        as_json = admin.session.post(service.url + path, json={"form_token": good}, headers={"Origin": service.url})
        assert as_json.status_code == 400
    assert service.state("waiting") in WAITS
    assert admin.get("/").status_code == 200


def test_a_session_changes_nothing_below_v1(admin: Browser, service: Guarded) -> None:
    url = service.url + "/v1/post-training/jobs/waiting"
    for method, path in (("POST", "/cancel"), ("POST", "/pause"), ("DELETE", "")):
        answer = admin.session.request(method, url + path, headers={"Origin": service.url}, timeout=30)
        assert (answer.status_code, "only reads" in answer.text) == (403, True)
    assert admin.session.put(f"{service.url}/v1/blobs/{'0' * 64}", data=b"x", timeout=30).status_code == 403
    assert admin.get("/v1/post-training/jobs/waiting/status").status_code == 200
    assert admin.get("/docs").status_code == 200
    assert service.state("waiting") in WAITS


def test_what_a_role_may_not_do_is_not_shown_and_refused(submit: Browser, service: Guarded) -> None:
    page = submit.get("/jobs/ended").text
    assert "/jobs/ended/delete" not in page
    assert submit.send("/jobs/ended/delete", form_token=submit.form_token()).status_code == 403
    assert service.get("/post-training/jobs/ended/status").status_code == 200
    assert submit.get("/v1/tokens").status_code == 403
    assert "/jobs/waiting/cancel" in submit.get("/jobs/waiting").text


def test_a_session_of_the_role_read_sees_the_pages_without_what_changes_something_and_is_refused_it(
    browser: Browser, service: Guarded
) -> None:
    assert browser.login("read").status_code == 303
    links = set()
    for path in (*PAGES[:-1], "/data", "/data/rows?dataset=questions", "/compare?job=ended", "/answers", "/docs"):
        answer = browser.get(path)
        assert (path, answer.status_code) == (path, 200)
        assert set(re.findall(r'<form method="post" action="([^"]+)', answer.text)) == {"/logout"}, path
        assert not re.search(r'data-act="|id="upload"', answer.text), path
        links |= set(re.findall(r'href="(/[^"?#]*)', answer.text))
    assert {"/compare", "/data", "/nodes", "/docs"} <= links
    assert not links & {"/new", "/playground", "/data/tokens"}
    before, token = service.contents(), browser.form_token()
    sentence = "needs a token with the role submit or admin, yours has the role read"
    for path in ("/new", "/playground", "/playground/votes", "/playground/prompt", "/data/tokens"):
        answer = browser.get(path)
        assert (path, answer.status_code, sentence in answer.text) == (path, 403, True)
    for path in FORMS[1:]:
        answer = browser.send(path, form_token=token)
        assert (path, answer.status_code, "yours has the role read" in answer.text) == (path, 403, True)
    assert service.contents() == before
    assert browser.send("/logout", form_token=token).status_code == 303
    assert browser.get("/").status_code == 401


def test_pause_resume_and_cancel_work_as_forms_and_are_recorded_under_the_name_of_the_token(
    admin: Browser, service: Guarded
) -> None:
    assert "/jobs/ended/delete" in admin.get("/jobs/ended").text
    token = admin.form_token("/jobs/waiting")
    paused = admin.send("/jobs/waiting/pause", form_token=token)
    assert (paused.status_code, paused.headers["Location"]) == (303, "/jobs/waiting")
    service.wait_state("waiting", "paused")
    assert "/jobs/waiting/resume" in admin.get("/jobs/waiting").text
    assert admin.send("/jobs/waiting/resume", form_token=token).status_code == 303
    service.wait_state("waiting", *WAITS)
    ends = [
        line
        for line in service.get("/audit", limit=1000).json()["data"]
        if line.get("route") == "/jobs/{job_uuid}/pause" and line["event"] != "refused"
    ]
    assert [(line["event"], line["params"], line["caller"]) for line in ends][-2:] == [
        ("begin", {"job_uuid": "waiting"}, "operator"),
        ("end", {"job_uuid": "waiting"}, "operator"),
    ]
    conflict = admin.send("/jobs/ended/cancel", form_token=token)
    assert conflict.status_code == 409
    assert "only a job that has not ended can be cancelled" in conflict.text
    assert admin.send("/jobs/nobody/cancel", form_token=token).status_code == 404


def test_an_admin_cordons_and_drains_nodes_and_other_roles_see_why_they_take_no_jobs(
    admin: Browser, service: Guarded
) -> None:
    def state() -> str:
        return str(service.get("/nodes/mine").json()["state"])

    token = admin.form_token("/nodes")
    for action, expected in (("uncordon", "open"), ("drain", "draining"), ("uncordon", "open"), ("cordon", "cordoned")):
        answer = admin.send(f"/nodes/mine/{action}", form_token=token)
        assert (answer.status_code, answer.headers["Location"]) == (303, "/nodes")
        poll(
            lambda expected=expected: "silent" in state() or state() == expected, f"the node is {expected}", timeout=20
        )
    assert admin.send("/nodes/nobody/cordon", form_token=token).status_code == 404
    assert admin.send("/nodes/mine/rename", form_token=token).status_code == 400
    assert "/nodes/mine/" in admin.get("/nodes").text
    reader = Browser(service)
    reader.login("submit")
    page = reader.get("/nodes").text
    assert re.search(r"no</span>: (cordoned|silent since)", page)
    assert "/nodes/mine/" not in page
    assert reader.send("/nodes/mine/uncordon", form_token=reader.form_token()).status_code == 403


def test_an_admin_removes_a_node_that_takes_no_jobs_and_the_audit_log_has_it(admin: Browser, service: Guarded) -> None:
    token = admin.form_token("/nodes")
    service.join("spare")
    assert "/nodes/spare/remove" in admin.get("/nodes").text
    assert f"/nodes/{service.get('/nodes').json()['data'][0]['node']}/remove" not in admin.get("/nodes").text
    reader = Browser(service)
    reader.login("submit")
    assert reader.send("/nodes/spare/remove", form_token=reader.form_token()).status_code == 403
    answer = admin.send("/nodes/spare/remove", form_token=token)
    assert (answer.status_code, answer.headers["Location"]) == (303, "/nodes")
    assert service.get("/nodes/spare").status_code == 404
    assert admin.send("/nodes/spare/remove", form_token=token).status_code == 404
    lines = service.get("/audit", limit=1000).json()["data"]
    removed = [line for line in lines if line.get("params") == {"name": "spare", "action": "remove"}]
    assert [(line["event"], line["caller"], line.get("status")) for line in removed] == [
        *(("begin", "operator", None), ("end", "operator", 303)),
        *(("begin", "operator", None), ("end", "operator", 404)),
    ]


def test_the_policy_of_every_page_allows_nothing_inline_and_no_other_site(admin: Browser) -> None:
    for path in (*PAGES, "/login", "/jobs/nobody"):
        answer = admin.get(path)
        policy = answer.headers["Content-Security-Policy"]
        assert "unsafe" not in policy
        assert "script-src 'self';" in policy
        assert "default-src 'none';" in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-store"
        for script in re.findall(r"<script[^>]*>", answer.text):
            assert 'src="/static/' in script or 'type="application/json"' in script
        data = r'(?<=<script type="application/json" id="marks">)[^<]*(?=</script>)'
        short = str(escape(HOSTILE.rpartition("/")[2]))  # of a model, in the list
        text = re.sub(data, "", answer.text).replace(escaped(), "").replace(short, "")
        assert not re.search(r"\son\w+=|\sstyle=|<style|javascript:", text)
        assert not re.search(r"(src|href|action)=\"(?!/)(?!#)", answer.text)


def escaped() -> str:
    return str(escape(HOSTILE))


@pytest.mark.parametrize("path", PAGES)
def test_html_in_names_messages_and_logs_is_shown_as_text(admin: Browser, path: str) -> None:
    answer = admin.get(path)
    assert answer.status_code == 200
    assert "<script>alert" not in answer.text
    assert "<img" not in answer.text
    if "hostile" in path or path == "/":
        assert escaped() in answer.text


def test_html_in_what_a_reader_sends_is_shown_as_text(admin: Browser) -> None:
    text = quote(HOSTILE, safe="")
    for path in (f"/?search={text}", f"/?state={text}", f"/jobs/{text}", f"/static/{text}"):
        answer = admin.get(path)
        assert "<script>alert" not in answer.text
        assert "<img" not in answer.text
    assert escaped() in admin.get(f"/?search={text}").text


def test_html_in_rows_is_shown_as_text_and_a_wrong_field_is_named_beside_the_form(
    admin: Browser, service: Guarded
) -> None:
    rows = [{"prompt": HOSTILE, "completion": HOSTILE}]
    dataset, model = service.register(HOSTILE[:20], rows), str(tiny_model())
    fields = {"form_token": admin.form_token("/data/tokens"), "dataset": dataset, "model": model, "method": "sft"}
    answer = admin.send("/data/tokens", **fields)
    assert answer.status_code == 200, answer.text
    for page in (answer.text, admin.get("/data").text, admin.get(f"/data/rows?dataset={quote(dataset)}").text):
        assert "<script>alert" not in page
        assert "<img" not in page
        assert str(escape(dataset)) in page
    # Each token on its own: the rows' brackets are in elements of theirs.
    tokens = re.findall(r'<span class="t loss" title="id \d+">(.*?)</span>', answer.text, re.DOTALL)
    assert any("&lt;" in token for token in tokens)
    assert not any("<" in token for token in tokens)
    for wrong, named in (
        ({"dataset": "<b>none"}, "&lt;b&gt;none"),
        ({"rows": "101"}, "rows"),
        ({"max_seq_length": "many"}, "max_seq_length"),
        ({"model": "no/such"}, "no/such"),
    ):
        refused = admin.send("/data/tokens", **{**fields, **wrong})
        assert 400 <= refused.status_code < 500, wrong
        assert named in refused.text.partition('role="alert"')[2].partition("</p>")[0]
        assert "<b>" not in refused.text


def test_a_file_is_taken_from_its_own_page_only(admin: Browser, service: Guarded) -> None:
    url, rows = f"{service.url}/data/upload?dataset=sent&file=rows.csv", b"prompt,completion\na,b\n"
    good = {
        "Origin": service.url,
        "Content-Type": "application/octet-stream",
        "X-Form-Token": admin.form_token("/data"),
    }
    for wrong in (
        {"X-Form-Token": "x"},
        {"X-Form-Token": None},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": None},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
    ):
        answer = admin.session.post(url, data=rows, headers={**good, **wrong}, timeout=30)
        assert answer.status_code in (400, 403), wrong
    assert service.get("/datasets/sent").status_code == 404
    assert admin.session.post(url, data=rows, headers=good, timeout=60).status_code == 201
    assert service.get("/datasets/sent").json()["metadata"]["num_rows"] == 1


def test_a_job_is_queued_by_its_form_and_what_is_wrong_is_named_beside_it(browser: Browser, service: Guarded) -> None:
    limited = service.post("/tokens", {"name": "limited", "max_queued_jobs": 1, "priorities": ["low"]}).json()["token"]
    assert browser.send("/login", token=limited).status_code == 303
    fields = {"form_token": browser.form_token("/new"), "dataset": "questions", "model": str(tiny_model())}
    fields |= {"method": "sft", "batch_size": "2", "lora_rank": "4", "priority": "low"}
    queued = browser.send("/new", **fields, job="by-form")
    assert (queued.status_code, queued.headers.get("Location")) == (303, "/jobs/by-form"), queued.text
    assert browser.send("/new", **fields, job="by-form").status_code == 303
    status = service.status("by-form")["resources_allocated"]
    assert status["created_by"] == "limited"
    assert status["effective_config"]["lora"]["alpha"] == 8
    for wrong, code, named in (
        ({"job": "by-form", "batch_size": "3"}, 409, "by-form"),
        ({"job": "other"}, 429, "limited"),
        ({"job": "other", "priority": "high"}, 400, "priority"),
        ({"job": HOSTILE}, 400, "job_uuid"),
        ({"job": ""}, 400, "job_uuid is missing"),
        ({"job": "other", "epochs": "many"}, 400, "n_epochs"),
        ({"job": "other", "dataset": "none"}, 400, "none"),
    ):
        refused = browser.send("/new", **{**fields, **wrong})
        assert refused.status_code == code, (wrong, refused.text)
        assert named in refused.text.partition('role="alert"')[2].partition("</p>")[0]
        assert "<script>alert" not in refused.text
    assert service.post("/post-training/jobs/by-form/cancel").ok


def test_files_of_the_dashboard_are_no_others(browser: Browser) -> None:
    assert browser.get("/static/job.js").headers["Content-Type"].startswith("text/javascript")
    for name in ("../rendering.py", "%2e%2e/rendering.py", "..%2frendering.py", "rendering.py", ".", ""):
        assert browser.get(f"/static/{name}").status_code in (400, 401, 404)


def test_a_session_outlives_a_restart_of_the_service(tmp_path: Path) -> None:
    with guarded_service(tmp_path) as service:
        browser = Browser(service)
        assert browser.login("submit").status_code == 303
        token = browser.form_token()
        service.kill()
        service.start()
        poll(lambda: browser.get("/").status_code == 200, "the session is known", timeout=20)
        assert browser.send("/jobs/waiting/pause", form_token=token).status_code == 303
