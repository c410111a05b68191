"""PyTorch's caching allocator over a CUDA that has no device: reads lists of requests, writes what it did with each.

A line is `[[name, bytes, stream], ...]`, where a negative name frees. The answer has for each what there is behind it:
allocated bytes, reserved bytes, retries, times out of memory.
"""

import json
import sys
from contextlib import suppress

import torch

_allocate = torch._C._cuda_cudaCachingAllocator_raw_alloc
_free = torch._C._cuda_cudaCachingAllocator_raw_delete


def play(events: list[tuple[int, int, int]]) -> list[tuple[int, int, int, int]]:
    """The answers; everything is free again behind them."""
    torch._C._cuda_resetAccumulatedMemoryStats(0)
    answers, addresses = [], dict[int, int]()
    for name, nbytes, stream in events:
        if name < 0:
            if -name in addresses:
                _free(addresses.pop(-name))
        elif nbytes:
            with suppress(torch.OutOfMemoryError):
                addresses[name] = _allocate(nbytes, stream)
        stats = torch._C._cuda_memoryStats(0)
        allocated, reserved = (stats[f"{what}_bytes"]["all"]["current"] for what in ("allocated", "reserved"))
        answers.append((allocated, reserved, stats["num_alloc_retries"], stats["num_ooms"]))
    for address in addresses.values():
        _free(address)
    torch._C._cuda_emptyCache()
    return answers


if __name__ == "__main__":
    # Sets the allocator up, and then fails: nothing else is there.
    with suppress(RuntimeError):
        torch.cuda.init()
    for line in sys.stdin:
        print(json.dumps(play(json.loads(line))), flush=True)
