"""Which part of a model a ledger's bytes belong to: its kinds of layers, its ends, and what no layer owns."""

from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

from labkit.ledger import Ledger
from labkit.memory.buffers import buffers
from labkit.memory.tape import DTYPE_BYTES
from labkit.memory.units import chunks
from labkit.memory.weights import weights
from labkit.summary import category
from labkit.workload import Workload
from labkit.workload.model import LayerKind
from labkit.workload.stages import stage_layers

_MIXERS: Final[Mapping[str | None, str]] = {
    "attention": "attention",
    "mla": "latent attention",
    "gdn": "gated delta net",
    "mamba": "Mamba",
}
_MLPS: Final[Mapping[str | None, str]] = {"dense": "MLP", "moe": "mixture of experts"}
_NORMS, _EMBEDDING, _HEAD = "norms and residual", "embedding", "head and loss"
_PREDICTION, _PIPELINE, _LIBRARIES = "multi-token prediction", "pipeline", "libraries"
_PADDING, _BETWEEN = "padding of buffers", "inputs and the rest"
PARTS: Final = (
    *_MIXERS.values(),
    *_MLPS.values(),
    _NORMS,
    _EMBEDDING,
    _HEAD,
    _PREDICTION,
    _PIPELINE,
    _LIBRARIES,
    _PADDING,
    _BETWEEN,
)
"""In the order of a model; `libraries` are workspaces, `padding of buffers` what DDP aligns its buffers with."""
_BUFFERS: Final = ("param_data", "grad_data")
_ENDS = {"embedding": _EMBEDDING, "output_layer": _HEAD, "loss": _HEAD, "outputs": _HEAD, "pipeline": _PIPELINE}


class Held(NamedTuple):
    """Bytes of a category that a part of the model holds."""

    part: str
    category: str
    bytes: int


def layer_parts(kind: LayerKind) -> list[str]:
    """The parts that a decoder layer has: its mixer, its MLP, or one of them."""
    return [*filter(None, (_MIXERS.get(kind.mixer), _MLPS.get(kind.mlp)))]


def layer_counts(workload: Workload, stage: int) -> Counter[str]:
    """How many decoder layers of a pipeline stage have each of the parts."""
    layers = (layer for chunk in stage_layers(workload, stage) for layer in chunk)
    return Counter(part for layer in layers for part in layer_parts(workload.model.layers[layer]))


def part_of(workload: Workload, module: str, kind: str, layer: int | None) -> str:
    """The part that a tensor below a module path belongs to.

    Args:
        workload: whose model it is.
        module: path below the model, as `labkit.ledger.Row.module` has it.
        kind: what holds the tensor (`Row.kind`).
        layer: decoder layer, from 0; None outside the layers.
    """
    path = module.lstrip(".").split(".")
    if kind == "library":
        return _LIBRARIES
    if path[0] == "mtp":
        return _PREDICTION
    if layer is None:
        if path[:1] == ["decoder"] and kind != "pipeline":
            return _HEAD  # the final norm
        return _ENDS.get(path[0], _HEAD if kind == "head" else _PIPELINE if kind == "pipeline" else _BETWEEN)
    below = path[3] if len(path) > 3 else ""
    if kind == "norm" or below.endswith("layernorm"):
        return _NORMS
    place = workload.model.layers[layer]
    if below in ("self_attention", "mixer"):
        return _MIXERS.get(place.mixer, _BETWEEN)
    return _MLPS.get(place.mlp, _BETWEEN) if below == "mlp" else _BETWEEN


def held_by_part(workload: Workload, stage: int, rows: Ledger) -> list[Held]:
    """Bytes of the rows by part and category (`labkit.summary.CATEGORIES`); their sum is the rows' block bytes.

    DDP's buffers hold the parameters or gradients of all layers: each part has what its own weights take in them.
    """
    found: Counter[tuple[str, str]] = Counter()
    buffered: Counter[tuple[str, str, str]] = Counter()
    for row in rows.rows:
        kind = category(row)
        if row.tensor in _BUFFERS:
            buffered[row.module, row.dtype, kind] += row.bytes  # of all model chunks
        else:
            found[part_of(workload, row.module, row.kind, row.layer), kind] += row.bytes
        found[_BETWEEN, "allocator remainders"] += row.block_bytes - row.bytes
    counts = _buffered(workload, stage) if buffered else {}
    for (module, dtype, kind), nbytes in buffered.items():
        shares = {part: numel * DTYPE_BYTES[dtype] for part, numel in counts[module].items()}
        for part, share in (*shares.items(), (_PADDING, nbytes - sum(shares.values()))):
            found[part, kind] += share
    places = {part: place for place, part in enumerate(PARTS)}
    return [Held(*key, nbytes) for key, nbytes in sorted(found.items(), key=lambda item: places[item[0][0]]) if nbytes]


def _buffered(workload: Workload, stage: int) -> dict[str, Counter[str]]:
    """Elements of each part in the DDP buffers of a stage, those of all its model chunks together, by name."""
    found: dict[str, Counter[str]] = {}
    for index, chunk in enumerate(chunks(workload, stage)):
        for buffer in buffers(weights(chunk), workload, bucketed=stage == index == 0):
            counts = found.setdefault(buffer.name, Counter())
            for parameter, numel in (each for block in buffer.parameters for each in block.tensors()):
                module = parameter.name.rpartition(".")[0]
                counts[part_of(workload, module, "parameters", parameter.layer)] += numel
    return found
