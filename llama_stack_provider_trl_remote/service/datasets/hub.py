"""Datasets of the hub: a revision becomes a commit, whose files of one split are read.

`HF_ENDPOINT`, `HF_HOME`, `HF_HUB_OFFLINE` and `HF_TOKEN` of the operator's environment name the hub or its mirror, the
cache, and the account. The files stay in the cache of the hub, so that they can be read offline later; `datasets`
decides which of them a split has, by a directory with the same names and empty files.

Files of rows are read by `row_files`, like those of any other source: a row keeps its own keys, and one row is in
memory at a time. Other kinds, and files with options in the dataset's card, are read by `datasets`.
"""

from __future__ import annotations

import errno
import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, fields
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from llama_stack_provider_trl.errors import InvalidRows
from llama_stack_provider_trl.specs import row_files
from llama_stack_provider_trl.specs.row_files import Row
from llama_stack_provider_trl.system.files import atomic_write, free_bytes
from llama_stack_provider_trl.system.hub_cache import find_snapshot, hub_cache, hub_shown, is_offline

from .uris import HubDataset

_TIMEOUT = 20.0
"""Seconds without an answer of the hub."""
_CARDS = ("README.md", ".huggingface.yaml", "dataset_infos.json")
"""Files by which a dataset describes its configurations and splits."""
_MOST_FILES = 100_000
_MOST_CARD = 16 << 20
_TWICE = re.compile(r"Multiple matches for FieldRef\.Name\((.{0,500}?)\) in|Column\(/(.{0,500}?)\) was specified twice")
"""What Arrow reports of a Parquet and of a JSON file."""
_NUMBERED = re.compile(r"\.\d+$")
_OWN_FIELDS = ("name", "version", "data_dir", "data_files", "description", "features")
"""Fields of a configuration that say nothing about how its files are read."""


class TooLargeFiles(Exception):
    """Raised when the files of a split have more bytes than the service accepts; its argument is a sentence."""


class HubRows(NamedTuple):
    """The rows of one commit."""

    commit: str
    rows: Iterable[Row]


class _CommitFiles(NamedTuple):
    """The files of a commit, of which some are in the cache."""

    snapshot: Path
    sizes: dict[str, int]


def read_hub(dataset: HubDataset, work: Path, known: str | None, most: int, spare: int) -> HubRows | None:
    """Find the commit of a dataset, and fetch its files that the cache lacks. Raises InvalidRows: there is no such
    dataset, revision, configuration or split, or it may not be read, or the hub does not answer; TooLargeFiles;
    OSError: the disk is full. Returns None where the commit is `known`.

    Args:
        known: the commit whose rows the caller has.
        most: bytes that the files of the split may have.
        spare: bytes that must stay free on the disk of the cache.
    """
    commit, reached = _commit(dataset)
    if commit == known:
        return None
    files = _listed(dataset, commit, reached)
    builder = _builder(dataset, _skeleton(files, work), work)
    names = _split_files(dataset, builder, work)
    _fetch(dataset, commit, reached, files, sorted({name for some in names.values() for name in some}), most, spare)
    if reached and dataset.commit is None:
        ref = files.snapshot.parents[1] / "refs" / (dataset.revision or "main")
        ref.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(ref, commit.encode(), 0o644)
    return HubRows(commit, _rows(dataset, builder, files.snapshot, names))


def _commit(dataset: HubDataset) -> tuple[str, bool]:
    """The commit of a dataset's revision, and whether the hub answers."""
    wanted = dataset.revision or "main"
    cached = find_snapshot(os.environ, dataset.name, wanted, "datasets")
    if is_offline(os.environ):
        if cached is None:
            raise InvalidRows(
                f"the cache {hub_cache(os.environ)} has no revision {wanted!r} of {dataset.name!r}, and HF_HUB_OFFLINE "
                f"is set: run `{_download(dataset)}` with the service's environment where the hub can be reached"
            )
        return cached.commit, False
    try:
        from huggingface_hub import HfApi

        found = HfApi().dataset_info(dataset.name, revision=dataset.revision, timeout=_TIMEOUT).sha
    except Exception as error:  # of the library, of its HTTP client (whose name changes), or of the answer's JSON
        if _is_silence(error) and cached is not None and dataset.commit is not None:
            return dataset.commit, False
        raise _refusal(dataset, error) from error
    if not found or (dataset.commit is not None and found != dataset.commit):
        raise InvalidRows(
            f"the hub {hub_shown(os.environ)} answers with the commit {found!r} for the revision {wanted!r} of "
            f"{dataset.name!r}: expected that commit; check HF_ENDPOINT"
        )
    return found, True


