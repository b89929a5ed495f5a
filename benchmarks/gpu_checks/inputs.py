"""Models, tokenizer and rows, made on the spot: a machine with a GPU may have no network."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .setting import Setting

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
    "+ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """A Llama."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    is_tied: bool = True
    """Its head is its table of embeddings."""

    @property
    def multiplied(self) -> int:
        """Weights by which each token is multiplied: all but a table of embeddings that is no head."""
        return self.parameters - (0 if self.is_tied else self.vocabulary * self.hidden)

    @property
    def parameters(self) -> int:
        width = self.hidden // self.heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * width * self.kv_heads
        block = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        tables = 1 if self.is_tied else 2
        return tables * self.vocabulary * self.hidden + self.layers * block + self.hidden


TINY = Shape("tiny", 64, 2, 4, 2, 128, 512)
DEEP = Shape("deep", 256, 8, 4, 2, 1024, 1024)
TEACHER = Shape("teacher", 320, 4, 5, 5, 960, 1024)
TEN_M = Shape("10M", 320, 6, 5, 5, 960, 4096)
HUNDRED_M = Shape("100M", 768, 12, 12, 12, 2048, 16384)
HALF_B = Shape("0.5B", 896, 24, 14, 2, 4864, 151_936)
ONE_B = Shape("1B", 2048, 16, 32, 8, 8192, 128_256)
ONE_B_WIDE = Shape("1B-wide", 2048, 2, 32, 8, 8192, 128_256)
"""Two of the blocks of 1B: a step checkpoint of all weights takes 5 GB, of 1B 15 GB."""
EIGHT_B = Shape("8B", 4096, 32, 32, 8, 14336, 128_256, is_tied=False)
EIGHT_B_WIDE = Shape("8B-wide", 4096, 4, 32, 8, 14336, 128_256)
"""Four of the blocks of 8B."""
_ALL = (TINY, DEEP, TEACHER, TEN_M, HUNDRED_M, HALF_B, ONE_B, ONE_B_WIDE, EIGHT_B, EIGHT_B_WIDE)
SHAPES = {shape.name: shape for shape in _ALL}


def model(setting: Setting, shape: Shape) -> Path:
    """Directory of a random model of this shape, or of a tiny one in a dry run, made once."""
    shape = TINY if setting.is_dry_run else shape
    path = setting.models / shape.name
    if path.is_dir():
        return path
    setting.models.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=setting.models))
    # In a process of its own: one that had used CUDA would keep its context beside the jobs that are measured.
    argv = [f"--folder={scratch}", f"--shape={shape.name}", f"--device={setting.device}"]
    exit_code, output = run_this(argv)
    if exit_code != 0:
        raise RuntimeError(f"the model {shape.name} was not made: {' '.join(output.strip().splitlines()[-1:])}")
    try:
        scratch.rename(path)
    except OSError:  # another process was first
        shutil.rmtree(scratch)
    return path


def run_this(arguments: Sequence[str]) -> tuple[int, str]:
    """Run this module as a program; its exit code and what it writes to standard error."""
    argv = [sys.executable, "-W", "ignore", "-m", "gpu_checks.inputs", *arguments]
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def save_model(path: Path, shape: Shape, device: str) -> None:
    """Save a random model with its tokenizer; in bf16 where it was made on a GPU, which halves the file."""
    import torch

    torch.manual_seed(0)
    with torch.device(device):
        made = random_model(shape)
    (made.bfloat16() if device == "cuda" else made).save_pretrained(path)
    tokenizer().save_pretrained(path)


def random_model(shape: Shape, **changes: Any) -> Any:
    """The model itself, on torch's default device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": shape.is_tied,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))


def tokenizer() -> Any:
    """A token per byte, with ChatML."""
    from memory import tokenizer as byte_tokenizer

    made = byte_tokenizer()
    made.chat_template = CHATML
    return made


def rows(algorithm: str, count: int, tokens: int) -> list[dict[str, str]]:
    """Rows of at least `tokens` tokens, every third of them half as long: real batches have padding."""
    text = "In the beginning of the year the order was late, and the answer was short. "
    long = text * (1 + tokens // len(text))
    found = []
    for number in range(count):
        answer = f"{number} {long[: tokens // (2 if number % 3 == 1 else 1)]}"
        if algorithm == "sft":
            found.append({"prompt": f"{number}?", "completion": answer})
        else:
            found.append({"prompt": f"{number}?", "chosen": answer, "rejected": f"no {answer[: len(answer) // 2]}"})
    return found


def full_rows(algorithm: str, count: int, tokens: int) -> list[dict[str, str]]:
    """Rows whose every sequence has more than `tokens` tokens, so that a job cuts it there."""
    long = rows("sft", 1, tokens)[0]["completion"]
    if algorithm == "sft":
        return [{"prompt": f"{number}?", "completion": f"{number} {long}"} for number in range(count)]
    return [
        {"prompt": f"{number}?", "chosen": f"{number} {long}", "rejected": f"no {number} {long}"}
        for number in range(count)
    ]


def rows_of_many_lengths(algorithm: str, count: int, tokens: int) -> list[dict[str, str]]:
    """Rows of up to about `tokens` tokens whose parts have lengths of their own, as people's rows have."""
    lengths = random.Random(0)
    text = "In the beginning of the year the order was late, and the answer was short. "
    long = text * (1 + tokens // len(text))
    found = []
    for number in range(count):
        prompt, one, other = (long[: lengths.randint(tokens // 8, tokens // 2 - 64)] for _ in range(3))
        if algorithm == "sft":
            found.append({"prompt": prompt, "completion": f"{number} {one}"})
        else:
            found.append({"prompt": prompt, "chosen": f"{number} {one}", "rejected": f"no {other}"})
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--device")
    given = parser.parse_args()
    save_model(given.folder, SHAPES[given.shape], given.device)
