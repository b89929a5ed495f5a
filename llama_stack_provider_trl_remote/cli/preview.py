"""`trl-remote datasets preview`: rows as they are trained."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from llama_stack_provider_trl.specs.previewed import composition_sentence, inference_sentence, turn_sentence
from llama_stack_provider_trl.system.texts import counted

from ..client import ServiceClient
from ..trl_client import preview_request
from .shared_options import trained_as
from .terminal import emit
from .waiting import waiting
from .whole_jobs import model_at

_MARKS = {("1", "1"): "+", ("1", "0"): " ", ("0", "0"): "x"}
"""Whether a token is kept, and whether the loss covers it -> the mark of its line."""


async def preview(client: ServiceClient, options: Namespace) -> int:
    """Print rows of a dataset: their tokens, the loss, what is cut or dropped, what inference has before each turn."""
    body = _body(client, options)
    with waiting("preview"):
        found = await preview_request(client, body)
    emit(options, found, *_lines(found))
    return 0


def _body(client: ServiceClient, options: Namespace) -> dict[str, Any]:
    body = job_body(options, options.method, options.dataset_id, model_at(options.model, client.url))
    return {**body, "first_row": options.first_row, "rows": options.rows}


def job_body(options: Namespace, method: str, dataset_id: str, model: str) -> dict[str, Any]:
    """The body of a job whose rows are read as the options of `shared_options.as_trained` say."""
    batch_size = 2 if method == "kto" else 1  # KTO pairs the rows of a step
    own, given = trained_as(options)
    data = {"dataset_id": dataset_id, "batch_size": batch_size, **own}
    return {
        "model": model,
        **({"algorithm_config": {"type": method}} if method != "sft" else {}),
        "training_config": {"n_epochs": 1, "data_config": data},
        "provider_options": given,
    }


def _quoted(text: str) -> str:
    """A text in quotes. What cannot be seen is escaped where lines are printed, which keeps joined emoji and letters,
    other than `repr`."""
    return "'" + text.replace("\\", "\\\\") + "'"


def _lines(found: dict[str, Any]) -> Iterator[str]:
    data = found["data"]
    yield "+ the loss covers it, x cut or dropped; one line for each run of tokens"
    for row in found["rows"]:
        outcome = f", {row['outcome']}: {row['reason']}" if row["outcome"] != "trained" else ""
        example = f", {row['example'] + 1} of {row['examples']}" if row["examples"] > 1 else ""
        of = f"{row['dataset_id']}, " if row["dataset_id"] else ""
        yield f"{of}row {row['row']}{example}: {row['tokens']} tokens{outcome}"
        marks = [_MARKS[pair] for pair in zip(row["kept"], row["trained"], strict=True)]
        begin = 0
        for name, length in row["parts"].items():
            shown = range(begin, min(begin + length, len(row["ids"])))
            begin += length
            if len(row["parts"]) > 1 and shown:
                yield f"  {name}"
            for mark, run in groupby(shown, marks.__getitem__):
                yield f"  {mark} {_quoted(''.join(row['texts'][at] for at in run))}"
        if len(row["ids"]) < row["tokens"]:
            yield f"    ({row['tokens'] - len(row['ids'])} more tokens)"
        if composition := composition_sentence(row):
            yield f"  {composition}"
        yield from (f"  {turn_sentence(turn)}" for turn in row["turns"])
    counts = f"{data['trained']} trained, {data['truncated']} of them cut to {found['max_seq_length']} tokens"
    made = f", which make {counted(data['examples'], 'example')}" if data["examples"] != data["read"] else ""
    yield f"{data['read']} of {counted(data['num_rows'], 'row')} read{made}: {counts}, {data['dropped']} dropped"
    yield f"{data['trained_tokens']} of {data['total_tokens']} tokens in the loss; longest {data['longest_before_cut']}"
    if data.get("images"):
        yield f"{counted(data['images'], 'image')}, whose tokens carry no loss"
    for bucket in data["histogram"]:
        yield f"  up to {bucket['up_to']:>7} tokens: {bucket['rows']}"
    yield inference_sentence(found["inference"])
    if first := found["inference"]["first_different"]:
        yield f"first   {first}"
    yield from (f"note    {warning}" for warning in found["warnings"])
