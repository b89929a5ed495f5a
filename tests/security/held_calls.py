"""Runs Llama Stack, or the service, so that a test can hold what requests order: `held_calls.py PROGRAM ARGUMENTS`, and
without a program the service.

A call of `system.limited` reaches the point `limited-call` first, which a test arms as those of the product. Whatever
waits for the call is held with it: the event loop, too, if the call was made on it.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from llama_stack_provider_trl import faults
from llama_stack_provider_trl.system.limited import Limited

POINT = "limited-call"
_call = Limited.call


def _held(self: Limited, *arguments: Any, **options: Any) -> list[Any]:
    faults.reach(POINT)
    return _call(self, *arguments, **options)


if __name__ == "__main__":
    Limited.call = _held  # type: ignore[method-assign]
    if sys.argv[1:]:
        del sys.argv[0]
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        from llama_stack_provider_trl_remote.service.__main__ import main

        sys.exit(main())
