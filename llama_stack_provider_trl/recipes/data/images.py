"""Images of rows, as a vision-language model's processor reads them.

A chat template writes one placeholder for an image, and the processor makes as many tokens of it as the image has
features. Both sides are the processor's own: the tokens when rows are prepared, the pixels when a batch is collated.
Between these an image is stored as the bytes that it has in its row.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from hashlib import sha256
from itertools import islice
from typing import TYPE_CHECKING, Any

from ...errors import InvalidRows, JobFailure
from ...specs.events import Reason
from ...specs.images import images_in
from ...specs.model_source import ModelSource
from ...specs.rows import PreferenceExample, SftExample
from .templates import processed_ids
from .tokenizer_calls import call_tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

MOST_PIXELS = 64 << 20
"""Of an image: decoded it takes 3 bytes for each."""
_FORMATS = ("PNG", "JPEG", "WEBP")
_MOST_KNOWN = 4096
"""Images whose tokens are remembered, by their digests."""
_CHUNK_BYTES = 64 << 20
"""Of the images that are tokenized at once."""
_OF_TEXT = frozenset(("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"))
"""What a processor returns that is of the text."""


_VIDEOS = "video_processor"
"""Part of a processor."""


class BrokenImage(ValueError):
    """Raised for bytes that are no image, with what is wrong as a sentence's end."""


def decode(data: bytes) -> Image:
    """An image in RGB. Raises BrokenImage: it is damaged, of another format, or has too many pixels; JobFailure:
    launch_failed, Pillow is not installed."""
    try:
        import PIL.Image
    except ImportError as error:
        raise JobFailure(
            Reason.launch_failed,
            "the rows have images, which Pillow decodes, and it is not installed. Install the extra that has it in the "
            "environment that trains: pip install 'llama_stack_provider_trl[images]'.",
        ) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
            image = PIL.Image.open(io.BytesIO(data), formats=_FORMATS)
            if image.width * image.height > MOST_PIXELS:
                raise BrokenImage(f"has {image.width} x {image.height} pixels, at most {MOST_PIXELS} are supported")
            return image.convert("RGB")
    except BrokenImage:
        raise
    except (PIL.Image.DecompressionBombWarning, PIL.Image.DecompressionBombError) as error:
        raise BrokenImage(f"has too many pixels ({error})") from error
    except Exception as error:  # of each format's own decoder
        detail = " ".join(str(error).split())[:200]
        raise BrokenImage(f"cannot be decoded ({type(error).__name__}: {detail})") from error