def _listed(dataset: HubDataset, commit: str, reached: bool) -> _CommitFiles:
    """The names and sizes of a commit's files, with those that describe it."""
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        directory = snapshot_download(
            dataset.name,
            repo_type="dataset",
            revision=commit,
            allow_patterns=list(_CARDS),
            local_files_only=not reached,
            etag_timeout=_TIMEOUT,
        )
        tree = get_cached_repo_tree(dataset.name, repo_type="dataset", revision=commit)
    except CachedRepoTreeNotFoundError as error:
        raise InvalidRows(
            f"the cache has the commit {commit} of {dataset.name!r} without the list of its files, of which any may be "
            f"missing: run `{_download(dataset)}` again where the hub can be reached"
        ) from error
    except Exception as error:  # as in _commit; offline: a file of the card is missing
        if reached:
            raise _refusal(dataset, error) from error
        raise InvalidRows(
            f"the cache lacks files that describe {dataset.name!r} at {commit}: run `{_download(dataset)}` again where "
            "the hub can be reached"
        ) from error
    if len(tree) > _MOST_FILES:
        raise InvalidRows(f"{dataset.name!r} has {len(tree)} files, expected {_MOST_FILES} at most: upload its rows")
    for file in tree:
        path = PurePosixPath(file.path)
        if path.is_absolute() or not path.parts or {"..", "."} & {*file.path.split("/")} or "\0" in file.path:
            raise InvalidRows(f"{dataset.name!r} lists a file {file.path[:200]!r}: expected a path within it")
    return _CommitFiles(Path(directory), {file.path: file.size for file in tree})


def _skeleton(files: _CommitFiles, work: Path) -> Path:
    """A directory with the names of a commit's files, in which only those that describe it have content."""
    home = work / "files"
    for name in files.sizes:
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name in _CARDS:
            path.write_bytes((files.snapshot / name).read_bytes()[:_MOST_CARD])
        else:
            path.touch()
    home.mkdir(exist_ok=True)
    return home


def _builder(dataset: HubDataset, home: Path, work: Path) -> Any:
    """The builder of a configuration by `datasets`, whose files are those of `home`."""
    try:
        from datasets import load_dataset_builder

        _keep_own_files(home)
        return load_dataset_builder(str(home), dataset.config, cache_dir=str(work / "arrow"))
    except ImportError as error:
        raise _refusal(dataset, error) from error
    except InvalidRows as error:
        raise InvalidRows(f"{dataset.name!r} {error}") from error
    except Exception as error:  # ValueError for a configuration, others for what its card has
        text = str(error).replace(str(home), dataset.name)
        raise InvalidRows(
            f"{dataset.name!r} cannot be read by datasets: {type(error).__name__}: {text[:500]}"
        ) from error


def _keep_own_files(home: Path) -> None:
    """Replace what describes a dataset by what was checked, which the library cannot read otherwise: its configurations
    name files within it, for its author may not have others read. Raises InvalidRows."""
    import yaml
    from huggingface_hub import DatasetCard

    found: dict[str, Any] = {}
    if (card := home / _CARDS[0]).exists():
        text = card.read_bytes().decode(errors="replace")
        found |= DatasetCard(text, ignore_metadata_errors=True).data.to_dict()
    if (alone := home / _CARDS[1]).exists():
        further = yaml.safe_load(alone.read_bytes().decode(errors="replace"))
        found |= further if isinstance(further, dict) else {}
        alone.unlink()
    kept = {name: found[name] for name in ("configs", "dataset_info") if name in found}
    for text in _texts(kept.get("configs")):
        if "://" in text or "::" in text or text.startswith(("/", "~")) or ".." in text.split("/"):
            raise InvalidRows(f"names the files {text[:200]!r} in its card: expected paths within the dataset")
    card.write_text(f"---\n{yaml.safe_dump(kept)}---\n", encoding="utf-8")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)


