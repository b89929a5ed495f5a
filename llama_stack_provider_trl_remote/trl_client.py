"""The training service in Python: `TrlClient`, and `AsyncTrlClient` for programs with an event loop.

from llama_stack_provider_trl_remote import TrlClient

client = TrlClient("http://127.0.0.1:8322")
rows = client.upload("rows.jsonl")
job = client.submit({
    "job_uuid": "sft-1",
    "model": "org/name",
    "training_config": {"n_epochs": 1, "data_config": {"dataset_id": rows.dataset_id, "batch_size": 4}},
})
if client.wait(job)["status"] == "completed":
    client.pull(job, "my-model")
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Literal

from llama_stack_provider_trl.specs.row_files import stem_of

from .address import DEFAULT_URL, checked_token, checked_url
from .answer_lines import answer_lines
from .client import JOBS, PREFLIGHT, PREVIEW, QUEUE, ServiceClient, Timeouts, job_path
from .follow import JobEvent, Note, events, statuses
from .plots.curves import LOSS, SMOOTHING, Axis, curves_of
from .plots.files import check_output, write_plot
from .plots.points import fetch_points
from .pull import pull
from .row_files import UploadedRows, name_by_content, register_rows, stored_rows
from .submitting import call_of, submit_request

Algorithm = Literal["sft", "dpo"]
Json = dict[str, Any]
_PAGE = 200
_QUEUE_PAGE = 1000
_SETS = 20
PREFLIGHT_TIMEOUTS = Timeouts(read=3600.0, total=3600.0)
"""The service itself bounds a preflight (`preflight_timeout`)."""


class AsyncTrlClient:
    """Calls the training service. Nothing is kept open, so nothing has to be closed.

    Every method may raise ServiceUnreachable (the service does not answer) and ServiceRefusal (it answered with an
    error, whose sentence is the message); both are TrlError. Requests that can be repeated without harm are repeated
    three times within two seconds. Requests and answers are the JSON documents of docs/reference/api.md. Raises
    ValueError: the address is none, or no HTTP header can carry the token.

    Args:
        url: address of the service; None: TRL_SERVICE_URL, or http://127.0.0.1:8322.
        token: None: TRL_SERVICE_TOKEN, if it is set.
    """

    def __init__(self, url: str | None = None, token: str | None = None, timeouts: Timeouts | None = None) -> None:
        self.url = checked_url(url or os.environ.get("TRL_SERVICE_URL") or DEFAULT_URL)
        token = checked_token(os.environ.get("TRL_SERVICE_TOKEN") if token is None else token)
        self._service = ServiceClient(self.url, token, timeouts or Timeouts())
        self._preflights = ServiceClient(self.url, token, timeouts or PREFLIGHT_TIMEOUTS)

    async def upload(self, rows: str | Path | Iterable[Json], dataset_id: str | None = None) -> UploadedRows:
        """Upload rows and register them for jobs. The same rows under the same name change nothing.

        Args:
            rows: a .jsonl, .ndjson, .json or .csv file, also compressed (.gz, .zst), or a .parquet file; or the rows
                themselves.
            dataset_id: None: a name that follows from the file's name and the rows.

        Raises:
            InvalidRequest: a file of another kind, or a row that cannot be read; names it.
            OSError: the file cannot be read.
        """
        given = Path(rows) if isinstance(rows, str | Path) else rows
        with stored_rows(given) as blob:
            stem = stem_of(given.name) if isinstance(given, Path) else "rows"
            return await register_rows(self._service, blob, dataset_id or name_by_content(stem, blob))

    async def submit(self, job: Mapping[str, Any], algorithm: Algorithm | None = None) -> str:
        """Queue a job; returns its `job_uuid`. The same request again is the same job.

        Args:
            job: the body of Llama Stack's call, with `provider_options` where wanted.
            algorithm: None: from the request's fields.
        """
        return str((await submit_request(self._service, job, algorithm))["job_uuid"])

    async def generate(self, job: Mapping[str, Any]) -> str:
        """Queue a job that answers the prompts of a dataset; returns its `job_uuid`. The same request again is the same
        job.

        Args:
            job: `job_uuid`, `model`, `dataset_id`, `output` ({"dataset_id": NAME}) and more (docs/how-to/generate.md).
        """
        return str((await submit_request(self._service, {**job, "kind": "generate"}))["job_uuid"])

    async def evaluate(self, job: Mapping[str, Any]) -> str:
        """Queue a job that evaluates a model or an ensemble; returns its `job_uuid`. `result` in its last status has
        the measures.

        Args:
            job: `job_uuid`, `model` or `models`, `dataset_id` and more (docs/how-to/evaluate.md).
        """
        return str((await submit_request(self._service, {**job, "kind": "evaluate"}))["job_uuid"])

    async def merge(self, job: Mapping[str, Any]) -> str:
        """Queue a job that merges models or adapters; returns its `job_uuid`. `pull` downloads the result.

        Args:
            job: `job_uuid`, `models` ([{"model", "weight"}]) and more (docs/how-to/merge.md).
        """
        return str((await submit_request(self._service, {**job, "kind": "merge"}))["job_uuid"])

    async def export(self, job: Mapping[str, Any]) -> str:
        """Queue a job that exports a model to files of other programs; returns its `job_uuid`. `result` in its last
        status has the comparison with the model, and `pull` downloads the files.

        Args:
            job: `job_uuid`, `model`, `to` and more (docs/how-to/export.md).
        """
        return str((await submit_request(self._service, {**job, "kind": "export"}))["job_uuid"])

    async def run(self, pipeline: Mapping[str, Any]) -> dict[str, str]:
        """Queue the jobs of a pipeline that the service does not have yet; returns the `job_uuid` of each by its name
        in the pipeline, those that others depend on first. Raises ServiceRefusal: a job, or a dataset, cannot be used;
        nothing was queued then.

        Args:
            pipeline: what `trl-remote run` reads (docs/how-to/chains.md): `jobs`, `teacher_student`.
        """
        from .submitting import place

        return {one["name"]: one["job_uuid"] for one in await place(self._service, pipeline)}

    async def teacher_student(
        self, section: Mapping[str, Any], jobs: Mapping[str, Mapping[str, Any]] | None = None
    ) -> dict[str, str]:
        """Queue a distillation: a teacher's answers, the students that learn them, their average, and the evaluation of
        each. As `run`.

        Args:
            section: `teacher`, `prompts`, `held_out`, `students` and more (docs/how-to/distillation.md).
            jobs: others of the same pipeline, such as the one that trains the teacher.
        """
        return await self.run({"teacher_student": section, **({"jobs": jobs} if jobs else {})})

    async def preflight(self, job: Mapping[str, Any], algorithm: Algorithm | None = None) -> Json:
        """What a job would do, and whether it fits (`fits`). Queues nothing."""
        return await preflight_request(self._preflights, job, algorithm)

    async def preview(
        self, job: Mapping[str, Any], algorithm: Algorithm | None = None, *, first_row: int = 0, rows: int = 10
    ) -> Json:
        """Rows of a job's dataset as they would be trained. Queues nothing.

        Args:
            first_row: counted from 0.
            rows: 1 to 100.
        """
        body = {**job, "first_row": first_row, "rows": rows}
        return await preview_request(self._preflights, body, algorithm)

    async def status(self, job_uuid: str) -> Json:
        """The whole status of a job."""
        return dict(await self._service.status(job_uuid))

    async def jobs(self, status: str | None = None) -> list[Json]:
        """Every job, oldest first, as `GET /v1/post-training/jobs?full=true` lists it; only those of a status."""
        return [job async for job in list_jobs(self._service, status)]

    async def wait(
        self,
        job_uuid: str,
        timeout: float | None = None,
        interval: float = 1.0,
        on_status: Callable[[Json], None] | None = None,
        note: Note | None = None,
    ) -> Json:
        """Wait until a job has ended, over restarts of the service; returns its last status.

        Its `status` is `completed`, `failed` or `cancelled`, and of a failed one `resources_allocated.error` has the
        reason. Raises TimeoutError: it has not ended within `timeout`.

        Args:
            timeout: seconds; None: as long as it takes. The job continues after it.
            interval: seconds between two polls.
            on_status: receives each status.
            note: receives a message where the service does not answer.
        """
        async with asyncio.timeout(timeout):
            async for status in statuses(self._service, job_uuid, interval, note):
                if on_status is not None:
                    on_status(status)
        return status

    async def events(self, job_uuid: str, after: str = "", *, follow: bool = True) -> AsyncGenerator[JobEvent, None]:
        """Events of a job behind the cursor `after`, each exactly once: until the job has ended, over restarts of the
        service; without `follow` those that there are. Raises ServiceRefusal: 400, no event of this job ends at
        `after`."""
        async with aclosing(events(self._service, job_uuid, after, follow=follow)) as found:
            async for event in found:
                yield event

    async def metrics(self, job_uuid: str, after: int = -1) -> list[Json]:
        """Metric points beyond step `after`: `kind` (train, validation), `step`, `epoch`, `time`, `metrics`."""
        answer = await self._service.get_all(job_path(job_uuid, "/metrics"), after=after)
        return list(answer["data"])

    async def samples(self, job_uuid: str) -> Json:
        """The model's answers to the job's `samples`: `prompts`, and `data`, a list of sets with `kind` (before,
        checkpoint, after), `step`, `epoch`, `time` and `answers` in the order of the prompts."""
        return await all_samples(self._service, job_uuid)

    async def answers(self, job_uuid: str) -> AsyncGenerator[Json, None]:
        """Each answer of a job that has answered prompts and has ended, in their order: `row`, `sample`, `prompt`,
        `text`, and of an evaluation what it `passed` and how it was `judged`. Raises ServiceRefusal: 404, the job has
        none; 409, it has not ended."""
        async with aclosing(answer_lines(self._service, job_uuid)) as lines:
            async for line in lines:
                yield self._service.parsed(line)

    async def pull(
        self, job_uuid: str, directory: str | Path, checkpoint: str = "final", note: Note | None = None
    ) -> str:
        """Download a checkpoint, verified, into a directory that appears when it is complete. An interrupted one is
        continued by the next call. Returns the checkpoint's identifier. Raises InvalidRequest: there is no such
        checkpoint, or the directory exists.

        Args:
            directory: must not exist yet.
            checkpoint: the identifier, or its end: `final`, `merged`, `checkpoint-100`.
            note: receives a line for each file.
        """
        return await pull(self._service, job_uuid, checkpoint, Path(directory), note or (lambda line: None))

    async def cancel(self, job_uuid: str) -> None:
        """End a job; its checkpoints stay."""
        await self._service.cancel(job_uuid)

    async def pause(self, job_uuid: str) -> Json:
        """Save a checkpoint, then free the devices; returns the status."""
        return dict(await self._service.post(job_path(job_uuid, "/pause")))

    async def resume(self, job_uuid: str) -> Json:
        """Queue a paused job again; returns the status."""
        return dict(await self._service.post(job_path(job_uuid, "/resume")))

    async def plot(
        self,
        *job_uuids: str,
        output: str | Path,
        metrics: Sequence[str] = (LOSS,),
        x: Axis = "step",
        smoothing: float = SMOOTHING,
    ) -> Path:
        """Plot metrics of jobs into a .png, .svg or .html file; returns its path. Needs the extra `plot`. Raises
        InvalidRequest: another kind of file, a job without points, a metric that no job has; MissingExtra: the extra is
        not installed; OSError: the file cannot be written.

        Args:
            job_uuids: one or several, in the same axes.
            metrics: each has axes of its own; the evaluation's value is beside that of the training.
            x: `step`, `epoch`, or `time` in minutes since the first point.
            smoothing: weight of the points before in the bold line, 0 (none) to less than 1.
        """
        target = check_output(output)
        points = {job_uuid: await fetch_points(self._service, job_uuid) for job_uuid in job_uuids}
        return write_plot(curves_of(points, metrics, x, smoothing), target, x)


def _done[**Arguments, Value](
    method: Callable[Concatenate[AsyncTrlClient, Arguments], Coroutine[Any, Any, Value]],
) -> Callable[Concatenate[TrlClient, Arguments], Value]:
    """A method of `AsyncTrlClient` as one that returns when it is done."""

    @wraps(method)
    def call(self: TrlClient, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
        return _run(method(self._client, *args, **kwargs))

    return call


def _yielded[**Arguments, Value](
    method: Callable[Concatenate[AsyncTrlClient, Arguments], AsyncGenerator[Value, None]],
) -> Callable[Concatenate[TrlClient, Arguments], Iterator[Value]]:
    """A generator of `AsyncTrlClient` as one for programs without an event loop."""

    @wraps(method)
    def call(self: TrlClient, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Iterator[Value]:
        return _iterated(method(self._client, *args, **kwargs))

    return call


class TrlClient:
    """`AsyncTrlClient` for programs without an event loop, and for notebooks: its methods return when they are done.

    Each call runs in an event loop of its own, in a thread that ends with it. Ctrl-C ends the call; jobs continue.
    """

    def __init__(self, url: str | None = None, token: str | None = None, timeouts: Timeouts | None = None) -> None:
        self._client = AsyncTrlClient(url, token, timeouts)

    @property
    def url(self) -> str:
        """Address of the service."""
        return self._client.url

    upload = _done(AsyncTrlClient.upload)
    submit = _done(AsyncTrlClient.submit)
    generate = _done(AsyncTrlClient.generate)
    evaluate = _done(AsyncTrlClient.evaluate)
    merge = _done(AsyncTrlClient.merge)
    export = _done(AsyncTrlClient.export)
    run = _done(AsyncTrlClient.run)
    teacher_student = _done(AsyncTrlClient.teacher_student)
    preflight = _done(AsyncTrlClient.preflight)
    preview = _done(AsyncTrlClient.preview)
    status = _done(AsyncTrlClient.status)
    jobs = _done(AsyncTrlClient.jobs)
    wait = _done(AsyncTrlClient.wait)
    events = _yielded(AsyncTrlClient.events)
    metrics = _done(AsyncTrlClient.metrics)
    samples = _done(AsyncTrlClient.samples)
    answers = _yielded(AsyncTrlClient.answers)
    pull = _done(AsyncTrlClient.pull)
    cancel = _done(AsyncTrlClient.cancel)
    pause = _done(AsyncTrlClient.pause)
    resume = _done(AsyncTrlClient.resume)
    plot = _done(AsyncTrlClient.plot)


async def preflight_request(service: ServiceClient, job: Mapping[str, Any], algorithm: str | None = None) -> Json:
    """POST a job for a preflight; the service's answer."""
    return dict(await service.submit(PREFLIGHT, {**job, "algorithm": algorithm or call_of(job)}))


