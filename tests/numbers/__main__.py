"""Records every number that jobs of each kind make, and compares them after a change that must alter none.

    python -m tests.numbers record FILE     # before the change
    python -m tests.numbers compare FILE    # after it: exit status 1, and a table, where a number differs
    python -m tests.numbers api             # writes tests/numbers/openapi.json

Every job trains a tiny model on the CPU, through the service and its processes. A record has the metrics of each step,
the result, the configuration, and the sha256 of each file. Records of two machines differ: the bits depend on the CPU's
kernels and on the versions of torch. `record` and `compare` have `--only NAME ...`, with `*` for any letters.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from tests.numbers import api
from tests.numbers.differences import differences, table
from tests.numbers.jobs import chosen
from tests.numbers.record import record


def main() -> int:
    options = _options()
    if options.command == "api":
        api.RECORDED.write_text(api.text())
        return 0
    recorded = json.loads(options.file.read_text()) if options.command == "compare" else None
    jobs = chosen(options.only)
    if not jobs:
        print(f"no job is called {' or '.join(options.only)}: {', '.join(job.name for job in chosen([]))}")
        return 2
    began = time.monotonic()
    found = record(jobs)
    print(f"{len(jobs)} jobs in {time.monotonic() - began:.0f} s")
    if recorded is None:
        options.file.write_text(json.dumps(found, indent=1) + "\n")
        return 1 if any(made["state"] != "completed" for made in found["jobs"].values()) else 0
    names = list(found["jobs"]) if options.only else list({**recorded["jobs"], **found["jobs"]})
    rows = list(differences(recorded, found, names))
    if rows and recorded["machine"] != found["machine"]:
        print(f"recorded on {recorded['machine']}\nand now on {found['machine']}: their bits may differ")
    print(table(rows) if rows else "equal")
    return 1 if rows else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.numbers", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("api", help="write the OpenAPI document that a test compares with the service's")
    for name, text in (("record", "run the jobs and write what they make"), ("compare", "run them and compare")):
        command = commands.add_parser(name, help=text)
        command.add_argument("file", type=Path)
        command.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these jobs, and those they need")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
