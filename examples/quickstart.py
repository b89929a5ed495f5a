"""Fine-tune through Llama Stack's HTTP API, first with SFT (LoRA), then with DPO, and show what changed.

    python examples/quickstart.py --url http://127.0.0.1:8321 --model MODEL_DIR [--service-url http://127.0.0.1:8322]

`scripts/quickstart.sh` starts Llama Stack and the training service and calls this. It registers the datasets of
examples/data, submits both jobs with plain `requests`, follows them, and scores the base model and both results on
prompts that no training row holds. Then the first steps of the same DPO job are trained by the service, with several
ranks, and must have the same losses. At the end the service asks the base model and the tuned one the same. It exits
with status 1 when a job fails, the scores did not clearly improve, or the losses differ.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import requests

from llama_stack_provider_trl.system.console import complain, redraw, show_lines
from llama_stack_provider_trl_remote.cli.terminal import progress_line, progress_within

HERE = Path(__file__).parent
DATA = HERE / "data"
ENDED = ("completed", "failed", "cancelled")

SFT_TRAINING = {
    "n_epochs": 1,
    "dtype": "fp32",
    "data_config": {"dataset_id": "orders-sft", "validation_dataset_id": "orders-validation", "batch_size": 4},
    "optimizer_config": {"optimizer_type": "adamw", "lr": 1e-3, "weight_decay": 0.0, "num_warmup_steps": 0},
}
LORA = {
    "type": "LoRA",
    "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "apply_lora_to_mlp": True,
    "apply_lora_to_output": False,
    "rank": 16,
    "alpha": 32,
}
SERVICE_STEPS = 3
QUESTIONS = 3
DPO_TRAINING = {
    "n_epochs": 1,
    "dtype": "fp32",
    "data_config": {"dataset_id": "orders-dpo", "batch_size": 4},
    "optimizer_config": {"optimizer_type": "adamw", "lr": 2e-4, "weight_decay": 0.0, "num_warmup_steps": 0},
}
DPO_OPTIONS = {"lora": LORA, "merge_adapter": True, "lr_scheduler": "constant"}
"""With a constant learning rate the first steps are the same however many follow."""


class Stack:
    """The few calls of Llama Stack that a fine-tuning needs; the training service takes the same ones."""

    def __init__(self, url: str, server_pid: int | None = None, server_log: Path | None = None) -> None:
        self.url, self.server_pid, self.server_log = url, server_pid, server_log

    def call(self, method: str, path: str, options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        """One request; the server's own sentence becomes our exit message.

        `options` are our provider's per-job options, which Llama Stack carries in a header.
        """
        headers = {"X-LlamaStack-Provider-Data": json.dumps({"trl": options})} if options else {}
        answer = requests.request(method, self.url + path, headers=headers, timeout=60, **kwargs)
        if not answer.ok:
            fail(f"{method} {path} was answered {answer.status_code}: {answer.text[:1000]}")
        return answer.json() if answer.content else None

    def wait_until_up(self, seconds: float = 180) -> None:
        """Until /v1/health answers; a server that died is reported with the end of its log."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.server_pid is not None and _gone(self.server_pid):
                break
            try:
                if requests.get(self.url + "/v1/health", timeout=5).ok:
                    return
            except requests.ConnectionError:
                pass
            time.sleep(0.5)
        log = self.server_log.read_text(errors="replace")[-3000:] if self.server_log else ""
        fail(f"nothing answers at {self.url}.\n{log}")

    def register(self, dataset_id: str, file: Path) -> int:
        """Register a JSONL file's rows as a dataset (an older one of that name is replaced)."""
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        known = {dataset["identifier"] for dataset in self.call("GET", "/v1/datasets")["data"]}
        if dataset_id in known:
            self.call("DELETE", f"/v1/datasets/{dataset_id}")
        source = {"type": "rows", "rows": rows}
        self.call(
            "POST",
            "/v1/datasets",
            json={"dataset_id": dataset_id, "purpose": "post-training/messages", "source": source},
        )
        return len(rows)

    def train(self, call: str, body: dict[str, Any], options: dict[str, Any] | None = None) -> dict[str, Any]:
        """Submit one job, follow it, and return its last status.

        A job that is interrupted here is cancelled, so that it does not continue training unseen.
        """
        uuid = body["job_uuid"]
        self.call("POST", f"/v1/post-training/{call}", options, json=body)
        try:
            status = self._follow(uuid)
        except BaseException:
            requests.post(f"{self.url}/v1/post-training/job/cancel", json={"job_uuid": uuid}, timeout=10)
            raise
        if status["status"] != "completed":
            error = status["resources_allocated"].get("error") or {}
            fail(f"job {uuid} {status['status']}: {error.get('message')} (log: {error.get('log_path')})")
        return status

    def _follow(self, uuid: str) -> dict[str, Any]:
        """On a terminal a line that changes, elsewhere one for each state and each tenth of the way."""
        told = ""
        while True:
            status = self.call("GET", "/v1/post-training/job/status", params={"job_uuid": uuid})
            columns = shutil.get_terminal_size().columns - 1
            line = f"{uuid}  {progress_within(status, columns - len(uuid) - 2)}"
            has_ended = status["status"] in ENDED
            if sys.stderr.isatty():
                redraw(sys.stderr, int(bool(told)), [line], columns)
                told = line
                if has_ended:
                    show_lines("", to=sys.stderr)
            elif (point := _point(status)) != told:
                show_lines(f"{uuid}  {progress_line(status)}", flush=True, to=sys.stderr)
                told = point
            if has_ended:
                return dict(status)
            time.sleep(1)


