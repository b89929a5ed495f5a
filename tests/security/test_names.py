"""Names from elsewhere: every text of every request is printable, short, and refused by name, or is declared free."""

from __future__ import annotations

import copy
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

import llama_stack_provider_trl.requests
import llama_stack_provider_trl_remote.service.http
from llama_stack_provider_trl.requests import bodies
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.specs.names import CheckedElsewhere, CheckedNames, FreeText, problem_of_name
from tests.required import FULL
from tests.security.bad_names import BAD
from tests.security.guarded import BODIES, KNOWN, NODE, TOKENS, Guarded, guarded_service, sentence_of, without_version

pytestmark = pytest.mark.contract

Json = dict[str, Any]
Path_ = tuple[str | int, ...]

KEY, VALUE = "<key>", "<value>"
"""Of an object with any keys."""
FREE = {
    "AnswerBody.stop": "compared with answers",
    "AnswerCheck.expected": "compared with answers",
    "AnswerCheck.json_schema": "compared with answers",
    "AnswerCheck.pattern": "searched in answers",
    "AnswerCheck.template": "a prompt",
    "CreateFineTuningJob.metadata": "any text; its keys are names",
    "CompletionBody.prompt": "a prompt",
    "GraderRunBody.item": "a row",
    "GraderRunBody.model_sample": "an answer",
    "MessageText.text": "a template of a prompt",
    "ModelMessage.content": "a template of a prompt",
    "MultiGrader.calculate_output": "a formula",
    "PythonGrader.source": "a program",
    "_Comparison.input": "a template, compared",
    "_Comparison.reference": "the same",
    "VoteBody.chosen": "an answer",
    "VoteBody.rejected": "an answer",
    "Harness.system_instruction": "a prompt",
    "JsonSchema.description": "a sentence, which nothing reads",
    "JsonSchema.schema_": "compared with answers",
    "LogEntries.lines": "lines of a log; displayed by the console",
    "ModelFiles.why_not": "a sentence",
    "RegisterDataset.metadata": "any JSON, as Llama Stack has it; its keys are names",
    "RowsSource.rows": "content",
    "Samples.prompts": "prompts",
    "MixtureEntry.system_prompt": "the text of a turn",
    "ProviderOptions.metadata": "any text; its keys are names",
    "ProviderOptions.system_prompt": "the same",
    "ProviderOptions.chat_template": "a template",
    "TaskOrder.spec": "the specification of a job, of which prompts are a part; from the service to its nodes",
    "TaskReport.detail": "a sentence",
    "TaskReport.error": "a sentence",
    "TaskReport.failed": "an event, with the message of an error",
    "TaskReport.observation": "a record with the message of an error",
}
"""Fields that name nothing, with the reason."""
ELSEWHERE = {
    "ChatBody.messages": "read as the rows of datasets are",
    "ChatBody.tools": "read as the rows of datasets are",
    "VoteBody.messages": "read as the rows of datasets are",
    "VoteBody.tools": "read as the rows of datasets are",
    "CreateFineTuningJob.integrations": "refused, unless it is empty",
    "ReinforcementMethod.grader": "the graders",
    "AnswerCheck.grader": "the graders",
    "GRPOReward.check": "AnswerCheck",
    "GRPOConfig.rewards": "GRPOReward",
    "SupervisedFineTuneRequest.algorithm_config": "LoraFinetuningConfig, QATFinetuningConfig",
    "PreferenceOptimizeRequest.algorithm_config": "the model of its type, or that of a package",
    "ProviderOptions.method": "the same",
    "ProviderOptions.evaluate": "EvaluateRequest",
}
"""Fields that another checked model parses."""
PARTS = {"PipelineBody.jobs": "the body of each job's own call", "PipelineBody.teacher_student": "those of its jobs"}
"""Fields that are checked with another model, and tried below all the same."""


def checked_models() -> set[type[CheckedNames]]:
    """Every model of requests and messages that checks names."""
    for package in (llama_stack_provider_trl.requests, llama_stack_provider_trl_remote.service.http):
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
    for name in ("wire", "openai.bodies"):
        importlib.import_module(f"llama_stack_provider_trl_remote.{name}")
    found: set[type[CheckedNames]] = set()
    pending = [CheckedNames]
    while pending:
        below = [one for one in pending.pop().__subclasses__() if one.__module__.startswith("llama_stack_provider_trl")]
        found.update(below)
        pending += below
    return found


