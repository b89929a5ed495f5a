"""Renders chat templates within limits: a template is a program of the model's author.

transformers renders in a sandbox that reaches no files and no attributes, and bounds neither time nor memory: loops in
loops end after years, and a text that is doubled 40 times has a terabyte. A thread watches the CPU time of the one that
renders, and raises an exception in it; Linux limits what the process may allocate meanwhile. A single call of C code,
such as an operation on numbers of a million digits, gives no other thread a chance: where the exception has no effect,
a timer of the kernel ends the process, whose end `specs.chat_templates.UNENDED` explains. Powers and products of large
numbers are refused before, which lets the process live. All of that takes 20 us for each text.
"""

from __future__ import annotations

import ctypes
import operator
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from jinja2.sandbox import SandboxedEnvironment

from ...errors import JobFailure
from ...specs.chat_templates import RENDER_SECONDS
from ...specs.events import Reason
from ...specs.rows import Message
from ...system.cpu_timer import CpuTimer
from ...system.process import allocated_memory
from .tokenizer_calls import SECONDS_PER_CHARACTER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS = RENDER_SECONDS
_UNTIL_THE_KERNEL = 2.0
"""Seconds of CPU time within which the watch, which needs the interpreter's lock, has ended what it can."""
MEMORY = 1 << 30
"""Bytes that the process may allocate meanwhile."""
MOST_TEXT = 64 << 20
"""Characters of a text. A row has at most 16 MiB."""
_BYTES_PER_CHARACTER = 512
"""What tokenizing may take. A byte-level BPE takes 180 bytes (measured)."""
_MOST_BITS = 4096
"""Of a whole number that a template multiplies."""
_POLL_S = 0.5
_LINUX = sys.platform == "linux"


class _TooSlow(BaseException):
    """Raised by the watch in a thread that renders. No template, and no library, catches it."""


def rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **options: Any) -> str:
    """The text that a tokenizer's chat template writes, which is not tokenized. Raises TemplateError, TypeError,
    ValueError: the template refuses the conversation; JobFailure: invalid_model, it takes more than the limits
    allow."""
    render = partial(tokenizer.apply_chat_template, list(messages), tokenize=False, **options)
    return _within_limits(tokenizer, render)


def rendered_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **options: Any) -> list[int]:
    """What the tokenizer's own `apply_chat_template` makes of a conversation, tokenized by that too. Raises as
    `rendered`."""
    characters = len(rendered(tokenizer, messages, **options))  # what is tokenized is bounded first
    render = partial(
        tokenizer.apply_chat_template,
        list(messages),
        tokenize=True,
        return_dict=False,
        tokenizer_kwargs={"verbose": False},  # a long one is counted, and cut, elsewhere
        **options,
    )
    return list(_limited(tokenizer, render, characters))


def processed_ids(
    processor: Any, tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **options: Any
) -> list[int]:
    """As `rendered_ids`, of a processor, with the tokens of the images in the messages' parts."""
    characters = len(rendered(tokenizer, messages, **options))
    render = partial(
        processor.apply_chat_template,
        list(messages),
        chat_template=tokenizer.chat_template,
        tokenize=True,
        return_dict=True,
        **options,
    )
    found: Any = _limited(tokenizer, render, characters)["input_ids"]
    return [int(token) for token in (found[0] if isinstance(found[0], list) else found)]


def limit(tokenizer: PreTrainedTokenizerBase) -> None:
    """Have a tokenizer that is given to a library render within the limits, too."""
    apply = tokenizer.apply_chat_template

    def limited(messages: Any, *, tokenize: bool = False, **options: Any) -> str:
        assert not tokenize
        return _within_limits(tokenizer, partial(apply, messages, tokenize=False, **options))

    tokenizer.apply_chat_template = limited


def _within_limits(tokenizer: PreTrainedTokenizerBase, render: Callable[[], Any]) -> str:
    found = _limited(tokenizer, lambda: str(render()))
    if len(found) > MOST_TEXT:
        raise _failure(tokenizer, f"{len(found)} characters for one conversation, expected at most {MOST_TEXT}")
    return found


def _limited[Result](tokenizer: PreTrainedTokenizerBase, render: Callable[[], Result], characters: int = 0) -> Result:
    """What a call renders within the limits. Raises TemplateError, TypeError, ValueError, JobFailure: as `rendered`.

    Args:
        characters: that it tokenizes, too.
    """
    _refuse_large_numbers()
    try:
        return _tried(render, characters)
    except _TooSlow:
        raise _failure(tokenizer, f"more than {SECONDS:g} s of CPU time to write one conversation") from None
    except MemoryError:
        raise _failure(tokenizer, f"more than {MEMORY >> 20} MiB of memory to write one conversation") from None
    except (TemplateError, TypeError, ValueError):
        raise
    except RecursionError as error:
        raise ValueError("it calls itself too deeply") from error
    except (ArithmeticError, LookupError, AttributeError, AssertionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}"[:500]) from error


