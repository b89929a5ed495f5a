"""The provider's own files in a data directory: no request reaches them, and none of them stops a start."""

from __future__ import annotations

import ast
import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from llama_stack_provider_trl.config import TrlConfig
from llama_stack_provider_trl.errors import InvalidRequest, JobConflict, StoreError
from llama_stack_provider_trl.launch.isolation import spec_paths
from llama_stack_provider_trl.post_training import TrlPostTraining
from llama_stack_provider_trl.requests.bodies import SupervisedFineTuneRequest
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.paths import resolve_base_model, resolve_checkpoint_dir
from llama_stack_provider_trl.requests.resolve import resolve
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.job import AttemptSpec
from llama_stack_provider_trl.specs.methods import DpoSpec
from llama_stack_provider_trl.specs.model_source import ModelSource, ReferenceSpec
from llama_stack_provider_trl.system.data_dir import DATABASE, OF_A_NODE, OWN, DataDir, DataEntry, NodeDir
from llama_stack_provider_trl.system.ownership import Ownership
from llama_stack_provider_trl_remote.service.datasets.blobs import Blobs
from llama_stack_provider_trl_remote.service.datasets.registry import DatasetRegistry
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import running
from tests.contract.stack import SFT
from tests.fake_trainer import fake_trainer
from tests.fakes import job_spec
from tests.required import in_full
from tests.security.guarded import TOKENS, Guarded
from tests.security.mounts import mounted, tmpfs
from tests.tiny import REPOSITORY

SHA = "0" * 64
NESTED = {
    "logs": ("service.log", "service.log.1", "agent-a.log", "agent.log"),
    "audit": ("audit-000000000001.jsonl", "audit-000000000400.jsonl"),
    "datasets": (f"{SHA}.jsonl", f"{SHA}.sft-any.json", "registry"),
    "datasets/registry": (f"{SHA}.json",),
    "model-manifests": (f"{SHA}.json", "digests.json"),
    "jobs": ("sft-1",),
    "node": ("jobs", "agent-id", "credential.json", "agent.lock"),
    "node/logs": ("agent.log",),
}
"""Names in the directories of a data directory that `OWN` has; of those at its top the patterns are examples."""
TOP = ("jobs.sqlite3-wal", "jobs.sqlite3.upgrade")


def top_names() -> list[str]:
    found = (entry.name.pattern.replace("\\", "") for entry in OWN if not entry.directory)
    return sorted({*(name for name in found if "(" not in name), *TOP, DATABASE})


def examples() -> list[str]:
    nested = [f"{directory}/{name}" for directory, names in NESTED.items() for name in names]
    return [*top_names(), *nested]


def entry_of(path: str) -> DataEntry:
    directory, _, name = path.rpartition("/")
    return next(entry for entry in OWN if entry.directory == directory and entry.name.fullmatch(name))


