"""Answers prompts with vLLM: a program of its own, run by the interpreter that has vLLM, which has nothing of this
project. `recipes.vllm_answerer` starts it and has the other end of its pipes.

Messages are lines of JSON. It reads its settings and then batches, each with the token ids of prompts. It answers with
`ready`, with `answers`, with `progress` in between, or with `error`, after which it ends. What vLLM prints goes to
standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

_PROGRESS_SECONDS = 1.0
"""Between two messages of progress at least."""
_LONGEST_ERROR = 600


def load(settings: dict[str, Any]) -> Any:
    """The engine with the model. Raises what vLLM raises."""
    from vllm import LLM

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
        distributed_executor_backend="uni",
        disable_log_stats=True,
    )


def answer(llm: Any, batch: dict[str, Any]) -> list[list[int]]:
    """The token ids of the answers to a batch's prompts, in their order.

    Args:
        batch: prompts, their seeds, and how tokens are chosen.
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
        )
        for seed in batch["seeds"]
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in batch["prompts"]]
    return [list(found.outputs[0].token_ids) for found in llm.generate(prompts, chosen, use_tqdm=False)]


def report_steps(llm: Any, after_step: Callable[[], None]) -> None:
    """Have a function called after each step of an engine. Its public methods return when all prompts are answered."""
    step = llm.llm_engine.step

    def observed() -> Any:
        found = step()
        after_step()
        return found

    llm.llm_engine.step = observed


def main() -> int:
    """Answer batches until there is no further one. Returns the exit status."""
    if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]  # the modules beside this file are none of vLLM's
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    parent = os.getppid()
    sent = time.monotonic()

    def send(**message: Any) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    def after_step() -> None:
        nonlocal sent
        if os.getppid() != parent:  # it was killed: no process reads the answers
            os._exit(1)
        if time.monotonic() - sent >= _PROGRESS_SECONDS:
            sent = time.monotonic()
            send(progress=True)

    try:
        settings = json.loads(sys.stdin.readline())
        llm = load(settings)
        report_steps(llm, after_step)
        send(ready=True)
        for line in sys.stdin:
            send(answers=answer(llm, json.loads(line)))
    except Exception as error:
        import traceback

        traceback.print_exc()
        send(error=f"{type(error).__name__}: {' '.join(str(error).split())}"[:_LONGEST_ERROR])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
