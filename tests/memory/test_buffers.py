"""DDP's buffers, laid out by what repeats, against Megatron's way: one parameter after the other."""

from collections.abc import Sequence
from math import lcm

from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.memory.buffers import sharded
from labkit.memory.tape import Parameter
from labkit.memory.weights import Alike, Block

PARAMETERS = st.builds(
    lambda width, copies: Parameter("", (width,), 0, False, False, copies=copies),
    st.integers(1, 700),
    st.none() | st.integers(1, 40),
)


@st.composite
def chunks(draw: st.DrawFn) -> tuple[Block, ...]:
    """Layers that repeat, between an embedding and a head that another stage may have too."""
    blocks, layer = [], 0
    for index in range(draw(st.integers(1, 4))):
        parameters = draw(st.lists(PARAMETERS, min_size=1, max_size=4))
        named = [each._replace(name=f"layers.0.b{index}.w{number}_") for number, each in enumerate(parameters)]
        times = draw(st.integers(1, 30))
        if times == 1 and draw(st.booleans()):
            named[0] = named[0]._replace(shared_embedding=True, copies=None)
        parts = [Alike(each, range(each.copies or 1), each.numel, layer) for each in named]
        blocks.append(Block(tuple(parts), range(times), 1))
        layer += times
    return tuple(blocks)


def one_by_one(
    parameters: Sequence[tuple[Parameter, int]], ranks: int, bucket_size: int
) -> tuple[int, list[tuple[str, int]]]:
    """`DistributedOptimizer._compute_per_buffer_param_layout`: elements of the buffer, and what its rank 0 steps."""
    unit = lcm(ranks, 128)
    buckets: list[list[tuple[str, int, int]]] = [[]]
    position = 0

    def ends_bucket() -> None:
        nonlocal position
        position = -(-position // unit) * unit
        bounds.append(position)
        buckets.append([])

    bounds = [0]
    for parameter, numel in reversed(parameters):
        position = -(-position // 64) * 64
        if parameter.shared_embedding and buckets[-1]:
            ends_bucket()
        buckets[-1].append((parameter.name, position, position + numel))
        position += numel
        if position - bounds[-1] >= bucket_size or parameter.shared_embedding:
            ends_bucket()
    if buckets[-1]:
        ends_bucket()
    owned = []
    for bucket, begin, end in zip(buckets, bounds, bounds[1:], strict=False):
        stop = begin + (end - begin) // ranks
        owned += [(name, min(last, stop) - first) for name, first, last in bucket if first < stop]
    return bounds[-1], owned


@given(chunks(), st.integers(1, 12), st.integers(1, 40_000))
@settings(max_examples=100, deadline=None)
def test_buckets_that_repeat_are_those_of_all_parameters(
    blocks: tuple[Block, ...], ranks: int, bucket_size: int
) -> None:
    parameters = [each for block in blocks for each in block.tensors()]
    buffer = sharded("buffers.0", False, blocks, ranks, bucket_size)
    numel, owned = one_by_one(parameters, ranks, bucket_size)
    assert buffer.numel == numel
    assert [(each.name, size) for block in buffer.groups[1] for each, size in block.tensors()] == owned
    laid_out = [each.name for block in buffer.parameters for each, _ in block.tensors()]
    assert laid_out == [each.name for each, _ in reversed(parameters)]
