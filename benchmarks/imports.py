"""CPU seconds and memory that importing both providers adds to a Llama Stack.

    .venv/bin/python benchmarks/imports.py --json out.json

Every measurement is a process of its own, native and external API in turn. Ends with 1 where the median exceeds 0.3 s
(where Llama Stack itself takes 1.5 s) or 30 MiB. tests/contract/test_import_cost.py holds what does not depend on the
machine.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

from machine import begin, finish, parser_of

SECONDS, MIB = 0.3, 30
"""Targets, where Llama Stack itself takes 1.5 s; on a slower or busy machine both grow."""
OURS = "llama_stack_provider_trl", "llama_stack_provider_trl_remote"
MODULES = {
    "native": [f"{OURS[0]}.provider", f"{OURS[0]}.post_training", f"{OURS[1]}.provider", f"{OURS[1]}.adapter"],
    "external": [f"{OURS[1]}.external_api{name}" for name in ("", ".inline", ".remote")],
}
PROGRAM = """
import importlib, json, resource, sys, time
started = time.process_time()
import llama_stack.core.server.server, llama_stack.core.stack
stack, before = time.process_time() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
started = time.process_time()
for name in sys.argv[1:]:
    importlib.import_module(name)
seconds = time.process_time() - started
print(json.dumps([stack, seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024]))
"""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    report = begin("llama-stack", "pydantic")
    report["runs"] = {kind: [] for kind in MODULES}
    for _ in range(options.repeats):
        for kind, modules in MODULES.items():
            report["runs"][kind].append(imported(modules))
    missed = False
    for kind, runs in report["runs"].items():
        stack, seconds, mib = (statistics.median(values) for values in zip(*runs, strict=True))
        scaled = seconds / max(1.0, stack / 1.5)
        print(f"{kind}: {seconds:.2f} s of CPU time, {mib:.1f} MiB; Llama Stack itself {stack:.2f} s")
        missed = missed or scaled > SECONDS or mib > MIB
    finish(report, options.json)
    return 1 if missed else 0


def imported(modules: list[str]) -> list[float]:
    """Seconds of Llama Stack's own import, of these modules', and the MiB that these add."""
    program = [sys.executable, "-c", PROGRAM, *modules]
    found: list[float] = json.loads(subprocess.run(program, check=True, stdout=subprocess.PIPE).stdout)
    return found


if __name__ == "__main__":
    sys.exit(main())
