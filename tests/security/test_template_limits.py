"""Chat templates that loop, recurse or grow, and tokenizers that do not end: a sentence that names them, wherever they
are used."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.launch.base import Observation, TaskState
from llama_stack_provider_trl.recipes.data import templates
from llama_stack_provider_trl.recipes.data.templates import limit, rendered
from llama_stack_provider_trl.recipes.data.tokenizer_calls import call_tokenizer
from llama_stack_provider_trl.specs.events import Failed, Preflighted, Reason
from llama_stack_provider_trl.specs.rows import Message
from llama_stack_provider_trl.system.cpu_timer import ENDED_BY
from llama_stack_provider_trl_remote.cli.recipe_process import run_recipe
from llama_stack_provider_trl_remote.service.views.preflights import _result
from tests.contract.payloads import QUESTIONS
from tests.tiny import tiny_model
from tests.training import job_spec, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]
TURNS: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SLOW = {
    "loops": LOOP,
    "macros": "{% macro f(n) %}{% for i in range(9) %}{{ f(n-1) if n else '' }}{% endfor %}{% endmacro %}{{ f(50) }}",
    "text": "{% for i in range(90000) %}{% for j in range(90000) %}x{% endfor %}{% endfor %}",
}
LARGE = {
    "doubling": "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x * 2 %}{% endfor %}{{ n.x }}",
    "repeated": "{{ 'a' * 10**10 }}",
    "list": "{{ ([0] * 10**10) | length }}",
    "centred": "{{ 'x' | center(10**11) }}",
    "format": "{{ '%0999999999999d' % 3 }}",
    "method": "{{ '{:>99999999999}'.format(3) }}",
}
REFUSED = {
    "range": ("{% for i in range(10**12) %}{% endfor %}", "Range too big"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself too deeply"),
    "zero": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "power": ("{{ 10**(10**9) }}", "a number of 4000000000 bits"),
    "squares": (
        "{% set n = namespace(x=10) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
        "bits, at most 4096",
    ),
}

UNBROKEN = {
    "a constant": "{{ 1.5 | round(1000000000, 'floor') }}",
    "a constant that is not written": "{% if false %}{{ 1.5 | round(1000000000, 'floor') }}{% endif %}",
    "a number from the messages": "{{ 1.5 | round(1000000000 * (messages | length), 'floor') }}",
}
"""Templates that call C code which gives no other thread the interpreter's lock."""
_RENDERING = """
import sys, threading
from transformers import AutoTokenizer
from llama_stack_provider_trl.recipes.data import templates
templates.SECONDS = templates._UNTIL_THE_KERNEL = 0.5
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer.chat_template = sys.argv[2]
thread = threading.Thread(target=templates.rendered, args=(tokenizer, [{"role": "user", "content": "a"}]))
thread.start()
thread.join()
"""
_TOKENIZING = """
import resource, signal, sys
from transformers import AutoTokenizer
from llama_stack_provider_trl.recipes.data import tokenizer_calls
from llama_stack_provider_trl.system.cpu_timer import CpuTimer
tokenizer_calls.SECONDS = 0.5
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
resource.setrlimit(resource.RLIMIT_SIGPENDING, (int(sys.argv[4]), int(sys.argv[4])))
longer = CpuTimer(900)
tokenizer_calls.call_tokenizer(tokenizer, ["a"])
assert (signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 800) == (sys.argv[4] == "0"), "the other one still counts"
longer.cancel()
assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)
longer = CpuTimer(900)
tokenizer_calls.call_tokenizer(tokenizer, [sys.argv[2] * 100] * int(sys.argv[3]))
"""


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(templates, "SECONDS", 0.5)
    return AutoTokenizer.from_pretrained(tiny_model())


def nothing_stays(before: tuple[int, int]) -> bool:
    return resource.getrlimit(resource.RLIMIT_DATA) == before and not templates._watch._watched


