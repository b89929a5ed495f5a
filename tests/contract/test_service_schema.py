"""The whole OpenAPI document of a training service, called by a machine (schemathesis): whatever it sends, the service
does not break, and answers nothing that the document does not announce."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from llama_stack_provider_trl.system.process import FileLock
from tests.contract.ended import add_ended_job
from tests.contract.openai_known import FILE, JOB, add_known
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import TrainingService, ndjson, running_service
from tests.contract.stack import SFT
from tests.required import FULL
from tests.tiny import tiny_model

pytestmark = pytest.mark.contract

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
)
OPTIONS = (
    *("--seed", "1", "--phases", "coverage,fuzzing", "--checks", ",".join(CHECKS)),
    *("--max-examples", "10" if FULL else "2"),  # test_fuzz.py sends requests at random, too
    *("--generation-database", "none", "--request-timeout", "10", "--continue-on-failure", "--warnings", "off"),
)
SUBMITS = "/v1/post-training/(supervised-fine-tune|preference-optimize|preflight|preview|evaluate|generate|merge)$"
"""Paths with the largest bodies: a half of all requests."""
PARTS = {
    "submits": ("--include-path-regex", f"^{SUBMITS}"),
    # Other versions lead to the same handlers as the calls below /v1, and would take a third of the time.
    # Every model that a grader asks is answered with 503, since the device is locked (test_grader_calls.py).
    "others": ("--exclude-path-regex", f"^(/(v1(alpha|beta)/|health$)|{SUBMITS}|/.*/graders/run$)"),
}
UNCOVERED = (
    # The body of /preference-optimize with three fields more, of which test_service_preflight.py sends the bounds.
    "preflight",
    "preview",
    # Most of each is provider_options, which /preference-optimize has, too.
    *(() if FULL else ("supervised-fine-tune", "evaluate", "generate", "merge", "export")),
)
"""Calls whose bounds are not sent: they get requests at random only."""
SECONDS = 170
"""Within which a part must be through."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    """With one job that has ended and two that wait; nothing trains, since the device is locked by us."""
    root = tmp_path_factory.mktemp("service")
    (root / "locks").mkdir()
    device = FileLock(root / "locks" / "cpu.lock")
    assert device.acquire("test_service_schema.py")
    add_ended_job(root / "data")
    with running_service(root) as service:
        questions = service.register("questions", QUESTIONS)
        for name in ("waiting", "held"):
            service.submit(SFT, sft(name, questions))
        assert service.put_blob(QUESTIONS)[0].ok
        add_known(service)
        yield service
    device.release()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("part", PARTS)
def test_every_call_answers_as_documented_whatever_it_is_sent(
    service: TrainingService, tmp_path: Path, part: str
) -> None:
    address = f"{service.url}/openapi.json"
    document = service.session.get(address, timeout=30).json()
    twins = {path for path in document["paths"] if not path.startswith(("/v1/", "/openai/v1/"))}
    assert {path.split("/")[1] for path in twins} == {"v1alpha", "v1beta", "health"}
    for twin in twins:
        path = re.sub("^/(v1(alpha|beta)/)?", "/v1/", twin)
        assert shape(document["paths"][twin]) == shape(document["paths"][path])
    (tmp_path / "schemathesis.toml").write_text(configuration())
    program = Path(sys.executable).with_name("schemathesis")
    done = subprocess.run(
        [program, "--config-file", "schemathesis.toml", "--no-color", "run", address, *OPTIONS, *PARTS[part]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    submits = {path for path in document["paths"] if re.match(SUBMITS, path)}
    assert len(submits) == 7
    left_out = {path for path in document["paths"] if path.endswith("/graders/run")}
    chosen = submits if part == "submits" else document["paths"].keys() - twins - submits - left_out
    tested = {path: calls for path, calls in document["paths"].items() if path in chosen}
    assert f"Tested: {operations(tested)}" in done.stdout, done.stdout


def shape(calls: Mapping[str, Mapping[str, object]]) -> dict[str, dict[str, object]]:
    """What a path takes and answers, without the ids of its calls."""
    return {
        method: {key: value for key, value in call.items() if key != "operationId"} for method, call in calls.items()
    }


def operations(paths: Mapping[str, Mapping[str, object]]) -> int:
    methods = {"get", "put", "post", "delete", "head", "patch", "options"}
    return sum(len(methods & path.keys()) for path in paths.values())


def configuration() -> str:
    """Most of what is sent as one of these parameters is a name that the service knows: no machine would guess it."""
    jobs = ("ended", "waiting")
    known = {
        **dict.fromkeys(("path.job_uuid", "query.job_uuid", "query.after", "body.job_uuid"), jobs),
        "path.sha256": (hashlib.sha256(ndjson(QUESTIONS)).hexdigest(),),
        "path.identifier": ("final",),
        "path.path": ("model.bin",),
        "path.dataset_id": ("questions",),
        "path.job_id": (JOB,),
        "path.file_id": (FILE,),
        "body.training_config.data_config.dataset_id": ("questions",),
        "body.model": (str(tiny_model()),),
        "body.checkpoint_dir": ("results",),
    }
    lines = []
    for number, (parameter, values) in enumerate(known.items()):
        lines += [f"[dictionaries.known-{number}]", f"values = {json.dumps(values)}"]
        lines += [f"[parameters.{json.dumps(parameter)}]", f'dictionary = "known-{number}"', "probability = 0.75"]
    # Of the others one has ended, and one will have been cancelled by then.
    lines += ["[[operations]]", 'include-path-regex = "/(pause|resume)$"', 'parameters = {"path.job_uuid" = "held"}']
    uncovered = "|".join(UNCOVERED)
    lines += ["[[operations]]", f'include-path-regex = "/({uncovered})$"', "phases.coverage.enabled = false"]
    # Of a job without a checkpoint: every other model is answered with 503, since the device is locked. That phase
    # chooses models of its own.
    lines += ["[[operations]]", 'include-path-regex = "^/openai/v1/.*completions$"', "phases.coverage.enabled = false"]
    lines += ['parameters = {"body.model" = "ft:waiting"}']
    return "\n".join(lines)
