"""The README.md of an adapter: what it was made of and how it is used, where PEFT writes a template to fill in."""

from __future__ import annotations

import json
import re
from pathlib import Path

from ...specs.job import JobSpec, MixedDataset

CARD = "README.md"
_USE = """\
## Use

This directory holds an adapter: the weights that were trained, without those of the base model.

```python
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained("DIR")
tokenizer = AutoTokenizer.from_pretrained("DIR")
```

`trl-remote adapter merge DIR -o MODEL` makes a whole model of it and of its base.
"""


def write_card(directory: Path, spec: JobSpec) -> None:
    """Write the card of the adapter that a job has trained. Raises OSError."""
    base = shown_name(spec.source.model)
    head = {"base_model": base, "library_name": "peft", "tags": ["trl", spec.algorithm]}
    head |= {} if spec.trains_reward else {"pipeline_tag": "text-generation"}
    rows = [("method", spec.algorithm), *(("rows", _rows(one)) for one in spec.data.mixed)]
    requested = spec.data.unmerged_batch_size or spec.data.batch_size
    rows += [("epochs", f"{spec.train.n_epochs}"), ("batch size of a rank", f"{requested}")]
    if spec.lora is not None:
        rows += [(name, code(json.dumps(value))) for name, value in spec.lora.model_dump(mode="json").items()]
    # JSON is YAML, and quotes whatever a name has.
    lines = ["---", *(f"{name}: {json.dumps(value)}" for name, value in head.items()), "---", ""]
    lines += [f"# {spec.job_uuid}", "", f"An adapter of {code(base)}.", "", "## Training", ""]
    lines += ["| what | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""]
    lines += ["All settings are in `training_job.json`.", ""]
    use = _USE if not spec.trains_reward else _USE.replace("ForCausalLM", "ForSequenceClassification")
    (directory / CARD).write_text("\n".join(lines) + "\n" + use, encoding="utf-8")


def _rows(mixed: MixedDataset) -> str:
    found = mixed.dataset
    return f"{found.num_rows} of {code(found.dataset_id)}, sha256 `{found.sha256}`"


def code(text: str) -> str:
    """A text as code in Markdown, also in a table, whatever it holds: what others named may be a picture or a link."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return f"{fence}{space}{text.replace('|', chr(92) + '|')}{space}{fence}"


def shown_name(model: str) -> str:
    """A model without the directories of this machine."""
    return "/".join(Path(model).parts[-2:]) if Path(model).is_absolute() else model
