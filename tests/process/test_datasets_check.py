"""`trl-remote datasets check`: each exit status, on files as users have them. No service and no weights are needed."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl_remote.cli.main import main
from tests.process.forked_recipes import fork_recipes
from tests.process.numbered_rows import NUMBERED
from tests.process.tool_rows import _TEMPLATES, ROW
from tests.required import in_full
from tests.tiny import CHATML, tiny_model
from tests.training import DPO_ROWS, SFT_ROWS

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
Check = Callable[..., tuple[int, str, str]]
LONG = {"prompt": "word " * 80, "completion": "Never seen."}


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Check:
    monkeypatch.setenv("TRL_SERVICE_URL", "http://127.0.0.1:1")  # no service is called
    fork_recipes(monkeypatch, tmp_path)

    def run(*words: object) -> tuple[int, str, str]:
        exit_status = main(["datasets", "check", *map(str, words)])
        captured = capsys.readouterr()
        return exit_status, captured.out, captured.err

    return run


UNTRAINED = {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "Two.", "weight": 0}]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model without its weights."""
    return model_with(tmp_path, CHATML)


def model_with(root: Path, template: str) -> Path:
    shutil.copytree(tiny_model(), found := root / "model", dirs_exist_ok=True)
    for weights in found.glob("*.safetensors"):
        weights.unlink()
    (found / "chat_template.jinja").write_text(template)
    return found


def written(file: Path, rows: list[Any]) -> Path:
    if file.suffix == ".gz":
        file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    elif file.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif file.suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
        file.write_text("\n".join(lines))
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows))
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("suffix", ["jsonl.gz", "parquet", *in_full("jsonl", "ndjson", "json", "csv")])
def test_rows_that_train_as_inference_renders_them_are_0(
    check: Check, model: Path, tmp_path: Path, suffix: str
) -> None:
    rows = written(tmp_path / f"rows.{suffix}", SFT_ROWS)
    exit_status, output, errors = check(rows, "--model", model, "--strict", "--max-seq-length", 64)
    assert (exit_status, errors) == (0, "")
    lines = output.splitlines()
    assert lines[0] == "rows    12: 12 trained, 0 of them cut to 64 tokens, 0 dropped"
    assert lines[1].startswith("tokens  ")
    assert lines[2:] == [
        "turns   12 of 12 trained turns are as at inference, 0 differ",
        "verdict no row is refused, and every trained turn is as at inference",
    ]


def test_calls_thoughts_and_pairs_are_0_too(check: Check, tmp_path: Path) -> None:
    model = model_with(tmp_path, (_TEMPLATES / "qwen3.jinja").read_text())
    exit_status, output, errors = check(written(tmp_path / "tools.jsonl", [ROW]), "--model", model, "--json")
    assert exit_status == 0, errors
    found = json.loads(output)
    assert (found["ok"], found["refused"], found["problems"], found["method"]) == (True, None, [], "sft")
    assert (found["data"]["read"], found["data"]["examples"]) == (1, 2)
    assert {name: found["inference"][name] for name in ("turns", "equal", "different")} == {
        "turns": 3,
        "equal": 3,
        "different": 0,
    }
    assert any("trained as several sequences" in warning for warning in found["warnings"])
    exit_status, output, errors = check(written(tmp_path / "pairs.jsonl", DPO_ROWS), "--model", model, "--json")
    assert (exit_status, json.loads(output)["method"]) == (0, "dpo"), errors
    labelled = [{"prompt": "1 + 1?", "completion": "Two.", "label": True}]
    file = written(tmp_path / "labelled.jsonl", labelled)
    assert check(file, "--model", model, "--method", "kto")[0] == 0


def test_a_greeting_before_any_question_is_0(check: Check, model: Path, tmp_path: Path) -> None:
    talk = [("assistant", "Hello."), ("user", "1 + 1?"), ("assistant", "Two.")]
    row = {"messages": [{"role": role, "content": content} for role, content in talk]}
    exit_status, output, errors = check(written(tmp_path / "rows.jsonl", [row]), "--model", model, "--strict")
    assert (exit_status, errors) == (0, "")
    assert "1 of 2 trained turns are as at inference, 0 differ, 1 are before any question" in output


