"""The model, the tokenizer and the rows that every variant of `recipe_throughput.py` trains on."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import REPOSITORY

if TYPE_CHECKING:
    from llama_stack_provider_trl.specs.job import Algorithm

Rows = list[dict[str, Any]]


def prepare_inputs(folder: Path, algorithm: Algorithm, options: argparse.Namespace, out: Path) -> None:
    """Write `folder/model` (unless one was given) and `folder/rows.jsonl`, which every variant reads."""
    model = options.model.resolve() if options.model else folder / "model"
    if not options.model:
        save_random_llama(model)
    rows = usable_rows(algorithm, model, options)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out.write_text(json.dumps({"model": str(model)}))


def save_random_llama(path: Path) -> None:
    """About 10M parameters: 6 layers, hidden size 320, 4096 tokens, embeddings tied."""
    sys.path.insert(0, str(REPOSITORY))
    from tests.tiny import save_llama

    save_llama(
        path,
        train_tokenizer(),
        vocab_size=4096,
        hidden_size=320,
        intermediate_size=960,
        num_hidden_layers=6,
        num_attention_heads=5,
        num_key_value_heads=5,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )


def train_tokenizer() -> Any:
    """Byte-level BPE of 4096 tokens with ChatML, from the manual inside Python's standard library and our examples."""
    from pydoc_data import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    examples = [path.read_text(encoding="utf-8") for path in sorted((REPOSITORY / "examples/data").glob("*.jsonl"))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*topics.topics.values(), *examples], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=2048,
        chat_template=(
            "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
            "+ '<|im_end|>' + '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
        ),
    )


def usable_rows(algorithm: Algorithm, model: Path, options: argparse.Namespace) -> Rows:
    """The first steps x batch rows whose answer is not cut away whole, as TRL's conversational columns; with
    `sample_rows` in a random order."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = conversational_rows(algorithm)
    if getattr(options, "sample_rows", False):  # a few steps are then like those of the whole file
        rows = iter(random.Random(options.seed).sample(found := list(rows), len(found)))
    if options.full_rows:
        rows = (lengthened(row, options.max_length) for row in rows)
    usable = (row for row in rows if _has_answer(row, algorithm, tokenizer, options.max_length))
    found = list(itertools.islice(usable, options.steps * options.batch))
    if not found:
        raise RuntimeError(f"no row has a token of its answer within --max-length {options.max_length}")
    return list(itertools.islice(itertools.cycle(found), options.steps * options.batch))


def conversational_rows(algorithm: Algorithm) -> Iterator[dict[str, Any]]:
    from llama_stack_provider_trl.recipes.data.prepare import read_examples

    source = data_file(algorithm)
    if algorithm == "dpo":
        for example in read_examples(source, "dpo"):
            for pair in example.written_out():
                yield {"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected}
        return
    for example in read_examples(source, "sft"):
        turns, requested = example.messages, example.prompt_turns
        if turns is None or requested is None:
            raise RuntimeError(f"{source}: expected rows with a prompt and an answer")
        yield {"prompt": turns[:requested], "completion": turns[requested:]}


def lengthened(row: dict[str, Any], max_length: int) -> dict[str, Any]:
    """The row with a short prompt and answers that fill `max_length` tokens, so that no batch is padded."""

    def fill(turns: list[dict[str, str]]) -> list[dict[str, str]]:
        repeated = (turns[-1]["content"] + " ") * max_length
        return [*turns[:-1], {**turns[-1], "content": repeated[: 8 * max_length]}]  # a token has 4 to 5 characters

    short = [{**row["prompt"][-1], "content": row["prompt"][-1]["content"][:8]}]
    return {name: short if name == "prompt" else fill(turns) for name, turns in row.items()}


def data_file(algorithm: Algorithm) -> Path:
    """Real rows where `$TRL_SHARED_DIR/data` (or `../shared/data`) has them, else those of examples/data."""
    shared = Path(os.environ.get("TRL_SHARED_DIR", REPOSITORY.parent / "shared")) / "data"
    real = shared / {"sft": "instruct_999.jsonl", "dpo": "preference_300.jsonl"}[algorithm]
    return real if real.is_file() else REPOSITORY / "examples/data" / f"{algorithm}_train.jsonl"


def _has_answer(row: dict[str, Any], algorithm: Algorithm, tokenizer: Any, max_length: int) -> bool:
    def ids(answer: list[dict[str, str]]) -> list[int]:
        text = tokenizer.apply_chat_template(row["prompt"] + answer, tokenize=False)
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    # A margin of 8 tokens: the answer's header, and that a template may end a prompt elsewhere than its answer begins.
    requested = len(ids([])) + 8
    answers = [row["completion"]] if algorithm == "sft" else [row["chosen"], row["rejected"]]
    return requested < max_length and all(len(ids(answer)) > requested for answer in answers)


def read_rows(folder: Path) -> Rows:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def model_of(folder: Path) -> Path:
    return Path(json.loads((folder / "setup" / "result.json").read_text())["model"])
