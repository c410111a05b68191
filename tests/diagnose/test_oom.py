"""PyTorch's out-of-memory messages of every version, in the wording of each."""

import pytest

from labkit.diagnose import oom
from labkit.diagnose.facts import Evidence, OutOfMemory

MIB, GIB = 2**20, 2**30
NOTHING = Evidence(source="x", line=1, text="")
AFTER = (
    " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to "
    "avoid "
    "fragmentation.  See documentation for Memory Management  "
    "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
)
MESSAGES: dict[str, tuple[str, dict[str, float]]] = {
    "1.0": (
        "RuntimeError: CUDA out of memory. Tried to allocate 1.37 GiB (GPU 0; 11.17 GiB total capacity; 7.33 GiB "
        "already "
        "allocated; 1.02 GiB free; 2.28 GiB cached)",
        {"requested": 1.37, "capacity": 11.17, "allocated": 7.33, "free": 1.02, "reserved": 7.33 + 2.28, "device": 0},
    ),
    "1.13": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 3; 79.15 GiB total capacity; "
        "76.30 GiB already allocated; 1.20 GiB free; 78.00 GiB allowed; 77.00 GiB reserved in total by PyTorch) If "
        "reserved "
        "memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.  See documentation for "
        "Memory "
        "Management and PYTORCH_CUDA_ALLOC_CONF",
        {
            "requested": 2, "capacity": 79.15, "allocated": 76.3, "free": 1.2, "allowed": 78, "reserved": 77,
            "device": 3,
        },
    ),
    "2.1": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 1 has a total capacty of "
        "79.15 "
        "GiB of which 8.00 MiB is free. Process 4321 has 2.50 GiB memory in use. Including non-PyTorch memory, this "
        "process "
        "has 76.50 GiB memory in use. Of the allocated memory 74.00 GiB is allocated by PyTorch, and 512.00 MiB is "
        "reserved "
        "by PyTorch but unallocated." + AFTER,
        {
            "requested": 20 / 1024, "capacity": 79.15, "free": 8 / 1024, "process": 76.5, "allocated": 74,
            "reserved": 74.5, "others": 2.5, "device": 1,
        },
    ),
    "2.3, its device a character": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU \0 has a total capacity of "
        "79.15 GiB "
        "of which 8.00 MiB is free. Of the allocated memory 74.00 GiB is allocated by PyTorch, and 3.00 GiB is "
        "reserved by "
        "PyTorch but unallocated." + AFTER,
        {"requested": 1, "capacity": 79.15, "free": 8 / 1024, "allocated": 74, "reserved": 77},
    ),
    "2.14, CUDA graphs, a limit": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 KiB. GPU 0 has a total capacity of "
        "139.81 GiB "
        "of which 1.20 GiB is free. Process 7 has 600.00 MiB memory in use. Process 8 has 424.00 MiB memory in use. "
        "Including non-PyTorch memory, this process has 137.00 GiB memory in use. 138.00 GiB allowed; Of the allocated "
        "memory 130.00 GiB is allocated by PyTorch, with 12.50 GiB allocated in private pools (e.g., CUDA Graphs), "
        "and 4.00 "
        "GiB is reserved by PyTorch but unallocated." + AFTER,
        {
            "requested": 0.5 / 1024, "capacity": 139.81, "free": 1.2, "process": 137, "allowed": 138, "allocated": 130,
            "private_pools": 12.5, "reserved": 134, "others": 1, "device": 0,
        },
    ),
    "cudaMallocAsync": (
        "torch.OutOfMemoryError: Allocation on device 2 would exceed allowed memory. (out of memory)\n"
        "Currently allocated     : 70.50 GiB\nRequested               : 4.00 GiB\nDevice limit            : 79.15 GiB\n"
        "Free (according to CUDA): 1.25 GiB\nPyTorch limit (set by user-supplied memory fraction)\n"
        "                        : 17179869184.00 GiB",
        {"allocated": 70.5, "requested": 4, "capacity": 79.15, "free": 1.25, "device": 2},
    ),
    "preemptively rejected": (
        "torch.OutOfMemoryError: CUDA out of memory. Allocation was preemptively rejected because it would exceed "
        "per_process_memory_fraction limit. Requested size: 3.00 GiB",
        {"requested": 3},
    ),
    "bytes": ("CUDA out of memory. Tried to allocate 512 bytes (GPU 0; 1.00 GiB total capacity;", {"capacity": 1}),
    "no figures": ("torch.OutOfMemoryError: CUDA out of memory.", {}),
}  # fmt: skip


def read(text: str) -> OutOfMemory:
    """A message from where it begins."""
    begins = oom.begins(text)
    assert begins is not None
    return oom.parse(text[begins:], NOTHING)


@pytest.mark.parametrize("version", MESSAGES)
def test_a_message_says_what_it_says_in_every_version(version: str) -> None:
    text, said = MESSAGES[version]
    found = read(text)
    assert oom.is_whole(text) or version == "bytes"
    assert found.device == said.get("device", found.device)
    for name in ("requested", "capacity", "free", "process", "allowed", "allocated", "private_pools", "reserved"):
        value = getattr(found, name)
        if name in said:
            assert value == pytest.approx(said[name] * GIB, abs=1), name
        elif (version, name) not in {("bytes", "requested"), ("cudaMallocAsync", "allowed")}:
            assert value is None, name
    assert sum(found.others) == pytest.approx(said.get("others", 0) * GIB, abs=1)


def test_in_a_container_the_process_that_holds_what_pytorch_has_is_this_one() -> None:
    found = read(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.20 GiB "
        "is free. "
        "Process 1 has 5.00 GiB memory in use. Process 2 has 72.90 GiB memory in use. Of the allocated memory 70.00 "
        "GiB is "
        "allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
    )
    assert (found.process, found.others) == (round(72.9 * GIB), (5 * GIB,))


@pytest.mark.parametrize("code", ["except torch.cuda.OutOfMemoryError:", "except torch.OutOfMemoryError as error:"])
def test_code_that_names_the_error_is_no_message(code: str) -> None:
    assert oom.begins(code) is None


def test_versions_before_a_setting_are_told() -> None:
    assert [read(MESSAGES[each][0]).before for each in ("1.0", "1.13", "2.1")] == ["1.4", "2.1", ""]
