"""Formats answers of the service for a terminal: pure functions, but for `emit` and `table`. Each text is one line."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import textwrap
from argparse import Namespace
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from llama_stack_provider_trl.specs.memory import PARTS
from llama_stack_provider_trl.specs.state_words import state_word
from llama_stack_provider_trl.system.console import lines_of, show_json, show_lines, shown
from llama_stack_provider_trl.system.texts import counted

_BAR, _SHORTEST_BAR = 24, 5
_MEMORY = re.compile(r"memory_bytes(_rank_\d+)?$")
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
    created = moment(job.get("scheduled_at"))
    why = f"  {job['detail']}" if state in ("scheduled", "failed") and job.get("detail") else ""
    return f"{created:<19}  {state_word(state):<11}  {_steps(job):>11}  {job['job_uuid']}{why}"


def _steps(job: dict[str, Any]) -> str:
    """The steps of a job of a list; empty: it has ended and trained none, as a search."""
    if not job.get("total_steps") and job.get("completed_at"):
        return ""
    return f"{job.get('step') or 0}/{job.get('total_steps') or '?'}"


JOB_COLUMNS = ("job", "state", "method", "model", "loss", "eval loss", "steps", "submitted", "by")


def job_row(job: dict[str, Any]) -> tuple[str, ...]:
    """One line of `jobs list --sort`."""
    losses = ("" if job.get(name) is None else f"{job[name]:.5g}" for name in ("loss", "eval_loss"))
    return (
        job["job_uuid"],
        f"{state_word(job['state'])}{f': {job["reason"]}' if job.get('reason') else ''}",
        job.get("algorithm") or "",
        *((job.get("model") or "").rstrip("/").rpartition("/")[2], *losses),
        _steps(job),
        *(moment(job.get("scheduled_at")), job.get("created_by") or ""),
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


def status_lines(status: dict[str, Any], points: Sequence[dict[str, Any]] = (), *, config: bool = False) -> list[str]:
    """A job as `jobs show` prints it: names with their values.

    Args:
        status: with its effective configuration.
        points: metric points, the last ones.
        config: the effective configuration is shown, too.
    """
    job, found = status["job_uuid"], status.get("resources_allocated") or {}
    progress, effective, error = (found.get(name) or {} for name in ("progress", "effective_config", "error"))
    parts = _progress(status)
    state, reason = parts.pop("state"), parts.pop("detail", "")
    if points:  # they have both
        parts.pop("loss", "")
        parts.pop("speed", "")
    where = f" on {found['device']}" if found.get("device") else ""
    drawn = bar(progress.get("percent")) if progress.get("total_steps") else ""
    facts = [
        ("job", job),
        ("state", f"{state}{f', attempt {found["attempt"]}' if found.get('attempt') else ''}{where}"),
        ("reason", f"{error['reason']}: {error['message']}" if error else reason),
        *(("earlier", failure) for failure in _earlier_failures(found)),
        *(
            ("after", f"{one['job_uuid']} ({state_word(one['state'] or 'deleted')})")
            for one in found.get("after") or ()
        ),
        ("log", found.get("log_path") or ""),
        ("progress", drawn + "  ".join(parts.values())),
        *((one["kind"], f"step {one['step']}: {', '.join(measures_of(one['metrics']))}") for one in points),
        *(("result", measure) for measure in measures_of(found.get("result") or {})),
        ("best", best_of(found.get("search") or {})),
        *(("trials", trial) for trial in _trials_of(found.get("search") or {})),
        *(("warning", warning) for warning in found.get("warnings") or ()),
        ("method", _method_of(effective)),
        ("model", effective.get("model") or ""),
        ("data", _data_of(effective)),
        ("submitted", f"{moment(status.get('scheduled_at'))}{f' by {by}' if (by := found.get('created_by')) else ''}"),
        ("started", moment(status.get("started_at"))),
        ("ended", moment(status.get("completed_at"))),
        *(("checkpoint", _checkpoint_of(one)) for one in status["checkpoints"]),
        *(("config", f"{name} = {json.dumps(value)}") for name, value in (_flat(effective) if config else ())),
        *(("next", f"trl-remote {command}") for command in _next_commands(status, effective)),
    ]
    return _beside_names([fact for fact in facts if fact[1]], _columns())


def _earlier_failures(found: Mapping[str, Any]) -> Iterable[str]:
    """Why earlier attempts of a job ended, unless the job itself failed, which has the reason of the last one."""
    for attempt in () if found.get("error") else found.get("attempts") or ():
        if attempt["reason"]:
            message = next(iter(lines_of(attempt["message"] or "")), "")
            yield f"attempt {attempt['attempt']} ended at step {attempt['step']}: {attempt['reason']}: {message}"


def _beside_names(facts: Sequence[tuple[str, str]], columns: int | None) -> list[str]:
    """Names with their values beside them; the name of several values stands beside the first."""
    width, found, last = max(len(name) for name, _ in facts), list[str](), ""
    for name, value in facts:
        for line in map(shown, lines_of(value)):
            room = max(_NARROWEST, columns - width - 2) if columns else sys.maxsize
            for part in textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False):
                found.append(f"{name if name != last else '':<{width}}  {part}")
                last = name
    return found


def _method_of(config: Mapping[str, Any]) -> str:
    work, adapter = config.get("work") or {}, config.get("lora") or {}
    if work:
        return str(work["kind"])
    kind = ", all weights" if config else ""
    if adapter:
        has_rank = adapter["method"] != "ia3"
        kind = f", {adapter['method']}{f' of rank {adapter["rank"]}' if has_rank else ''}"
    return f"{config.get('algorithm', '')}{kind}{', a search' if config.get('search') else ''}"


def _data_of(config: Mapping[str, Any]) -> str:
    """The datasets of a job."""
    names = [one["dataset"]["dataset_id"] for one in (config, *config.get("mixed_with", ())) if one.get("dataset")]
    validation = (config.get("validation") or {}).get("dataset_id")
    return f"{', '.join(names)}{f'; evaluated on {validation}' if validation else ''}"


def _checkpoint_of(checkpoint: dict[str, Any]) -> str:
    metrics = checkpoint.get("training_metrics") or {}
    losses = [
        f"{text} {metrics[name]:.6g}"
        for name, text in (("train_loss", "loss"), ("validation_loss", "eval loss"))
        if metrics.get(name) is not None
    ]
    return f"{checkpoint['identifier']}{f' ({", ".join(losses)})' if losses else ''}: {checkpoint['path']}"


def _next_commands(status: dict[str, Any], config: Mapping[str, Any]) -> list[str]:
    """What the state of a job leads to."""
    job, state = shlex.quote(status["job_uuid"]), (status.get("resources_allocated") or {}).get("state")
    if state == "paused":
        return [f"resume {job}", f"jobs cancel {job}"]
    if status["status"] in ("scheduled", "in_progress"):
        return [f"jobs watch {job}", *([f"jobs logs {job}"] if state == "in_progress" else []), f"jobs cancel {job}"]
    if status["status"] == "failed":
        return [f"jobs logs {job}"]
    if best := ((status.get("resources_allocated") or {}).get("search") or {}).get("best"):
        return [*_chat(job, config), f"jobs show {shlex.quote(best['job_uuid'])}"]
    return [*_chat(job, config), f"jobs pull {job} DIR"] if status["checkpoints"] else []


def _chat(job: str, config: Mapping[str, Any]) -> list[str]:
    """The command that asks the result of a job; empty: it writes no text."""
    from llama_stack_provider_trl.specs.methods import METHODS  # with pydantic, which no other command needs

    method = METHODS.get(config.get("algorithm", ""))
    answers = not config.get("work") and method is not None and not method.trains_reward
    return [f"chat {job}"] if answers else []


def _flat(values: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, Any]]:
    """The values of a configuration, each by its dotted name."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def best_of(search: dict[str, Any]) -> str:
    """The best trial of a search, with its values; empty: there is none."""
    best = search.get("best")
    if not best:
        return ""
    values = ", ".join(f"{path}={value}" for path, value in best["values"].items())
    return f"{best['job_uuid']}: {search['objective']} {best['value']:.6g} with {values}"


