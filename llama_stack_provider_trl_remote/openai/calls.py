"""What the routes of OpenAI's API work with. Built at the first call of an application."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from ..service.context import Service
from .files import OpenAIFiles
from .jobs import FineTuning
from .models import OpenAIModels
from .uploads import OpenAIUploads


class OpenAICalls:
    """Files, jobs and models of a service. Its state is the locks of requests that are under way, and which
    answers may have been lost."""

    def __init__(self, service: Service) -> None:
        self.files = OpenAIFiles(service.datasets, service.row_uploads, service.blobs, service.store)
        self.uploads = OpenAIUploads(service.part_uploads, self.files)
        self.fine_tuning = FineTuning(service.submissions, service.store, self.files, service.settings.openai.models)
        self.models = OpenAIModels(service.chats, service.jobs, service.store)


async def _calls(request: Request) -> OpenAICalls:
    state = request.app.state
    if not hasattr(state, "openai"):
        state.openai = OpenAICalls(state.service)
    found: OpenAICalls = state.openai
    return found


OpenAICallsDep = Annotated[OpenAICalls, Depends(_calls)]