def test_a_field_is_free_text_only_where_that_was_decided() -> None:
    free, elsewhere = set(), set()
    for model in checked_models():
        for name, field in model.model_fields.items():
            owner = next(one for one in reversed(model.__mro__) if name in getattr(one, "model_fields", {}))
            if any(isinstance(mark, FreeText) for mark in field.metadata):
                free.add(f"{owner.__name__}.{name}")
            if any(isinstance(mark, CheckedElsewhere) for mark in field.metadata):
                elsewhere.add(f"{owner.__name__}.{name}")
    assert free == FREE.keys()
    # The options of a body are parsed by ProviderOptions.
    assert {one for one in elsewhere if not one.endswith(".provider_options")} == ELSEWHERE.keys() | PARTS.keys()


# --- The service ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded_service(tmp_path_factory.mktemp("names")) as service:
        yield service


class Walk:
    """The texts of the bodies of a document."""

    def __init__(self, document: Json) -> None:
        self._schemas = document["components"]["schemas"]

    def texts(self, schema: Json, model: str = "", path: Path_ = (), seen: tuple[str, ...] = ()) -> Iterator[Path_]:
        """Paths of texts, without those of free fields."""
        if "$ref" in schema:
            model = schema["$ref"].rpartition("/")[2]
            if model not in seen:
                yield from self.texts(self._schemas[model], model, path, (*seen, model))
            return
        for one in (schema.get(union) for union in ("anyOf", "oneOf", "allOf")):
            for inner in one or ():
                yield from self.texts(inner, model, path, seen)
        for name, inner in schema.get("properties", {}).items():
            if not _is_free(model, name):
                yield from self.texts(inner, model, (*path, name), seen)
        if (more := schema.get("additionalProperties")) and path:
            yield (*path, KEY)
            yield from self.texts(more if isinstance(more, dict) else {"type": "string"}, model, (*path, VALUE), seen)
        for inner in [schema["items"]] if "items" in schema else schema.get("prefixItems", ()):
            yield from self.texts(inner, model, (*path, 0), seen)
        if schema.get("type") == "string" and "const" not in schema and "enum" not in schema and path:
            yield path

    def sample(self, schema: Json) -> Any:
        """A small value of a schema."""
        if "$ref" in schema:
            return self.sample(self._schemas[schema["$ref"].rpartition("/")[2]])
        for union in ("anyOf", "oneOf", "allOf"):
            if union in schema:
                return self.sample(schema[union][0])
        if "const" in schema or "enum" in schema:
            return schema.get("const", schema.get("enum", [None])[0])
        match schema.get("type"):
            case "object":
                return {name: self.sample(schema["properties"][name]) for name in schema.get("required", ())}
            case "array":
                return [self.sample(schema["items"])] * schema.get("minItems", 0) if "items" in schema else []
            case "integer" | "number":
                return schema.get("minimum", 1)
            case "boolean":
                return False
            case "string":
                return (
                    "0" * 64
                    if "64" in schema.get("pattern", "")
                    else "cpu"
                    if "cpu" in schema.get("pattern", "")
                    else "a"
                )
        return None

    def placed(self, schema: Json, body: Any, path: Path_, value: str) -> Any:
        """The body with a text at a path; what is missing on the way is made."""
        if not path:
            return value
        first, rest = path[0], path[1:]
        inner = self._inner(schema, first)
        if first in (KEY, VALUE):
            key = value if first == KEY else "key"
            # An object with any content may have the text at any depth.
            return (
                {key: self.sample(inner) if inner else 1}
                if first == KEY
                else {key: self.placed(inner, None, rest, value)}
            )
        if first == 0:
            return [self.placed(inner, body[0] if body else self.sample(inner), rest, value)]
        made = copy.deepcopy(body) if isinstance(body, dict) else {}
        for union in (one for one in self._branches(schema) if first in one.get("properties", {})):
            needed = {name: self.sample(union["properties"][name]) for name in union.get("required", ())}
            fixed = {name: each["const"] for name, each in union["properties"].items() if "const" in each}
            if not isinstance(body, dict) or any(made.get(name) != each for name, each in fixed.items()):
                made = {**needed, **fixed}
            break
        made[str(first)] = self.placed(inner, made.get(str(first)), rest, value)
        return made

    def _branches(self, schema: Json) -> Iterator[Json]:
        if "$ref" in schema:
            yield from self._branches(self._schemas[schema["$ref"].rpartition("/")[2]])
            return
        yield schema
        for union in ("anyOf", "oneOf", "allOf"):
            for inner in schema.get(union, ()):
                yield from self._branches(inner)

    def _inner(self, schema: Json, first: str | int) -> Json:
        for one in self._branches(schema):
            if first == 0 and ("items" in one or "prefixItems" in one):
                return dict(one["items"] if "items" in one else one["prefixItems"][0])
            if first in (KEY, VALUE) and (more := one.get("additionalProperties")):
                return more if isinstance(more, dict) else {}
            if first in one.get("properties", {}):
                return dict(one["properties"][first])
        return {}


