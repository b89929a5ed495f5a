"""What parses in a process that serves requests is listed, with what bounds it: a new reader fails until it is, too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.unit.packages import PACKAGE, modules, package_of, tree

SERVING = ("specs", "requests", "jobs", "stack", "provider", "wire", "adapter", "openai", "service")
"""Packages whose modules the service, or Llama Stack with a provider, imports; `service` and `jobs` with all below."""

LIMITED = "a function that `Limited.call` calls in another process"
PROGRAM = "a program of its own, with limits of memory and time"
ON_THE_WAY = "reads rows for the functions listed here only"
TRAINING = "trainings and the command line only"
ROWS = {
    "specs.answer_rows.RowsOnDemand.columns": TRAINING,
    "specs.answer_rows._checked_rows": ON_THE_WAY,
    "specs.answer_rows._first_problem": LIMITED,
    "specs.answer_rows._prompt": ON_THE_WAY,
    "specs.answer_rows._question": ON_THE_WAY,
    "specs.custom.check_custom_rows": ON_THE_WAY,
    "specs.custom_limits._problem": LIMITED,
    "specs.row_files": "the readers themselves",
    "specs.row_files.read_json": ON_THE_WAY,
    "specs.row_files.read_parquet": ON_THE_WAY,
    "remote.service.pages.data_pages.upload_rows": "an ending is looked up; `Blobs.convert` has the reader's process",
    "specs.row_prompts._messages": ON_THE_WAY,
    "specs.row_prompts._prompt": LIMITED,
    "specs.row_verdicts._verdict": LIMITED,
    "specs.row_verdicts.check_file": ON_THE_WAY,
    "remote.service.datasets.reader.main": PROGRAM,
    "remote.service.datasets.buckets._listed": "compares the endings of names with those of the readers",
    "remote.service.datasets.buckets._rows": PROGRAM,
    "remote.service.datasets.hub._builder": PROGRAM,
    "remote.service.datasets.hub._split_rows": PROGRAM,
    "remote.service.datasets.reader.convert": PROGRAM,
    "remote.service.serving.chats._messages": "one row, of the body of a request, which `http.received` bounds",
    "remote.service.datasets.votes.row_of": "one row, of the body of a request, which `http.received` bounds",
    "remote.service.datasets.registry.DatasetRegistry._file": "compares a file's ending with those of the readers",
    "remote.service.datasets.registry.DatasetRegistry._refuse_bucket": "compares a name's ending with those of readers",
}
"""Who names a reader of rows, and where it runs."""
READERS = {
    *(
        "read_ndjson",
        "read_csv",
        "read_json",
        "ROW_READERS",
        "parse_row",
        "check_rows",
        "check_file",
        "check_custom_rows",
    ),
    *("read_checked_rows", "RowsOnDemand", "ParquetFile", "load_dataset", "load_dataset_builder"),
    *("read_parquet", "read_hub", "read_bucket"),
}

OURS = "a file or a row of the database that this project writes, of bounded values"
CHILD = "the answer of a child process"
BODY = "the body of a request, whose size, values and levels are bounded by `http.received`"
BOUNDED = "a file of at most 1 MiB"
JSON = {
    "jobs.store.related.cancels._order": OURS,
    "specs.grading.asking._json_of": "a reply of a model, of as many tokens as it may have",
    "specs.grading.grading._comparisons": LIMITED,
    "specs.grading.grading._json_of": "an answer: of a request at most 1 MiB, else of a model",
    "specs.grading.isolated._called": LIMITED,
    "jobs.store.reader.JobReader.evaluations": OURS,
    "jobs.store.reader.JobReader.sparks": OURS,
    "jobs.store.reader.read_request": "a request of at most 4 MiB (`LONGEST_REQUEST`)",
    "jobs.store.reader.read_watched.points": OURS,
    "jobs.store.row_mapping._progress": OURS,
    "jobs.store.row_mapping": OURS,
    "jobs.store.row_mapping.job_record": OURS,
    "jobs.store.row_mapping.listed_job": OURS,
    "jobs.store.row_mapping.point_record": OURS,
    "jobs.store.row_mapping.samples_record": OURS,
    "jobs.store.related.searches._trial": OURS,
    "jobs.store.tokens._record": OURS,
    "jobs.store.monitoring.totals.Totals.all": OURS,
    "jobs.inputs.damaged_models._problems_of_weights": "at most 1 MiB (`SMALL`)",
    "jobs.inputs.exported_models._read": "at most 1 MiB (`_MOST`)",
    "jobs.inputs.vocabularies._strings": LIMITED,
    "jobs.inputs.vocabularies._vocabulary": LIMITED,
    "requests.bases._adapter_config": BOUNDED,
    "requests.trial_values.answered_values": CHILD,
    "requests.search.make_trial": BODY,
    "specs.answer_checks._parsed": BODY,
    "specs.compiled_checks.compiled_schema": LIMITED,
    "specs.model_files._weights": "an index of at most MOST_INDEX bytes",
    "specs.row_files.parse_line": "called by specs.custom.check_custom_rows, in a call with limits, and by trainings",
    "specs.row_files._is_one_object": PROGRAM,
    "specs.row_files._parsed": PROGRAM,
    "specs.row_files.read_ndjson": "called by the functions in ROWS",
    "specs.rows._Row._parsed": "called by the functions in ROWS",
    "specs.tool_calls._decoded": "called by the functions in ROWS",
    "stack.external._is_object": "a header, which the HTTP server bounds",
    "remote.openai.names.Called.of": "metadata of a job, which `requests.options` bounds",
    "remote.service.cluster.launcher.ClusterLauncher._conclude": OURS,
    "remote.service.cluster.logs._difference": OURS,
    "remote.service.cluster.models._parsed": OURS,
    "remote.service.routes.openai._error": "an answer of this service",
    "remote.service.serving.tool_texts._call_of": "of an answer, as long as the model has positions",
    "remote.service.pages.new_job_pages._again": "options of a request of at most 4 MiB (`LONGEST_REQUEST`)",
    "remote.service.pages.job_form._object": "at most 64 Ki characters (`MOST_OPTIONS`)",
    "remote.service.loading.provider_block": "the operator's settings",
    "remote.service.datasets.blobs.Blobs._child": CHILD,
    "remote.service.datasets.blobs._parsed_verdict": OURS,
    "remote.service.datasets.registration.Registration._child": CHILD,
    "remote.service.datasets.registration._read": PROGRAM,
    "remote.service.datasets.registry.DatasetRegistry._write": OURS,
    "remote.service.http.received.parse": BODY,
    "remote.service.pages.route._page_of": "the answer of a route of this service",
    "remote.service.pages.route.problem_of": "the answer of a route of this service",
    "remote.service.security.audit._parsed": OURS,
    "remote.service.security.sessions._parsed": OURS,
    "remote.service.space._count_weights": BOUNDED,
    "remote.service.views.events.parsed": "a line of events, which the supervisor bounds",
    "remote.service.views.series._Curves.read": OURS,
}
"""Who parses JSON, and what bounds it."""

FORMATS = {
    *("bz2", "csv", "datasets", "email", "gzip", "h5py", "lzma", "marshal", "numpy", "pandas", "pickle", "pyarrow"),
    *("safetensors", "shelve", "tarfile", "tokenizers", "torch", "transformers", "xml", "zipfile", "zlib", "zstandard"),
}
LIBRARIES = {
    "jobs.store.reader": {"zlib"},
    "specs.compressed": {"gzip", "pyarrow", "zlib"},
    "specs.row_files": {"csv", "pyarrow"},
    "remote.openai.outgoing": {"email"},
    "remote.service.datasets.buckets": {"pyarrow"},
    "remote.service.datasets.hub": {"datasets"},
}
"""Who imports libraries of formats that can take much more memory, or time, than their files."""


BENEATH = "opens beneath a directory, without links out of it (`ModelDirectory`)"
CREATED = "a file that the service creates, in a directory of its own, and follows no link to"
OWN_FILE = "a file of the service's own, in a directory that no job writes"
OPERATOR = "a file that the operator has named"
PACKAGED = "a file of the installed package"
ROW_FILE = "rows that the service has stored"
FILES = {
    "jobs.inputs.damaged_models._modules": BENEATH,
    "jobs.inputs.resume_from._link": "creates a file; its source is opened by `open_regular`",
    "jobs.inputs.row_parts.split_parts.stored": ROW_FILE,
    "jobs.inputs.row_parts.stored_shard": ROW_FILE,
    "jobs.inputs.task_files._read": "below harness_roots, where no job writes; no FIFO is awaited",
    "jobs.store.database.Database._create": OWN_FILE,
    "jobs.store.database._sql": PACKAGED,
    "jobs.store.related.cancels.CancelOrders._slots": OWN_FILE,
    "jobs.store.related.cancels.CancelOrders.pending": OWN_FILE,
    "jobs.store.related.cancels.CancelOrders.prepare": OWN_FILE,
    "jobs.supervision.housekeeping._registered": OWN_FILE,
    "remote.service.cluster.launcher.ClusterLauncher.start": "a specification, before its task starts",
    "remote.service.cluster.logs._difference": OWN_FILE,
    "remote.service.cluster.logs._opened": OWN_FILE,
    "remote.service.cluster.models.ServedModels._with_digests": BENEATH,
    "remote.service.cluster.models.ServedModels.open": BENEATH,
    "remote.service.cluster.node_answers._opened": "follows no link (O_NOFOLLOW), awaits no FIFO",
    "remote.service.cluster.uploads._announce": CREATED,
    "remote.service.cluster.uploads._opened": "below a directory's descriptor, without links",
    "remote.service.loading.provider_block": OPERATOR,
    "remote.service.configured_pools._node_plan": OPERATOR,
    "remote.service.context.Service.start": "begins the audit log",
    "remote.service.datasets.blobs.Blobs._arriving": CREATED,
    "remote.service.datasets.blobs.Blobs.keep": OWN_FILE,
    "remote.service.datasets.blobs.Blobs.receive_file": OWN_FILE,
    "remote.service.datasets.blobs._count_lines": ROW_FILE,
    "remote.service.datasets.hub._keep_own_files": PROGRAM,
    "remote.service.datasets.hub._skeleton": PROGRAM,
    "remote.service.datasets.hub._split_rows": PROGRAM,
    "remote.service.datasets.overviews.Overviews._line": ROW_FILE,
    "remote.service.datasets.part_uploads.PartUploads._arriving": CREATED,
    "remote.service.datasets.reader.convert": PROGRAM,
    "remote.service.datasets.registration.Registration._spooled": CREATED,
    "remote.service.datasets.registration._read": PROGRAM,
    "remote.service.pages.assets.assets": PACKAGED,
    "remote.service.pages.assets.style_ids": PACKAGED,
    "remote.service.pages.login.log_in": "a session, and no file",
    "remote.service.routes.agents.model_file": BENEATH,
    "remote.service.security.audit.AuditLog._begin_file": OWN_FILE,
    "remote.service.security.audit.AuditLog._force_directory": OWN_FILE,
    "remote.service.security.audit.AuditLog._lines": OWN_FILE,
    "remote.service.security.audit.AuditLog.open": OWN_FILE,
    "remote.service.security.audit._last_whole": OWN_FILE,
    "remote.service.serving.process.ServingProcess._connect": "a directory that the service has created",
    "remote.service.serving.served._opened": BENEATH,
    "remote.service.serving.served.copy_adapter": CREATED,
    "remote.service.space._count_weights": BENEATH,
}
"""Who opens a file otherwise than by `open_in`, `open_regular` and `read_regular`, and why a job cannot have put a link
or a FIFO there: the service would follow it, with what only the service may read."""
OPENERS = {"open", "read_text", "read_bytes", "copyfile", "copy2", "copytree", "copyfileobj"}


def serving() -> Iterator[tuple[str, Path]]:
    for name, path in modules().items():
        home = package_of(name)
        if home in SERVING or home.startswith(("service.", "jobs.")):
            yield name, path


@cache
def named_in(path: Path) -> tuple[tuple[str, ast.AST], ...]:
    """Each node of a module that names something, with the function or class that it is in."""
    return tuple(_walk(tree(path), ()))


def _walk(node: ast.AST, inside: tuple[str, ...]) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Name | ast.Attribute | ast.Import | ast.ImportFrom):
            yield ".".join(inside), child
        is_scope = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from _walk(child, (*inside, child.name) if is_scope else inside)  # type: ignore[attr-defined]


def _at(module: str, inside: str) -> str:
    return f"{module}.{inside}" if inside else module


def rows_are_read_in() -> set[str]:
    found = set()
    for module, path in serving():
        for inside, node in named_in(path):
            names = [node.id] if isinstance(node, ast.Name) else [node.attr] if isinstance(node, ast.Attribute) else []
            if isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names if alias.asname]
            if READERS & {*names}:
                found.add(_at(module, inside))
    return found


def json_is_parsed_in() -> set[str]:
    return {
        _at(module, inside)
        for module, path in serving()
        for inside, node in named_in(path)
        if (isinstance(node, ast.Attribute) and node.attr in ("load", "loads") and _is_json(node.value))
        or (isinstance(node, ast.Name) and node.id in ("from_json", "JSONDecoder", "parse_json") and inside)
        or (isinstance(node, ast.ImportFrom) and node.module == "json" and node.level == 0)
    }


def files_are_opened_in() -> set[str]:
    return {
        _at(module, inside)
        for module, path in serving()
        if not module.startswith(("specs.", "stack."))
        for inside, node in named_in(path)
        if (isinstance(node, ast.Name) and node.id == "open")
        or (isinstance(node, ast.Attribute) and node.attr in OPENERS)
    }


def _is_json(value: ast.AST) -> bool:
    return isinstance(value, ast.Name) and value.id in ("json", "orjson", "ujson", "pickle", "yaml")


def format_libraries() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for module, path in serving():
        for _, node in named_in(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            if libraries := {name.partition(".")[0] for name in names} & FORMATS:
                found.setdefault(module, set()).update(libraries)
    return found


def test_rows_are_read_by_programs_and_calls_with_limits_only() -> None:
    assert rows_are_read_in() == {*ROWS}, "read rows in a process with limits (system.limited), and list it in ROWS"


def test_json_is_parsed_where_something_bounds_it() -> None:
    assert json_is_parsed_in() == {*JSON}, "what bounds the memory of this? List it in JSON"


def test_libraries_of_formats_are_imported_by_the_reader_program_only() -> None:
    assert format_libraries() == LIBRARIES


def test_chat_templates_are_rendered_within_limits_only() -> None:
    found = {
        module
        for module, path in modules().items()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute)
        and node.attr == "apply_chat_template"
        and not (isinstance(node.value, ast.Name) and node.value.id in ("work", "self"))
    }
    assert found == {"recipes.data.templates"}


def test_files_that_a_job_may_have_made_are_opened_without_following_its_links() -> None:
    assert files_are_opened_in() == {*FILES}, "open it by open_in, open_regular or read_regular, or list it in FILES"


def test_functions_that_read_rows_are_given_to_a_call_and_not_called() -> None:
    """A function that is listed as limited is an argument of `Limited.call` or of another one that passes it on."""
    limited = {name for name, why in ROWS.items() if why == LIMITED and ".custom." not in name}
    called = {
        f"{module}.{node.func.id}"
        for module, path in serving()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert limited
    assert not called & limited


@pytest.mark.parametrize(
    "text",
    ["rows = read_ndjson(file)", "import pyarrow", "value = json.loads(line)", "shutil.copyfile(file, line)"],
)
def test_a_new_reader_fails(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new.py"
    path.write_text(f"def read(file, line):\n    {text}\n")
    monkeypatch.setattr(f"{__name__}.serving", lambda: iter([("jobs.new", path)]))
    found = {*rows_are_read_in(), *json_is_parsed_in(), *format_libraries(), *files_are_opened_in()}
    assert found & {"jobs.new", "jobs.new.read"}, PACKAGE
