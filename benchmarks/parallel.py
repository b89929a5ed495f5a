"""Whether the predicted step of two nodes is the measured one, over links of several speeds (root, Linux, `ip`, `tc`).

    .venv/bin/python benchmarks/parallel.py --json parallel.json

Two machines made of network namespaces train with the lines of `trl-remote nodes commands --torchrun`, one rank of one
thread on each. The prediction has the step of one such machine alone, and the link as the ranks measure it when they
meet. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import REPOSITORY, begin, finish, parser_of

sys.path.insert(0, str(REPOSITORY))

from scaling import SHAPES, make_model

from llama_stack_provider_trl.specs.events import Event, Failed, Prepared, Progress, iter_events
from llama_stack_provider_trl.specs.parallel import Exchange
from llama_stack_provider_trl_remote.cli.main import main as trl_remote
from tests.cluster.bed import Bed, Machine, why_not

STRATEGIES = {"DDP": "NO_SHARD", "FSDP2": "FULL_SHARD"}
WITHIN = 0.25
"""Share of the measured step by which the predicted one may differ."""
Result = dict[str, Any]


def main() -> int:
    options = parse_options()
    if reason := why_not():
        sys.exit(f"parallel.py needs network namespaces: {reason}")
    report = begin("torch", "transformers", "trl", options=options)
    report["runs"] = []
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory(prefix="parallel-") as scratch:
        folder = Path(scratch)
        make_model(folder / "models", options.model)
        for rate in options.mbit_per_s:
            # Again for each rate: what else the machine does changes within minutes.
            alone, prepared = measure(folder / f"alone-{rate}", folder / "models", 1, "DDP", None, options)
            print(f"  one node                    step {alone['step_s']:8.3f} s", flush=True)
            for name in options.strategies:
                run, _ = measure(folder / f"{name}-{rate}", folder / "models", 2, name, rate, options)
                report["runs"].append(compared(run, name, rate, alone["step_s"], prepared))
                shown = report["runs"][-1]
                print(
                    f"  {name:6} at {rate:5} Mbit/s  step {shown['step_s']:8.3f} s  "
                    f"predicted {shown['predicted_s']:8.3f} s",
                    flush=True,
                )
    missed = print_report(report, options)
    finish(report, options.json)
    return 1 if missed else 0


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="100M")
    parser.add_argument("--mbit-per-s", type=int, nargs="+", default=[10, 100, 1000], metavar="N")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--rows", type=int, default=2, help="of a step, on each node")
    parser.add_argument("--tokens", type=int, default=512, help="of a row")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps")
    parser.add_argument("--warm-up", type=int, default=2, help="of them that are not measured")
    options = parser.parse_args()
    if not 0 < options.warm_up < options.steps:
        parser.error("expected more --steps than --warm-up, and one of those at least")
    return options


def measure(
    folder: Path, models: Path, nodes: int, name: str, rate: int | None, options: argparse.Namespace
) -> tuple[Result, Prepared]:
    """Train on machines of their own, which see each other over links of this rate (Mbit/s; None: unlimited)."""
    folder.mkdir(parents=True)
    with Bed(folder) as bed:
        machines = [bed.machine(f"node-{number}") for number in range(nodes)]
        if rate is not None:
            # On one cable: each direction of the link between two machines is limited once.
            machines[0].limit(rate * 1000)
        for one, line in zip(machines, lines(folder, models, machines, name, options), strict=True):
            one.run("sh", "-c", f"cd {REPOSITORY} && {line}")
        for one in machines:
            assert one.process is not None
            if one.process.wait() != 0:
                raise RuntimeError(f"{name} at {rate} Mbit/s: {failure(folder)}\n{one.log_tail()}")
    events = recorded(folder)
    points = [event for event in events if isinstance(event, Progress)]
    times = [point.time for point in points][options.warm_up - 1 :]
    (prepared,) = (event for event in events if isinstance(event, Prepared))
    run = {
        "step_s": (times[-1] - times[0]) / (len(times) - 1),
        "link_mbit_per_s": points[-1].link_mbit_per_s,
        "loss": points[-1].metrics["loss"],
    }
    return run, prepared


def lines(folder: Path, models: Path, machines: list[Machine], name: str, options: argparse.Namespace) -> list[str]:
    """What `trl-remote nodes commands --torchrun` prints, and the job that it writes."""
    text = "What is the time? " * options.tokens
    rows = [{"prompt": str(row), "completion": text} for row in range(options.steps * options.rows * len(machines))]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = {"dataset_id": "rows", "batch_size": options.rows, "shuffle": False}
    request = {
        "model": str(models / options.model),
        "training_config": {"n_epochs": 1, "dtype": "fp32", "data_config": data},
        "provider_options": {"device": "cpu", "max_seq_length": options.tokens},
    }
    (folder / "job.json").write_text(json.dumps(request))
    files = ["--data", str(folder / "rows.jsonl"), "--directory", str(folder / "job"), "--python", sys.executable]
    addresses = [word for one in machines for word in ("--address", one.address)]
    words = ["--torchrun", str(folder / "job.json"), *files, *addresses, "--sharding", STRATEGIES[name], "--json"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert trl_remote(["nodes", "commands", *words]) == 0
    return [row["command"] for row in json.loads(printed.getvalue())["commands"]]


def recorded(folder: Path) -> list[Event]:
    return list(iter_events(folder / "job" / "run" / "events.jsonl"))


def failure(folder: Path) -> str:
    return "; ".join(event.message for event in recorded(folder) if isinstance(event, Failed))


def compared(run: Result, name: str, rate: int, alone: float, prepared: Prepared) -> Result:
    """The run with its prediction."""
    exchange = Exchange(
        nodes=2,
        trainable=prepared.trainable_parameters,
        total=prepared.total_parameters,
        strategy=STRATEGIES[name],  # type: ignore[arg-type]
    )
    predicted = exchange.step_seconds(alone, run["link_mbit_per_s"])
    return {
        **run,
        "alone_s": alone,
        "strategy": name,
        "mbit_per_s": rate,
        "bytes_per_node": exchange.bytes_per_node,
        "predicted_s": predicted,
        "difference": predicted / run["step_s"] - 1,
        "speedup": exchange.speedup(alone, run["step_s"]),
        "predicted_speedup": exchange.speedup(alone, predicted),
    }


def print_report(report: Result, options: argparse.Namespace) -> list[Result]:
    """Print the table; returns the runs that were predicted wrong."""
    print(f"\n{options.model}, {options.rows} rows of {options.tokens} tokens on each node\n")
    print("| | link, Mbit/s | measured | MB of a node | s a step, one node | two | predicted | difference | speedup |")
    print("|---|---|---|---|---|---|---|---|---|")
    for run in report["runs"]:
        print(
            f"| {run['strategy']} | {run['mbit_per_s']} | {run['link_mbit_per_s']:.0f} | "
            f"{run['bytes_per_node'] / 1e6:.0f} | {run['alone_s']:.2f} | {run['step_s']:.2f} | "
            f"{run['predicted_s']:.2f} | {run['difference']:+.0%} | {run['speedup']:.2f} |"
        )
    print(f"measured at {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC")
    missed = [run for run in report["runs"] if abs(run["difference"]) > WITHIN]
    for run in missed:
        print(
            f"{run['strategy']} at {run['mbit_per_s']} Mbit/s: {run['difference']:+.0%}, at most {WITHIN:.0%} expected"
        )
    return missed


if __name__ == "__main__":
    sys.exit(main())
