"""What routes depend on: each names the parts of the service that it uses (see `context`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Depends, Request

from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.supervision.supervisor import Supervisor

from .cluster.joined_nodes import JoinedNodes
from .cluster.joins import Joins
from .cluster.models import ServedModels
from .cluster.node_rows import NodeRows
from .cluster.polls import Polls
from .cluster.pools import Pools
from .cluster.presence import Presence
from .cluster.ray_datasets import RayDatasets
from .cluster.uploads import UploadReceiver
from .datasets.blobs import Blobs
from .datasets.overviews import Overviews
from .datasets.prompts import RowPrompts
from .datasets.registry import DatasetRegistry
from .datasets.uploads import RowUploads
from .datasets.votes import Votes
from .disks import DiskWatch
from .jobs.checks import JobChecks
from .jobs.pipelines import Pipelines
from .jobs.stored_jobs import StoredJobs
from .jobs.submissions import Submissions
from .metrics.registry import Metrics
from .security.audit import AuditLog
from .security.tokens import CreatedTokens
from .serving.chats import Chats
from .settings import ServiceSettings
from .views.checkpoints import Digests
from .views.events import Feeds
from .views.series import SeriesAnswers
from .views.service_logs import ServiceLogs


def _part(name: str) -> Any:
    """Finds a part of the service, or of the dashboard, that answers a request."""

    async def part(request: Request) -> Any:  # async: FastAPI sends other functions through a thread
        return getattr(request.app.state.service, name)

    return Depends(part)


# Of services and of dashboards.
SettingsDep = Annotated[ServiceSettings, _part("settings")]
StoreDep = Annotated[Store, _part("store")]
StoredJobsDep = Annotated[StoredJobs, _part("jobs")]
DigestsDep = Annotated[Digests, _part("digests")]
FeedsDep = Annotated[Feeds, _part("feeds")]
SeriesDep = Annotated[SeriesAnswers, _part("series")]
StoppingDep = Annotated[asyncio.Event, _part("stopping")]
AuditDep = Annotated[AuditLog | None, _part("audit")]
# Of services.
AuditLogDep = Annotated[AuditLog, _part("audit")]
BlobsDep = Annotated[Blobs, _part("blobs")]
ChatsDep = Annotated[Chats, _part("chats")]
DatasetsDep = Annotated[DatasetRegistry, _part("datasets")]
DisksDep = Annotated[DiskWatch, _part("disks")]
JobChecksDep = Annotated[JobChecks, _part("checks")]
JoinsDep = Annotated[Joins, _part("joins")]
LogsDep = Annotated[ServiceLogs, _part("logs")]
MetricsDep = Annotated[Metrics, _part("metrics")]
ModelsDep = Annotated[ServedModels, _part("models")]
NodeRowsDep = Annotated[NodeRows, _part("node_rows")]
NodesDep = Annotated[JoinedNodes, _part("nodes")]
OverviewsDep = Annotated[Overviews, _part("overviews")]
PipelinesDep = Annotated[Pipelines, _part("pipelines")]
PollsDep = Annotated[Polls, _part("agent_polls")]
PoolsDep = Annotated[Pools, _part("pools")]
PresenceDep = Annotated[Presence, _part("presence")]
PromptsDep = Annotated[RowPrompts, _part("prompts")]
RayDatasetsDep = Annotated[RayDatasets, _part("ray_datasets")]
RowUploadsDep = Annotated[RowUploads, _part("row_uploads")]
SubmissionsDep = Annotated[Submissions, _part("submissions")]
SupervisorDep = Annotated[Supervisor, _part("supervisor")]
TokensDep = Annotated[CreatedTokens, _part("tokens")]
UploadsDep = Annotated[UploadReceiver, _part("uploads")]
VotesDep = Annotated[Votes, _part("votes")]
WakeDep = Annotated[Callable[[], None], _part("wake")]