def _split_files(dataset: HubDataset, builder: Any, work: Path) -> dict[str, list[str]]:
    """Names of the files of each split that is wanted."""
    home = (work / "files").resolve()
    found = {
        str(split): [Path(path).resolve().relative_to(home).as_posix() for path in paths]
        for split, paths in (builder.config.data_files or {}).items()
    }
    wanted = [*found] if dataset.split == "all" else [re.split(r"\[", part)[0] for part in dataset.split.split("+")]
    if not wanted or (missing := [name for name in wanted if name not in found]):
        named = ", ".join(repr(name) for name in (missing if wanted else [dataset.split]))
        raise InvalidRows(f"{dataset.name!r} has no split {named}: expected one of {', '.join(map(repr, found))}")
    return {name: found[name] for name in dict.fromkeys(wanted)}


def _fetch(
    dataset: HubDataset, commit: str, reached: bool, files: _CommitFiles, names: Sequence[str], most: int, spare: int
) -> None:
    """Download the files that the cache lacks."""
    if (size := sum(files.sizes.get(name, 0) for name in names)) > most:
        raise TooLargeFiles(f"the files of the split {dataset.split!r} have {size >> 20} MiB,")
    lacking = [name for name in names if not (files.snapshot / name).exists()]
    if not lacking:
        return
    if not reached:
        raise InvalidRows(
            f"the cache lacks {len(lacking)} of {len(names)} files of the split {dataset.split!r} of {dataset.name!r} "
            f"at {commit}, such as {lacking[0]!r}: run `{_download(dataset)}` where the hub can be reached"
        )
    needed, free = sum(files.sizes[name] for name in lacking), free_bytes(files.snapshot)
    if free - needed < spare:
        raise OSError(
            errno.ENOSPC,
            f"the cache {hub_cache(os.environ)} needs {needed >> 20} MiB for files of {dataset.name!r}, and of "
            f"{free >> 20} MiB {spare >> 20} must stay free",
        )
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(
            dataset.name,
            repo_type="dataset",
            revision=commit,
            allow_patterns=[glob.escape(name) for name in lacking],
            etag_timeout=_TIMEOUT,
            max_workers=4,
        )
    except Exception as error:  # as in _commit
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise _refusal(dataset, error) from error
    if left := [name for name in lacking if not (files.snapshot / name).exists()]:
        where = hub_shown(os.environ)
        raise InvalidRows(f"the hub {where} did not send {left[0]!r} of {dataset.name!r}: send the request again")


def _rows(dataset: HubDataset, builder: Any, snapshot: Path, names: dict[str, list[str]]) -> Iterator[Row]:
    """The rows of the wanted splits, in the order in which they are named."""
    if "[" not in dataset.split:
        for split in names:
            yield from _split_rows(dataset, builder, snapshot, names[split])
        return
    from datasets import ReadInstruction

    counts = {split: sum(1 for _ in _split_rows(dataset, builder, snapshot, names[split])) for split in names}
    try:
        parts = ReadInstruction.from_spec(dataset.split).to_absolute(counts)
    except (ValueError, AssertionError) as error:
        raise InvalidRows(f"{dataset.split!r} is no split: {error}; expected such as train or train[:10%]") from error
    for part in parts:
        for number, row in enumerate(_split_rows(dataset, builder, snapshot, names[part.splitname])):
            if number >= part.to:
                break
            if number >= part.from_:
                yield row


def _split_rows(dataset: HubDataset, builder: Any, snapshot: Path, names: Sequence[str]) -> Iterator[Row]:
    if _has_options(builder.config) or any(row_files.ending_of(name) not in row_files.ROW_READERS for name in names):
        yield from _rows_by_library(dataset, builder, snapshot, names)
        return
    for name in names:
        with open(snapshot / name, "rb") as file:
            try:
                yield from row_files.ROW_READERS[row_files.ending_of(name)](file)
            except InvalidRows as error:
                raise InvalidRows(f"{name}: {error}") from error


def _has_options(config: Any) -> bool:
    """Whether a configuration states how its files are read, such as the separator of CSV files."""
    for field in fields(config):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if field.name not in _OWN_FIELDS and getattr(config, field.name) != default:
            return True
    return False


