"""On PYTHONPATH of a bed's machines: services and agents fork their warm processes (tests/forked.py).

The shipped scripts start them, so nothing else of the tests is in their command line.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent

if "llama_stack_provider_trl_remote" in sys.orig_argv and os.environ.get("PYTHONPATH") == str(HERE):
    del os.environ["PYTHONPATH"]  # trainings are started without it, as everywhere
    sys.path.insert(0, str(HERE.parents[2]))
    import tests.forked  # noqa: F401

    del sys.path[0]
