"""Keys of tokenized rows: digests of all that determines the token ids and the report on the rows."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import tokenizers
import transformers

from ...specs import images, tool_calls
from ...specs import rows as row_shapes
from ...specs.job import DatasetRef, JobSpec
from ...specs.methods import METHODS
from ...system.texts import json_digest
from .chat import default_chat_template
from .images import digest_of
from .tokenizer_calls import call_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VARYING = re.compile(r"strftime_now|lipsum|\|\s*random\b")
"""What makes a template write something else on another day, or by chance."""


def _digest_of_code() -> str:
    """Digest of the modules that turn rows into tokens: what another release has cached is not used."""
    of_rows = [Path(row_shapes.__file__), Path(tool_calls.__file__), Path(images.__file__)]
    files = [*sorted(Path(__file__).parent.glob("*.py")), *of_rows]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


# At import, so that it is the digest of the code that runs.
_CODE = _digest_of_code()


class RowKeys:
    def __init__(
        self, spec: JobSpec, tokenizer: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase | None = None
    ) -> None:
        self._spec = spec
        self._inputs = _tokenizer_inputs(tokenizer)
        self._teacher = None if teacher is None else _tokenizer_inputs(teacher)
        if teacher is not None and self._teacher is None:
            self._inputs = None

    def of(self, rows: DatasetRef) -> str | None:
        """The key of a dataset's rows; None: the content of the tokenizer or processor is not known."""
        of_images = digest_of(self._spec.source) if self._spec.data.has_images else ""
        if self._inputs is None or of_images is None:
            return None
        spec, is_sft = self._spec, not self._spec.has_pairs
        templates = [inputs["chat_template"] for inputs in (self._inputs, self._teacher) if inputs]
        varies = _VARYING.search(json.dumps(templates))
        return _digest(
            **self._inputs,
            rows=rows.sha256,
            names=rows.names.model_dump() if rows.names else None,
            algorithm=METHODS[spec.algorithm].rows,
            data_format=spec.data.data_format if is_sft else None,
            train_on=spec.data.trained if is_sft else None,
            reasoning=spec.data.reasoning if is_sft else None,
            max_seq_length=spec.data.max_seq_length,
            truncation_side=spec.data.truncation_side,
            answer=spec.method.answer_tokens,
            **({"images": of_images} if of_images else {}),
            **({"teacher": self._teacher} if self._teacher else {}),
            # The ranks and attempts of a job train on the same rows also where the template writes the date.
            job=spec.job_uuid if varies else None,
        )

    @staticmethod
    def packed(key: str, first: int | None) -> str:
        """The key of the sequences that the first rows of `key` are packed into."""
        return _digest(rows=key, first=first)


def _digest(**inputs: Any) -> str:
    return json_digest({**inputs, "code": _CODE})


def _tokenizer_inputs(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """What of a tokenizer and its library determines the tokens of a text. None: it is not known, since Python code of
    the model's own or of a library without such a description decides too."""
    if not tokenizer.is_fast or not type(tokenizer).__module__.startswith("transformers."):
        return None
    call_tokenizer(tokenizer, [""])  # switches the backend's own truncation and padding off, as every call here does
    return {
        "class": type(tokenizer).__qualname__,
        "backend": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "split_special_tokens": bool(tokenizer.split_special_tokens),
        "chat_template": tokenizer.chat_template or default_chat_template(tokenizer),
        "versions": [jinja2.__version__, tokenizers.__version__, transformers.__version__],
    }
