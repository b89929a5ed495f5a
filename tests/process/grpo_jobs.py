"""Jobs of GRPO with tiny models, given answers, and what TRL logs for the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llama_stack_provider_trl.specs.answer_checks import AnswerCheck
from llama_stack_provider_trl.specs.events import Progress
from llama_stack_provider_trl.specs.job import JobSpec, OptimizerSpec
from llama_stack_provider_trl.specs.methods import GrpoSpec
from llama_stack_provider_trl.specs.rewards import RewardSource
from tests.process.plain_trl import plain_arguments
from tests.required import FULL
from tests.tiny import tiny_model
from tests.training import job_spec, of_kind


def answering_arguments(root: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of TRL's trainers that answer prompts."""
    answering = {"gradient_accumulation_steps": 2, "optim": "sgd", "shuffle_dataset": False}
    return plain_arguments(root, **{**answering, **changes})


STEPS = 20 if FULL else 4


ROWS = [{"prompt": f"What is {n} plus {n}?" + " Please." * (n % 3), "answer": str(2 * n)} for n in range(2 * STEPS)]


DIGITS = RewardSource(name="regex", check=AnswerCheck(type="regex", pattern="[0-9]"))


LETTER = RewardSource(name="letter", check=AnswerCheck(type="regex", pattern="[ea]"), weight=0.5)


def spec_of(root: Path, method: GrpoSpec, **changes: Any) -> JobSpec:
    fields = {
        "rows": ROWS,
        "batch_size": 2,
        "optimizer": OptimizerSpec(name="sgd", learning_rate=0.05),
        "method": method,
    }
    return job_spec(root, tiny_model(), "grpo", **{**fields, **changes})


def given_answers(prompts: list[list[int]], count: int) -> list[list[int]]:
    """Answers that follow from the prompts: of several lengths, some with digits or letters, some ended by eos."""
    eos = 2
    found = []
    for prompt in prompts:
        for number in range(count):
            base = sum(prompt) * 7 + number * 13
            ids = [3 + (base + 31 * at) % 250 for at in range(1 + (base + number) % 6)]
            found.append([*ids, eos] if base % 2 else ids)
    return found


def metric(events: list[Any], name: str) -> list[float]:
    return [event.metrics[name] for event in of_kind(events, Progress)]


def trl_history(
    root: Path,
    method: GrpoSpec,
    log_probs: Callable[[list[list[int]]], list[list[float]]] = lambda answers: [],
    **further: Any,
) -> list[dict[str, float]]:
    """What TRL's own trainer reports of the same rows and answers, in order.

    Args:
        log_probs: of the tokens of answers, where another program chose them.
        further: arguments of the trainer.
    """
    import re

    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    class Given(GRPOTrainer):  # type: ignore[misc]
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            # Each prompt is repeated num_generations times already.
            answers = given_answers(prompt_ids[:: method.num_generations], method.num_generations)
            return answers, log_probs(answers) or None

    def digits(completions: list[Any], **_: Any) -> list[float]:
        return [float(bool(re.search("[0-9]", one[0]["content"]))) for one in completions]

    def letters(completions: list[Any], **_: Any) -> list[float]:
        return [float(bool(re.search("[ea]", one[0]["content"]))) for one in completions]

    arguments = GRPOConfig(
        **answering_arguments(root, per_device_train_batch_size=method.num_generations, learning_rate=0.05),
        num_generations=method.num_generations,
        max_completion_length=method.max_completion_length,
        temperature=method.temperature,
        beta=method.beta,
        loss_type=method.loss_type,
        scale_rewards=method.scale_rewards,
        reward_weights=[1.0, 0.5],
        **further,
    )
    trainer = Given(
        model=AutoModelForCausalLM.from_pretrained(tiny_model(), dtype="float32"),
        args=arguments,
        reward_funcs=[digits, letters],
        processing_class=AutoTokenizer.from_pretrained(tiny_model()),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]),
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


TOY = GrpoSpec(rewards=(LETTER,), num_generations=16, max_completion_length=4, beta=0.01)


MORE = [{"prompt": f"Name a number above {n}."} for n in range(8)]


def toy(root: Path, method: GrpoSpec = TOY, **changes: Any) -> JobSpec:
    fields = {"rows": MORE, "n_epochs": 5, "optimizer": OptimizerSpec(learning_rate=1e-2), "save_steps": 10}
    return spec_of(root, method, **{**fields, **changes})