def request(**changes: Any) -> SupervisedFineTuneRequest:
    data = {"dataset_id": "rows", "batch_size": 2}
    body = {"job_uuid": "sft-1", "model": "org/base", "training_config": {"n_epochs": 1, "data_config": data}}
    return SupervisedFineTuneRequest.model_validate({**body, **changes})


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data directory with one of everything."""
    home = tmp_path / "data"
    for path in examples():
        made = home / path
        made.parent.mkdir(parents=True, exist_ok=True)
        made.mkdir(exist_ok=True) if entry_of(path).kind == "directory" else made.write_text("{}")
    return home


def settings(data_dir: Path, **changes: Any) -> Settings:
    return Settings(data_dir=data_dir, devices=("cpu",), **changes)


def test_every_path_of_a_data_directory_is_looked_after_at_a_start() -> None:
    for kind, entries in ((DataDir, OWN), (NodeDir, OF_A_NODE)):
        place = kind(Path("/data"))
        for name, path in vars(place).items():
            if name == "root":
                continue
            directory = "" if path.parent == place.root else str(path.parent.relative_to(place.root))
            assert any(one.directory == directory and one.name.fullmatch(path.name) for one in entries), (kind, name)


def test_no_other_module_names_a_file_of_a_data_directory() -> None:
    """One that does would have a file that no start looks after."""
    found = []
    for package in ("llama_stack_provider_trl", "llama_stack_provider_trl_remote"):
        for file in sorted((REPOSITORY / package).rglob("*.py")):
            # Sent to another machine as it is, and works there with the standard library only.
            if file.name in ("data_dir.py", "on_host.py"):
                continue
            found += [f"{file.relative_to(REPOSITORY)}:{line}" for line in below_data_dir(ast.parse(file.read_text()))]
    assert not found, "use DataDir or NodeDir of system/data_dir.py, and give the file a row there"


def below_data_dir(module: ast.AST) -> Iterator[int]:
    for node in ast.walk(module):
        match node:
            case ast.BinOp(op=ast.Div(), left=left) if is_data_dir(left):
                yield node.lineno
            case ast.Call(func=ast.Attribute(attr="joinpath" | "glob" | "rglob" | "with_name", value=value)):
                if is_data_dir(value) and not is_glob_of_jobs(node):
                    yield node.lineno
            case ast.Call(func=ast.Name(id="Path"), args=[first, _, *_]) if is_data_dir(first):
                yield node.lineno


def is_data_dir(node: ast.AST) -> bool:
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):  # data_dir.resolve()
        node = node.func.value
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in ("data_dir", "_data_dir", "root") and (name != "root" or ast.unparse(node).endswith("data_dir.root"))


def is_glob_of_jobs(node: ast.Call) -> bool:
    return "jobs/*" in ast.unparse(node)


def test_no_job_takes_a_file_of_ours_as_its_directory(data_dir: Path) -> None:
    everywhere = settings(data_dir, checkpoint_roots=[data_dir.parent, "/"])
    for number, path in enumerate(examples()):
        directory, _, name = path.rpartition("/")
        own, link = data_dir / path, f"link-{number}"
        (data_dir / "checkpoints" / link).symlink_to(own)
        bodies: list[dict[str, Any]] = [{"checkpoint_dir": str(own.parent), "job_uuid": name}, {"job_uuid": link}]
        if path != "checkpoints":
            given = (
                str(own),
                str(own / "below"),
                f"../{path}",
                f"checkpoints/../{path}",
                f"./checkpoints/x/../../{path}",
            )
            bodies += [{"checkpoint_dir": one} for one in (*given, link)]
        for body in bodies:
            with pytest.raises(InvalidRequest, match="checkpoint_dir"):
                resolve_checkpoint_dir(request(**body), everywhere)
        # The same name where results are.
        found = resolve_checkpoint_dir(request(checkpoint_dir=directory or None, job_uuid=name), everywhere)
        assert found == data_dir / "checkpoints" / directory.removeprefix("checkpoints") / name


def test_no_request_reads_a_file_of_ours(data_dir: Path) -> None:
    service = ServiceSettings(data_dir=data_dir, dataset_roots=(data_dir.parent,))
    registry = DatasetRegistry(service, Blobs(service))
    for number, path in enumerate(path for path in examples() if path != "checkpoints"):
        own = data_dir / path
        if not own.is_dir():
            own = own.parent
        model = own / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text("{}")
        (model / "rows.jsonl").write_text("{}\n")
        link = data_dir / "checkpoints" / f"link-{number}"
        link.symlink_to(model)
        for roots in (None, (data_dir.parent,), (Path("/"),)):
            for given in (model, link):
                with pytest.raises(InvalidRequest, match="model"):
                    resolve_base_model("model", str(given), settings(data_dir, model_roots=roots))
        for uri in (f"file://{model}/rows.jsonl", f"{model}/rows.jsonl", f"{link}/rows.jsonl"):
            with pytest.raises(InvalidRequest, match="dataset_roots"):
                registry._readable(uri)
        reference = ReferenceSpec(source=ModelSource(model=str(model)))
        job = job_spec(model=str(model), method=DpoSpec(reference=reference))
        read = spec_paths(AttemptSpec(job=job, attempt=1, run_dir=data_dir), [data_dir]).read
        assert read == [job.data.dataset.path]
        with pytest.raises(JobConflict, match="among the own files"):
            Ownership(data_dir).check_unused(own / "sft-1")
        assert not Ownership(data_dir).is_ours(own / "sft-1")


def test_a_directory_of_ours_that_was_moved_to_another_disk_is_ours_there(data_dir: Path, tmp_path: Path) -> None:
    for name in ("audit", "checkpoints"):
        (data_dir / name).rename(tmp_path / name)
        (data_dir / name).symlink_to(tmp_path / name)
    everywhere = settings(data_dir, checkpoint_roots=[tmp_path])
    for given in (data_dir / "audit", tmp_path / "audit"):
        with pytest.raises(InvalidRequest, match="checkpoint_dir"):
            resolve_checkpoint_dir(request(checkpoint_dir=str(given)), everywhere)
    with pytest.raises(InvalidRequest, match="checkpoint_dir"):
        resolve_checkpoint_dir(request(checkpoint_dir=str(tmp_path), job_uuid="checkpoints"), everywhere)
    assert resolve_checkpoint_dir(request(checkpoint_dir="a"), everywhere) == tmp_path / "checkpoints" / "a" / "sft-1"


@pytest.mark.parametrize("what", ["", "audit", ".."])
def test_a_directory_of_ours_is_ours_where_a_bind_mount_shows_it_too(tmp_path: Path, what: str) -> None:
    data_dir = tmp_path / "disk" / "data"
    for name in ("audit", "checkpoints", "elsewhere"):
        (data_dir / name).mkdir(parents=True)
    with mounted(tmp_path / "roots" / "shown", "--bind", str(data_dir / what)) as shown:
        audit = shown / {"": "audit", "audit": "", "..": "data/audit"}[what]
        place = DataDir(data_dir)
        assert place.is_ours(audit)
        assert place.is_ours(audit / "not-there-yet" / "sft-1")
        assert not place.is_free(audit)
        assert not place.is_free(shown)
        assert place.is_free(tmp_path / "roots" / "beside")
        everywhere = settings(data_dir, checkpoint_roots=[tmp_path / "roots"])
        with pytest.raises(InvalidRequest, match="checkpoint_dir"):
            resolve_checkpoint_dir(request(checkpoint_dir=str(audit)), everywhere)
        if what == "":
            results = shown / "checkpoints" / "sft-1"
            assert place.is_free(results)  # there it may write under its usual name, too
            assert not place.is_ours(results)


def test_what_mounts_show_deeper_than_one_level_is_ours_too(tmp_path: Path) -> None:
    data_dir, roots = tmp_path / "disk" / "data", tmp_path / "roots"
    attempts = data_dir / "jobs" / "a job" / "attempts"
    for directory in (attempts, data_dir / "checkpoints", data_dir / "datasets", roots / "asked"):
        directory.mkdir(parents=True)
    place = DataDir(data_dir)
    with ExitStack() as mounts:
        shown = mounts.enter_context(mounted(roots / "with a space", "-o", "bind,ro", str(attempts)))
        assert place.is_ours(shown)
        assert place.is_ours(shown / "1")
        mounts.enter_context(mounted(roots / "asked" / "a" / "b", "--bind", str(data_dir)))
        assert not place.is_ours(roots / "asked")
        assert not place.is_free(roots / "asked")
        assert place.is_ours(roots / "asked" / "a" / "b" / "datasets")
        elsewhere = mounts.enter_context(tmpfs(tmp_path / "other disk", "size=1m"))
        (elsewhere / "rows").mkdir()
        mounts.enter_context(mounted(data_dir / "datasets", "--bind", str(elsewhere / "rows")))
        assert place.is_ours(elsewhere / "rows" / "a")
        assert not place.is_free(elsewhere)
        assert place.is_free(elsewhere / "beside")


def test_what_has_the_inode_of_a_directory_that_was_ours_is_not_ours(tmp_path: Path) -> None:
    place = DataDir(tmp_path / "data")
    own = tmp_path / "data" / "audit"
    own.mkdir(parents=True)
    assert place.is_ours(own)
    own.rename(tmp_path / "moved")  # as a new directory with the same inode
    assert not place.is_ours(tmp_path / "moved")
    assert place.is_free(tmp_path / "moved")


@pytest.mark.parametrize("given", [".sft-2.owner", "a/.sft-2.owner", ".hidden/a"])
def test_no_job_takes_the_name_of_a_record_of_ownership(data_dir: Path, given: str) -> None:
    with pytest.raises(InvalidRequest, match="begin with a dot"):
        resolve_checkpoint_dir(request(checkpoint_dir=given), settings(data_dir))


@pytest.mark.parametrize("given", ["results", "checkpoints/results", "./checkpoints/results", "./results"])
def test_a_relative_directory_is_below_checkpoints_with_or_without_that_name(data_dir: Path, given: str) -> None:
    here = settings(data_dir)
    absolute = str(data_dir / "checkpoints" / "results")
    for one in (given, absolute):
        found = resolve(request(checkpoint_dir=one), ProviderOptions(), here).fields["checkpoint_dir"]
        assert found == data_dir / "checkpoints" / "results" / "sft-1"


@pytest.mark.parametrize("field", ["checkpoint_roots", "harness_roots", "model_roots", "dataset_roots"])
def test_a_configuration_opens_nothing_of_the_data_directory(tmp_path: Path, field: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "data")
    kinds = (ServiceSettings,) if field == "dataset_roots" else (ServiceSettings, TrlConfig)
    for kind in kinds:
        for root in ("data", "data/audit", "data/mine", "link/jobs"):
            with pytest.raises(ValidationError, match=rf"{field}: .* lies in data_dir"):
                kind.model_validate({"data_dir": tmp_path / "data", field: [tmp_path / root]})
        for root in ("", "data/checkpoints", "data/checkpoints/a", "beside"):
            if field != "harness_roots" or root == "beside":
                kind.model_validate({"data_dir": tmp_path / "data", field: [tmp_path / root]})


def test_code_of_task_files_does_not_lie_where_jobs_write(tmp_path: Path) -> None:
    given = {"data_dir": tmp_path / "data", "checkpoint_roots": [tmp_path / "big"]}
    for root in ("", "data/checkpoints", "big", "big/tasks"):
        with pytest.raises(ValidationError, match=r"harness_roots: the code in .* runs in jobs"):
            ServiceSettings.model_validate({**given, "harness_roots": [tmp_path / root]})
    ServiceSettings.model_validate({**given, "harness_roots": [tmp_path / "tasks"]})


def spoil(path: Path, kind: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "directory":
        path.mkdir()
        (path / "inside").write_text("kept")
    elif kind == "garbage":
        path.write_bytes(b"\x00\xff no file of ours {")
    else:
        path.symlink_to(path.parent / "nowhere")


def spoilt(level: str, kind: str) -> list[str]:
    """What can be there in place of one of our files: together, since they do not lie in one another."""
    nested = [path for path in examples() if "/" in path and path != "datasets/registry"]
    paths = [path for path in examples() if "/" not in path] if level == "top" else nested
    return [
        path
        for path in paths
        if path != DATABASE
        and not (kind == "directory" and entry_of(path).kind == "directory")
        and not (kind == "link" and entry_of(path).cannot_be_made_again)
    ]


@pytest.mark.contract
@pytest.mark.parametrize(
    ("level", "kind"),
    [
        *(("nested", "directory"), ("top", "garbage"), ("nested", "link")),
        *in_full(("top", "directory"), ("nested", "garbage"), ("top", "link")),
    ],
)
def test_a_service_starts_whatever_has_the_names_of_its_files(tmp_path: Path, level: str, kind: str) -> None:
    service = Guarded(tmp_path, train_python=str(fake_trainer(tmp_path)))
    paths = spoilt(level, kind)
    for path in paths:
        spoil(service.data_dir / path, kind)
    with running(service):
        login = service.session.post(
            f"{service.url}/login",
            {"token": TOKENS["admin"], "back": "/"},
            headers={"Origin": service.url},
            allow_redirects=False,
            timeout=30,
        )
        assert login.status_code == 303
        service.register("questions", QUESTIONS)
        assert service.get("/datasets").status_code == 200
        service.wait(service.submit(SFT, sft("sft-1", "questions")), "completed")
        for route in ("/audit", "/logs", "/nodes", "/post-training/jobs", "/health"):
            assert service.get(route).status_code == 200, route
    place = DataDir(service.data_dir)
    assert place.odd() == []
    aside = {str(path.relative_to(service.data_dir)) for path in place.aside()}
    for path in paths:
        entry = entry_of(path)
        if kind != "garbage" or entry.kind == "directory":
            assert f"{path}.stale-1" in aside
    if kind == "garbage" and level == "top":
        assert {"identity.stale-1", "sessions.json.stale-1"} <= aside
    if kind == "directory":
        assert all((service.data_dir / f"{path}.stale-1" / "inside").read_text() == "kept" for path in paths)
    assert_all_listed(service.data_dir)


def assert_all_listed(data_dir: Path) -> None:
    """A file that the service makes, and `OWN` does not have, is none that a start looks after."""
    aside = set(DataDir(data_dir).aside())
    for path in data_dir.iterdir():
        found = any(not entry.directory and entry.name.fullmatch(path.name) for entry in OWN)
        assert found or path in aside or path.name == "nowhere", path


@pytest.mark.parametrize("kind", ["directory", "garbage", "link"])
def test_an_agent_sets_aside_what_has_the_names_of_its_files(tmp_path: Path, kind: str) -> None:
    names = [entry.name.pattern.replace("\\", "") for entry in OF_A_NODE if not entry.directory]
    for name in names:
        spoil(tmp_path / name, kind)
    NodeDir(tmp_path).prepare()
    for entry in OF_A_NODE:
        name = entry.name.pattern.replace("\\", "")
        if entry.directory:
            continue
        wrong = kind == "link" or (kind == "directory") != (entry.kind == "directory")
        assert (tmp_path / f"{name}.stale-1").is_symlink() if kind == "link" else True
        assert (tmp_path / name).exists() != wrong, name


@pytest.mark.parametrize("name", ["jobs", "checkpoints", "datasets"])
def test_a_disk_that_is_not_there_stops_a_start_with_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/mnt/not-there")
    with pytest.raises(Exception, match=rf"{name} is a link to /mnt/not-there, which is not there: mount its disk"):
        DataDir(tmp_path).prepare()
    assert (tmp_path / name).is_symlink()


@pytest.mark.parametrize(
    "part", ["datasets/registry", "jobs/sft-1", "node/models", "trackers/tensorboard", "node/jobs/sft-1-1", DATABASE]
)
def test_a_part_that_was_moved_behind_a_deeper_link_stops_a_start(tmp_path: Path, part: str) -> None:
    """A submit token could register it as a dataset, or have checkpoints written there."""
    own, moved = tmp_path / "data" / part, tmp_path / "roots" / "moved"
    own.parent.mkdir(parents=True)
    moved.parent.mkdir()
    if part == DATABASE:
        moved.touch()
    else:
        moved.mkdir()
    own.symlink_to(moved)
    with pytest.raises(StoreError, match=f"{part} is a link to {moved}, where requests could name"):
        DataDir(tmp_path / "data").prepare()
    assert own.is_symlink()
    own.unlink()
    moved.rename(own)
    assert DataDir(tmp_path / "data").prepare() == []


def test_links_that_stay_among_what_is_ours_stop_no_start(tmp_path: Path) -> None:
    place, disk = DataDir(tmp_path / "data"), tmp_path / "disk"
    for directory in (place.trackers, disk / "jobs" / "sft-1", place.checkpoints / "sft-2"):
        directory.mkdir(parents=True)
    place.jobs.symlink_to(disk / "jobs")
    (place.trackers / "latest-run").symlink_to("..")
    (place.jobs / "other").symlink_to("sft-1")
    (place.checkpoints / "sft-1").symlink_to(tmp_path)
    assert place.prepare() == []
    assert place.is_ours(disk / "jobs" / "sft-1")
    (place.jobs / "sft-2").symlink_to(place.checkpoints / "sft-2")
    with pytest.raises(StoreError, match="jobs/sft-2 is a link"):
        place.prepare()


def test_names_in_a_checkpoint_dir_that_are_taken_by_files_are_refused(data_dir: Path) -> None:
    (data_dir / "checkpoints" / "a").write_text(json.dumps({}))
    with pytest.raises(InvalidRequest, match="is a file"):
        resolve_checkpoint_dir(request(checkpoint_dir="a"), settings(data_dir))


@pytest.mark.parametrize("kind", ["directory", "garbage", "link"])
@pytest.mark.parametrize("level", ["top", "nested"])
def test_the_inline_provider_starts_whatever_has_the_names_of_its_files(tmp_path: Path, level: str, kind: str) -> None:
    paths = spoilt(level, kind)
    for path in paths:
        spoil(tmp_path / path, kind)
    provider = TrlPostTraining(TrlConfig(data_dir=tmp_path, device="cpu", warm_start=False, isolation="off"), {})
    try:
        asyncio.run(provider.initialize())
        assert provider.supervisor.supervising
        assert asyncio.run(provider.get_training_jobs()).data == []
    finally:
        asyncio.run(provider.shutdown())
    assert DataDir(tmp_path).odd() == []
    if kind != "garbage":
        assert {tmp_path / f"{path}.stale-1" for path in paths} <= set(DataDir(tmp_path).aside())


def test_the_inline_provider_does_not_start_without_the_jobs_whose_directories_are_there(tmp_path: Path) -> None:
    (tmp_path / "jobs" / "sft-1" / "attempts" / "1").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"has no jobs, and in .* is the directory of a job \(sft-1\)"):
        TrlPostTraining(TrlConfig(data_dir=tmp_path, device="cpu", isolation="off"), {})