def _is_free(model: str, field: str) -> bool:
    """Whether a model of the document, or one that it derives from, has declared the field free, or for another one."""
    bases = {one.__name__: {each.__name__ for each in one.__mro__} for one in checked_models()}
    names = bases.get(model, {model})
    return any(f"{name}.{field}" in {**FREE, **ELSEWHERE} for name in names)


def _routes(document: Json) -> dict[str, tuple[str, Json]]:
    """`METHOD path` without the version -> a path, and the schema of its body."""
    found = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if content is not None:
                found[f"{method.upper()} {without_version(path)}"] = (path, content["schema"])
    return found


def test_every_name_of_every_body_is_refused_by_name(service: Guarded) -> None:
    document = service.document()
    walk = Walk(document)
    wrong, tried = [], 0
    for route, (path, schema) in _routes(document).items():
        where = path.format(**KNOWN)
        token = service.credentials[NODE] if "{name}" in path else TOKENS["admin"]
        token = TOKENS["node"] if route == "POST /nodes" else token
        texts = list(dict.fromkeys(walk.texts(schema)))
        assert texts, route
        for number, text in enumerate(texts):
            names = [str(one) for one in text if one not in (KEY, VALUE, 0)]
            # Each field with the next ones of the kinds: one function decides on all of them.
            for kind in next_kinds(number, 3 if FULL else 1):
                value = BAD[kind]
                body = walk.placed(schema, copy.deepcopy(BODIES[route]), text, value)
                answer = service.session.post(
                    f"{service.url}{where}", json=body, headers={"Authorization": f"Bearer {token}"}, timeout=30
                )
                tried += 1
                if not (400 <= answer.status_code < 500 and names[-1] in sentence_of(answer.json())):
                    wrong.append(f"{route} {text} {kind}: {answer.status_code} {answer.text[:300]}")
    assert not wrong, "\n".join([f"{len(wrong)} of {tried}", *wrong[:40]])
    assert tried > (300 if FULL else 100)


def next_kinds(number: int, count: int) -> list[str]:
    return (list(BAD) * 2)[count * number % len(BAD) :][:count]


ALGORITHMS = {
    "supervised-fine-tune": [bodies.LoraFinetuningConfig, bodies.QATFinetuningConfig],
    "preference-optimize": [
        bodies.DPOAlignmentConfig,
        bodies.ORPOConfig,
        bodies.CPOConfig,
        bodies.SimPOConfig,
        bodies.RewardConfig,
        bodies.KTOConfig,
        bodies.GRPOConfig,
        bodies.DistillationConfig,
    ],
}
TYPES = {"DPOAlignmentConfig": "dpo", "LoraFinetuningConfig": "LoRA", "QATFinetuningConfig": "QAT"}


def _type(model: type) -> str:
    return TYPES.get(model.__name__, model.__name__.removesuffix("Config").lower())


def test_every_name_of_an_algorithm_is_refused_by_name(service: Guarded) -> None:
    wrong = []
    for call, models in ALGORITHMS.items():
        base = BODIES[f"POST /post-training/{call}"]
        for model in models:
            schema = model.model_json_schema()
            walk = Walk({"components": {"schemas": schema.get("$defs", {})}})
            for number, text in enumerate(walk.texts(schema, model.__name__)):
                for kind in next_kinds(number, len(BAD) if FULL else 2):
                    config = walk.placed(schema, {"type": _type(model)}, text, BAD[kind])
                    bad = {**base, "algorithm_config": config}
                    answer = service.post(f"/post-training/{call}", bad)
                    if answer.status_code != 400 or str(text[0]) not in answer.json()["detail"]:
                        wrong.append(f"{model.__name__} {text} {kind}: {answer.status_code} {answer.text[:300]}")
    assert not wrong, "\n".join(wrong[:30])