@pytest.mark.parametrize("name", SLOW)
def test_a_template_that_does_not_end_is_ended_and_named(tokenizer: Any, name: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    tokenizer.chat_template = SLOW[name]
    with pytest.raises(JobFailure, match=r"the chat template of '.*' takes more than 0.5 s of CPU time") as caught:
        rendered(tokenizer, TURNS)
    assert caught.value.reason == Reason.invalid_model
    assert nothing_stays(before)


@pytest.mark.skipif(sys.platform != "linux", reason="a timer of a thread's CPU time ends it")
@pytest.mark.parametrize("name", UNBROKEN)
def test_a_template_that_no_exception_ends_is_ended_with_its_process(name: str) -> None:
    command = [sys.executable, "-c", _RENDERING, str(tiny_model()), UNBROKEN[name]]
    assert subprocess.run(command, timeout=120, check=False).returncode == -ENDED_BY


def with_pattern(directory: Path, pattern: str) -> str:
    """A tokenizer that replaces what matches a pattern."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model() / name, directory)
    path = directory / "tokenizer.json"
    normalizer = {"type": "Replace", "pattern": {"Regex": pattern}, "content": "z"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "normalizer": normalizer}))
    return str(directory)


@pytest.mark.skipif(sys.platform != "linux", reason="a timer of CPU time ends it")
@pytest.mark.parametrize(("texts", "timers"), [(1, 100), (2, 100), (1, 0), (2, 0)])
def test_a_tokenizer_whose_expression_does_not_end_is_ended_with_its_process(
    tmp_path: Path, texts: int, timers: int
) -> None:
    """Also where a job of the same user has taken all timers."""
    given = [with_pattern(tmp_path, r"x*x*x*[^x\n]"), "x" * 350 + "\n", str(texts), str(timers)]
    command = [sys.executable, "-c", _TOKENIZING, *given]
    assert subprocess.run(command, timeout=120, check=False).returncode == -ENDED_BY


def test_an_expression_that_the_library_gives_up_is_the_tokenizers_fault(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(with_pattern(tmp_path, "(x+x+)+y"))
    with pytest.raises(JobFailure, match="cannot tokenize a text: Onig: Regex search error: retry-limit") as caught:
        call_tokenizer(tokenizer, ["x" * 60])
    assert caught.value.reason == Reason.invalid_model


def test_what_started_that_process_reports_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unused: Any = None
    with pytest.raises(JobFailure, match="a chat template, or the tokenizer, did not end") as preflight:
        _result(tmp_path, Observation(TaskState.exited, exit_code=-ENDED_BY), unused, Preflighted)
    ended = subprocess.CompletedProcess([], -ENDED_BY)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(JobFailure, match="a chat template, or the tokenizer, did not end") as command:
        run_recipe("recipe", "{}", "evaluation")
    assert {preflight.value.reason, command.value.reason} == {Reason.invalid_model}


@pytest.mark.parametrize("name", LARGE)
def test_a_template_that_grows_is_ended_and_named(tokenizer: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "SECONDS", 60.0)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    tokenizer.chat_template = LARGE[name]
    with pytest.raises(JobFailure, match=r"the chat template of '.*' takes more than 1024 MiB of memory"):
        rendered(tokenizer, TURNS)
    assert nothing_stays(before)


def test_memory_that_was_allocated_since_it_was_read_is_not_the_templates(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "MEMORY", 64 << 20)
    monkeypatch.setattr(templates, "_known", (time.monotonic() + 60, -(63 << 20)))  # a process of 1 MiB
    tokenizer.chat_template = "{{ 'a' * 20000000 }}"
    assert len(rendered(tokenizer, TURNS)) == 20_000_000


@pytest.mark.parametrize("name", REFUSED)
def test_an_error_of_a_template_is_one_that_callers_report(
    tokenizer: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "SECONDS", 60.0)  # jinja rewrites the frames of a recursion: 0.2 s, more under load
    tokenizer.chat_template, sentence = REFUSED[name]
    with pytest.raises((TemplateError, TypeError, ValueError), match=sentence):
        rendered(tokenizer, TURNS)


def test_a_text_that_is_too_long_is_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MOST_TEXT", 1000)
    tokenizer.chat_template = "{{ 'a' * 2000 }}"
    with pytest.raises(JobFailure, match="takes 2000 characters for one conversation, expected at most 1000"):
        rendered(tokenizer, TURNS)


def test_a_thread_that_is_not_the_main_one_is_watched_too(tokenizer: Any) -> None:
    tokenizer.chat_template = LOOP
    found: list[str] = []

    def render() -> None:
        try:
            rendered(tokenizer, TURNS)
        except JobFailure as error:
            found.append(error.message)

    thread = threading.Thread(target=render, daemon=True)
    thread.start()
    thread.join(60)
    assert "more than 0.5 s of CPU time" in found[0]


def test_what_follows_a_text_is_not_ended_in_its_place(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "_UNTIL_THE_KERNEL", 0.5)
    rendered(tokenizer, TURNS)
    end = time.thread_time() + 1.5
    while time.thread_time() < end:  # longer than the limit
        pass
    assert rendered(tokenizer, TURNS)


def test_usual_arithmetic_of_templates_stays(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ 3 * 4 }} {{ 2 ** 3 }} {{ 5 * '-' }} {{ 2.5 ** 2 }}"
    assert rendered(tokenizer, TURNS) == "12 8 ----- 6.25"


def test_a_tokenizer_of_a_library_is_limited_too(tokenizer: Any) -> None:
    limit(tokenizer)
    assert "a" in tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    tokenizer.chat_template = LOOP
    with pytest.raises(JobFailure, match=r"takes more than 0\.5 s"):
        tokenizer.apply_chat_template(TURNS, tokenize=False)


def model_with(path: Path, template: str) -> Path:
    shutil.copytree(tiny_model(), path)
    settings = path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
    (path / "chat_template.jinja").write_text(template)
    return path


@pytest.mark.parametrize("template", [LOOP, LARGE["repeated"]], ids=["loop", "repeated"])
def test_a_training_ends_with_the_templates_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(templates, "SECONDS", 0.5)
    model = model_with(tmp_path / "model", template)
    status, events = run(tmp_path / "run", job_spec(tmp_path, model, rows=QUESTIONS))
    assert status == 1
    (failed,) = of_kind(events, Failed)
    assert failed.reason is Reason.invalid_model
    assert f"the chat template of '{model}' takes more than" in failed.message
