"""`import_huggingface`: a model's `config.json` as a `Workload`."""

import re
from collections.abc import Mapping, Sequence
from math import lcm
from pathlib import Path
from typing import Any, NamedTuple

from labkit.errors import InputError, nearest
from labkit.importers.documents import parse_json, source_name, text_from
from labkit.importers.families import Section, section
from labkit.importers.imported import Imported
from labkit.importers.keys import Keys
from labkit.memory.parameters import expert_biases, parameter_count, without_prediction
from labkit.workload import Model, Workload
from labkit.workload.gpu import GPUS
from labkit.workload.training import Kernels

_SEQ_LENGTH = 4096
_WRAPPED = ("text_config", "llm_config", "language_config")
"""Where the language model of a multimodal one is described."""
_INDEX = "model.safetensors.index.json"
_MOST_CONFIG_BYTES, _MOST_INDEX_BYTES = 16 * 2**20, 64 * 2**20
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class Layout(NamedTuple):
    """What a configuration does not say, and is asked for."""

    seq_length: int | None = None
    """None: 4096, or as many as the model has positions."""
    micro_batch_size: int | None = None
    """None: 1."""
    global_batch_size: int | None = None
    """None: a micro-batch for every rank, and every stage of the pipeline."""
    world_size: int | None = None
    """None: the smallest that the parallel sizes allow."""
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    gpu: str | None = None
    """None: labkit's default."""


def import_huggingface(path: Path | None, layout: Layout | None = None) -> Imported:
    """Read a `config.json`; `path` None is standard input. Without `layout` it is the model that is asked for.

    Raises:
        InputError: it cannot be read, describes no model that labkit knows, or a rule of the workload refuses it.
    """
    source, asked, layout = source_name(path), layout is not None, layout or Layout()
    if layout.gpu is not None and layout.gpu not in GPUS:
        raise InputError(f"--gpu {layout.gpu[:80]}: no such GPU{nearest(layout.gpu[:80], GPUS)}")
    if path is not None:
        path = config_file(path)
    config = load_config(path)
    found = read_config(config, source)
    name = model_name(config.get("_name_or_path"), path)
    workload = _workload(_mapping(found, name, layout), source)
    assumed = [*found.assumed, *_kernels(found)]
    if asked:
        assumed += _unsaid(workload, layout)
    not_priced = [f"{argument}: {meaning}" for argument, meaning in found.launch.items()]
    return Imported(workload, not_priced, found.not_expressed, assumed, _counts(workload, found, path))


def _workload(mapping: dict[str, Any], source: str) -> Workload:
    try:
        return Workload.from_mapping(mapping, source)
    except InputError as error:
        if "parallelism.pipeline_model_parallel_size" not in str(error):
            raise
        raise InputError(
            f"{error}; uneven stages have no option here: import without --pp and write them into the file"
        ) from None


def config_file(path: Path) -> Path:
    """The file itself; of a folder, as models are downloaded, the `config.json` in it.

    Raises:
        InputError: there is none.
    """
    try:
        found = path / "config.json" if path.is_dir() else path
        if found.exists():
            return found
    except (OSError, ValueError):  # no file can have such a name
        pass
    reason = "there is no such file, and nothing is downloaded here"
    raise InputError(f"{str(path)[:200]}: {reason}; give the config.json of the model, or a folder that has one")


def load_config(path: Path | None) -> dict[str, Any]:
    """A configuration as plain data.

    Raises:
        InputError: it cannot be read, or is no JSON object.
    """
    return parse_json(text_from(path, _MOST_CONFIG_BYTES), source_name(path))


def read_config(config: Mapping[str, Any], source: str) -> Section:
    """The model that a configuration describes; of a multimodal one the language model.

    Raises:
        InputError: as `import_huggingface`.
    """
    outer = Keys(config, source)
    inner = next((name for name in _WRAPPED if name in outer), None)
    if inner is None:
        found = section(outer)
        found.assumed += _quantized(outer)
        return found
    whole = outer.text("model_type", "the model")
    language = outer.part(inner)
    if "tie_word_embeddings" not in language and "tie_word_embeddings" in outer:
        language = Keys(
            {**outer.plain(inner), "tie_word_embeddings": outer.plain("tie_word_embeddings")}, source, f"{inner}."
        )
    found = section(language)
    found.assumed.append(f"{inner} of {whole[:80]}: the language model alone")
    found.assumed += _quantized(outer) or _quantized(language)
    towers = [name for name in outer.left() if name.endswith("_config")]
    found.not_expressed += [f"{name[:80]}: no part of a decoder-only model; left out" for name in towers[:8]]
    return found


def _quantized(keys: Keys) -> list[str]:
    method = keys.part("quantization_config").plain("quant_method")
    if "quantization_config" not in keys:
        return []
    return [f"quantization_config ({str(method)[:40]}): of the published weights; training is taken in bf16"]


def model_name(stated: object, path: Path | None) -> str:
    """What a model is called: as is stated, else by its file, or that file's folder where all are called alike."""
    if isinstance(stated, str) and stated.strip("/. "):
        name = stated.rstrip("/").rpartition("/")[2]
    elif path is None:
        name = ""
    else:
        name = path.absolute().parent.name if path.stem == "config" else path.stem.removesuffix("_config")
    return re.sub(r"[^\w.-]+", "-", name)[:200].strip("-") or "imported"