async def preview_request(service: ServiceClient, body: Mapping[str, Any], algorithm: str | None = None) -> Json:
    """POST a job for a preview of its rows; the service's answer."""
    return dict(await service.submit(PREVIEW, {**body, "algorithm": algorithm or call_of(body)}))


async def all_samples(service: ServiceClient, job_uuid: str) -> Json:
    """Prompts and sets of answers of all pages."""
    data: list[Json] = []
    while True:
        page = await service.get(job_path(job_uuid, "/samples"), limit=_SETS, offset=len(data))
        data += page["data"]
        if not page["data"] or len(data) >= page["total"]:
            return {"prompts": page["prompts"], "data": data}


async def list_jobs(service: ServiceClient, status: str | None = None) -> AsyncIterator[Json]:
    """Jobs of all pages, oldest first."""
    after: str | None = None
    while True:
        page = await service.get(JOBS, full=True, limit=_PAGE, status=status, after=after)
        for job in page["data"]:
            yield job
        after = page.get("next")
        if after is None:
            return


async def sorted_jobs(service: ServiceClient, sort: str, status: str | None = None) -> list[Json]:
    """Jobs of all pages as the queue has them, sorted by a column; with a minus the largest first."""
    if status is not None:
        await service.get(JOBS, limit=1, status=status)  # which refuses what is no status
    found: list[Json] = []
    while True:
        page = await service.get(QUEUE, sort=sort, limit=_QUEUE_PAGE, offset=len(found))
        found += page["data"]
        if not page["data"] or len(found) >= page["matching"]:
            return [job for job in found if status is None or status in (job["status"], job["state"])]


type _Run = Callable[[Coroutine[Any, Any, Any]], Any]


@contextmanager
def _event_loop() -> Iterator[_Run]:
    """Yields a function that runs a coroutine in an event loop and thread of its own, to its end.

    Not `asyncio.run`, which a notebook's running loop forbids."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="TrlClient", daemon=True)
    thread.start()

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    try:
        yield run
    finally:
        run(_end_tasks(loop))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """End what an interrupted call has left."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()


def _run[Value](coroutine: Coroutine[Any, Any, Value]) -> Value:
    with _event_loop() as run:
        result: Value = run(coroutine)
        return result


def _iterated[Value](found: AsyncGenerator[Value, None]) -> Iterator[Value]:
    """The values of an asynchronous generator, in an event loop of their own from the first one on."""
    with _event_loop() as run:
        try:
            while (value := run(_next(found))) is not None:
                yield value
        except GeneratorExit:  # it is not read to its end; where a call is interrupted, its task is ended
            run(_close(found))
            raise


async def _next[Value](found: AsyncIterator[Value]) -> Value | None:
    return await anext(found, None)


async def _close(found: AsyncGenerator[Any, None]) -> None:
    await found.aclose()
