"""Runs the service with deadlines of a second or two, for tests of slow peers."""

from __future__ import annotations

import sys

from llama_stack_provider_trl_remote.service.__main__ import main
from llama_stack_provider_trl_remote.service.http import acceptor
from llama_stack_provider_trl_remote.service.http.connections import Connection, Deadlines

if __name__ == "__main__":
    Connection.deadlines = Deadlines(head=1.0, body=2.0, unknown_body=1.0, reader=1.0, close=1.0)
    acceptor._SWEEP = 0.1
    sys.exit(main())
