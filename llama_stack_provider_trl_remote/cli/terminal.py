"""Formats answers of the service for a terminal: pure functions, but for `emit` and `table`. Each text is one line."""

from __future__ import annotations

import shutil
import sys
from argparse import Namespace
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from llama_stack_provider_trl.specs.memory import PARTS
from llama_stack_provider_trl.specs.state_words import state_word
from llama_stack_provider_trl.system.console import show_json, show_lines, shown

_BAR, _SHORTEST_BAR = 24, 5
_NARROWEST = 8
"""Characters that a cell of a table keeps, however narrow the terminal is."""


def emit(options: Namespace, answer: Any, *lines: str) -> None:
    """Print the result of a command: with --json the answer as JSON, else as lines."""
    if options.json:
        show_json(answer, indent=2)
    else:
        show_lines(*lines)


def job_line(job: dict[str, Any]) -> str:
    """One line of `jobs list`."""
    state = job.get("state") or job.get("status") or "?"
    steps = f"{job.get('step') or 0}/{job.get('total_steps') or '?'}"
    created = str(job.get("scheduled_at") or "")[:19].replace("T", " ")
    waits = f"  {job['detail']}" if state == "scheduled" and job.get("detail") else ""
    return f"{created:<19}  {state_word(state):<11}  {steps:>11}  {job['job_uuid']}{waits}"


JOB_COLUMNS = ("job", "state", "method", "model", "loss", "eval loss", "steps", "submitted", "by")


def job_row(job: dict[str, Any]) -> tuple[str, ...]:
    """One line of `jobs list --sort`."""
    losses = ("" if job.get(name) is None else f"{job[name]:.5g}" for name in ("loss", "eval_loss"))
    return (
        *(job["job_uuid"], state_word(job["state"]), job.get("algorithm") or ""),
        *((job.get("model") or "").rstrip("/").rpartition("/")[2], *losses),
        f"{job.get('step') or 0}/{job.get('total_steps') or '?'}",
        *(str(job.get("scheduled_at") or "")[:19].replace("T", " "), job.get("created_by") or ""),
    )


def progress_line(status: dict[str, Any]) -> str:
    """The state of a job in one line: `running   34% step 12/35  loss 2.310  870 tokens/s  1:05 left`."""
    return "  ".join(_progress(status).values())


def progress_within(status: dict[str, Any], columns: int) -> str:
    """The state of a job in one line with a bar, for a terminal. Where there is no room, the bar is shorter, then left
    out, then the speed, then the loss; the time that is left stays."""
    parts = _progress(status)
    detail = parts.pop("detail", "")
    percent = ((status.get("resources_allocated") or {}).get("progress") or {}).get("percent")
    for name in ("", "speed", "loss"):
        parts.pop(name, "")
        line = "  ".join(parts.values())
        if len(line) <= columns:
            break
    drawn = bar(percent, min(_BAR, columns - len(line) - len("[] "))) + line
    return f"{drawn}  {detail}" if detail else drawn


def _progress(status: dict[str, Any]) -> dict[str, str]:
    """The parts of a job's progress that are known, in the order of its line."""
    resources = status.get("resources_allocated") or {}
    progress = resources.get("progress") or {}
    parts = {"state": state_word(resources.get("state") or status["status"])}
    if progress.get("total_steps"):
        parts["step"] = f"{progress['percent']:3.0f}% step {progress['step']}/{progress['total_steps']}"
    elif progress.get("total_rows"):
        parts["step"] = f"tokenized {progress['tokenized_rows']:,}/{progress['total_rows']:,} rows"
    if progress.get("loss") is not None:
        parts["loss"] = f"loss {progress['loss']:.3f}"
    if progress.get("tokens_per_second"):
        parts["speed"] = f"{progress['tokens_per_second']:,.0f} tokens/s"
    if progress.get("eta_seconds") and status["status"] == "in_progress":
        parts["left"] = f"{duration(progress['eta_seconds'])} left"
    if resources.get("detail"):
        parts["detail"] = resources["detail"]
    return parts


def bar(percent: float | None, width: int = _BAR) -> str:
    """A progress bar, `[######            ]`; empty while nothing is known, or where it would be too short to read."""
    if percent is None or width < _SHORTEST_BAR:
        return ""
    full = round(min(max(percent, 0.0), 100.0) * width / 100)
    return f"[{'#' * full}{' ' * (width - full)}] "


