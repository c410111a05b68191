"""What would make a refused micro-batch fit: each proposal is priced by the estimate before it is made."""

from collections.abc import Iterator
from typing import Literal

from labkit.admission.passes import Load, Pass
from labkit.admission.requests import Item
from labkit.admission.split import Batch, split
from labkit.errors import InputError
from labkit.plan.price import EVERY_LAYER, Priced, Pricer
from labkit.plan.space import recompute_choices
from labkit.workload import Recompute, Workload
from labkit.workload.base import Part
from labkit.workload.gpu import GIB

_LARGEST_SIZE = 64
_CHEAPEST = 4
"""Recompute choices that are looked at more closely: by their blocks alone all of them fit."""


class Remedy(Part):
    """A change under which it fits."""

    kind: Literal["recompute", "layout", "allocator", "tokens"]
    change: str
    """What to set, in words."""
    peak_bytes: int
    covered_bytes: int
    reserved_bytes: int

    def __str__(self) -> str:
        peak, covered, reserved = (each / GIB for each in (self.peak_bytes, self.covered_bytes, self.reserved_bytes))
        return f"{self.change} fits at {peak:.1f} GiB ({covered:.1f} with its margin, {reserved:.1f} reserved)"


def remedies(run: Pass, batch: Batch) -> Iterator[Remedy]:
    """Other recompute choices, the allocator's setting, more tensor or context-parallel ranks, fewer tokens."""
    load = batch.load
    if batch.covered <= run.limit and not run.template.training.allocator.expandable_segments:
        yield from _fitting(run, load, "allocator", "expandable_segments: true", _expandable(run.template))
    yield from _recomputed(run, load)
    yield from _laid_out(run, load)
    yield from _shorter(run, batch)


def _fitting(
    run: Pass,
    load: Load,
    kind: Literal["recompute", "layout", "allocator"],
    change: str,
    template: Workload,
) -> Iterator[Remedy]:
    """The remedy, if the load fits with another template."""
    if not template.can_run:
        return
    try:
        other = run.changed(template)
        moved = other.load(load.lengths, load.shared_prefix)
        if not other.workload(moved).can_run:
            return
        found = other.runs(moved)
    except InputError:
        return
    if found is not None:
        peak, covered, reserved = found
        yield Remedy(kind=kind, change=change, peak_bytes=peak, covered_bytes=covered, reserved_bytes=reserved)


def _expandable(template: Workload) -> Workload:
    allocator = template.training.allocator.model_copy(update={"expandable_segments": True})
    return template.model_copy(update={"training": template.training.model_copy(update={"allocator": allocator})})


def _recomputed(run: Pass, load: Load) -> Iterator[Remedy]:
    """The choice that replays least and fits, then full recompute of every layer."""
    template = run.template
    if not template.training.differentiates:
        return
    workload = run.workload(load, by_itself=True)
    pricer = Pricer(workload)
    worth = pricer.worth_pricing(recompute_choices(workload))
    choices = [each for each in pricer.each(worth) if each.covered_bytes <= run.limit]
    seen: set[Recompute] = set()
    cheapest = sorted(choices, key=_cost)[:_CHEAPEST]
    for choice in [*(each.workload.recompute for each in cheapest), EVERY_LAYER]:
        if choice in seen or choice == template.recompute:
            continue
        seen.add(choice)
        name = "full recompute (uniform, 1 layer)" if choice == EVERY_LAYER else f"recompute {choice.label}"
        found = list(_fitting(run, load, "recompute", name, template.model_copy(update={"recompute": choice})))
        yield from found
        if found and choice != EVERY_LAYER:
            seen |= {each.workload.recompute for each in cheapest}


def _cost(choice: Priced) -> tuple[float, int]:
    return choice.replay.seconds, choice.regions


def _laid_out(run: Pass, load: Load) -> Iterator[Remedy]:
    """The smallest tensor-parallel size that fits, and the smallest context-parallel one, on the same GPUs."""
    template = run.template
    layout = template.parallelism
    for field, name, size in (
        ("tensor_model_parallel_size", "TP", layout.tp),
        ("context_parallel_size", "CP", layout.cp),
    ):
        other = size * 2
        while other <= min(layout.world_size, _LARGEST_SIZE):
            update: dict[str, object] = {field: other}
            if field.startswith("tensor") and template.model.mixture_of_experts is not None:
                update["sequence_parallel"] = True
            moved = template.model_copy(update={"parallelism": layout.model_copy(update=update)})
            change = (
                f"{name} {other}" if name == "TP" or not run.packs_trees else f"{name} {other}, rows shared evenly,"
            )
            found = list(_fitting(run, load, "layout", change, _regrouped(moved)))
            yield from found
            if found:
                break
            other *= 2


def _regrouped(template: Workload) -> Workload:
    """With a global batch that the data-parallel ranks of its layout share, and a row that all ranks can."""
    batch, layout = template.batch, template.parallelism
    if layout.world_size % (layout.tp * layout.pp * layout.cp):
        return template
    unit = layout.tp * layout.cp * 2
    update = {
        "global_batch_size": batch.micro_batch_size * layout.dp * template.num_microbatches or layout.dp,
        "seq_length": -(-batch.seq_length // unit) * unit,
    }
    return template.model_copy(update={"batch": batch.model_copy(update=update)})


def _shorter(run: Pass, batch: Batch) -> Iterator[Remedy]:
    """As many sequences of the same proportions, with as many tokens as would be admitted."""
    lengths, shared = batch.load.lengths, batch.load.shared_prefix
    longest = max(lengths)

    def admitted(tokens: int) -> Batch | None:
        """So many tokens of the longest, as a decision prices them."""
        scaled = tuple(max(each * tokens // longest, 1) for each in lengths)
        prefix = max(min(shared * tokens // longest, min(scaled) - 1), 0)
        item = Item(tuple(range(len(lengths))), scaled, "its own" if prefix else None, "of them")
        return next(iter(split(run, [item], {"its own": prefix}).batches), None)

    unit = run.least_unit
    low, high, found = 0, -(-longest // unit), None
    while high - low > 1:
        middle = (low + high) // 2
        fits = admitted(middle * unit)
        low, high, found = (low, middle, found) if fits is None else (middle, high, fits)
    if found is None:
        return
    load = found.load
    tokens = sum(load.lengths) - load.shared_prefix * (len(lengths) - 1 if load.shared_prefix else 0)
    what = "a sequence" if len(lengths) == 1 else f"a group of {len(lengths)}"
    yield Remedy(
        kind="tokens",
        change=f"{what} of at most {tokens:,} tokens",
        peak_bytes=int(found.peak),
        covered_bytes=int(found.covered),
        reserved_bytes=int(found.reserved),
    )
