"""Answers prompts with vLLM: a program of its own, run by the interpreter that has vLLM, which has nothing of this
project. `recipes.model.vllm_process` starts it and has the other end of its pipes.

Messages are lines of JSON. It reads its settings and then batches, each with the token ids of prompts, until `end`. It
answers with `ready`, with `answers`, with `progress` in between, or with `error`, after which it ends. A model that
trains has two messages more: `reload`, answered with `reloaded` once vLLM has its weights as they are now, and `sleep`,
answered with `asleep` once vLLM has released the device's memory until the next `reload`. What vLLM prints goes to
standard error.

Its calls of vLLM are those of release 0.32.0, by file and line of the package: LLM.generate, collective_rpc, sleep and
wake_up in entrypoints/llm.py:418, 574, 836, 869; EngineArgs for adapters in engine/arg_utils.py:676; LLMEngine.add_lora
in v1/engine/llm_engine.py:469; LoRARequest in lora/request.py:8; LoRAModelManager.modules and get_adapter in
lora/model_manager.py:130, 1374; Worker.reload_weights in v1/worker/gpu_worker.py:629.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_PROGRESS_SECONDS = 1.0
"""Between two messages of progress at least."""
_WATCH_SECONDS = 1.0
_LONGEST_ERROR = 600


def load(settings: dict[str, Any]) -> Any:
    """The engine with the model. Raises what vLLM raises."""
    from vllm import LLM

    training: dict[str, Any] = {}
    if "weights" in settings or "max_lora_rank" in settings:
        training = {
            # Of the distribution that tokens are chosen from, with its temperature.
            "logprobs_mode": "processed_logprobs",
            # What a job that trains takes of the device beside it.
            **({} if settings["is_cpu"] else {"gpu_memory_utilization": settings["gpu_memory_utilization"]}),
            "enable_sleep_mode": settings["sleeps"],
        }
    if "max_lora_rank" in settings:
        training |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": settings["max_lora_rank"]}
    return LLM(
        model=settings["model"],
        revision=settings["revision"],
        trust_remote_code=settings["trust_remote_code"],
        dtype=settings["dtype"],
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        # Compilation and graphs take a minute on a CPU, and save nothing there.
        enforce_eager=settings["is_cpu"],
        seed=0,
        skip_tokenizer_init=True,  # prompts and answers are token ids
        generation_config="vllm",  # not the model's own, whose penalties and limits would change the answers
        enable_prefix_caching=False,  # what was answered before must not change the order of a batch's sums
        tensor_parallel_size=settings["devices"],
        distributed_executor_backend="uni" if settings["devices"] == 1 else "mp",
        disable_log_stats=True,
        **training,
    )


class Weights:
    """The weights of a model that trains, in memory that the process which trains it writes.

    Args:
        settings: with the path of that memory, and the place of each weight.
    """

    sleep_level = 2
    """All of the device's memory is released: the weights are new ones at each `reload`."""
    adapter = None

    def __init__(self, settings: dict[str, Any]) -> None:
        self._places = settings["weights_path"], settings["weights_bytes"], settings["weights"]

    def reload(self, llm: Any, policy: dict[str, Any]) -> None:
        """Have an engine take them. Raises ValueError: the engine's model has weights that these lack."""
        missing = sorted(set().union(*llm.collective_rpc(_reloaded, args=self._places)))
        if missing:
            raise ValueError(f"{len(missing)} weights are not among those of the model that trains: {missing[:3]}")


def _tensors(memory: mmap.mmap, table: list[list[Any]]) -> Iterator[tuple[str, Any]]:
    import torch

    for name, dtype, shape, begin, end in table:
        data = torch.frombuffer(memory, dtype=torch.uint8, offset=begin, count=end - begin)
        yield name, data.view(getattr(torch, dtype)).reshape(shape)


def _reloaded(worker: Any, path: str, size: int, table: list[list[Any]]) -> set[str]:
    """Have a worker of an engine take weights, in its own process. Returns the names of those that it has and did not
    get."""
    if not hasattr(worker, "memory_of_policy"):  # mapped once: a large one has millions of pages
        with open(path, "r+b") as file:
            worker.memory_of_policy = mmap.mmap(file.fileno(), size)
    weights = _tensors(worker.memory_of_policy, table)
    model = worker.model_runner.get_model()
    plain = model.load_weights
    loaded: set[str] = set()

    def observed(given: Any) -> Any:
        found = plain(given)
        loaded.update({name for name, _ in model.named_parameters()} if found is None else found)
        return found

    expected = {name for name, _ in model.named_parameters()}
    model.load_weights = observed
    try:
        worker.reload_weights(weights_iterator=weights)
    finally:
        del model.load_weights
    _process_tied(model)
    return expected - loaded


def _process_tied(model: Any) -> None:
    """Have layers that share a weight of another layer process that again.

    vLLM reloads a weight by its first layer, and on a CPU a head computes with a packed copy of the weight that it
    shares with the embeddings.
    """
    own = {name for name, _ in model.named_parameters()}
    shared = [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in own]
    for layer in (model.get_submodule(name.rpartition(".")[0]) for name in shared):
        if getattr(layer, "quant_method", None) is not None:
            layer.quant_method.process_weights_after_loading(layer)


