"""The caching allocator's rules, by property and by known figures."""

from hypothesis import given
from hypothesis import strategies as st

from labkit.allocator import Allocator, simulate
from labkit.ledger import rounded
from labkit.workload.caching import AllocatorSettings
from labkit.workload.gpu import MIB

SIZES = st.integers(0, 64 * MIB) | st.integers(0, 4096)


@st.composite
def events(draw: st.DrawFn) -> list[tuple[int, int]]:
    """A valid sequence of allocations and frees."""
    sequence: list[tuple[int, int]] = []
    live: list[int] = []
    for name in range(1, draw(st.integers(1, 60))):
        frees = draw(st.booleans())
        if live and frees:
            sequence.append((-live.pop(draw(st.integers(0, len(live) - 1))), 0))
        else:
            sequence.append((name, draw(SIZES)))
            live.append(name)
    return sequence


@given(events(), st.booleans())
def test_allocated_counts_whole_blocks_of_live_tensors(sequence: list[tuple[int, int]], expandable: bool) -> None:
    allocator = Allocator(AllocatorSettings(expandable_segments=expandable))
    blocks: dict[int, int] = {}
    for name, nbytes in sequence:
        if name < 0:
            allocator.free(-name)
            del blocks[-name]
        else:
            blocks[name] = allocator.allocate(name, nbytes)
            assert rounded(nbytes) <= blocks[name] <= rounded(nbytes) + MIB
        assert allocator.allocated == sum(blocks.values())
        assert allocator.reserved >= allocator.allocated
    for name in list(blocks):
        allocator.free(name)
    assert allocator.allocated == 0


@given(events())
def test_freed_memory_is_whole_again(sequence: list[tuple[int, int]]) -> None:
    """When everything is free, the largest request fits without a new segment."""
    allocator = Allocator()
    largest = 0
    for name, nbytes in sequence:
        if name < 0:
            allocator.free(-name)
        else:
            allocator.allocate(name, nbytes)
            largest = max(largest, nbytes)
    for name, _ in sequence:
        allocator.free(name)
    reserved = allocator.reserved
    allocator.allocate("again", largest)
    assert allocator.reserved == reserved


def test_small_requests_share_a_segment_of_2_mib() -> None:
    allocator = Allocator()
    assert [allocator.allocate(name, 1) for name in range(4)] == [512] * 4
    assert allocator.reserved == 2 * MIB


def test_a_remainder_up_to_1_mib_stays_with_a_large_block() -> None:
    allocator = Allocator()
    allocator.allocate("whole", 12 * MIB)
    allocator.free("whole")
    assert allocator.allocate("part", 11 * MIB) == 12 * MIB
    allocator.free("part")
    assert allocator.allocate("smaller", 11 * MIB - 512) == 11 * MIB - 512


def test_expandable_segments_split_large_remainders() -> None:
    allocator = Allocator(AllocatorSettings(expandable_segments=True))
    allocator.allocate("whole", 12 * MIB)
    allocator.free("whole")
    assert allocator.allocate("part", 11 * MIB) == 11 * MIB


def test_simulate_names_blocks_and_reserved_growth() -> None:
    found = simulate([(1, 3 * MIB), (2, 100), (-1, 0), (3, 30 * MIB)])
    assert found.block_bytes == {1: 3 * MIB, 2: 512, 3: 30 * MIB}
    assert found.reserved == [(0, 20 * MIB), (1, 22 * MIB), (3, 52 * MIB)]


def test_segments_of_any_size_lie_apart() -> None:
    """Blocks are known by their addresses: those of segments of terabytes are not those of their neighbours."""
    allocator, tebibyte = Allocator(), 2**40
    for name, size in (("a", 2), ("b", 1)):
        allocator.allocate(name, size * tebibyte)
    allocator.free("a")
    allocator.free("b")
    for name in ("in b", "in a"):
        allocator.allocate(name, tebibyte)
    allocator.free("in b")
    for name in ("in b again", "in a, behind"):
        assert allocator.allocate(name, tebibyte) == tebibyte
    assert (allocator.allocated, allocator.reserved) == (3 * tebibyte, 3 * tebibyte)