def duration(seconds: float) -> str:
    """A duration, `1:05` or `2:00:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def table(
    head: Sequence[str], rows: Iterable[Sequence[Any]], columns: int | None = None, *, cut: Collection[str] = ()
) -> list[str]:
    """The lines of a table with columns as wide as their widest cell.

    Args:
        columns: of the terminal; None: those of standard output, if that is a terminal.
        cut: heads of the columns whose widest cells lose their ends where there is no room. All others stay whole,
            however long the lines become: the user copies names and addresses from them.
    """
    lines = [[shown(str(cell)) for cell in row] for row in (head, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    if columns is None and sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
    if columns is not None:
        least = [
            min(width, max(_NARROWEST, len(name))) if name in cut else width
            for name, width in zip(head, widths, strict=True)
        ]
        widths = _narrowed(widths, least, columns)
    return ["  ".join(f"{_cut(c, w):<{w}}" for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]


def _narrowed(widths: list[int], least: list[int], columns: int) -> list[int]:
    """The widths of columns that fit, as far as the least ones allow it: what is above those is taken from the most."""
    found = [max(floor, min(width, columns)) for width, floor in zip(widths, least, strict=True)]
    while sum(found) + 2 * (len(found) - 1) > columns:
        room, widest = max(
            (width - floor, column) for column, (width, floor) in enumerate(zip(found, least, strict=True))
        )
        if room <= 0:
            break
        found[widest] -= 1
    return found


def _cut(cell: str, width: int) -> str:
    return cell if len(cell) <= width else f"{cell[: width - 3]}..."


def token_row(token: dict[str, Any]) -> tuple[str, ...]:
    """One line of `tokens list`."""
    limits = {
        "jobs": token.get("max_queued_jobs"),
        "requests/s": token.get("requests_per_second"),
        "priorities": ",".join(token.get("priorities") or ()),
    }
    shown = " ".join(f"{name}={value}" for name, value in limits.items() if value) or "-"
    moments = (str(token.get(name) or "-")[:19].replace("T", " ") for name in ("expires_at", "last_used_at"))
    return (token["name"], token["role"], token["source"], *moments, shown)


def audit_line(line: dict[str, Any]) -> str:
    """One line of `audit`: `17  2026-11-22 10:00:00  end      ci (submit)  10.0.0.7  POST /v1/...  job_uuid=a  200`."""
    role = line.get("role") or ""
    who = f"{line.get('caller') or '-'} ({role})" if role else line.get("caller") or "-"
    parts = [
        f"{line['seq']:>6}",
        str(line["time"])[:19].replace("T", " "),
        f"{line['event']:<7}",
        who,
        line.get("address") or "-",
        f"{line.get('method') or ''} {line.get('route') or ''}".strip(),
        " ".join(f"{name}={value}" for name, value in (line.get("params") or {}).items()),
        *(str(line[name]) for name in ("status", "state", "error", "version") if line.get(name) is not None),
        f"of {line['of']}" if line.get("of") else "",
        f"{line['count']} more" if line.get("count") else "",
    ]
    return "  ".join(part for part in parts if part)


def preflight_lines(found: dict[str, Any]) -> list[str]:
    """The result of a preflight: rows, steps, memory by part, disk, and the verdict as the last line."""
    data, steps, memory, disk = (found[name] for name in ("data", "steps", "memory", "disk"))
    parts = {name: size for name in PARTS if (size := memory.get(f"{name}_bytes"))}
    beside = f", and {gib(memory['host_bytes'])} of CPU memory" if memory["host_bytes"] else ""
    per = f"each of {memory['devices']} {memory['device']} devices" if memory["devices"] > 1 else memory["device"]
    total = data["num_rows"]
    if data["examples"] != total:
        total = f"{data['examples']} examples made of {total} rows"
    lengths = "  ".join(f"<={bucket['up_to']}: {bucket['rows']}" for bucket in data["histogram"])
    return [
        f"rows    {data['trained']} of {total}, {data['truncated']} truncated, {data['dropped']} dropped",
        f"tokens  {lengths}  (median {data['median_tokens']}, longest {data['max_tokens']})",
        *(f"mixture {of['rows_per_epoch']} per epoch of {of['rows']}: {of['dataset_id']}" for of in data["mixture"]),
        f"steps   {steps['total_steps']} = {steps['epochs']} epochs x {steps['steps_per_epoch']}, "
        f"global batch {steps['global_batch']}",
        f"memory  {gib(memory['estimate_bytes'])} of {gib(memory['limit_bytes'])} on {per}: "
        + ", ".join(f"{name} {gib(size)}" for name, size in parts.items())
        + beside,
        *_machine_lines(memory),
        f"disk    {gib(disk['needed_bytes'])} of {gib(disk['free_bytes'])} free",
        *(f"note    {warning}" for warning in found["warnings"]),
        f"verdict {found['message']}",
    ]


def _machine_lines(memory: dict[str, Any]) -> list[str]:
    if "machine_limit_bytes" not in memory:  # an older service
        return []
    limit, count = memory["machine_limit_bytes"], memory["ranks_per_machine"]
    of = f" of {gib(limit)}" if limit else ""
    ranks = f"{count} ranks" if count > 1 else "1 rank"
    taken, files = gib(memory["machine_bytes"]), gib(memory["page_cache_bytes"])
    return [f"host    {taken}{of} for {ranks} of a machine; files of weights in its page cache: {files}"]


def evaluation_lines(found: dict[str, Any]) -> list[str]:
    """The result of an evaluation: what was counted, then a line for each measure."""
    counted = f"{found['rows']} {'pairs' if found['method'] == 'dpo' else 'rows'}, {found['trained_tokens']} tokens"
    names = ("loss", "perplexity", "token_accuracy", "preference_accuracy", "margin")
    measures = [(name.replace("_", " "), f"{found[name]:.4f}") for name in names if found.get(name) is not None]
    return [
        f"{counted}, {found['truncated']} truncated, {found['dropped']} dropped",
        *(f"{name:<20}{value:>10}" for name, value in measures),
        *(f"note    {warning}" for warning in found["warnings"]),
    ]


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
