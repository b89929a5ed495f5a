"""Compiles and runs one Triton kernel: exit status 0 where it works. `@triton.jit` needs a file to read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def double(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + offsets, 2 * tl.load(source + offsets, mask=offsets < count), mask=offsets < count)


if __name__ == "__main__":
    source = torch.arange(1000, device="cuda", dtype=torch.float32)
    target = torch.empty_like(source)
    double[(4,)](source, target, 1000, BLOCK=256)
    if not torch.equal(target, 2 * source):
        raise RuntimeError("the kernel computed something else")
