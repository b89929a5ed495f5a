"""Chat templates of models: a preflight renders them, within its limits of memory and time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import TrainingService, refusal, running_service
from tests.tiny import tiny_model

pytestmark = pytest.mark.contract
PREFLIGHT = "/post-training/preflight"


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


def test_a_chat_template_that_takes_gigabytes_is_refused_with_the_limits_name(
    service: TrainingService, tmp_path: Path
) -> None:
    hungry = model_with(tmp_path / "model", "{% set x = 'a' * (7 * 1024**3) %}{{ x | length }}")
    answer = service.session.post(
        f"{service.url}/v1{PREFLIGHT}", json=sft("hungry", "questions", model=hungry), timeout=120
    )
    assert "more than 1024 MiB of memory (preflight_memory_mb" in refusal(answer)
    answer = service.session.post(f"{service.url}/v1{PREFLIGHT}", json=sft("usual", "questions"), timeout=120)
    assert answer.status_code == 200, answer.text
