"""A service that takes pipelines, played."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel

from llama_stack_provider_trl.errors import JobNotFound
from llama_stack_provider_trl_remote.service.http.bodies import PipelineBody, PipelineJobRow
from llama_stack_provider_trl_remote.service.http.errors import NotFound
from llama_stack_provider_trl_remote.service.jobs.pipelines import Pipelines
from llama_stack_provider_trl_remote.service.security.access import Caller

Json = dict[str, Any]


class Service:
    """What a pipeline uses of a service."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self.bodies: dict[str, Json] = {}
        self.rows = {"rows": "a" * 64, "pairs": "b" * 64}

    def get(self, name: str) -> Any:
        if name not in self.rows:
            raise NotFound("no such dataset")
        return SimpleNamespace(source=SimpleNamespace(type="blob"), metadata={"sha256": self.rows[name]})

    def status(self, job_uuid: str) -> Any:
        if job_uuid not in self.states:
            raise JobNotFound(job_uuid)
        body = self.bodies[job_uuid]
        named = body.get("model") or ""
        after = [*(body.get("provider_options") or {}).get("after", ()), named.removeprefix("job:").partition("/")[0]]
        known = [{"job_uuid": one, "state": self.states[one]} for one in after if one in self.states]
        return SimpleNamespace(status=self.states[job_uuid], resources_allocated={"after": known})

    async def submit_all(self, bodies: dict[str, BaseModel], caller: Caller) -> None:
        assert all(field.startswith("jobs.") for field in bodies)
        for body in bodies.values():
            given = body.model_dump(exclude_unset=True, warnings=False)
            self.states[given["job_uuid"]], self.bodies[given["job_uuid"]] = "scheduled", given

    def run(self, pipeline: Json) -> list[PipelineJobRow]:
        parts: Any = (self, self, self)
        body = PipelineBody.model_validate(pipeline)
        return asyncio.run(Pipelines(*parts).submit(body, Caller("submit", "a"))).data