def _rows_by_library(dataset: HubDataset, builder: Any, snapshot: Path, names: Sequence[str]) -> Iterator[Row]:
    found = _stream(builder, snapshot, names)
    numbered = False
    try:
        for number, row in enumerate(found):
            if number == 0 and builder.name == "csv":
                numbered = any(_NUMBERED.search(name) and _NUMBERED.sub("", name) in row for name in row)
                if numbered:
                    _refuse_header_twice(builder, snapshot, names, len(row))
            yield row
    except Exception as error:
        texts = " ".join(map(str, (error, error.__cause__)))
        if name := _TWICE.search(texts):
            row_files.refuse_twice([name[1] or name[2]] * 2)
        raise


def _stream(builder: Any, snapshot: Path, names: Sequence[str]) -> Any:
    from datasets.data_files import DataFilesDict, DataFilesList

    paths = [str(snapshot / name) for name in names]
    builder.config.data_files = DataFilesDict(rows=DataFilesList(paths, [()] * len(paths)))
    # A card may declare a text to be an image or a sound: undecoded, it stays what the file has, and nothing opens it.
    found = builder.as_streaming_dataset("rows")
    return found if found.features is None else found.decode(False)


def _refuse_header_twice(builder: Any, snapshot: Path, names: Sequence[str], columns: int) -> None:
    """Return if the CSV files of a dataset have no name twice, of which pandas calls the second one `prompt.1`: their
    headers are read as rows. Raises InvalidRows."""
    from copy import deepcopy

    headers = deepcopy(builder)
    headers.config.names, headers.config.nrows = [str(number) for number in range(columns)], 1
    headers.config.keep_default_na = False
    headers.info.features = headers.config.features = None
    for header in _stream(headers, snapshot, names):
        row_files.refuse_twice([str(column) for column in header.values() if column not in (None, "")])


def _download(dataset: HubDataset) -> str:
    """The command that fills the cache."""
    revision = f" --revision {dataset.revision}" if dataset.revision else ""
    return f"hf download {dataset.name} --repo-type dataset{revision}"


def _is_silence(error: BaseException) -> bool:
    """Whether the hub has not answered, or reports a fault of its own."""
    status = _status(error)
    return status >= 500 if status else not isinstance(error, (ValueError, ImportError))


def _status(error: BaseException) -> int:
    """The status of the hub's answer behind an error; 0: there was none."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    found = (getattr(getattr(cause, "response", None), "status_code", None) for cause in causes)
    return next((status for status in found if isinstance(status, int)), 0)


def _refusal(dataset: HubDataset, error: Exception) -> InvalidRows:
    """The sentence for an error of the hub's library. It has no text of the error, which may name headers or signed
    addresses."""
    if isinstance(error, ImportError):
        return InvalidRows(
            "the interpreter that reads datasets lacks datasets and huggingface_hub: install the extra train there "
            "(pip install 'llama_stack_provider_trl[train]'), name another one in train_python, or send the rows"
        )
    from huggingface_hub import errors

    name, where, status = repr(dataset.name), hub_shown(os.environ), _status(error)
    account = "the account of HF_TOKEN has" if os.environ.get("HF_TOKEN") else "no HF_TOKEN is set, so the service has"
    if isinstance(error, errors.GatedRepoError):
        return InvalidRows(
            f"{name} is gated on {where}, and {account} no access: ask for it on {where}/datasets/{dataset.name}, then "
            "set HF_TOKEN of that account in the service's environment"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return InvalidRows(
            f"{name} has no revision {dataset.revision or 'main'!r} on {where}: expected a branch, a tag or the whole "
            "id of a commit"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return InvalidRows(
            f"{where} has no dataset {name} that may be read, and {account} no access to a private one: check the "
            "name, or set HF_TOKEN of an account that has it in the service's environment"
        )
    if status in (401, 403):
        return InvalidRows(
            f"{where} refuses HF_TOKEN ({status}) for {name}: set a valid one in the service's environment"
        )
    if status == 429:
        return InvalidRows(f"{where} allows no more requests for now (429): send the request for {name} again later")
    if status:
        return InvalidRows(
            f"{where} answers with {status} for {name}, expected the API of a hub: check HF_ENDPOINT, or send the "
            "request again later"
        )
    return InvalidRows(
        f"the hub {where} does not answer for {name} ({type(error).__name__}): check HF_ENDPOINT and the network, or "
        "set HF_HUB_OFFLINE=1 to read what the cache has"
    )
