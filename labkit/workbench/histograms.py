"""Rows of each expert: read from what somebody counted, or drawn as examples that are called so."""

import csv
import io
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from pydantic import ValidationError

from labkit.errors import InputError
from labkit.files import read_regular
from labkit.memory.layers.sizes import Sizes
from labkit.workload import Routing, Workload
from labkit.workload.files import load_mapping, text_of
from labkit.workload.model import MixtureOfExperts
from labkit.workload.workload import first_problem

EXAMPLE: Final = "example, not measured"
_LARGEST_FILE = 16 * 2**20
_EXPONENT = 0.5
"""Of the Zipf-like example: the load of the k-th expert falls with the root of k."""


class Histograms(NamedTuple):
    """Rows of each expert."""

    name: str
    rows: tuple[tuple[int, ...], ...]
    """One list for all MoE layers, or one for each of them."""
    basis: str


def experts_of(case: Workload) -> MixtureOfExperts:
    """The model's experts.

    Raises:
        InputError: it has none.
    """
    moe = case.model.mixture_of_experts
    if moe is None:
        raise InputError(f"{case.model.name} has no experts to route to; give a workload with MoE layers")
    return moe


def read_histograms(path: Path) -> tuple[tuple[int, ...], ...]:
    """Rows of each expert in each MoE layer, from a file.

    A YAML or JSON mapping with `rows_per_expert`, a list of lists (as a workload's `routing` has it, which will do
    too), or a CSV file: with `layer,expert,rows` in its first line, or of bare numbers, a line for each layer and a
    column for each expert.

    Raises:
        InputError: it is none of these.
    """
    found = _from_csv(path) if path.suffix.lower() == ".csv" else _from_mapping(path)
    try:
        stated = Routing.model_validate({"kind": "measured", "rows_per_expert": found})
    except ValidationError as error:
        raise InputError(f"{path}: {first_problem(Routing, error)}") from None
    return stated.rows_per_expert or ()


def _from_mapping(path: Path) -> Any:
    data = load_mapping(path)
    for _ in range(2):
        if "rows_per_expert" in data:
            return data["rows_per_expert"]
        data = data["routing"] if isinstance(data.get("routing"), dict) else data
    raise InputError(f"{path}: has no rows_per_expert; give a list of each expert's rows for each MoE layer")


def _from_csv(path: Path) -> list[list[int]]:
    text = text_of(lambda: read_regular(path, _LARGEST_FILE), str(path), encoding="utf-8-sig")  # as Excel writes it
    try:
        lines = [line for line in csv.reader(io.StringIO(text)) if line]
    except csv.Error as error:
        raise InputError(f"{path}: cannot be read as CSV ({error})") from None
    head = [each.strip() for each in lines[0]] if lines else []
    named = head == ["layer", "expert", "rows"]
    numbers = [_integers(line, f"{path}: line {at}") for at, line in enumerate(lines, 1) if not (named and at == 1)]
    if not named:
        return numbers
    table: dict[int, dict[int, int]] = {}
    for at, line in enumerate(numbers, 2):
        if len(line) != 3:
            raise InputError(f"{path}: line {at}: should be layer, expert and rows")
        layer, expert, rows = line
        if expert in table.setdefault(layer, {}):
            raise InputError(f"{path}: line {at}: expert {expert} of layer {layer} is given twice")
        table[layer][expert] = rows
    experts = sorted(set().union(*table.values()))
    return [[table[layer].get(expert, 0) for expert in experts] for layer in sorted(table)]


def _integers(line: list[str], where: str) -> list[int]:
    for each in line:
        if not each.strip().isdecimal() or len(each) > 18:
            raise InputError(f"{where}: {each[:80]!r} is no number of rows")
    return [int(each) for each in line]


def examples(workload: Workload, seed: int) -> tuple[Histograms, ...]:
    """Histograms that nobody measured, of as many rows as a micro-batch of all expert-parallel ranks has.

    Zipf-like: an expert's load falls with the root of its place among all experts, once in an order that all layers
    share and once in one of the layer's own. Uniform: each row goes to any expert alike, so that only chance makes
    loads differ. No expert gets more than one row of each token.
    """
    moe, layout = experts_of(workload), workload.parallelism
    layers = sum(kind.mlp == "moe" for kind in workload.model.layers)
    experts, draw = moe.num_moe_experts, np.random.default_rng(seed)
    tokens = int(Sizes.of(workload).shard) * layout.ep * layout.etp
    zipf = np.arange(1, experts + 1, dtype=np.float64) ** -_EXPONENT
    uniform = np.ones(experts)
    found = []
    for name, weights in (("Zipf-like", zipf), ("Uniform", uniform)):
        common = draw.permutation(weights)
        counts = [_drawn(draw, common * draw.permutation(weights), tokens, moe.moe_router_topk) for _ in range(layers)]
        found.append(Histograms(f"{name} (example, not measured)", tuple(counts), "example, not measured"))
    return tuple(found)


def _drawn(draw: np.random.Generator, weights: Any, tokens: int, topk: int) -> tuple[int, ...]:
    counts = draw.multinomial(tokens * topk, weights / weights.sum())
    # What is above a row of each token goes to the experts with room, the emptiest first.
    over = np.maximum(counts - tokens, 0)
    counts -= over
    left = int(over.sum())
    for expert in np.argsort(counts):
        added = min(left, tokens - int(counts[expert]))
        counts[expert] += added
        left -= added
    return tuple(map(int, counts))
