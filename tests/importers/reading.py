"""Run as a process: texts of launches in (JSON list on standard input), what the importer made of each out.

A text that is a mapping of `workload` is answered with Megatron's configuration of it.

One process for all texts: Megatron's imports take seconds. `differing` are the fields on which Megatron's
configuration of the arguments and that of the imported workload (`labkit.drivers.build`) do not agree.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import sys
from typing import Any

from labkit.diagnose import logs
from labkit.diagnose.reading import Source
from labkit.drivers.trace import megatron_args
from labkit.drivers.trace.surface import fake_cuda
from labkit.errors import InputError
from labkit.importers.fields import Arguments, fields
from labkit.importers.launch import Launch, read_launch
from labkit.importers.megatron import MegatronReader
from labkit.workload import Workload
from labkit.workload.gpu import GPUS
from labkit.workload.launched import OPTION_OF
from tests.small import MODEL

_ALL_PARTS = [
    Workload.unchecked(
        {
            "model": MODEL | model,
            "parallelism": {"world_size": 1},
            "batch": {"seq_length": 256, "global_batch_size": 1},
            "training": {"kernels": {"transformer_impl": "local"}, "optimizer": {"fp8_recipe": "delayed"}},
        }
    )
    for model in (
        {"gated_delta_net": {}, "mamba": {}, "hybrid_layer_pattern": "M"},
        {"multi_latent_attention": None, "position_embedding_type": "yarn"},
    )
]
"""Workloads that have every part between them."""


def _read(launch: Launch) -> tuple[argparse.Namespace, Arguments]:
    """Megatron's reading of a launch."""
    request = MegatronReader.request(launch, "")
    namespace, parser, given, config, written = megatron_args.read(request)
    return namespace, Arguments(
        {name: megatron_args.plain(value) for name, value in vars(namespace).items()},
        {name: megatron_args.plain(value) for name, value in given.items()},
        {action.dest: action.option_strings[0] for action in parser._actions},
        megatron_args.plain_config(config),
        written,
    )


def _of_log(log: str, launch: Launch) -> dict[str, Any]:
    """The workload of the arguments that Megatron printed into a log."""
    (printed,) = logs.read(Source("log", log.encode(), io.BytesIO(log.encode()), None)).facts.printed
    again = launch._replace(arguments=(), world_size=int(printed.values["world_size"]), printed=printed.values)
    found = fields(_read(again)[1], name="imported", gpu=launch.gpu, environment=launch.environment)
    return Workload.from_mapping(found.mapping).model_dump(mode="json")


def imported(text: str) -> dict[str, Any]:
    """As `labkit.importers.megatron.import_megatron`, in this process."""
    from labkit.drivers.arguments import megatron_arguments
    from labkit.drivers.build import transformer_config

    launch = read_launch(text, "launch")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        namespace, arguments = _read(launch)
    found = fields(arguments, name="imported", gpu=launch.gpu, environment=launch.environment)
    workload = Workload.from_mapping(found.mapping)
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(workload.parallelism.world_size), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if namespace.use_megatron_fsdp:
        del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]  # Megatron asks for it to be unset
    again = megatron_arguments(workload, num_microbatches=workload.num_microbatches)
    theirs, ours = arguments.config, megatron_args.plain_config(transformer_config(workload, again))
    return {
        "workload": workload.model_dump(mode="json"),
        "not_priced": found.not_priced,
        "not_expressed": found.not_expressed,
        "assumed": found.assumed,
        "of_its_log": _of_log(printed.getvalue(), launch) if text.startswith("{") else None,
        "differing": {name: [theirs[name], ours[name]] for name in theirs if theirs[name] != ours[name]},
    }


def configured(mapping: dict[str, Any]) -> dict[str, Any]:
    """Megatron's configuration of a workload."""
    from labkit.drivers.arguments import megatron_arguments
    from labkit.drivers.build import transformer_config

    workload = Workload.from_mapping(mapping)
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(workload.parallelism.world_size), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    again = megatron_arguments(workload, num_microbatches=workload.num_microbatches)
    return {"configuration": megatron_args.plain_config(transformer_config(workload, again))}


def known_names() -> dict[str, Any]:
    """What Megatron's parser and its configuration call their entries."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from megatron.training.arguments import add_megatron_arguments

    from labkit.drivers.arguments import arguments_of

    parser = add_megatron_arguments(argparse.ArgumentParser())
    classes = (TransformerConfig, MLATransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    said = {name for workload in _ALL_PARTS for name in arguments_of(workload, num_microbatches=1)}
    return {
        "defaults": {each.__name__: defaults(each) for each in classes},
        "said_by_fields": [
            option for action in parser._actions if action.dest in said for option in action.option_strings
        ],
        "launched": {
            option: [action.dest, megatron_args.plain(action.default), _values(action)]
            for action in parser._actions
            for option in action.option_strings
            if option in OPTION_OF.values()
        },
        "arguments": [action.dest for action in parser._actions],
        "options": [option for option in parser._option_string_actions if option.startswith("--")],
        "configuration": [field.name for field in dataclasses.fields(MLATransformerConfig)],
    }


def defaults(kind: type) -> dict[str, Any]:
    """What the fields of a configuration are where nothing is said."""
    fields_of = dataclasses.fields(kind)
    return {
        each.name: megatron_args.plain(each.default) for each in fields_of if each.default is not dataclasses.MISSING
    }


def _values(action: argparse.Action) -> list[str]:
    """What an option takes: its choices, or the name of its type; nothing of a flag."""
    if action.nargs == 0:
        return []
    if action.choices:
        return [str(megatron_args.plain(choice)) for choice in action.choices]
    return [getattr(action.type, "__name__", "str")]


def main() -> None:
    """Megatron's names, then an answer to each text."""
    answers = os.dup(1)
    os.dup2(2, 1)  # Megatron prints
    found: list[dict[str, Any]] = []
    with fake_cuda(GPUS["h100-80gb"]):
        for text in json.load(sys.stdin):
            try:
                workload = json.loads(text).get("workload") if text.startswith('{"workload"') else None
                found.append(imported(text) if workload is None else configured(workload))
            except InputError as error:
                found.append({"error": str(error)})
        names = known_names()
    with os.fdopen(answers, "w") as stream:
        json.dump([names, *found], stream)


if __name__ == "__main__":
    main()
