"""Finds out whether a job's rows have images, and whether the job can train on them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator

from ..errors import InvalidRows, JobFailure
from ..specs.events import Reason
from ..specs.images import COLUMNS, count_images
from ..specs.job import DatasetRef, JobSpec
from ..specs.methods import METHODS
from ..specs.model_source import ModelSource
from ..specs.row_files import parse_line
from ..specs.rows import PreferenceExample, SftExample, parse_row
from .data.images import digest_of
from .data.mixed import named_by_dataset
from .model.configs import DAMAGE
from .model.loading import auto_class, load_config


def with_images(spec: JobSpec) -> JobSpec:
    """The job, with `has_images` where a row of it has an image: then its batches are padded (`fast.support`).

    Rows are read until one has an image, and only where the model has a vision part: those of other models are refused
    when they are tokenized.

    Raises:
        JobFailure: invalid_request, the job asks for what is not done with images; invalid_model, the class of the
            model or its reference, or the processor, reads none, or both have different processors.
        InvalidRows: a column of images has something else.
    """
    if spec.data.has_images or not METHODS[spec.algorithm].reads_images or not _has_vision(spec.source):
        return spec
    refs = [ref for one in spec.data.mixed for ref in (one.dataset, one.validation) if ref is not None]
    if not any(_has_images(ref, spec) for ref in refs):
        return spec
    if refused := next(_refused(spec), None):
        raise JobFailure(
            Reason.invalid_request, f"the rows have images, and {refused}: leave that out, or the images of the rows"
        )
    for source in dict.fromkeys([spec.source, spec.reference_source]):
        if not _takes_images(source):
            raise JobFailure(
                Reason.invalid_model,
                f"model {source.model!r}: the rows have images, and transformers loads it by a class that reads text "
                "alone. Name another vision-language model, or leave the images out of the rows.",
            )
    if digest_of(spec.source) != digest_of(spec.reference_source):
        raise JobFailure(
            Reason.invalid_model,
            f"reference_model {spec.reference_source.model!r} does not fit the model {spec.source.model!r}: the rows "
            "have images, and its processor reads them otherwise. Name a reference with the same processor, such as an "
            "earlier checkpoint of the model, or leave it out: the base model.",
        )
    return spec.changed(has_images=True)


def _has_vision(source: ModelSource) -> bool:
    return getattr(load_config(source), "vision_config", None) is not None


def _takes_images(source: ModelSource) -> bool:
    """Whether transformers loads a model by a class that reads images."""
    config = load_config(source)
    try:
        auto, _ = auto_class(config, is_reward=False)
        known = auto._model_mapping[type(config)]
        return _has_vision(source) and "pixel_values" in inspect.signature(known.forward).parameters
    except (*DAMAGE, RuntimeError):
        return False


def _has_images(ref: DatasetRef, spec: JobSpec) -> bool:
    """Whether a row has an image. Raises InvalidRows: a row's column of images has something else."""
    named = ref.names.columns if ref.names else {}
    mapped = [named[column] for column in COLUMNS if column in named]
    # Stored rows have characters beyond ASCII as they are, or as escapes where a row has bytes.
    keys = [b'"image', *(json.dumps(name, ensure_ascii=way).encode() for name in mapped for way in (True, False))]
    with open(ref.path, "rb") as file:
        for number, line in enumerate(file):
            if not any(key in line for key in keys):
                continue
            try:
                row = parse_row(parse_line(line.decode()), number, spec.algorithm, spec.data.data_format, ref.names)
            except (InvalidRows, ValueError):
                return False  # reading the rows reports it
            if not isinstance(row, SftExample | PreferenceExample):
                return False
            if row.unread_image:
                error = InvalidRows(row.unread_image)
                raise named_by_dataset(error, ref) if spec.data.mixed_with else error
            if count_images(row.prompt if isinstance(row, PreferenceExample) else row.messages):
                return True
    return False


def _refused(spec: JobSpec) -> Iterator[str]:
    """What of a job has not been shown to train as it should with images."""
    if spec.work is not None:
        yield "jobs that do not train read text alone"
    if spec.data.packed:
        yield "packed is true"
    if spec.train.qat is not None:
        yield "quantization-aware training is asked for"
    if spec.lora is not None and spec.lora.quantize_base:
        yield "quantize_base is true"
    if spec.adapter is not None:
        yield "an adapter is continued or merged"