def _tried[Result](render: Callable[[], Result], characters: int) -> Result:
    """What a call renders within the limits. Raises MemoryError, _TooSlow, and what the call raises."""
    global _known
    try:
        with _Limits(characters):
            return render()
    except MemoryError:
        # The memory of the process may have grown since it was read: only a limit from a fresh reading counts.
        _known = 0.0, 0
    with _Limits(characters):
        return render()


def _failure(tokenizer: PreTrainedTokenizerBase, takes: str) -> JobFailure:
    return JobFailure(
        Reason.invalid_model,
        f"the chat template of {tokenizer.name_or_path!r} takes {takes}: correct the template in the model's tokenizer "
        "files (chat_template.jinja, or chat_template in tokenizer_config.json)",
    )


@cache
def _refuse_large_numbers() -> None:
    operators = SandboxedEnvironment.default_binop_table
    for name in ("*", "**"):
        operators[name] = partial(_of_small_numbers, operators[name])
    SandboxedEnvironment.intercepted_binops = frozenset({*SandboxedEnvironment.intercepted_binops, "*", "**"})


def _of_small_numbers(compute: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    if isinstance(one, int) and isinstance(other, int):
        bits = one.bit_length() + other.bit_length()
        if compute is operator.pow:
            bits = one.bit_length() * abs(other)
        if bits > _MOST_BITS:
            raise OverflowError(f"a number of {bits} bits, at most {_MOST_BITS} are supported")
    return compute(one, other)


class _Limits:
    """Limits of memory and CPU time while a template is rendered.

    Args:
        characters: that are tokenized meanwhile.
    """

    def __init__(self, characters: int) -> None:
        self._seconds = SECONDS + characters * SECONDS_PER_CHARACTER
        self._memory = MEMORY + characters * _BYTES_PER_CHARACTER
        self._timer: CpuTimer | None = None

    def __enter__(self) -> None:
        self._before: tuple[int, int] | None = None
        self._thread = threading.get_ident()
        _watch.add(self._thread, self._seconds)
        if _LINUX:
            self._before = resource.getrlimit(resource.RLIMIT_DATA)
            soft, most = self._before
            size = _allocated() + self._memory
            resource.setrlimit(resource.RLIMIT_DATA, (size if soft < 0 else min(size, soft), most))
        try:
            self._timer = CpuTimer(self._seconds + _UNTIL_THE_KERNEL)
        except OSError:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._before is not None:
            resource.setrlimit(resource.RLIMIT_DATA, self._before)
        _watch.remove(self._thread)


_PAGE = resource.getpagesize()


_SAME_S = 0.05
"""Seconds for which the memory of the process is taken to be the same: to read it takes as long as a short text."""
_known = 0.0, 0


def _allocated() -> int:
    """About what `limit_memory` counts."""
    global _known
    now = time.monotonic()
    if now - _known[0] > _SAME_S:
        _known = now, _read_allocated()
    return _known[1]


def _read_allocated() -> int:
    """In 10 us; `allocated_memory` takes four times as long."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read(200).split()[5]) * _PAGE
    except (OSError, IndexError, ValueError):
        return allocated_memory()


class _Watch:
    """Raises an exception in threads that take too much CPU time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[int, tuple[int, float]] = {}
        """Thread -> its CPU clock, and the time at which it is ended."""
        self._has_thread = False
        self._wake = threading.Event()

    def add(self, thread: int, seconds: float) -> None:
        """Watch the calling thread, which may take so much CPU time."""
        clock = time.pthread_getcpuclockid(thread) if _LINUX else time.CLOCK_MONOTONIC
        with self._lock:
            self._watched[thread] = clock, time.clock_gettime(clock) + seconds
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._run, name="chat template", daemon=True).start()
        if not self._wake.is_set():
            self._wake.set()

    def remove(self, thread: int) -> None:
        """End watching a thread. The exception that is raised in it may still be on its way: it is withdrawn."""
        with self._lock:
            if self._watched.pop(thread, None) is None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            time.sleep(_POLL_S)
            with self._lock:
                if not self._watched:
                    self._wake.clear()
                for ident, (clock, end) in [*self._watched.items()]:
                    if time.clock_gettime(clock) > end:
                        del self._watched[ident]
                        error = ctypes.py_object(_TooSlow)
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), error)


_watch = _Watch()


def _after_fork() -> None:
    """The fork has one thread, and the lock as it was."""
    global _watch
    _watch = _Watch()


os.register_at_fork(after_in_child=_after_fork)
