"""Both providers add to a Llama Stack their own modules, at most 30 MiB, and no library that it has not loaded itself
(benchmarks/imports.py has the seconds); the service imports nothing that only agents and clients need, and neither its
readers of datasets nor the command line what they do not use."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.contract

MEASURE = """
import importlib, json, resource, sys
import llama_stack.core.server.server, llama_stack.core.stack
def mib():
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)
before, loaded = mib(), set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
added = {name.partition(".")[0].lstrip("_") for name in sys.modules.keys() - loaded}
print(json.dumps([mib() - before, sorted(added - sys.stdlib_module_names)]))
"""

OURS = "llama_stack_provider_trl", "llama_stack_provider_trl_remote"
NATIVE = [f"{OURS[0]}.provider", f"{OURS[0]}.post_training", f"{OURS[1]}.provider", f"{OURS[1]}.adapter"]
EXTERNAL = [f"{OURS[1]}.external_api{name}" for name in ("", ".inline", ".remote")]


UNUSED = {"prometheus_client", "http.server", "urllib.request", "statistics"}
"""What a service without scrapes and pools has no use for."""


@pytest.mark.parametrize("modules", [NATIVE, EXTERNAL], ids=["native", "external"])
def test_both_providers_import_no_library_that_llama_stack_has_not_loaded(modules: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE, *modules], capture_output=True, text=True, check=True)
    mib, added = json.loads(done.stdout)
    assert set(added) == set(OURS)
    assert mib < 30


def test_the_service_imports_no_client_no_agent_and_no_pool() -> None:
    """aiohttp takes 9 MiB of the service's 80. Pools are imported where the configuration has some."""
    program = f"import sys, {OURS[1]}.service.server; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    agents = {f"{OURS[1]}.{name}" for name in ("client", "nodes.agent", "nodes.start")}
    pools = {f"{OURS[1]}.{name}" for name in ("service.configured_pools", "nodes.pools.cluster_api", "nodes.pools.ssh")}
    assert {"aiohttp", "torch", "optuna", *agents, *pools, *UNUSED} & set(done.stdout.split()) == set()


def test_a_command_imports_no_models_of_requests_and_of_the_job_store() -> None:
    """With them each call would take 0.55 s of CPU time in place of 0.3."""
    call = "main(['jobs', 'list', '--url', sys.argv[1]])"
    program = f"import sys; from {OURS[1]}.cli.main import main; {call}; print(*sorted(sys.modules))"
    words = [sys.executable, "-c", program, "http://127.0.0.1:1"]  # where no service listens
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found = done.stdout.split()
    assert f"{OURS[1]}.client" in found, done.stderr
    unused = {f"{OURS[0]}.{name}" for name in ("requests.bodies", "jobs.store.reader", "specs.job")}
    assert {"pydantic", *unused, f"{OURS[1]}.pipeline"} & set(found) == set()


def test_a_process_that_reads_a_dataset_imports_no_models_of_jobs() -> None:
    """It is started for each dataset with a uri: with pydantic it would take 0.27 s of CPU time in place of 0.1."""
    program = f"import sys, {OURS[1]}.service.datasets.reader; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found = done.stdout.split()
    assert f"{OURS[1]}.service.datasets.reader" in found
    assert {"pydantic", "pyarrow", "datasets", f"{OURS[0]}.specs.job"} & set(found) == set()