class Adapter:
    """The adapter of a model that trains, for the base model that the engine has."""

    sleep_level = 1
    """The base model goes to CPU memory and back: nothing else has it."""
    adapter: Any = None
    """That of the last `reload`."""

    def reload(self, llm: Any, policy: dict[str, Any]) -> None:
        """Have an engine take the adapter of a directory, in place of the one before. Raises ValueError: the engine's
        model lacks a layer that the adapter has.

        Args:
            policy: the directory, and a number that no earlier adapter had: an engine keeps the one that it has by that
                number, and what it has computed of prompts by the name.
        """
        from vllm.lora.request import LoRARequest

        version = policy["version"]
        self.adapter = LoRARequest(f"policy-{version}", version, policy["adapter"])
        llm.llm_engine.add_lora(self.adapter)
        if unknown := sorted(set().union(*llm.collective_rpc(_unused, args=(version,)))):
            raise ValueError(f"its model lacks {len(unknown)} layers that the adapter has: {unknown[:3]}")


def _unused(worker: Any, version: int) -> set[str]:
    """The layers of an adapter that a worker's model has none of, which vLLM itself leaves out without a word."""
    manager = worker.model_runner.get_model().lora_manager
    return set(manager.get_adapter(version).loras) - set(manager.modules)


def policy_of(settings: dict[str, Any]) -> Weights | Adapter | None:
    """What is new at each `reload`; None: the model does not train."""
    if "weights" in settings:
        return Weights(settings)
    return Adapter() if "max_lora_rank" in settings else None


def answer(llm: Any, batch: dict[str, Any], policy: Weights | Adapter | None = None) -> dict[str, Any]:
    """The token ids of the answers to a batch's prompts, in their order, as `answers`.

    Args:
        batch: prompts, their seeds, and how tokens are chosen.
        policy: of a model that trains: `log_probs` has the log-probability of each token, too.
    """
    from vllm import SamplingParams

    chosen = [
        SamplingParams(
            temperature=batch["temperature"],
            top_p=batch["top_p"],
            max_tokens=batch["max_tokens"],
            stop_token_ids=batch["ends"],
            seed=seed,
            detokenize=False,
            logprobs=None if policy is None else 0,
        )
        for seed in batch["seeds"]
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in batch["prompts"]]
    adapted = {} if policy is None or policy.adapter is None else {"lora_request": policy.adapter}
    outputs = [found.outputs[0] for found in llm.generate(prompts, chosen, use_tqdm=False, **adapted)]
    answers: dict[str, Any] = {"answers": [list(output.token_ids) for output in outputs]}
    if policy is not None:
        answers["log_probs"] = [
            [of_token[token].logprob for token, of_token in zip(output.token_ids, output.logprobs, strict=True)]
            for output in outputs
        ]
    return answers


def report_steps(llm: Any, after_step: Callable[[], None]) -> None:
    """Have a function called after each step of an engine. Its public methods return when all prompts are answered."""
    step = llm.llm_engine.step

    def observed() -> Any:
        found = step()
        after_step()
        return found

    llm.llm_engine.step = observed


def end_with_parent() -> None:
    """End when the process that started this one has ended, even by SIGKILL: no process reads the answers."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def recorded_workers() -> list[Any]:
    """A list that gets the processes that vLLM starts, one for each device where it has several."""
    from multiprocessing.process import BaseProcess

    started: list[Any] = []
    plain = BaseProcess.start

    def start(process: Any) -> None:
        plain(process)
        started.append(process)

    BaseProcess.start = start  # type: ignore[assignment, method-assign]
    return started


def sentence_of(error: Exception, workers: list[Any]) -> str:
    """What has gone wrong. Of a worker that was killed vLLM itself reports that something was cancelled."""
    codes = list[Any]()
    for worker in workers:
        with contextlib.suppress(ValueError):  # it has ended, and was closed
            codes.append(worker.exitcode)
    if -signal.SIGKILL in codes:
        return "one of its processes was killed, as the kernel does when memory runs out"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_LONGEST_ERROR]


def main() -> int:
    """Answer batches until there is no further one. Returns the exit status."""
    if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]  # the modules beside this file are none of vLLM's
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    end_with_parent()
    sent = time.monotonic()

    def send(**message: Any) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    def after_step() -> None:
        nonlocal sent
        if time.monotonic() - sent >= _PROGRESS_SECONDS:
            sent = time.monotonic()
            send(progress=True)

    workers = recorded_workers()
    try:
        settings = json.loads(sys.stdin.readline())
        llm = load(settings)
        report_steps(llm, after_step)
        policy = policy_of(settings)
        sleeps = settings.get("sleeps", False)

        def sleep() -> None:
            if policy is not None and sleeps:
                llm.sleep(level=policy.sleep_level)

        def wake_up(tag: str) -> None:
            if sleeps:
                llm.wake_up(tags=[tag])

        sleep()
        send(ready=True)
        for line in sys.stdin:
            message = json.loads(line)
            if "end" in message:
                break
            if policy is not None and "reload" in message:
                wake_up("weights")
                policy.reload(llm, message["reload"])
                wake_up("kv_cache")
                send(reloaded=True)
            elif "sleep" in message:
                sleep()
                send(asleep=True)
            else:
                send(**answer(llm, message, policy))
    except Exception as error:
        import traceback

        traceback.print_exc()
        send(error=sentence_of(error, workers))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
