"""What of an answer is sent while its tokens come, and in which order threads get their turns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from llama_stack_provider_trl.recipes.data.token_texts import TokenTexts
from llama_stack_provider_trl.recipes.serving.text import AnswerText, written_token
from llama_stack_provider_trl.recipes.serving.turns import Turns
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.process

TEXTS = ("Plain words.", "Zwölf 😊 Köpfe: 你好!", "one two  three\n\n  four", "\ufffd is a character, too", "")


def with_byte_tokens() -> PreTrainedTokenizerFast:
    letters = sorted({*"Zwölf !", "\ufffd"})
    vocab = {token: at for at, token in enumerate(["<unk>", *letters, *(f"<0x{byte:02X}>" for byte in range(256))])}
    made = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def sentencepiece() -> PreTrainedTokenizerFast:
    """As that of Llama 2: a space is a part of the next word, and the decoder drops that of the first one."""
    letters = sorted({*"onetw▁."})
    pairs = dict.fromkeys((word[:n], word[n]) for word in ("▁one", "▁two", "▁ten", "▁▁") for n in range(1, len(word)))
    names = ["<unk>", "<s>", *letters, *map("".join, pairs), *(f"<0x{byte:02X}>" for byte in range(256))]
    made = Tokenizer(models.BPE({name: at for at, name in enumerate(names)}, [*pairs], byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>")


@pytest.fixture(scope="module")
def tokenizer() -> object:
    return tiny_tokenizer(vocabulary=300)  # few words are tokens: characters take several


def parts_of(tokenizer: object, text: str, *stops: str) -> tuple[list[str], AnswerText]:
    answer = AnswerText(tokenizer, stops)  # type: ignore[arg-type]
    parts = []
    for token in tokenizer(text)["input_ids"]:  # type: ignore[operator]
        parts.append(answer.add(token))
        if answer.is_stopped:
            return parts, answer
    return [*parts, answer.rest()], answer


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("stops", [(), ("never there", "!?")])
def test_the_parts_together_are_the_text_and_none_has_half_a_character(
    tokenizer: object, text: str, stops: tuple[str, ...]
) -> None:
    parts, answer = parts_of(tokenizer, text, *stops)
    assert "".join(parts) == text
    assert not answer.is_stopped
    if "\ufffd" not in text:
        assert not [part for part in parts if "\ufffd" in part]
    assert len(text) < 3 or sum(map(bool, parts)) > 1


@pytest.mark.parametrize(
    ("text", "stops", "kept"),
    [
        ("one two three", ("two",), "one "),
        ("one two three", ("three", "two"), "one "),
        ("one two three", ("two three", "wo"), "one t"),
        ("ababac", ("abac",), "ab"),
        ("Köpfe 😊 und mehr", ("😊",), "Köpfe "),
        ("one", ("one",), ""),
    ],
)
def test_an_answer_ends_before_the_first_stop_text_and_no_part_of_it_was_sent(
    tokenizer: object, text: str, stops: tuple[str, ...], kept: str
) -> None:
    parts, answer = parts_of(tokenizer, text, *stops)
    assert "".join(parts) == kept
    assert answer.is_stopped
    assert answer.rest() == ""


def test_the_beginning_of_a_stop_text_is_sent_at_the_end(tokenizer: object) -> None:
    parts, _ = parts_of(tokenizer, "one tw", "two")
    assert parts[-1] == "tw"


def test_turns_are_given_in_the_order_in_which_they_were_asked_for() -> None:
    turns, order, threads = Turns(), [], []
    turns.take()

    def wait(number: int) -> None:
        with turns:
            order.append(number)

    for number in range(8):
        threads.append(threading.Thread(target=wait, args=(number,)))
        threads[-1].start()
        while len(turns._waiting) <= number:
            time.sleep(0.001)
    turns.give()
    for thread in threads:
        thread.join()
    assert order == list(range(8))


@pytest.mark.parametrize("make", [tiny_tokenizer, with_byte_tokens])
def test_the_bytes_of_all_tokens_are_those_of_the_text(make: Callable[[], PreTrainedTokenizerFast]) -> None:
    """One whose tokens are bytes, and one with characters and tokens for single bytes, as SentencePiece has them."""
    tokenizer = make()
    text = "Zwölf 😊 你好 \ufffd!"
    found = [written_token(tokenizer, token) for token in tokenizer.encode(text, add_special_tokens=False)]
    assert b"".join(part or b"?" for _, part in found).decode().strip() == text.strip()
    partial = [(shown, part) for shown, part in found if shown.startswith("bytes:")]
    assert len({shown for shown, _ in partial}) > 1
    assert all(shown == "bytes:" + "".join(f"\\x{byte:02x}" for byte in part or b"") for shown, part in partial)


@pytest.mark.parametrize("text", ["one two ten", "one  two. ten", "one 你好 two"])
@pytest.mark.parametrize("cut", [1, 2])
def test_a_space_that_is_a_part_of_the_next_word_is_not_lost(text: str, cut: int) -> None:
    """Of a completion, which continues its prompt, also at its beginning; the tokens have the text together."""
    tokenizer = sentencepiece()
    ids = [tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]
    prompt, rest = ids[: 1 + cut], ids[1 + cut :]
    begun = str(tokenizer.decode(prompt, skip_special_tokens=True))
    for before, expected in ((prompt, text.removeprefix(begun)), ([], str(tokenizer.decode(rest)))):
        answer, parts, written = AnswerText(tokenizer, (), before), list[str](), list[bytes]()
        for token in rest:
            _, content = written_token(tokenizer, token, answer.last())
            assert content is not None
            written.append(content)
            parts.append(answer.add(token))
        assert "".join([*parts, answer.rest()]) == expected
        assert b"".join(written).decode() == expected


def test_a_preview_shows_the_spaces_of_each_token() -> None:
    tokenizer = sentencepiece()
    texts = TokenTexts(tokenizer)
    for text in ("one two", "one  two", "one   two"):
        assert "".join(texts.of(tokenizer(text)["input_ids"])) == f" {text}"