class Images:
    """The images of a job, read by the processor of its model.

    Args:
        tokenizer: that the job trains with, whose chat template the processor gets, too.
    """

    def __init__(self, source: ModelSource, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self._source, self._tokenizer = source, tokenizer
        self._known: dict[bytes, str] = {}

    @cached_property
    def processor(self) -> Any:
        """Raises JobFailure: invalid_model, there is none that transformers can load, or it reads no images."""
        return load_processor(self._source)

    @property
    def token(self) -> str:
        """The placeholder of an image in what a chat template writes."""
        return str(self.processor.image_token)

    @cached_property
    def _video_token(self) -> str:
        """The placeholder of a video; empty: the model reads none."""
        return str(getattr(self.processor, "video_token", None) or "")

    @cached_property
    def token_ids(self) -> frozenset[int]:
        """Of the placeholders that features take the place of."""
        return frozenset(self.processor.image_token_ids)

    def expanded(self, text: str, images: Sequence[bytes]) -> str:
        """What a template has written, with all the tokens of each image, and the one that begins texts. Raises
        ValueError: it has other placeholders than the conversation has images, or one of a video; BrokenImage: an image
        cannot be decoded."""
        if self._video_token and self._video_token in text:
            raise ValueError(f"it writes {self._video_token!r}, which stands for a video, and no method reads videos")
        first, *others = (self._begin(text) + text).split(self.token)
        if len(others) != len(images):
            raise ValueError(
                f"it writes {len(others)} placeholders {self.token!r} for {len(images)} images (a text that has the "
                "placeholder itself is read as an image)"
            )
        return first + "".join(self._tokens(image) + rest for image, rest in zip(images, others, strict=True))

    def _begin(self, text: str) -> str:
        """The token that the processor puts before a text whose template has not written it."""
        bos = self._begins_with
        return "" if text.startswith(bos) else bos

    @cached_property
    def _begins_with(self) -> str:
        """The token that begins texts, where the tokenizer adds it; empty: it does not."""
        tokenizer = self._tokenizer or self.processor.tokenizer
        first = call_tokenizer(tokenizer, ["a"])["input_ids"][0][0]
        return str(tokenizer.bos_token) if first == tokenizer.bos_token_id else ""

    def of_sequence(self, ids: Sequence[int], images: Sequence[bytes], row: int) -> list[bytes]:
        """The images of a sequence, which are the first ones of its row. Raises JobFailure: invalid_model, its tokens
        are those of no number of images."""
        found, tokens = self.placeholders(ids), 0
        for count in range(len(images) + 1):
            if tokens == found:
                return list(images[:count])
            if count < len(images):
                tokens += self.placeholders(self._ids(images[count]))
        raise JobFailure(
            Reason.invalid_model,
            f"row {row}: its text has {found} tokens for features of images, and its images have {tokens}. Expected a "
            "tokenizer that has the image token of the processor as one token: use the files of one model.",
        )

    def refuse_stray(self, ids: Sequence[int], row: int) -> None:
        """Return if no token is one that features of images, or videos, take the place of. Raises JobFailure:
        invalid_dataset, names the row and the token."""
        if stray := self._never_text.intersection(ids):
            token = (self._tokenizer or self.processor.tokenizer).convert_ids_to_tokens(min(stray))
            text = f"row {row}: the text {token!r}, which stands for a part of an image or a video"
            raise JobFailure(Reason.invalid_dataset, f"{text}: leave it out, or send the image")

    @cached_property
    def _never_text(self) -> frozenset[int]:
        of_videos = getattr(self.processor, "video_token_ids", ())
        return self.token_ids.union(token for token in of_videos if token is not None)

    def placeholders(self, ids: Sequence[int]) -> int:
        """Tokens that features of images take the place of."""
        return sum(token in self.token_ids for token in ids)

    def inferred(self, turns: Sequence[dict[str, Any]], images: Sequence[bytes], **options: Any) -> list[int]:
        """The tokens that the processor's own `apply_chat_template` makes of a conversation.

        Args:
            turns: in the form that the template takes.
        """
        left = iter(images)
        given: list[dict[str, Any]] = []
        for turn in turns:
            content = turn.get("content")
            if isinstance(content, list):
                parts = [{**one, "image": decode(next(left))} if one.get("type") == "image" else one for one in content]
                turn = {**turn, "content": parts}
            given.append(turn)
        return processed_ids(self.processor, self._tokenizer or self.processor.tokenizer, given, **options)

    def features(
        self, rows: Sequence[Sequence[bytes]], ids: Sequence[Sequence[int]], repeats: int = 1
    ) -> dict[str, Any]:
        """The inputs of the model beside the tokens, as tensors; none: no row has an image, and the model needs none.

        Args:
            ids: tokens of each sequence, padded: `repeats` times as many as rows.
            repeats: how often the rows follow one another with these images, which are read once.
        """
        import torch

        found: dict[str, Any] = {}
        name = next((name for name in ("mm_token_type_ids", "token_type_ids") if name in self._names), None)
        if name is not None and getattr(self.processor, "return_mm_token_type_ids", False):
            found[name] = torch.tensor(self.processor.create_mm_token_type_ids([list(row) for row in ids]))
        nested = [[decode(image) for image in row] for row in rows if row]
        if nested:
            texts = [self.token * len(row) for row in nested]
            out = self.processor(images=nested, text=texts, padding=True, return_tensors="pt")
            # The first dimension counts rows, images or patches, all of them in the order of the rows.
            found |= {key: torch.cat([value] * repeats) for key, value in out.items() if key not in _OF_TEXT}
        return found

    @cached_property
    def _names(self) -> list[str]:
        return list(self.processor.model_input_names)

    def _ids(self, image: bytes) -> list[int]:
        tokenizer = self._tokenizer or self.processor.tokenizer
        return call_tokenizer(tokenizer, [self._tokens(image)], add_special_tokens=False)["input_ids"][0]

    def _tokens(self, image: bytes) -> str:
        key = sha256(image).digest()
        if key not in self._known:
            out = self.processor(images=[[decode(image)]], text=[self.token], return_text_replacement_offsets=True)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = out["text_replacement_offsets"][0][0]["replacement"]
        return self._known[key]


@lru_cache(maxsize=2)
def load_processor(source: ModelSource) -> Any:
    """The processor of a model. Raises JobFailure: invalid_model, there is none that transformers can load, or it reads
    no images."""
    from transformers import (  # imports torch, which a process that tokenizes texts does not need
        AutoConfig,
        AutoProcessor,
    )

    arguments: dict[str, Any] = {"trust_remote_code": source.trust_remote_code}
    if source.revision:
        arguments["revision"] = source.revision
    try:
        known = _without_videos(AutoConfig.from_pretrained(source.location, **arguments))
        processor = (known or AutoProcessor).from_pretrained(source.location, **arguments)
    except MemoryError:
        raise
    except Exception as error:  # of transformers, and of each processor's own class
        detail = " ".join(str(error).split())[:300].rstrip(".")
        raise _unfit(source, f"its processor cannot be loaded ({type(error).__name__}: {detail})") from error
    tokenizer = getattr(processor, "tokenizer", None)
    if tokenizer is not None and tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # it pads texts that are thrown away
    if getattr(processor, "image_processor", None) is None or not getattr(processor, "image_token", None):
        raise _unfit(source, f"transformers finds a {type(processor).__name__} in its files, which reads no images")
    return processor


def _without_videos(config: Any) -> Any:
    """The class of a model's processor without its part for videos, which needs torchvision, and no row has one. None:
    torchvision is installed, or the processor has no such part."""
    from transformers import PROCESSOR_MAPPING
    from transformers.utils import is_torchvision_available

    known = None if is_torchvision_available() else PROCESSOR_MAPPING.get(type(config), None)
    if known is None or _VIDEOS not in known.get_attributes():
        return None

    class OfImages(known):  # type: ignore[misc, valid-type]
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if name != _VIDEOS]

    OfImages.__name__ = OfImages.__qualname__ = known.__name__  # of which digests know it
    return OfImages


