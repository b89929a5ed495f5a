"""Images in rows: where they may be, and the sentences about what is no image."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRows
from llama_stack_provider_trl.specs.images import MARK, as_parts
from llama_stack_provider_trl.specs.job import RowNames
from llama_stack_provider_trl.specs.rows import PreferenceExample, SftExample, check_rows, parse_row
from llama_stack_provider_trl.system.json_rows import encoded

PNG, JPEG = b"\x89PNG\r\n\x1a\n" + b"one", b"\xff\xd8\xff" + b"other"
ANSWER = {"role": "assistant", "content": "A cat."}


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def row(content: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, ANSWER], **columns}


def first_turn(given: dict[str, Any]) -> tuple[str, list[bytes]]:
    example = parse_row(given, 0, "sft")
    assert isinstance(example, SftExample)
    assert example.messages is not None
    return example.messages[0]["content"], example.messages[0].get("images", [])


IMAGE_PROMPT = [{"role": "user", "content": [{"type": "image", "image": uri(PNG)}]}]


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


@pytest.mark.parametrize(
    ("given", "content", "images"),
    [
        (
            row([text("See "), {"type": "image_url", "image_url": {"url": uri(PNG)}}, text("?")]),
            f"See {MARK}?",
            [PNG],
        ),
        (row([{"type": "image", "image": uri(PNG)}, text("?")]), f"{MARK}?", [PNG]),
        (row([{"type": "image", "image": {"bytes": uri(PNG), "path": None}}]), MARK, [PNG]),
        # Arrow gives each part the keys of all others.
        (row([{"type": "image", "text": None}, {"type": "text", "text": "?"}], images=[uri(PNG)]), f"{MARK}?", [PNG]),
        (row("<image> and <image>?", images=[uri(PNG), uri(JPEG)]), f"{MARK} and {MARK}?", [PNG, JPEG]),
        (
            row([{"type": "image", "index": 1}, {"type": "image", "index": 0}], images=[uri(PNG), uri(JPEG)]),
            MARK * 2,
            [JPEG, PNG],
        ),
        (row("?", image=uri(PNG)), f"{MARK}?", [PNG]),
        (row("Write <image>."), "Write <image>.", []),
        (row("?", images=None, image=""), "?", []),
        (row("?", images=None, image=uri(PNG)), f"{MARK}?", [PNG]),
        (
            row(
                [text("<image>, then "), {"type": "image", "image": uri(JPEG)}, text("?")],
                images=[{"bytes": uri(PNG)}],
            ),
            f"{MARK}, then {MARK}?",
            [PNG, JPEG],
        ),
    ],
)
def test_where_images_may_be(given: dict[str, Any], content: str, images: list[bytes]) -> None:
    assert first_turn(given) == (content, images)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (row([{"type": "image", "image": "https://a.test/b.png"}]), "address 'https://a.test/b.png', which no"),
        (row([{"type": "image", "path": "b.png"}]), "'b.png', expected a data URI"),
        (row([{"type": "image", "image": uri(b"GIF89a")}]), "another format, expected PNG, JPEG or WebP"),
        (row([{"type": "image", "image": uri(PNG)[:-1]}]), "a data URI that is not base64"),
        (row([{"type": "image"}]), "an image part without an image"),
        (row("<image> <image>", images=[uri(PNG)]), "column images: found 1 image, expected 2, one for each"),
        (row("<image>?", images=None), "column images: found 0 images, expected 1, one for each"),
        (row("<image>?", image=float("nan")), "column image: found 0 images, expected 1, one for each"),
        (row("<image>?", image="b.png"), "column image, image 0: found 'b.png', expected a data URI"),
        (row("?", images=[uri(PNG), "b.png"]), "column images, image 1: found 'b.png', expected a data URI"),
        (row(f"<image> {MARK}", images=[uri(PNG)]), "U+FFFC"),
        (row([text(f"<image> {MARK}"), {"type": "image"}], images=[uri(PNG), uri(PNG)]), "one for each placeholder"),
        (row([{"type": "image", "image": uri(PNG)}, text(MARK)]), "U+FFFC"),
        (row([{"type": "video", "video": "a.mp4"}]), "audio and video are not supported"),
        (row([{"type": "input_audio", "input_audio": {}}]), "audio and video are not supported"),
        (row("?", images=[{"bytes": {"binary": "9 bytes"}, "path": None}]), "binary value (9 bytes) that is no image"),
        (
            {"messages": [*row("?")["messages"], {"role": "assistant", "content": [{"type": "image"}]}]},
            "an image in an assistant turn, expected images in turns of users",
        ),
        (
            row([{"type": "image", "index": 0}, {"type": "image", "index": 0}], images=[uri(PNG), uri(JPEG)]),
            "image parts with the indexes [0, 0], expected each image of images once, from 0 on",
        ),
        (row([{"type": "image", "index": "a"}], images=[uri(PNG)]), "index: found 'a', expected the number of"),
    ],
)
def test_what_is_no_image_is_refused_by_a_sentence(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRows) as caught:
        parse_row(given, 0, "sft")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("use", "given"),
    [
        ("reward", {"prompt": "<image>?", "chosen": "a", "rejected": "b", "images": [uri(PNG)]}),
        ("orpo", {"prompt": IMAGE_PROMPT, "chosen": "a", "rejected": "b"}),
        ("kto", {**row([{"type": "image", "image": uri(PNG)}]), "label": True}),
        ("grpo", {"prompt": IMAGE_PROMPT}),
        ("prompts", {"prompt": "?", "images": [{"bytes": uri(PNG)}]}),
    ],
)
def test_every_other_method_refuses_images_by_name(use: Any, given: dict[str, Any]) -> None:
    expected = r"found images, expected text alone: .* reads no images, SFT, DPO, CPO and SimPO do"
    with pytest.raises(InvalidRows, match=expected):
        parse_row(given, 0, use)


ASKED = {"role": "user", "content": [{"type": "image", "image": uri(PNG)}, text("?")]}
PLACED = {"role": "user", "content": [{"type": "image"}, text("?")]}
OTHER = {"role": "assistant", "content": "A dog."}


@pytest.mark.parametrize(
    "given",
    [
        {"prompt": [ASKED], "chosen": "A cat.", "rejected": "A dog."},
        {"prompt": "<image>?", "chosen": "A cat.", "rejected": ["A dog."], "image": {"bytes": uri(PNG), "path": None}},
        {"prompt": [PLACED], "chosen": [ANSWER], "rejected": [OTHER], "images": [uri(PNG)]},
        {"chosen": [PLACED, ANSWER], "rejected": [PLACED, OTHER], "images": [uri(PNG)]},
        {"prompt": [ASKED], "chosen": [ASKED, ANSWER], "rejected": [ASKED, OTHER]},
        {"input": {"messages": [ASKED]}, "preferred_output": [ANSWER], "non_preferred_output": [OTHER]},
        {"prompt": "?", "responses": ["A dog.", "A cat."], "scores": [1, 2], "images": [uri(PNG)]},
    ],
)
def test_both_answers_of_a_pair_share_the_images_of_its_prompt(given: dict[str, Any]) -> None:
    example = parse_row(given, 0, "dpo")
    assert isinstance(example, PreferenceExample)
    assert example.prompt == [{"role": "user", "content": f"{MARK}?", "images": [PNG]}]
    assert [pair.chosen + pair.rejected for pair in example.written_out()] == [[ANSWER, OTHER]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"rejected": [{"role": "assistant", "content": [{"type": "image"}]}]},
            "column rejected, turn 0 (assistant): ",
        ),
        ({"images": [uri(PNG), uri(PNG)]}, "column images: found 2 images, expected 1, one for each placeholder"),
        ({"images": None}, "column images: found 0 images, expected 1, one for each placeholder"),
    ],
)
def test_an_image_of_an_answer_or_too_many_of_a_pair_are_refused(changed: dict[str, Any], message: str) -> None:
    pair = {"prompt": [PLACED], "chosen": [ANSWER], "rejected": [OTHER], "images": [uri(PNG)]}
    with pytest.raises(InvalidRows) as caught:
        parse_row({**pair, **changed}, 0, "dpo")
    assert message in str(caught.value)


def test_columns_of_that_name_with_something_else_are_not_read_by_other_methods() -> None:
    report = check_rows([{"prompt": "?", "chosen": "a", "rejected": "b", "image": "b.png"}], "orpo")
    assert any("columns never read: image" in warning for warning in report.warnings)


@pytest.mark.parametrize("image", ["b.png", ["a.png", "b.png"], 3, {"width": 3}])
def test_a_column_of_that_name_without_images_is_named_as_not_read_where_nothing_refers_to_it(image: Any) -> None:
    assert check_rows([row("?", image=image)], "sft").warnings == ["columns never read: image"]
    example = parse_row(row("?", image=image), 7, "sft")
    assert isinstance(example, SftExample)
    assert (example.messages or [])[0] == {"role": "user", "content": "?"}
    assert (example.unread_image or "").startswith("row 7: column image")


def test_such_a_column_beside_pairs_is_named_as_not_read() -> None:
    pair = {"prompt": "?", "chosen": "a", "rejected": "b", "image": "b.png"}
    assert check_rows([pair], "dpo").warnings == ["columns never read: image"]
    example = parse_row(pair, 7, "dpo")
    assert isinstance(example, PreferenceExample)
    assert (example.unread_image or "").startswith("row 7: column image")


def test_a_null_column_is_that_of_the_option_columns() -> None:
    names = RowNames(columns={"images": "bilder"})
    with pytest.raises(InvalidRows, match="column images: found 0 images"):
        parse_row(row("<image>?", bilder=None), 0, "sft", names=names)
    check_rows([row("<image>?", bild=None), row("?", bilder=[uri(PNG)])], "sft", names=names)


def test_keys_of_image_parts_that_nothing_reads_are_named() -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": uri(PNG), "detail": "high"}, "cache": None},
        {"type": "image", "image": {"bytes": uri(PNG), "path": "a.png"}, "index": None, "max_pixels": 99},
    ]
    assert check_rows([row(parts)], "sft").warnings == ["message keys never read: image.max_pixels, image_url.detail"]
    images = [{"bytes": uri(PNG), "path": None, "caption": "A cat."}]
    assert check_rows([row("?", images=images)], "sft").warnings == ["message keys never read: images.caption"]


def test_bytes_of_images_in_parquet_files_are_stored_and_others_are_not() -> None:
    stored = json.loads(encoded(row("?", images=[{"bytes": PNG, "path": "a.png"}], other={"bytes": b"12"}), 0))
    assert stored["other"] == {"bytes": {"binary": "2 bytes"}}
    del stored["other"]
    assert first_turn(stored) == (f"{MARK}?", [PNG])


def test_a_content_as_parts() -> None:
    image = {"type": "image"}
    assert as_parts(f"a{MARK}{MARK}b", has_images=True) == [text("a"), image, image, text("b")]
    assert as_parts(f"a{MARK}", has_images=False) == [text(f"a{MARK}")]
