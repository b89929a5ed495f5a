"""`python -m tests.cluster.forked_server MODULE ...`: MODULE in a fork (tests/site), on a machine of its own."""

import platform
import runpy
import sys

if __name__ == "__main__":
    platform._uname_cache = None  # type: ignore[attr-defined] - the name of the machine on which the imports were made
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
