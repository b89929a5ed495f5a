"""YAML files that would stop or fill the program that reads them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from llama_stack_provider_trl.system.bounded_yaml import check_files

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))


def test_files_that_are_read_without_harm_pass(tmp_path: Path) -> None:
    texts = {"a": "task: a\ninclude: [b.yaml, none.yaml]\n", "b": "include: a.yaml\n", "c": "[", "d": "", "e": "- a"}
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    (tmp_path / "link.yaml").symlink_to("a.yaml")
    check_files(tmp_path.glob("*.yaml"))


def test_what_a_library_leaves_out_is_left_to_it(tmp_path: Path) -> None:
    """As lm-evaluation-harness does. Its other tasks are measured."""
    (tmp_path / "directory.yaml").mkdir()
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    unreadable = tmp_path / "unreadable.yaml"
    unreadable.write_text("task: a\n")
    unreadable.chmod(0)
    names = ["directory.yaml", "loop.yaml", "unreadable.yaml", "~no-user-of-this-name/a.yaml", "a\0b.yaml"]
    (tmp_path / "plain.yaml").write_text(yaml.safe_dump({"task": "a", "include": names}))
    check_files(tmp_path.glob("*.yaml"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "it is not a regular file"),
        (BOMB, "it stands for more than 524288 values"),
        ("a: &a [*a]\n", "it contains itself"),
        (f"a: {'x' * (1 << 20)}\n", "it has more than 1 MiB"),
        ("[" * 200_000 + "]" * 200_000, "it has more than 100 levels"),
    ],
)
@pytest.mark.parametrize("is_included", [False, True])
def test_a_file_that_would_do_harm_is_named(tmp_path: Path, text: str | None, why: str, is_included: bool) -> None:
    path = tmp_path / "harm.yaml"
    if text is None:
        os.mkfifo(path)
    else:
        path.write_text(text)
    (tmp_path / "plain.yaml").write_text("task: a\ninclude: harm.yaml\n")
    with pytest.raises(ValueError, match=f"^{path} cannot be read: {why}"):
        check_files([tmp_path / "plain.yaml" if is_included else path])