def _point(status: dict[str, Any]) -> str:
    """Changes with the state of a job, and with each tenth of its way."""
    resources = status["resources_allocated"]
    percent = (resources.get("progress") or {}).get("percent") or 0
    return f"{resources.get('state') or status['status']} {int(percent) // 10}"


def fail(text: str) -> NoReturn:
    """End with a message. What the server answers is shown as text: nothing in it acts on the terminal."""
    complain(text, "quickstart")
    sys.exit(1)


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


class Phases:
    """The wall time of each phase, in the order in which they began."""

    def __init__(self, before: list[str]) -> None:
        self._seconds: dict[str, float] = {}
        for phase in before:
            name, _, seconds = phase.rpartition("=")
            self._seconds[name] = float(seconds)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._seconds[name] = time.monotonic() - began

    def report(self) -> None:
        show_lines("", "Time, s")
        for name, seconds in self._seconds.items():
            show_lines(f"  {name:28}{seconds:>6.0f}")
        show_lines(f"  {'total':28}{sum(self._seconds.values()):>6.0f}")


def score(model: str, title: str) -> dict[str, float]:
    """Held-out scores of one checkpoint, by examples/score.py. It is imported once for all of them."""
    show_lines("", f"== {title}: {model}", flush=True)
    if Path(model).is_dir():
        os.environ["HF_HUB_OFFLINE"] = "1"  # all is here: ask no hub
    import score as scoring

    try:
        return scoring.evaluate(model, threads=2)
    except (OSError, ValueError) as error:
        fail(f"{model} cannot be loaded: {str(error).splitlines()[0]}")


def paths(status: dict[str, Any]) -> dict[str, str]:
    """Where the checkpoints of a job are: {kind: path}."""
    return {Path(checkpoint["path"]).name: checkpoint["path"] for checkpoint in status["checkpoints"]}


