"""Datasets with a `ray://` uri: a job of a configured Ray cluster reads their files, and sends the rows here.

The cluster is one of the configured pools; a request names at most which. The id of a reading is valid until its
request ends, for one upload, together with a token of the role node, which the job reads from the `token_file` of its
pool: what Ray shows of a job opens nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows, TrlError
from llama_stack_provider_trl.system.offload import FairSlots, in_work_thread

from ...nodes.pools.base import PoolRefusal, PoolUnavailable
from ...nodes.pools.ray_jobs import RayJobs, is_active
from ...nodes.pools.ray_rows import JSON, PARQUET, RowsOrder, is_beneath
from ..http.errors import Conflict, NotFound

log = logging.getLogger(__name__)
UPLOADS = "/v1/readings"
"""Path of the uploads, followed by the id of a reading."""
FORM = "ray:///DIRECTORY/FILE, or ray://POOL/DIRECTORY/FILE with the name of a pool"
_MODULE = "llama_stack_provider_trl_remote.nodes.pools.ray_rows"
_AT_ONCE = 2
"""Readings at a time; each is a job that takes CPUs of its cluster."""
_POLL = 1.0
"""Seconds between two polls of a job."""
_POLLS_TO_THE_END = 30
"""Polls of a job that has sent its rows, and has only to end: then it is stopped."""


class RayUnavailable(TrlError):
    """Raised when a cluster does not answer, or refuses a job. -> 503"""

    status_code = 503


@dataclass(frozen=True)
class RaySource:
    """A Ray cluster that reads datasets."""

    pool: str
    """Name of its pool."""
    jobs: RayJobs
    python: str
    """Interpreter on its machines that has ray[data] and this package."""
    roots: Sequence[str]
    """Directories on its machines; files elsewhere are not read. None: it reads nothing."""
    service_url: str
    token_file: str


class RayFile(NamedTuple):
    """What a uri names."""

    source: RaySource
    path: str


class _Reading:
    """The rows that a job sends."""

    def __init__(self) -> None:
        self.sha256: str | None = None
        self.storing = asyncio.Lock()


class RayDatasets:
    """Reads datasets on Ray clusters.

    Args:
        timeout: seconds that a reading may take.
        poll: seconds between two polls of a job.
    """

    def __init__(
        self, sources: Sequence[RaySource], max_rows: int, max_bytes: int, timeout: float, poll: float = _POLL
    ) -> None:
        self._sources = sources
        self._max_rows, self._max_bytes, self._timeout, self._poll = max_rows, max_bytes, timeout, poll
        self._readings: dict[str, _Reading] = {}
        self._slots = FairSlots(_AT_ONCE, _AT_ONCE)

    def find(self, uri: str) -> RayFile:
        """The cluster and the path of a uri. Raises InvalidRequest: it names what may not be read."""
        try:
            parts = urlsplit(uri)
        except ValueError as error:  # brackets that are no IPv6 address
            raise InvalidRequest("source.uri", uri, f"expected {FORM}") from error
        source = self._source(uri, parts.netloc)
        path = unquote(parts.path)
        if parts.query or parts.fragment:
            raise InvalidRequest("source.uri", uri, f"expected {FORM}, without ? and #")
        if not is_beneath(path, source.roots):
            roots = ", ".join(source.roots)
            raise InvalidRequest("source.uri", uri, f"expected a path below the pool's dataset_roots ({roots})")
        name = path.rpartition("/")[2]
        if "." in name and not name.lower().endswith((*PARQUET, *JSON)):
            endings = ", ".join((*PARQUET, *JSON))
            raise InvalidRequest("source.uri", uri, f"expected a file that ends in {endings}, or a directory of them")
        return RayFile(source, path)

    async def read(self, uri: str) -> str:
        """Have the rows of a uri sent here. Returns their digest; they are stored.

        Raises:
            InvalidRequest: as `find`; InvalidRows: they cannot be read, or not in time.
            RayUnavailable.
        """
        found = self.find(uri)
        async with self._slots.taken():
            try:
                async with asyncio.timeout(self._timeout):
                    return await self._read(found)
            except TimeoutError as error:
                what = f"its Ray job took more than {self._timeout:.0f} s (convert_timeout)"
                raise InvalidRows(f"{what}: the cluster may have no free CPU, or raise convert_timeout") from error
            except (PoolUnavailable, PoolRefusal) as error:
                raise RayUnavailable(f"{uri}: {error}") from error

    @asynccontextmanager
    async def receiving(self, reading: str, sha256: str) -> AsyncIterator[None]:
        """Accept rows within the block, which stores them. Raises NotFound: no request waits for this reading;
        Conflict: it has sent other rows."""
        known = self._readings.get(reading)
        if known is None:
            raise NotFound("no request waits for this reading: its dataset was read, or the request has ended")
        async with known.storing:
            if known.sha256 not in (None, sha256):
                raise Conflict("this reading has sent other rows already: one upload is accepted")
            yield
            known.sha256 = sha256

    def _source(self, uri: str, name: str) -> RaySource:
        sources = [source for source in self._sources if source.roots]
        if not sources:
            hint = "no pool of kind ray has dataset_roots in the service's configuration: send the rows themselves"
            raise InvalidRequest("source.uri", uri, hint)
        known = ", ".join(source.pool for source in sources)
        if name:
            source = next((source for source in sources if source.pool == name), None)
            if source is None:
                hint = f"expected the name of a pool of kind ray with dataset_roots ({known}), never an address"
                raise InvalidRequest("source.uri", uri, hint)
            return source
        if len(sources) > 1:
            hint = f"expected the name of a pool, since there are several ({known}): ray://{sources[0].pool}/..."
            raise InvalidRequest("source.uri", uri, hint)
        return sources[0]

    async def _read(self, found: RayFile) -> str:
        jobs = found.source.jobs
        reading, known, polls = secrets.token_hex(16), _Reading(), _POLLS_TO_THE_END
        name = f"trl-rows-{reading[:12]}"
        self._readings[reading] = known
        submitting = asyncio.ensure_future(in_work_thread(jobs.submit, name, self._entrypoint(found, reading), {}))
        try:
            await asyncio.shield(submitting)
            while (job := await in_work_thread(jobs.get, name)) is not None and is_active(job):
                if known.sha256 is not None and (polls := polls - 1) < 0:
                    break
                await asyncio.sleep(self._poll)
            if known.sha256 is None:
                why = await in_work_thread(jobs.why_ended, name, job or {"status": "it is gone"})
                raise InvalidRows(f"Ray could not read it: {why}")
            return known.sha256
        finally:
            del self._readings[reading]
            await asyncio.shield(self._stop(jobs, name, submitting))

    def _entrypoint(self, found: RayFile, reading: str) -> str:
        """The command of the job. It has no secret: everyone who may see jobs of the cluster can read it."""
        source = found.source
        order = RowsOrder(
            path=found.path,
            roots=list(source.roots),
            service_url=source.service_url,
            upload=f"{UPLOADS}/{reading}",
            token_file=source.token_file,
            max_rows=self._max_rows,
            max_bytes=self._max_bytes,
            seconds=self._timeout,
        )
        return f"{shlex.quote(source.python)} -m {_MODULE} {shlex.quote(json.dumps(order._asdict()))}"

    async def _stop(self, jobs: RayJobs, name: str, submitting: asyncio.Future[None]) -> None:
        """Stop a job, once its submission has ended: nothing waits for its rows any more."""
        await asyncio.wait([submitting])
        if submitting.exception() is not None:
            return
        try:
            await in_work_thread(jobs.stop, name)
        except (PoolUnavailable, PoolRefusal) as error:
            log.warning("Ray job %s could not be stopped, and ends within %.0f s: %s", name, self._timeout, error)