def _mapping(found: Section, name: str, layout: Layout) -> dict[str, Any]:
    experts = "mixture_of_experts" in found.model
    dense, expert = layout.tensor * layout.pipeline * layout.context, layout.expert * layout.pipeline
    world = layout.world_size or (lcm(dense, expert) if experts else dense)
    parallelism: dict[str, Any] = {"world_size": world}
    sizes = {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
    }
    parallelism |= {size: ranks for size, ranks in sizes.items() if ranks > 1}
    if layout.tensor > 1:
        parallelism["sequence_parallel"] = True
        if experts:
            parallelism["expert_tensor_parallel_size"] = 1
    micro = layout.micro_batch_size or 1
    positions = found.keys.optional_integer("max_position_embeddings") or _SEQ_LENGTH
    mapping: dict[str, Any] = {
        "model": {"name": name, **found.model},
        "parallelism": parallelism,
        "batch": {
            "seq_length": layout.seq_length or min(_SEQ_LENGTH, positions),
            "micro_batch_size": micro,
            # A pipeline is filled where each of its stages has a micro-batch.
            "global_batch_size": layout.global_batch_size or micro * max(1, world // dense) * layout.pipeline,
        },
    }
    training: dict[str, Any] = {}
    if layout.gpu is not None:
        training["gpu"] = layout.gpu
    if found.kernels:
        training["kernels"] = found.kernels
    if training:
        mapping["training"] = training
    return {**mapping, "launch": {"arguments": list(found.launch)}} if found.launch else mapping


def _kernels(found: Section) -> list[str]:
    """Choices without which Megatron refuses the model."""
    reason = "Megatron has no such kernel for this model"
    return [f"training.kernels.{name} {str(value).lower()}: {reason}" for name, value in found.kernels.items()]


def _unsaid(workload: Workload, layout: Layout) -> list[str]:
    """What was neither said nor asked for."""
    taken = {
        "seq_length": (layout.seq_length, workload.batch.seq_length),
        "micro_batch_size": (layout.micro_batch_size, workload.batch.micro_batch_size),
        "global_batch_size": (layout.global_batch_size, workload.batch.global_batch_size),
        "world_size": (layout.world_size, workload.parallelism.world_size),
        "gpu": (layout.gpu, workload.training.gpu),
    }
    said = [f"{name} {value}" for name, (stated, value) in taken.items() if stated is None]
    if layout.tensor > 1:
        said.append("sequence_parallel")
    return (
        [f"{', '.join(said)}: a configuration does not say how it is trained; change them in the file"] if said else []
    )


def _counts(workload: Workload, found: Section, path: Path | None) -> list[str]:
    """The parameters, and what an index beside the file says of them."""
    model, kernels = workload.model, workload.training.kernels
    index = None if path is None else path.with_name(_INDEX)
    counted = [count(model, kernels, found.differences)]
    if index is not None and index.is_file():
        main = without_prediction(model)
        published = parameter_count(main, kernels, padded=False) + sum(number for number, _ in found.differences)
        counted.append(_published(index, published + expert_biases(main), found))
    return counted


def count(model: Model, kernels: Kernels, differences: Sequence[tuple[int, str]] = ()) -> str:
    """A model's parameters as they are published, and what Megatron has beside them.

    `differences`: what the published weights have beyond Megatron's, or lack.
    """
    main = without_prediction(model)
    here = parameter_count(main, kernels, padded=False)
    published = here + sum(number for number, _ in differences)
    said = [f"{published:,} ({published / 1e9:.2f} billion)"]
    if buffers := expert_biases(main):
        said.append(f"{buffers:,} expert biases beside them are buffers in Megatron")
    said += [f"{number:,} of them, {what}, are not in this file" for number, what in differences if number > 0]
    said += [f"Megatron has {-number:,} more, {what}" for number, what in differences if number < 0]
    if model.mtp_num_layers:
        said.append(f"multi-token prediction has {parameter_count(model, kernels, padded=False) - here:,} more")
    if padding := parameter_count(main, kernels) - here:
        said.append(f"the vocabulary as Megatron pads it has {padding:,} more")
    return "; ".join(said)


def _published(index: Path, parameters: int, found: Section) -> str:
    """What the index of the published weights says of their number."""
    try:
        metadata = Keys(parse_json(text_from(index, _MOST_INDEX_BYTES), _INDEX), _INDEX).part("metadata")
        total = metadata.optional_integer("total_parameters", most=2**62)
        size = metadata.optional_integer("total_size", most=2**62)
    except InputError as error:
        return f"not compared, {error}"
    kind = found.keys.plain("dtype", found.keys.plain("torch_dtype", "bfloat16"))
    width = _BYTES.get(kind, 2) if isinstance(kind, str) else 2
    if total is None and size is None:
        return f"not compared, {_INDEX} has neither total_parameters nor total_size"
    said = (
        f"{_INDEX} has {total:,}"
        if total
        else f"{_INDEX} has {size:,} bytes, {(size or 0) // width:,} of {width} bytes each"
    )
    difference = (total or (size or 0) // width) - parameters
    if not difference:
        return f"{said}: the same"
    reason = "towers, multi-token prediction, quantised weights or other precisions would be such"
    return f"{said}: {abs(difference):,} {'more' if difference > 0 else 'fewer'} than here; {reason}"