def train_on_service(url: str, body: dict[str, Any], options: dict[str, Any], reference: dict[str, Any]) -> None:
    """The first steps of a job once more, by the training service with its own number of ranks: the same losses."""
    service = Stack(url)
    service.wait_until_up()
    service.register("orders-dpo", DATA / "dpo_train.jsonl")
    training = body["training_config"]
    requested = os.environ.get("TRL_NPROC_PER_NODE", "")
    batch_size = training["data_config"]["batch_size"]
    # `auto` is for jobs that set no number.
    ranks = min(int(requested) if requested.isdigit() else 2, batch_size)
    data = {**training["data_config"], "batch_size": batch_size // ranks}
    uuid = f"{body['job_uuid']}-service"
    service.train(
        "preference-optimize",
        {
            **body,
            "job_uuid": uuid,
            "training_config": {**training, "max_steps_per_epoch": SERVICE_STEPS, "data_config": data},
            "provider_options": {**options, "merge_adapter": False, "nproc_per_node": ranks},
        },
    )
    points = service.call("GET", f"/v1/post-training/jobs/{uuid}/metrics")["data"]
    losses = [point["metrics"]["loss"] for point in points if point["kind"] == "train"]
    events = Path(reference["resources_allocated"]["log_path"]).with_name("events.jsonl").read_text().splitlines()
    expected = [event["metrics"]["loss"] for event in map(json.loads, events) if event["type"] == "progress"]
    # The service leaves the configuration out of a status unless it is asked for.
    asked = {"job_uuid": uuid, "config": "true"}
    whole = service.call("GET", "/v1/post-training/job/status", params=asked)["resources_allocated"]
    sharding = whole["effective_config"]["recipe"]["effective"]["sharding"] or {}
    show_lines(
        "", f"The same job, first {len(losses)} steps: 1 process, and {ranks} ranks ({sharding.get('strategy')})"
    )
    for step, (alone, together) in enumerate(zip(expected, losses, strict=False), start=1):
        show_lines(f"  step {step}   loss {alone:.6f}   {together:.6f}")
    worst = max(abs(one / other - 1) for one, other in zip(losses, expected, strict=False))
    if len(losses) != SERVICE_STEPS or worst > 1e-3:
        fail(f"{len(losses)} steps, losses that differ by {worst:.1e} of their value, expected 1e-3")


def ask_both(url: str, models: dict[str, str]) -> None:
    """The first held-out prompts, answered by each model over the service's chat call, below each other."""
    service = Stack(url)
    service.wait_until_up()
    lines = (DATA / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[:QUESTIONS]
    for prompt in (json.loads(line)["prompt"] for line in lines):
        show_lines("", prompt[-1]["content"], flush=True)
        for title, model in models.items():
            body = {"model": model, "messages": prompt, "temperature": 0, "max_tokens": 60}
            answer = service.call("POST", "/openai/v1/chat/completions", json=body)
            show_lines(f"  {title:10} {answer['choices'][0]['message']['content'].strip()}", flush=True)


def report(scores: dict[str, dict[str, float]]) -> None:
    """The table at the end: one row a measure (score.py describes each), one column a model."""
    show_lines("", "Held-out scores (share of answers, greedy)")
    show_lines(f"{'':28}" + "".join(f"{title:>14}" for title in scores))
    for measure in next(iter(scores.values())):
        show_lines(f"{measure:28}" + "".join(f"{values[measure]:>14.0%}" for values in scores.values()))


def shortfalls(base: dict[str, float], sft: dict[str, float], dpo: dict[str, float]) -> list[str]:
    """What did not clearly improve; empty when the run is a success."""
    claims = [
        ("SFT: orders understood", sft["right"], min(0.95, base["right"] + 0.4)),
        ("DPO: orders still understood", dpo["right"], sft["right"] - 0.2),
        ("DPO: answers that are only JSON", dpo["only_json"], max(sft["only_json"], min(0.9, sft["only_json"] + 0.4))),
    ]
    return [f"{claim}: {got:.0%}, expected at least {least:.0%}" for claim, got, least in claims if got < least]


def main() -> None:
    parser = argparse.ArgumentParser(description="SFT, then DPO, through Llama Stack's HTTP API.")
    parser.add_argument("--url", default="http://127.0.0.1:8321")
    parser.add_argument("--model", required=True, help="base model: a directory or a model id")
    parser.add_argument("--server-pid", type=int, help="the Llama Stack process to watch while it starts")
    parser.add_argument("--server-log", type=Path, help="its log, shown when it does not start")
    parser.add_argument("--service-url", help="a training service, to train the DPO job's first steps once more")
    parser.add_argument(
        "--phase", action="append", default=[], metavar="NAME=SECONDS", help="a phase that went before, for the times"
    )
    arguments = parser.parse_args()
    phases = Phases(arguments.phase)
    run = time.strftime("%m%d-%H%M%S")

    stack = Stack(arguments.url, arguments.server_pid, arguments.server_log)
    show_lines(f"Waiting for Llama Stack at {arguments.url} ...", flush=True)
    with phases.phase("Llama Stack, datasets"):
        stack.wait_until_up()
        for dataset_id, file in [
            ("orders-sft", "sft_train"),
            ("orders-validation", "sft_validation"),
            ("orders-dpo", "dpo_train"),
        ]:
            show_lines(
                f"Registered {dataset_id}: {stack.register(dataset_id, DATA / f'{file}.jsonl')} rows", flush=True
            )

    with phases.phase("scores of the base model"):
        scores = {"base": score(arguments.model, "Base model")}

    show_lines("", "== SFT with LoRA", flush=True)
    with phases.phase("SFT"):
        sft_status = stack.train(
            "supervised-fine-tune",
            {
                "job_uuid": f"sft-{run}",
                "model": arguments.model,
                "algorithm_config": LORA,
                "training_config": SFT_TRAINING,
                "hyperparam_search_config": {},
                "logger_config": {},
            },
            {"merge_adapter": True},
        )
    sft = paths(sft_status)
    with phases.phase("scores after SFT"):
        scores["after SFT"] = score(sft["merged"], "After SFT")

    show_lines("", "== DPO on the SFT result", flush=True)
    dpo_body = {
        "job_uuid": f"dpo-{run}",
        "finetuned_model": sft["merged"],
        "algorithm_config": {"beta": 0.1},
        "training_config": DPO_TRAINING,
        "hyperparam_search_config": {},
        "logger_config": {},
    }
    with phases.phase("DPO"):
        dpo_status = stack.train("preference-optimize", dpo_body, DPO_OPTIONS)
    dpo = paths(dpo_status)
    with phases.phase("scores after DPO"):
        scores["after DPO"] = score(dpo["merged"], "After DPO")

    report(scores)
    show_lines("", "Checkpoints", f"  SFT adapter  {sft['final']}", f"  SFT merged   {sft['merged']}")
    show_lines(f"  DPO adapter  {dpo['final']}", f"  DPO merged   {dpo['merged']}")
    if arguments.service_url:
        show_lines("", "== The same DPO job by the training service", flush=True)
        with phases.phase("first steps by the service"):
            train_on_service(arguments.service_url, dpo_body, DPO_OPTIONS, dpo_status)
        show_lines("", "== A chat with both, by the training service", flush=True)
        with phases.phase("chat"):
            ask_both(arguments.service_url, {"base": arguments.model, "after DPO": dpo["merged"]})
    phases.report()
    missing = shortfalls(*scores.values())
    if missing:
        fail("the model did not improve as it must:\n  " + "\n  ".join(missing))
    show_lines(
        "",
        "The model changed as intended. To continue:",
        "  ./scripts/run-direct.sh                        Llama Stack with this provider on port 8321",
        "  ./scripts/run-remote-fsdp-server.sh            the training service on port 8322 (docs/tutorials)",
        "  examples/quickstart.py                         the requests that were just made, to copy from",
        "  trl-remote chat MODEL --against MODEL          the chat of above, while a service runs",
        "  docs/reference                                 every field, every row shape, every setting",
        f"  AutoModelForCausalLM.from_pretrained({dpo['merged']!r})",
    )


if __name__ == "__main__":
    main()
