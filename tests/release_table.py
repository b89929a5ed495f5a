"""Release x feature, from the results of the suite of releases, into docs/reference/compatibility.md.

    python -m tests.release_table RESULTS.xml...      (scripts/test-matrix.sh does it)

A cell is yes where every test of the feature passed, for both providers. A release without a test that ran keeps its
column.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as xml
from collections import defaultdict
from pathlib import Path

from tests.releases import RELEASES, REPOSITORY

TABLE = REPOSITORY / "docs" / "reference" / "compatibility.md"
BEGIN, END = "<!-- releases -->\n", "<!-- /releases -->"
NATIVE = {
    "both providers start; datasets, SFT, artifacts": ("test_sft", "test_every_job_is_listed_once"),
    "DPO": ("test_dpo",),
    "the promised payload": ("test_the_promised_payload",),
    "cancel": ("test_cancel",),
    "unknown job": ("test_unknown_job",),
    "job_uuid taken": ("test_duplicate",),
    "bad body: 400 with the field": ("test_bad_body", "test_bad_dataset"),
    "provider data": ("test_provider_data",),
    "restart in mid-job": ("test_restart_in_mid_job",),
    "llama-stack-client": ("test_client",),
    "a job really trains": ("test_a_job_that_really_trains",),
    "the build files end in an environment that starts": (
        "test_list_deps_ends_in_an_environment_that_starts",
        "test_build_ends_in_an_environment_that_starts",
    ),
}
EXTERNAL = "the same through the external API"
SPECIAL = {
    ("the promised payload", "0.6.1"): "400 that names what is missing",
    ("unknown job", "0.2.14"): "400",
    ("job_uuid taken", "0.2.14"): "400",
    ("unknown job", ""): "404",
    ("job_uuid taken", ""): "409",
    ("llama-stack-client", "0.6.1"): "all but `job.status`, `artifacts`, `cancel`",
}
"""What yes means there; an empty release: everywhere else."""


def main(results: list[Path]) -> None:
    outcomes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for case in (case for path in results for case in xml.parse(path).getroot().iter("testcase")):
        name, _, parameters = case.attrib["name"].partition("[")
        release = next((release for release in RELEASES if release in parameters), None)
        if release is None:
            continue
        feature = EXTERNAL if "external" in case.attrib["classname"] else name
        bad = case.find("failure") is not None or case.find("error") is not None
        outcomes[feature, release].append("no" if bad else "skipped" if case.find("skipped") is not None else "yes")
    text = TABLE.read_text()
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    TABLE.write_text(before + BEGIN + _table(outcomes, _cells(old)) + END + after)


def _table(outcomes: dict[tuple[str, str], list[str]], old: dict[tuple[str, str], str]) -> str:
    # A test that TRL_RELEASES leaves out is reported as skipped, with the release as its parameter.
    ran = {release for (_, release), seen in outcomes.items() if {*seen} != {"skipped"}}
    lines = [f"| | {' | '.join(release.replace('ogx-', 'OGX ') for release in RELEASES)} |"]
    lines.append(f"|---|{'---|' * len(RELEASES)}")
    for feature, tests in [*NATIVE.items(), (EXTERNAL, (EXTERNAL,))]:
        cells = []
        for release in RELEASES:
            seen = [outcome for test in tests for outcome in outcomes.get((test, release), ())]
            cells.append(_word(feature, release, seen) if release in ran else old.get((feature, release), ""))
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _word(feature: str, release: str, seen: list[str]) -> str:
    if "no" in seen:
        return "**no**"
    if "yes" not in seen:
        return "-"
    return SPECIAL.get((feature, release), SPECIAL.get((feature, ""), "yes"))


def _cells(table: str) -> dict[tuple[str, str], str]:
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.strip().splitlines()]
    return {
        (row[0], release): cell for row in rows[2:] for release, cell in zip(RELEASES, row[1:], strict=True) if rows
    }


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