def _trials_of(search: dict[str, Any]) -> Iterable[str]:
    """A line for each trial of a search: its state, steps, what it reached, and its values."""
    for trial in search.get("trials") or ():
        reached = "" if trial["value"] is None else f", {search['objective']} {trial['value']:.6g}"
        values = ", ".join(f"{path}={value}" for path, value in trial["values"].items())
        state = "pruned" if trial["pruned"] else state_word(trial["state"])
        yield f"{trial['job_uuid']}: {state}, {_steps(trial)} steps{reached} with {values}"


def measures_of(result: Mapping[str, Any], above: str = "") -> list[str]:
    """The numbers of a result, each with its dotted name."""
    found: list[str] = []
    for name, value in result.items():
        if isinstance(value, dict):
            found += measures_of(value, f"{above}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            number = f"{value:.6g}" if isinstance(value, float) else str(value)
            found.append(f"{above}{name} {gib(value) if _MEMORY.search(name) else number}")
    return found


def moment(time: str | None) -> str:
    """A time of the service, in UTC, to the second; empty: there is none."""
    return str(time or "")[:19].replace("T", " ")


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
    columns = columns or _columns()
    if columns is not None:
        least = [
            min(width, max(_NARROWEST, len(name))) if name in cut else width
            for name, width in zip(head, widths, strict=True)
        ]
        widths = _narrowed(widths, least, columns)
    return ["  ".join(f"{_cut(c, w):<{w}}" for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]


def _columns() -> int | None:
    """Of standard output; None: it is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


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


_FRESH = 30.0
"""Seconds after which a load is shown with its age."""


def node_lines(node: dict[str, Any], columns: int | None = None) -> list[str]:
    """A machine as `nodes show` prints it: names with their values.

    Args:
        columns: of the terminal, into which long values are wrapped; None: those of standard output, if that is one.
    """
    name, state = node["node"], node.get("state", "open")
    memory, free, disk = (node.get(f"{one}_bytes") for one in ("memory", "memory_available", "disk_free"))
    devices = [f"{device}: {job}{f', {load}' if load else ''}" for device, job, load in devices_of(node)]
    change = "uncordon" if state in ("cordoned", "draining") else "drain"
    facts = [
        ("node", f"{name}{' (of the service)' if node.get('head') else ''}"),
        ("state", f"{state}{'; takes jobs only while the load of its owner is low' if node.get('loaned') else ''}"),
        *(("device", device) for device in devices),
        ("cores", str(node.get("cpus") or "")),
        ("memory", f"{gib(memory)}{'' if free is None else f', {gib(free)} available'}" if memory else ""),
        ("free disk", gib(disk) if disk else ""),
        ("address", node.get("address") or ""),
        ("machine", node.get("machine") or ""),
        *(("version", f"{package} {version}") for package, version in (node.get("versions") or {}).items()),
        *(("label", f"{label}={value}") for label, value in (node.get("labels") or {}).items()),
        *(("model", model) for model in node.get("models") or ()),
        *(("ollama", f"{model} (not for training)") for model in node.get("ollama_models") or ()),
        # The machine of a service without an agent of its own cannot be taken out.
        ("next", f"trl-remote nodes {change} {shlex.quote(name)}" if node.get("agent") else ""),
    ]
    return _beside_names([fact for fact in facts if fact[1]], columns or _columns())


def devices_of(node: dict[str, Any]) -> list[tuple[str, str, str]]:
    """A node's devices, and the cores of its CPU that jobs have reserved, with the job of each, and the last load of
    each device, such as `93 %, 61.2 of 79.6 GiB`: of `cpu` that of all cores and of the memory; empty: not known."""
    jobs = node.get("jobs", {})
    cores = {place: job for place, job in jobs.items() if place not in node["devices"]}
    free = f"{max(0, node.get('cpus', 0) - len(cores))} of {node.get('cpus', 0)} cores free" if cores else "free"
    found = [(device, jobs.get(device) or (free if device == "cpu" else "free")) for device in node["devices"]]
    found += sorted(cores.items(), key=lambda one: (len(one[0]), one[0]))
    return [(device, job, _load(node, device)) for device, job in found]


def _load(node: dict[str, Any], device: str) -> str:
    load = node.get("load") or {}
    if device == "cpu":
        share, used, total = load.get("cpu_percent"), load.get("memory_used_bytes"), node.get("memory_bytes")
    else:
        devices = {one["name"]: one for one in load.get("devices", ())}
        own = devices.get(device, {})
        share, used = own.get("utilization_percent"), own.get("memory_used_bytes")
        total = node.get("memory_of_devices", {}).get(device)
    parts = [] if share is None else [f"{share:.0f} %"]
    if used is not None:
        parts.append(f"{used / (1 << 30):.1f}{f' of {total / (1 << 30):.1f}' if total else ''} GiB")
    if parts and (age := load.get("age_seconds", 0.0)) >= _FRESH:
        parts.append(f"{age:.0f} s ago")
    return ", ".join(parts)


def preflight_lines(found: dict[str, Any]) -> list[str]:
    """The result of a preflight: rows, steps, memory by part, disk, and the verdict as the last line."""
    data, steps, memory, disk = (found[name] for name in ("data", "steps", "memory", "disk"))
    parts = {name: size for name in PARTS if (size := memory.get(f"{name}_bytes"))}
    beside = f", and {gib(memory['host_bytes'])} of CPU memory" if memory["host_bytes"] else ""
    per = f"each of {memory['devices']} {memory['device']} devices" if memory["devices"] > 1 else memory["device"]
    total = data["num_rows"]
    if data["examples"] != total:
        total = f"{counted(data['examples'], 'example')} made of {counted(total, 'row')}"
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


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
