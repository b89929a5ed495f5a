"""Score a checkpoint on the quickstart's held-out orders.

    python examples/score.py MODEL [--threads 2] [--json OUT]

MODEL is a transformers checkpoint, a PEFT adapter (it is then loaded on its base model), or a model id of the hub.
Answers are greedy, so the same checkpoint always gets the same scores.
"""

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llama_stack_provider_trl.system.console import complain, lines_of, show_lines

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TQDM_DISABLE"] = "1"

Messages = list[dict[str, str]]
DATA_DIR = Path(__file__).parent / "data"
# The longest right answer has 27 tokens, polite words around it about 12 more.
MAX_NEW_TOKENS = 48
BATCH_SIZE = 30
"""Prompts that one thread answers at once; the batches are answered side by side."""


@dataclass(frozen=True)
class Scores:
    """Shares between 0 and 1."""

    right: float
    """Answers whose JSON has every value right; words around the JSON are forgiven."""
    right_new_words: float
    """The same, over the half whose words and sentences were in no training row."""
    fields: float
    """Single values that are right."""
    only_json: float
    """Answers that are one JSON object and nothing else."""
    right_and_only_json: float
    """Answers that a program can use as they are."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """One JSON object a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def load(model_dir: Path | str) -> tuple[Any, Any]:
    """The model, ready to generate, and its tokenizer; an adapter directory names its base model itself."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # TQDM_DISABLE is read when tqdm is imported, which the quickstart does before
    base_dir = model_dir
    adapter_config = Path(model_dir) / "adapter_config.json"
    if adapter_config.is_file():
        base_dir = json.loads(adapter_config.read_text(encoding="utf-8"))["base_model_name_or_path"]
    model = AutoModelForCausalLM.from_pretrained(base_dir, dtype="float32")
    if base_dir is not model_dir:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, model_dir).merge_and_unload()
    return model.eval(), AutoTokenizer.from_pretrained(base_dir, padding_side="left")


def answer(model: Any, tokenizer: Any, prompts: list[Messages], threads: int = 1) -> list[str]:
    """Greedy answers to `prompts`.

    Each batch has one thread: a step of a generation is hundreds of small operations, too small to be divided.
    """
    import torch

    torch.set_num_threads(1)
    # Prompts of similar length are padded least.
    order = sorted(range(len(prompts)), key=lambda index: sum(len(message["content"]) for message in prompts[index]))
    size = min(BATCH_SIZE, -(-len(prompts) // threads))
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    with ThreadPoolExecutor(threads) as pool:
        texts = pool.map(lambda batch: answer_batch(model, tokenizer, [prompts[index] for index in batch]), batches)
        found = [text for batch in texts for text in batch]
    answers = dict(zip(order, found, strict=True))
    return [answers[index] for index in range(len(prompts))]


def answer_batch(model: Any, tokenizer: Any, prompts: list[Messages]) -> list[str]:
    """Greedy answers to `prompts` in one batch, padded on the left."""
    import torch

    inputs = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    with torch.inference_mode():
        tokens = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    texts = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [text.strip() for text in texts]


def parse(text: str) -> dict[str, Any]:
    """The JSON object in an answer; words around it are forgiven, so that an untrained model gets a fair chance."""
    try:
        value = json.loads(text[text.index("{") : text.rindex("}") + 1])
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def is_only_json(text: str) -> bool:
    """Whether the answer is one JSON object with no words around it."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def share(hits: list[bool]) -> float:
    """The share of hits, rounded for reading."""
    return round(sum(hits) / len(hits), 3)


def score(rows: list[dict[str, Any]]) -> Scores:
    """Compare every row's answer with what was expected."""
    right = [parse(row["answer"]) == row["expected"] for row in rows]
    bare = [is_only_json(row["answer"]) for row in rows]
    fields = [parse(row["answer"]).get(name) == value for row in rows for name, value in row["expected"].items()]
    return Scores(
        right=share(right),
        right_new_words=share([hit for hit, row in zip(right, rows, strict=True) if row["kind"] == "new"]),
        fields=share(fields),
        only_json=share(bare),
        right_and_only_json=share([a and b for a, b in zip(right, bare, strict=True)]),
    )


def evaluate(model_dir: Path | str, threads: int) -> dict[str, float]:
    """Load, answer, score, and print the first answers and the scores.

    Raises:
        OSError, ValueError: the model cannot be loaded.
    """
    began = time.monotonic()
    model, tokenizer = load(model_dir)
    rows = read_rows(DATA_DIR / "heldout.jsonl")
    for row, text in zip(rows, answer(model, tokenizer, [row["prompt"] for row in rows], threads), strict=True):
        row["answer"] = text
    scores = asdict(score(rows))

    for row in rows[:3]:
        show_lines(f"> {row['prompt'][-1]['content']}", *(f"  {line}" for line in lines_of(row["answer"])))
    for name, value in scores.items():
        show_lines(f"{name:26} {value:6.1%}")
    show_lines(f"{len(rows)} answers in {time.monotonic() - began:.0f} s")
    return scores


def main() -> None:
    """Parse, evaluate, write."""
    parser = argparse.ArgumentParser(description="Score a checkpoint on the quickstart's held-out orders.")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--json", type=Path, dest="json_path", help="also write the scores to this file")
    arguments = parser.parse_args()
    if Path(arguments.model).is_dir():
        os.environ["HF_HUB_OFFLINE"] = "1"  # all is here: ask no hub
    elif arguments.model.startswith((".", "/", "~")):
        complain(f"there is no directory {arguments.model}: give the path of a checkpoint, or a model id.", "score")
        sys.exit(1)
    try:
        scores = evaluate(arguments.model, arguments.threads)
    except (OSError, ValueError) as error:
        complain(f"{arguments.model} cannot be loaded: {str(error).splitlines()[0]}", "score")
        sys.exit(1)
    if arguments.json_path:
        arguments.json_path.write_text(json.dumps(scores) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
