"""What there is to choose: recompute choices that can run and do something, other layouts and micro-batches."""

from collections.abc import Iterator, Set
from itertools import chain, combinations
from math import lcm

from labkit.workload import Batch, Parallelism, Recompute, Workload
from labkit.workload.recompute import RECOMPUTE_MODULES
from labkit.workload.stages import stage_layers


def recompute_choices(workload: Workload) -> Iterator[Recompute]:
    """Every list of labels that each save something, and full recompute by both methods.

    Lists come by length; those that the rules reject are left out. Uniform recompute comes with every number of layers
    that makes other regions, up to `_LONGEST_REGION`; block recompute with every number, of long chunks with
    `_MOST_BLOCKS` of them at even distances.
    """
    labels = [label for label in RECOMPUTE_MODULES if not why_not(workload, _selective((label,)))]
    lists = chain.from_iterable(combinations(labels, count) for count in range(len(labels) + 1))
    for modules in lists:
        yield from _valid(workload, _selective(modules))
    lengths = {len(layers) for stage in range(workload.parallelism.pp) for layers in stage_layers(workload, stage)}
    most = max(lengths)
    for count in _region_lengths(lengths):
        yield from _valid(workload, _full("uniform", count))
    for count in range(1, most, -(-most // _MOST_BLOCKS)):  # all of them is uniform with one layer each
        yield from _valid(workload, _full("block", count))


_LONGEST_REGION = 64
"""Layers. Longer regions save next to nothing, and each is recorded layer by layer."""
_MOST_BLOCKS = 128


def _region_lengths(chunks: Set[int]) -> Iterator[int]:
    """Numbers of layers a region, each the least that cuts chunks of these lengths into so few.

    With more layers for the same number of regions only the longest would be longer.
    """
    found: set[tuple[int, ...]] = set()
    for count in range(1, min(max(chunks), _LONGEST_REGION) + 1):
        regions = tuple(-(-length // count) for length in sorted(chunks))
        if regions not in found:
            found.add(regions)
            yield count


def _selective(modules: tuple[str, ...]) -> Recompute:
    return Recompute.model_validate({"recompute_granularity": "selective", "recompute_modules": modules})


def _full(method: str, count: int) -> Recompute:
    return Recompute.model_validate(
        {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": count}
    )


def why_not(workload: Workload, choice: Recompute) -> str:
    """Why the rules reject a list of labels, or call one of them idle; empty where they do not."""
    findings = workload.model_copy(update={"recompute": choice}).findings
    return next((each.reason for each in findings if each.field == "recompute.recompute_modules"), "")


def is_plain(choice: Recompute) -> bool:
    """Lists of at most one label, and full recompute layer by layer."""
    return len(choice.modules) < 2 if choice.recompute_granularity == "selective" else choice.recompute_num_layers == 1


def _valid(workload: Workload, choice: Recompute) -> Iterator[Recompute]:
    if workload.model_copy(update={"recompute": choice}).can_run:
        yield choice


def resized(workload: Workload, part: int, of: int) -> Workload | None:
    """The workload with sequences of `part` of `of` equal parts of their length; None where they do not divide so.

    Of a packed batch each sequence and the shared prefix.
    """
    batch, layout = workload.batch, workload.parallelism
    packed = batch.packed
    if packed is None:
        length, left = divmod(batch.seq_length * part, of)
        changed = batch.model_copy(update={"seq_length": length})
        return None if left or not length else workload.model_copy(update={"batch": changed})
    unit = _unit(layout)
    lengths = tuple(max(length * part // of // unit, 1) * unit for length in packed.lengths)
    prefix, busiest = min(packed.shared_prefix * part // of, min(lengths) - 1), packed.busiest_rank_rows
    update = {
        "lengths": lengths,
        "shared_prefix": prefix,
        "busiest_rank_rows": None if busiest is None else -(-busiest * part // of),
    }
    changed = batch.model_copy(update={"packed": packed.model_copy(update=update), "seq_length": 1})
    return workload.model_copy(update={"batch": padded(changed, layout)})


def padded(batch: Batch, layout: Parallelism) -> Batch:
    """A packed batch with as many rows as its ranks can share."""
    if batch.packed is None:
        return batch
    multiple = lcm(_unit(layout), layout.tp)
    rows = max(batch.packed.rows, batch.seq_length)
    return batch.model_copy(update={"seq_length": -(-rows // multiple) * multiple})


def _unit(layout: Parallelism) -> int:
    """A context-parallel rank has two parts of a sequence."""
    return 2 * layout.cp if layout.cp > 1 else 1


def other_settings(workload: Workload) -> Iterator[Workload]:
    """The same model and global batch in other tensor, context, expert and pipeline sizes and micro-batches.

    On as many GPUs, nearest first: those that change fewest fields, and those by the smallest factors.
    """
    layout, batch = workload.parallelism, workload.batch
    micro_batches = [each for each in _up_to(batch.micro_batch_size) if not batch.global_batch_size % each]
    found = []
    for tensor in _powers(layout.tp, layout.world_size):
        for context in _powers(layout.cp, layout.world_size):
            for pipeline in _powers(layout.pp, layout.world_size):
                for expert in _powers(layout.ep, layout.world_size):
                    for micro_batch in micro_batches:
                        changes = (tensor, layout.tp), (context, layout.cp), (pipeline, layout.pp), (expert, layout.ep)
                        steps = sum(abs((new // old).bit_length() - 1) for new, old in changes)
                        steps += micro_batch != batch.micro_batch_size
                        if 0 < steps <= _MOST_STEPS:
                            found.append((steps, tensor, context, pipeline, expert, micro_batch))
    for _, tensor, context, pipeline, expert, micro_batch in sorted(found):
        other = _laid_out(workload, tensor, context, pipeline, expert, micro_batch)
        if other is not None:
            yield other


_MOST_STEPS = 3
"""Doublings of a size that are tried together."""


_ALL_UP_TO = 16


def _up_to(size: int) -> list[int]:
    """`size` and smaller: its halves, and every small one."""
    halves = {size >> times for times in range(size.bit_length())}
    return sorted(halves | set(range(1, min(size, _ALL_UP_TO) + 1)))


def _powers(size: int, most: int) -> list[int]:
    """`size`, and its doublings up to `most`."""
    found = [size]
    while found[-1] * 2 <= most:
        found.append(found[-1] * 2)
    return found


def _laid_out(
    workload: Workload, tensor: int, context: int, pipeline: int, expert: int, micro_batch: int
) -> Workload | None:
    """The workload in another layout; None if it cannot run so."""
    layout = workload.parallelism
    update = {
        "tensor_model_parallel_size": tensor,
        "context_parallel_size": context,
        "pipeline_model_parallel_size": pipeline,
        "expert_model_parallel_size": expert,
        "sequence_parallel": tensor > 1 and (layout.sequence_parallel or workload.model.mixture_of_experts is not None),
    }
    if pipeline != layout.pp and layout.pipeline_model_parallel_layout is not None:
        return None
    parallelism: Parallelism = layout.model_copy(update=update)
    if layout.world_size % (parallelism.tp * parallelism.pp * parallelism.cp):
        return None
    batch = padded(workload.batch.model_copy(update={"micro_batch_size": micro_batch}), parallelism)
    other = workload.model_copy(update={"parallelism": parallelism, "batch": batch})
    return other if other.can_run else None
