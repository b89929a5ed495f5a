"""The scripts that complete `trl-remote`, in the shells that they are for."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from llama_stack_provider_trl_remote.cli.main import main

pytestmark = pytest.mark.contract

ASK = """
COMP_WORDS=({words}); COMP_CWORD=$(({count} - 1)); COMP_LINE="{words}"; COMP_POINT=${{#COMP_LINE}}
$(complete -p trl-remote | sed -E 's/.*-F ([^ ]+) .*/\\1/') trl-remote "${{COMP_WORDS[COMP_CWORD]}}" ""
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("trl-remote", "tra"), {"train"}),
        (("trl-remote", "jobs", "pa"), {"pause"}),
        (("trl-remote", "train", "--lora-"), {"--lora-r", "--lora-alpha", "--lora-modules"}),
        (("trl-remote", "train", "--method", "d"), {"dpo"}),
    ],
)
def test_bash_completes_commands_options_and_values(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], found: set[str]
) -> None:
    text = script("bash", capsys) + ASK.format(words=" ".join(words), count=len(words))
    done = subprocess.run(["bash", "--norc"], input=text, capture_output=True, text=True, check=True)
    assert (set(done.stdout.split()), done.stderr) == (found, "")


def test_the_script_of_zsh_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = script("zsh", capsys)
    assert text.startswith("#compdef trl-remote\n")
    assert all(name in text for name in ("train", "resume", "watch", "--lora-alpha"))
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n"], input=text, capture_output=True, text=True, check=True)