def test_a_turn_that_differs_is_1(check: Check, tmp_path: Path) -> None:
    rows, model = written(tmp_path / "rows.jsonl", SFT_ROWS), model_with(tmp_path, NUMBERED)
    exit_status, output, errors = check(rows, "--model", model)
    assert exit_status == 1
    assert "turns   0 of 12 trained turns are as at inference, 12 differ" in output
    assert "verdict" not in output
    begin = "trl-remote: 12 of 12 trained turns are not as at inference, first row 0, turn 1: token 5 is ' 2' "
    assert errors.startswith(begin), errors
    assert (errors.count("\n"), "correct the model's chat template" in errors) == (1, True)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "Well?", "completion": " "}, "row 12: column completion: found blank text, expected text"),
        (ROW, "row 12: the model's chat template writes no tools, and the messages come with them"),
        *in_full(
            ({"colour": "red"}, "row 12: found the columns colour, expected for SFT one of"), ("no object", "row 12")
        ),
    ],
)
def test_a_row_that_does_not_train_is_1(check: Check, model: Path, tmp_path: Path, row: Any, message: str) -> None:
    rows = written(tmp_path / "rows.jsonl", [*SFT_ROWS, row])
    exit_status, output, errors = check(rows, "--model", model)
    assert (exit_status, output, errors.count("\n")) == (1, "", 1), errors
    assert errors.startswith("trl-remote: a row does not train: ")
    assert message in errors
    exit_status, output, _ = check(rows, "--model", model, "--json")
    found = json.loads(output)
    assert (exit_status, found["ok"], found["data"]) == (1, False, None)
    assert found["problems"] == [f"a row does not train: {found['refused']}"]


def test_rows_of_which_none_trains_are_1(check: Check, model: Path, tmp_path: Path) -> None:
    for rows, message in (
        ([LONG], "none of the 1 rows has a token left to train on"),
        ([], "the dataset is empty"),
        ([UNTRAINED], "none of the 1 rows has a token to train on: the loss covers none of them, as of answers with"),
    ):
        file = written(tmp_path / "rows.jsonl", rows)
        exit_status, _, errors = check(file, "--model", model, "--max-seq-length", 24)
        assert (exit_status, message in errors) == (1, True), errors


def test_a_warning_is_1_where_the_check_is_strict(check: Check, model: Path, tmp_path: Path) -> None:
    words = (written(tmp_path / "rows.jsonl", [*SFT_ROWS, LONG]), "--model", model, "--max-seq-length", 64)
    exit_status, output, errors = check(*words)
    assert (exit_status, errors) == (0, "")
    assert "note    1 of 13 rows were dropped" in output
    assert "12 of 13 trained turns are as at inference, 0 differ, 1 more are in rows that are cut or dropped" in output
    exit_status, output, errors = check(*words, "--strict")
    assert (exit_status, "verdict" in output) == (1, False)
    assert errors.startswith("trl-remote: with --strict warnings are failures, and there are 1: 1 of 13 rows were")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("none.jsonl", "--model", "MODEL"), "no such file"),
        (("rows.txt", "--model", "MODEL"), "expected a file name that ends in"),
        (("rows.jsonl", "--model", "org/no-such-model"), "org/no-such-model"),
        *in_full(
            (("rows.jsonl", "--model", "/none"), "there is no such directory"),
            (("rows.jsonl", "--model", "MODEL", "--max-seq-length", "1"), "max_seq_length=1 is not supported"),
            (("rows.jsonl", "--model", "MODEL", "--column", "colour=red"), "columns"),
        ),
    ],
)
def test_a_command_that_cannot_check_is_2(
    check: Check, model: Path, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    written(tmp_path / "rows.jsonl", SFT_ROWS)
    (tmp_path / "rows.txt").write_text("text")
    named = [str(model) if word == "MODEL" else tmp_path / word if n == 0 else word for n, word in enumerate(words)]
    exit_status, output, errors = check(*named)
    assert (exit_status, output, errors.count("\n")) == (2, "", 1), errors
    assert message in errors


def test_words_that_are_no_command_are_2(check: Check, tmp_path: Path) -> None:
    for words in ((), ("rows.jsonl",), ("rows.jsonl", "--model", "m", "--column", "prompt")):
        with pytest.raises(SystemExit) as ended:
            check(*words)
        assert ended.value.code == 2


def test_other_names_and_what_is_trained_are_those_of_the_options(check: Check, model: Path, tmp_path: Path) -> None:
    talk = [{"role": "customer", "content": "1 + 1?"}, {"role": "agent", "content": "<think>Hm.</think>Two."}]
    rows = written(tmp_path / "rows.jsonl", [{"dialogue": talk}])
    names = ("--column", "messages=dialogue", "--role", "user=customer", "--role", "assistant=agent")
    exit_status, output, errors = check(rows, "--model", model, *names, "--json")
    assert exit_status == 0, errors
    kept = json.loads(output)["data"]
    for option in (("--reasoning", "drop"), ("--train-on", "final_answer"), ("--train-on-input",)):
        exit_status, output, errors = check(rows, "--model", model, *names, *option, "--json")
        assert exit_status == 0, errors
        found = json.loads(output)["data"]
        assert (found["trained_tokens"] > kept["trained_tokens"]) is (option == ("--train-on-input",))
        assert found != kept
