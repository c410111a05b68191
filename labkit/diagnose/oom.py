"""PyTorch's out-of-memory messages, of every version since 0.4.

- 0.4 to 2.0: `CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 79.15 GiB total capacity; 76.30 GiB already
  allocated; 1.20 GiB free; 77.00 GiB reserved in total by PyTorch)`; until 1.3 it says `cached` at the end, which
  is what it keeps unallocated (`amount_cached - amount_allocated`), and since 1.8 `78.00 GiB allowed;` before it where
  the process is limited.
- since 2.1 (`c10/cuda/CUDACachingAllocator.cpp`, `malloc`): `... GPU 0 has a total capacity of 79.15 GiB of which 1.20
  GiB is free. Process 123 has 1.00 GiB memory in use. Including non-PyTorch memory, this process has 77.00 GiB memory
  in use. 78.00 GiB allowed; Of the allocated memory 76.00 GiB is allocated by PyTorch, with 1.00 GiB allocated in
  private pools (e.g., CUDA Graphs), and 512.00 MiB is reserved by PyTorch but unallocated.` 2.1 spells `capacty`; some
  versions print the device as a character; what NVML does not tell is left out.
- with `backend:cudaMallocAsync` (`CUDAMallocAsyncAllocator.cpp`): a table below `Allocation on device 0 would exceed
  allowed memory. (out of memory)`.

The texts of 2.14 are those in its library (`libc10_cuda.so`). Amounts are rounded to a hundredth of their unit.
"""

import re
from dataclasses import replace

from labkit.diagnose.facts import Before, Evidence, OutOfMemory

_BEGINS = re.compile(
    r"\bOutOfMemoryError: \S|^[\w.]{0,40}OutOfMemoryError$|(?:CUDA|HIP) out of memory|"
    r"Allocation on device \S{0,8} ?would exceed allowed memory|out of memory\. Tried to allocate "
)
_SIGNS = ("out of memory", "OutOfMemoryError", "would exceed allowed")
"""One of these is where any message begins."""
_ENDS = re.compile(
    r"Requested size: \S+ \w+|reserved in total by PyTorch|"
    r"\bcached\)|reserved by PyTorch but unallocated|memory fraction\)\s+:|more than 1EB"
)
_GOES_ON = re.compile(r"Tried to|Allocation on device|Requested")
_MOST = 4000
"""Characters of a message; torch's have some 900."""

_AMOUNT = r"(\d{1,20}(?:\.\d{1,4})?) ?(bytes|[KMGT]i?B|B)\b"
_UNITS: dict[str, int] = {"bytes": 1, "B": 1} | {
    f"{letter}{infix}B": 1024**power for power, letter in enumerate("KMGT", 1) for infix in ("i", "")
}
"""A `GB` in such a message is 2**30: it comes from versions that wrote so before units were said."""
_AMOUNTS = {
    "requested": rf"(?:Tried to allocate|Requested size:|Requested :) {_AMOUNT}",
    "capacity": rf"has a total capaci?ty of {_AMOUNT}|{_AMOUNT} total capacity|Device limit : {_AMOUNT}",
    "free": rf"of which {_AMOUNT} is free|; {_AMOUNT} free;|Free \(according to CUDA\): {_AMOUNT}",
    "process": rf"this process has {_AMOUNT} memory in use",
    "allowed": rf"{_AMOUNT} allowed;|user-supplied memory fraction\) : {_AMOUNT}",
    "allocated": rf"{_AMOUNT} already allocated|{_AMOUNT} is allocated by PyTorch|Currently allocated : {_AMOUNT}",
    "private_pools": rf"with {_AMOUNT} allocated in private pools",
    "total": rf"; {_AMOUNT} reserved in total by PyTorch",
    "unallocated": rf"{_AMOUNT} is reserved by PyTorch but unallocated|; {_AMOUNT} cached",
}
_PATTERNS = {name: re.compile(pattern) for name, pattern in _AMOUNTS.items()}
"""For text whose blanks are single."""
_OTHERS = re.compile(r"Process \d{1,12} has " + _AMOUNT + " memory in use")
_VERSIONS: tuple[tuple[re.Pattern[str], Before], ...] = (
    (re.compile(r" cached\)"), "1.4"),
    (re.compile(r" total capacity; "), "2.1"),
)
"""What only versions before these write."""
_DEVICE = re.compile(r"\(GPU (\d{1,4});|GPU (\d{1,4}) has a total|on device (\d{1,4})\b")
_MOST_PROCESSES = 64
_ROUNDED = 0.999


def begins(text: str) -> int | None:
    """Where in a line a message begins."""
    if not any(each in text for each in _SIGNS):
        return None
    found = _BEGINS.search(text)
    return None if found is None else found.start()


def is_whole(text: str) -> bool:
    """Whether a message has its last figure, or none at all: what follows is advice."""
    return len(text) >= _MOST or _ENDS.search(text) is not None or _GOES_ON.search(text) is None


def parse(text: str, evidence: Evidence, rank: int | None = None) -> OutOfMemory:
    """What a message says, from its beginning."""
    text = " ".join(text[:_MOST].split())
    found = {name: _first(pattern, text) for name, pattern in _PATTERNS.items()}
    total, unallocated, allocated = found.pop("total"), found.pop("unallocated"), found["allocated"]
    if unallocated is not None and allocated is not None:
        total = allocated + unallocated
    device = _DEVICE.search(text)
    others = [amount(*each) for each in _OTHERS.findall(text)[:_MOST_PROCESSES]]
    if found["process"] is None and total is not None:
        # In a container NVML's numbers are not the process's own: the one that holds what PyTorch has is this one.
        own = [each for each in others if each >= _ROUNDED * total]
        if own:
            found["process"] = min(own)
            others.remove(min(own))
    message = OutOfMemory(
        evidence=evidence,
        rank=rank,
        device=None if device is None else int(next(group for group in device.groups() if group)),
        reserved=total,
        others=tuple(others),
        before=next((version for pattern, version in _VERSIONS if pattern.search(text)), ""),
    )
    return replace(message, **found)  # type: ignore[arg-type]


def amount(number: str, unit: str) -> int:
    """Bytes of a number with its unit."""
    return min(round(min(float(number), 2.0**60) * _UNITS[unit]), 2**63 - 1)


def _first(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    if found is None:
        return None
    number, unit = (group for group in found.groups() if group is not None)
    return amount(number, unit)