NESTED = {
    "a check of GRPO": (
        "rewards",
        {"algorithm_config": {"type": "grpo", "rewards": [{"check": {"type": "exact", "column": "BAD"}}]}},
    ),
    "a function of GRPO": ("rewards", {"algorithm_config": {"type": "grpo", "rewards": [{"function": "BAD"}]}}),
    "a reward model": ("rewards", {"algorithm_config": {"type": "grpo", "rewards": [{"model": "BAD"}]}}),
    "the model of an evaluation": (
        "evaluate",
        {"provider_options": {"evaluate": {"dataset_id": "questions", "model": "BAD"}}},
    ),
    "the rows of an evaluation": ("evaluate", {"provider_options": {"evaluate": {"dataset_id": "BAD"}}}),
    "a method in the options": ("method", {"provider_options": {"method": {"type": "BAD"}}}),
    "a metric of a search": (
        "objective",
        {
            "hyperparam_search_config": {
                "method": "grid",
                "parameters": {"training_config.learning_rate": [1e-4]},
                "objective": "BAD",
            }
        },
    ),
    "a value of a search": (
        "hyperparam_search_config",
        {"hyperparam_search_config": {"method": "grid", "parameters": {"model": ["BAD"]}}},
    ),
    "a field of a search": (
        "hyperparam_search_config",
        {"hyperparam_search_config": {"method": "grid", "parameters": {"BAD": [1]}}},
    ),
    "a project": ("logger_config", {"logger_config": {"mlflow": {"project": "BAD"}}}),
}


@pytest.mark.parametrize("name", NESTED)
def test_names_in_blocks_of_free_form_are_refused_too(service: Guarded, name: str) -> None:
    field, more = NESTED[name]
    for kind, value in BAD.items():
        bad = _replaced({**BODIES["POST /post-training/preference-optimize"], **more}, value)
        if "evaluate" in field or "search" in field or field in ("objective", "logger_config"):
            bad = _replaced({**BODIES["POST /post-training/supervised-fine-tune"], **more}, value)
            answer = service.post("/post-training/supervised-fine-tune", bad)
        else:
            answer = service.post("/post-training/preference-optimize", bad)
        assert answer.status_code == 400, (kind, answer.text)
        assert field in answer.json()["detail"], (kind, answer.text)


def _replaced(value: Any, by: str) -> Any:
    if value == "BAD":
        return by
    if isinstance(value, dict):
        return {by if key == "BAD" else key: _replaced(each, by) for key, each in value.items()}
    return [_replaced(each, by) for each in value] if isinstance(value, list) else value


def test_every_parameter_of_every_route_is_printable(service: Guarded) -> None:
    document = service.document()
    wrong, tried = [], 0
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            for parameter in operation.get("parameters", ()):
                for kind in next_kinds(tried, len(BAD) if FULL else 2):
                    if parameter["in"] not in ("path", "query") or kind == "half a surrogate pair":  # no UTF-8 has it
                        continue
                    value = BAD[kind]
                    target = "/".join(
                        quote(value, safe="")
                        if part == f"{{{parameter['name']}}}"
                        else "mine"
                        if part[:1] == "{"
                        else part
                        for part in path.split("/")
                    )
                    if parameter["in"] == "query":
                        target += f"?{parameter['name']}={quote(value, safe='')}"
                    answer = service.session.request(method, service.url + target, timeout=30)
                    tried += 1
                    if not 400 <= answer.status_code < 500:
                        wrong.append(f"{method} {target[:100]} {kind}: {answer.status_code}")
                    elif method != "head" and parameter["in"] == "query" and parameter["name"] not in answer.text:
                        wrong.append(f"{method} {target[:100]} {kind}: {answer.text[:200]}")
    assert not wrong, "\n".join(wrong[:30])
    assert tried > (200 if FULL else 50)


def test_free_texts_and_names_of_every_language_are_taken(service: Guarded) -> None:
    rows = [{"prompt": "a\x1b[2J\n\u202e", "completion": "b"}]
    body = {
        "dataset_id": "Fragen, 你好, שאלות 🎉",
        "purpose": "post-training/messages",
        "source": {"type": "rows", "rows": rows},
        "metadata": {"description": "two\nlines\x1b[2J"},
    }
    assert service.post("/datasets", body).status_code == 200
    assert not problem_of_name("Zwölf Boxkämpfer/v1.0 ジャパン हिन्दी")
    parsed = ProviderOptions.parse({"samples": {"prompts": ["a\nb\x1b"]}})
    assert parsed.samples is not None


def test_a_new_text_of_a_body_is_a_name_without_further_work() -> None:
    class Extended(bodies.DataConfig):
        another: str | None = None
        anything: dict[str, Any] | None = None
        listed: tuple[str, ...] = ()

    for value in BAD.values():
        for more in (
            {"another": value},
            {"anything": {"a": [{"b": value}]}},
            {"anything": {value: 1}},
            {"listed": [value]},
        ):
            with pytest.raises(ValueError, match=next(iter(more))):
                Extended.model_validate({"dataset_id": "a", "batch_size": 1, **more})