def _unfit(source: ModelSource, found: str) -> JobFailure:
    return JobFailure(
        Reason.invalid_model,
        f"model {source.model!r}: the rows have images, and {found}. Expected a vision-language model with the files "
        "of its processor (processor_config.json, preprocessor_config.json), or rows without images.",
    )


def digest_of(source: ModelSource) -> str | None:
    """What of a processor determines the tokens of images; None: it is not known, since Python code of the model's own
    decides, too. Raises as `load_processor`."""
    processor = load_processor(source)
    classes = [type(processor), type(processor.image_processor)]
    if not all(one.__module__.startswith("transformers.") for one in classes):
        return None
    described = [type(processor).__qualname__, processor.to_json_string(), processor.image_processor.to_json_string()]
    return sha256("\n".join(described).encode()).hexdigest()


def chunked[Row: SftExample | PreferenceExample](
    examples: Iterable[tuple[int, Row]], rows: int, most: int = _CHUNK_BYTES
) -> Iterator[tuple[tuple[int, Row], ...]]:
    """The examples in chunks of at most so many rows, and about so many bytes of images."""
    left = iter(examples)
    while chunk := list(islice(left, 1)):
        size = _size(chunk[0][1])
        while len(chunk) < rows and size < most and (following := next(left, None)):
            chunk.append(following)
            size += _size(following[1])
        yield tuple(chunk)


def _size(example: SftExample | PreferenceExample) -> int:
    messages = example.prompt if isinstance(example, PreferenceExample) else example.messages
    return sum(len(image) for _, image in images_in(messages or ()))


def image_numbers(images: Iterable[bytes]) -> list[int]:
    return [int.from_bytes(sha256(image).digest()[:8]) for image in images]


def check_images(messages: Sequence[Mapping[str, Any]], row: int, where: str = "messages") -> None:
    """Return if the images of a conversation can be decoded. Raises InvalidRows: names the row, turn and image."""
    for turn, message in enumerate(messages):
        for number, image in enumerate(message.get("images", ())):
            try:
                decode(image)
            except BrokenImage as error:
                found = f"{where}, turn {turn}: image {number} {error}"
                raise InvalidRows(f"{found}: expected a whole PNG, JPEG or WebP image", row=row) from error
