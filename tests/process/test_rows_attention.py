"""The attention of batches in one sequence: where its rows are, and how its backward pass is made to repeat."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from llama_stack_provider_trl.recipes.fast import attention, cpu_attention
from llama_stack_provider_trl.recipes.fast.layout import Group, Layout, Places

pytestmark = pytest.mark.process
GROUPS = {
    "rows": [(0, (3,)), (0, (5,)), (0, (1,))],
    "pairs": [(4, (3, 2)), (1, (1, 6))],
    "both": [(0, (3,)), (2, (4, 1)), (0, (2,))],
    "answers": [(3, (2, 1, 4)), (0, (2,))],
}


@pytest.fixture
def default_mode() -> Iterator[None]:
    yield
    torch.set_deterministic_debug_mode(0)


def one_kernel(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_bounds: torch.Tensor,
    key_bounds: torch.Tensor,
    longest_query: int,
    longest_key: int,
    dropout: float,
    *,
    is_causal: bool,
    return_debug_mask: bool,
    scale: float | None,
    window_size_left: int,
    window_size_right: int,
) -> tuple[torch.Tensor, None, None, None, None]:
    """What torch documents of `varlen_attn`, a row at a time: causal masks are aligned to the last query and key."""
    assert (dropout, return_debug_mask, window_size_right) == (0.0, False, 0)
    assert is_causal == (window_size_left < 0)
    outputs = []
    rows = zip(itertools.pairwise(query_bounds.tolist()), itertools.pairwise(key_bounds.tolist()), strict=True)
    for (first, last), (first_key, last_key) in rows:
        assert last - first <= longest_query
        assert last_key - first_key <= longest_key
        at = torch.arange(last_key - first_key - (last - first), last_key - first_key)[:, None]
        other = torch.arange(last_key - first_key)
        seen = (other <= at) if window_size_left < 0 else (other <= at) & (other >= at - window_size_left)
        parts = (queries[first:last], keys[first_key:last_key], values[first_key:last_key])
        parts = tuple(part.transpose(0, 1)[None] for part in parts)
        attended = F.scaled_dot_product_attention(*parts, attn_mask=seen, scale=scale, enable_gqa=True)
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs), None, None, None, None


def rows_of_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each call of `one_kernel`, which takes the place of torch's, from now on."""
    calls: list[int] = []

    def kernel(*arguments: Any, **options: Any) -> Any:
        calls.append(len(arguments[3]) - 1)
        return one_kernel(*arguments, **options)

    monkeypatch.setattr(attention, "_flash_attention", kernel)
    return calls


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_one_kernel_for_all_rows_gets_what_a_call_for_each_row_gets(
    groups: Sequence[Group], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = sum(prefix + sum(sizes) for prefix, sizes in groups)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, tokens, 8, requires_grad=True) for heads in (4, 2, 2))
    found = []
    calls = rows_of_calls(monkeypatch)
    monkeypatch.setattr(attention, "_multiprocessors", lambda device: 132)
    for has_kernel in (False, True):
        monkeypatch.setattr(attention, "has_kernel_of_rows", lambda query, value, found=has_kernel: found)
        output, _ = attention.attend_in_rows(
            torch.nn.Module(), query, key, value, None, layout=Layout(groups), sliding_window=window
        )
        gradients = torch.autograd.grad(output.square().sum(), (query, key, value))
        found.append((output, *gradients))
    assert calls == [len(Layout(groups).sizes())]
    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_this_torch_takes_the_arguments_of_one_kernel_also_backward(
    groups: Sequence[Group], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_multiprocessors", lambda device: 132)
    tokens = sum(prefix + sum(sizes) for prefix, sizes in groups)
    given = [
        torch.empty(1, heads, tokens, 8, dtype=torch.bfloat16, device="meta", requires_grad=True) for heads in (4, 2, 2)
    ]
    attended, _ = attention.attend_in_one_kernel(*given, Layout(groups), None, window)
    assert attended.shape == (tokens, 4, 8)
    assert attention._REPEATABLE in type(attended.grad_fn).__name__
    gradients = torch.autograd.grad(attended.sum(), given)
    assert [one.shape for one in gradients] == [one.shape for one in given]
    sums = torch.empty(4, tokens, device="meta")
    own = attention.differentiate_one_kernel(
        attended.detach(), *(one.detach() for one in (*given, attended, sums)), Layout(groups), None, window
    )
    assert [one.shape for one in own] == [one[0].transpose(0, 1).shape for one in given]


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_the_gradients_of_one_kernel_are_those_that_autograd_has(
    groups: Sequence[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's backward pass is that of `one_kernel` here."""

    def backward(gradient: torch.Tensor, *tensors: Any, rng_state: Any, unused: Any, **options: Any) -> Any:
        assert torch.get_deterministic_debug_mode() == 2
        leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
        attended, *_ = one_kernel(*leaves, *tensors[5:], return_debug_mask=False, **options)
        return torch.autograd.grad(attended, leaves, gradient)

    tokens = sum(prefix + sum(sizes) for prefix, sizes in groups)
    torch.manual_seed(0)
    given = [torch.randn(1, heads, tokens, 8, requires_grad=True) for heads in (4, 2, 2)]
    rows_of_calls(monkeypatch)
    monkeypatch.setattr(attention, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(attention, "_flash_attention_backward", backward)
    attended, sums = attention.attend_in_one_kernel(*given, Layout(groups), None, None)
    gradient = torch.randn(attended.shape)
    expected = torch.autograd.grad(attended, given, gradient)
    found = attention.differentiate_one_kernel(
        gradient, *(one.detach() for one in given), attended.detach(), sums, Layout(groups), None, None
    )
    assert torch.get_deterministic_debug_mode() == 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other[0].transpose(0, 1))


class _IndexAdds(TorchDispatchMode):
    """Records the mode in which the gradients of keys that are read several times are added."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "index_add" in str(func):
            self.modes.append(torch.get_deterministic_debug_mode())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("answers", "mode"), [((2, 1), 0), ((2, 1, 4), 2)])
def test_the_gradients_of_a_prompt_of_more_than_two_answers_are_added_in_a_fixed_order(
    answers: tuple[int, ...], mode: int, default_mode: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, tokens = Layout([(3, answers)]), 3 + sum(answers)
    given = [torch.randn(1, heads, tokens, 8, requires_grad=True) for heads in (4, 2, 2)]
    rows_of_calls(monkeypatch)
    monkeypatch.setattr(attention, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(
        attention, "_flash_attention_backward", lambda gradient, *tensors, **_: [one.clone() for one in tensors[:3]]
    )
    attended, sums = attention.attend_in_one_kernel(*given, layout, None, None)
    with _IndexAdds() as added:
        attended.sum().backward()
    assert added.modes == [mode, mode]
    tensors = [one.detach() for one in (*given, attended)]
    with _IndexAdds() as added:
        attention.differentiate_one_kernel(tensors[-1], *tensors, sums, layout, None, None)
    assert added.modes == [2, 2]
    assert torch.get_deterministic_debug_mode() == 0


def test_rows_have_a_call_each_where_one_kernel_would_take_too_much_for_a_fixed_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = rows_of_calls(monkeypatch)
    monkeypatch.setattr(attention, "_multiprocessors", lambda device: 3)
    monkeypatch.setattr(attention, "has_kernel_of_rows", lambda query, value: True)
    query = torch.randn(1, 2, 9, 8)
    for copies in (1, 2):  # of 2 heads and 3 multiprocessors: one for 2 rows
        monkeypatch.setattr(attention, "_limit", [copies * attention._sums(9, 2, 2, 8) - 1])
        layout = Layout([(0, (5,)), (0, (4,))])
        attention.attend_in_rows(torch.nn.Module(), query, query, query, None, layout=layout)
        assert calls == [2] * (copies - 1)
        calls.clear()
        attention.attend_in_rows(torch.nn.Module(), query, query, query, None, layout=layout, sliding_window=3)
        assert calls == [2], "with masks it would take more"
        calls.clear()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The queries and keys of each call of the CPU's kernel from now on."""
    calls, original = [], cpu_attention._forward

    def forward(query: torch.Tensor, key: torch.Tensor, *others: Any, **options: Any) -> Any:
        calls.append((query.shape[2], key.shape[2]))
        return original(query, key, *others, **options)

    monkeypatch.setattr(cpu_attention, "_forward", forward)
    return calls


@pytest.mark.parametrize("scaling", [None, 0.2])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("groups", [*GROUPS.values(), [(40, (50, 33)), (0, (45,))]], ids=[*GROUPS, "long"])
def test_on_a_cpu_attention_without_masks_has_the_same_numbers(
    groups: Sequence[Group], key_heads: int, scaling: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = counted(monkeypatch)
    tokens = sum(prefix + sum(sizes) for prefix, sizes in groups)
    torch.manual_seed(0)
    given = [torch.randn(1, tokens, heads, 8, requires_grad=True) for heads in (4, key_heads, key_heads)]
    weights, found = torch.randn(1, tokens, 4, 8), []
    for attend in (attention.attend_in_rows, cpu_attention.attend_on_cpu):
        views = (tensor.transpose(1, 2) for tensor in given)
        output, _ = attend(torch.nn.Module(), *views, None, layout=Layout(groups), scaling=scaling)
        found.append((output, *torch.autograd.grad((output * weights).sum(), given)))
    shared = [(row, prefix) for prefix, (_, *others) in groups for row in others if prefix]
    assert calls
    assert sorted(one for one in calls if one[0] != one[1]) == sorted(shared)  # no keys are repeated for a row
    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)


def test_rows_of_one_length_that_follow_each_other_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [(0, (45,)), (0, (45,)), (0, (45,)), (0, (45,)), (0, (9,)), (3, (6, 9))]
    shapes, original = [], cpu_attention._forward

    def forward(query: torch.Tensor, key: torch.Tensor, *others: Any, **options: Any) -> Any:
        shapes.append((query.shape[0], query.shape[2], key.shape[2]))
        return original(query, key, *others, **options)

    monkeypatch.setattr(cpu_attention, "_forward", forward)
    torch.manual_seed(0)
    given = [torch.randn(1, 207, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    weights, found = torch.randn(1, 207, 4, 8), []
    for is_joined in (True, False):
        if not is_joined:
            monkeypatch.setattr(cpu_attention._Queries, "can_be_joined_with", lambda self, row: False)
        views, layout = (tensor.transpose(1, 2) for tensor in given), Layout(groups)
        output, _ = cpu_attention.attend_on_cpu(torch.nn.Module(), *views, None, layout=layout)
        found.append((output, *torch.autograd.grad((output * weights).sum(), given)))
        if is_joined:  # the last row shares 3 tokens
            assert shapes == [(4, 45, 45), (2, 9, 9), (1, 9, 9), (1, 9, 3)]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)  # in each bit on one thread only


@pytest.mark.parametrize(
    "other",
    ["window", "dropout", "half precision", "no layout", "heads of two sizes", "two sequences", "numbers far apart"],
)
def test_what_that_kernel_does_not_compute_is_computed_as_elsewhere(
    other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, layout = counted(monkeypatch), Layout([(2, (4, 3))])
    torch.manual_seed(0)
    given = [torch.randn(2 if other == "two sequences" else 1, 2, 9, 8) for _ in range(3)]
    options: dict[str, Any] = {"layout": None if other in ("no layout", "two sequences") else layout}
    if other == "window":
        options["sliding_window"] = 5
    elif other == "dropout":
        options["dropout"] = 0.5
    elif other == "half precision":
        given = [tensor.bfloat16() for tensor in given]
    elif other == "numbers far apart":
        given = [tensor.transpose(2, 3).contiguous().transpose(2, 3) for tensor in given]
    elif other == "heads of two sizes":
        given[2] = given[2][..., :4]
    torch.manual_seed(1)
    expected, _ = attention.attend_in_rows(torch.nn.Module(), *given, None, **options)
    torch.manual_seed(1)
    found, _ = cpu_attention.attend_on_cpu(torch.nn.Module(), *given, None, **options)
    assert found.equal(expected)
    assert not calls
    given = [torch.randn(1, 2, 9, 8) for _ in range(3)]
    cpu_attention.attend_on_cpu(torch.nn.Module(), *given, None, layout=layout, sliding_window=6)  # of the longest row
    assert calls


@pytest.mark.parametrize("other", ["mask", "scores", "not causal"])
def test_other_attention_is_refused_on_a_cpu_too(other: str) -> None:
    given = [torch.randn(1, 2, 3, 8) for _ in range(3)]
    module, options = torch.nn.Module(), {"softcap": 30.0} if other == "scores" else {}
    module.is_causal = other != "not causal"
    with pytest.raises(ValueError, match="its attention"):
        cpu_attention.attend_on_cpu(
            module, *given, torch.zeros(1) if other == "mask" else None, layout=Layout([(0, (3,))]), **options
        )


def test_the_places_of_rows_that_share_a_prefix_repeat_its_keys() -> None:
    places = Layout([(0, (3,)), (2, (2, 3))]).places(torch.device("cpu"))
    assert places.query_bounds.tolist() == [0, 3, 7, 10]
    assert places.key_bounds.tolist() == [0, 3, 7, 12]
    assert (places.longest_query, places.longest_key) == (4, 5)
    assert places.keys is not None
    assert places.keys.tolist() == [0, 1, 2, 3, 4, 5, 6, 3, 4, 7, 8, 9]


def test_the_places_of_rows_that_share_nothing_are_the_sequence() -> None:
    layout = Layout([(0, (3,)), (0, (2,))])
    places = layout.places(torch.device("cpu"))
    assert isinstance(places, Places)
    assert places.keys is None
    assert places.query_bounds.dtype is torch.int32
    assert places.query_bounds.equal(places.key_bounds)
    assert layout.places(torch.device("cpu")) is places


class _FlashAttentionOfAName(torch.autograd.Function):
    """A node whose name is that of flash attention, and which records the mode that its backward pass runs in."""

    modes: ClassVar[list[int]] = []
    filling: ClassVar[list[bool]] = []
    """Whether torch fills memory that it allocates, in a mode with a fixed order."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        _FlashAttentionOfAName.modes.append(torch.get_deterministic_debug_mode())
        _FlashAttentionOfAName.filling.append(torch.utils.deterministic.fill_uninitialized_memory)
        return gradients[0] * 2


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_flash_attention_is_computed_backward_in_a_fixed_order(
    mode: int, default_mode: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_multiprocessors", lambda device: 132)
    torch.set_deterministic_debug_mode(mode)
    _FlashAttentionOfAName.modes.clear()
    _FlashAttentionOfAName.filling.clear()
    values = torch.randn(2, 2, 1, requires_grad=True)
    attended = attention.repeatable(_FlashAttentionOfAName.apply(values))
    other = attention.repeatable(values * 3)  # a node of another name
    (attended + other).sum().backward()
    assert _FlashAttentionOfAName.modes == [2]
    assert torch.get_deterministic_debug_mode() == mode
    assert (_FlashAttentionOfAName.filling, torch.utils.deterministic.fill_uninitialized_memory) == ([False], True)
    assert values.grad is not None
    assert values.grad.flatten().tolist() == [5.0] * 4


@pytest.mark.parametrize(("rows", "expected"), [(1, 0), (3, 2)])
def test_a_fixed_order_takes_bounded_memory(
    rows: int, expected: int, default_mode: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_multiprocessors", lambda device: 12)
    monkeypatch.setattr(attention, "_limit", [0])
    attention.limit_accumulators(2 * attention._sums(5, 3, 2, 8))  # two copies, and not six
    _FlashAttentionOfAName.modes.clear()
    values = torch.randn(5, 2, 8, requires_grad=True)
    attention.repeatable(_FlashAttentionOfAName.apply(values), rows).sum().backward()
    assert _FlashAttentionOfAName.modes == [expected]


def test_without_gradients_nothing_is_to_be_repeated() -> None:
    values = torch.randn(4)
    assert attention.repeatable(values) is values


@pytest.mark.parametrize(
    ("dtype", "head", "device"),
    [
        (torch.bfloat16, 8, "cpu"),
        (torch.float32, 64, "meta"),
        (torch.bfloat16, 512, "meta"),
        (torch.bfloat16, 12, "meta"),
    ],
)
def test_one_kernel_is_for_half_precision_and_heads_of_its_sizes_on_a_gpu(
    dtype: torch.dtype, head: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_is_on_gpu", lambda tensor: tensor.device.type == "meta")
    monkeypatch.setattr(attention, "largest_head", lambda device: 256)
    query = torch.empty(1, 2, 4, head, dtype=dtype, device=device)
    assert not attention.has_kernel_of_rows(query, query)
    fitting = torch.empty(1, 2, 4, 64, dtype=torch.bfloat16, device="meta")
    assert attention.has_kernel_of_rows(fitting, fitting)
    assert not attention.has_kernel_of_rows(fitting, fitting[..., :48])  # values of latent attention


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((7, 5), 0), ((8, 0), 256), ((8, 6), 192), ((8, 9), 192), ((9, 0), 256), ((10, 0), 256), ((12, 0), 192)],
)
def test_thelargest_head_depends_on_the_gpu(
    capability: tuple[int, int], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert attention.largest_head.__wrapped__(torch.device("cuda")) == expected


@pytest.mark.parametrize(
    ("sizes", "heads", "head_size", "expected"),
    [
        ([1000], 8, 64, 20 * 4 * 1128 * 8 * 64),  # 160 multiprocessors, 8 heads; 128 tokens more for each row
        ([1000, 500, 500, 10], 8, 64, 20 * 4 * 1128 * 8 * 64),  # a call for each takes more than one for all
        ([500] * 4, 8, 64, 5 * 4 * (2000 + 4 * 128) * 8 * 64),
        ([100] * 40, 8, 64, 4 * 40 * 228 * 8 * 64),  # one for all, whose rows keep all busy without a copy
        ([1000] * 10, 2, 64, 80 * 4 * 1128 * 2 * 64),
        ([5000] * 5, 64, 128, 4 * 5 * 5128 * 64 * 128),  # no copy: as many as the limit allows
        ([4096], 32, 120, 5 * 4 * 4224 * 32 * 128),  # heads of a multiple of 32
        ([4096], 32, 136, 5 * 4 * 4224 * 32 * 192),  # or of 64
        ([8192], 32, 128, 3 * 4 * 8320 * 32 * 128),  # of 5 copies the limit allows 3
        ([10**6], 32, 128, 4 * (10**6 + 128) * 32 * 128),
    ],
)
def test_the_most_that_flash_attention_takes_for_its_sums(
    sizes: list[int], heads: int, head_size: int, expected: int
) -> None:
    assert attention.accumulator_bytes(sizes, heads, head_size) == expected


@pytest.mark.parametrize("multiprocessors", [1, 46, 84, 108, 132, 148])
@pytest.mark.parametrize(("tokens", "heads", "rows"), [(300, 4, 1), (4096, 32, 1), (8192, 32, 2), (60000, 64, 12)])
def test_no_gpu_takes_more_for_its_sums_than_is_counted(
    multiprocessors: int, tokens: int, heads: int, rows: int
) -> None:
    sums = attention._sums(tokens, rows, heads, 128)
    limit = attention.LARGEST_ACCUMULATORS
    counted = attention._most_of_call(sums, heads, rows, limit)
    taken = attention._copies(multiprocessors, heads, rows) * sums
    assert counted >= (taken if taken <= limit else sums)
    shorter = [tokens // rows - number for number in range(rows)]
    together, alone = attention.fixed_order_bytes(shorter, heads, 128)
    for count in range(1, rows + 1):  # of any batch of some of these rows
        sums = attention._sums(sum(shorter[:count]), count, heads, 128)
        assert attention._copies(multiprocessors, heads, count) * sums <= together
    assert attention._copies(multiprocessors, heads, 1) * attention._sums(shorter[0], 1, heads, 128) <= alone
