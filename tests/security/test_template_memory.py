"""Chat templates of models: preflights and previews render them, within their limits of memory and time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import TrainingService, refusal, running_service
from tests.required import in_full
from tests.tiny import tiny_model

pytestmark = pytest.mark.contract
PREFLIGHT, PREVIEW = "/post-training/preflight", "/post-training/preview"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    root = tmp_path_factory.mktemp("service")
    with running_service(root, preflight_memory_mb=1024, preflight_timeout=60) as service:
        service.register("questions", QUESTIONS)
        yield service


def model_with(path: Path, template: str) -> str:
    """A model whose tokenizer has this chat template."""
    shutil.copytree(tiny_model(), path)
    settings = path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
    (path / "chat_template.jinja").write_text(template)
    return str(path)


HUNGRY = {
    "memory": ("{% set x = 'a' * (7 * 1024**3) %}{{ x | length }}", "takes more than 1024 MiB of memory to write one"),
    "loop": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "takes more than 10 s of CPU",
    ),
}


@pytest.mark.parametrize(
    ("path", "kind"),
    # A loop takes its 10 s of CPU time; that loops end is tried with half a second in test_template_limits.py.
    [(PREFLIGHT, "memory"), (PREVIEW, "memory"), *in_full((PREFLIGHT, "loop"), (PREVIEW, "loop"))],
)
def test_a_chat_template_that_takes_too_much_is_refused_by_its_name(
    service: TrainingService, tmp_path: Path, path: str, kind: str
) -> None:
    template, sentence = HUNGRY[kind]
    hungry = model_with(tmp_path / "model", template)
    answer = service.session.post(f"{service.url}/v1{path}", json=sft("hungry", "questions", model=hungry), timeout=120)
    assert f"the chat template of '{hungry}' {sentence}" in refusal(answer)
    answer = service.session.post(f"{service.url}/v1{PREFLIGHT}", json=sft("usual", "questions"), timeout=120)
    assert answer.status_code == 200, answer.text
