"""One of two NCCL ranks: prints by how many bytes an all-reduce lets its GPU's memory grow beyond torch's own."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def beyond_torch() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    before = beyond_torch()
    dist.init_process_group("cpu:gloo,cuda:nccl")
    dist.all_reduce(torch.ones(64 << 20, device="cuda"))
    torch.cuda.synchronize()
    print(f"grown={beyond_torch() - before}", flush=True)
    dist.destroy_process_group()
