"""Megatron's own reading of launch arguments: its parser, its validator, its `TransformerConfig`.

A process of its own (`python -m labkit.drivers.trace.megatron_args`), because Megatron reads `sys.argv` and the
environment, and its import needs the stand-in for the GPU. It reads a JSON object from each line of standard input,
`{"arguments", "printed", "environment", "world_size", "gpu", "silent"}`, and answers with one a line on standard
output: what `read` returns as plain data, or `{"error": "one sentence"}`. `printed` are arguments as a log has them
(`labkit.drivers.trace.printed`).
Sources: `megatron.training.arguments`, `argument_utils`, Megatron Core 0.19.
"""

import argparse
import dataclasses
import enum
import json
import math
import os
import re
import sys
from fnmatch import fnmatchcase
from typing import Any

from labkit.drivers.options import check_values, groups, nearest_option, refusing, shown
from labkit.drivers.trace.printed import words as printed_words
from labkit.errors import InputError
from labkit.workload.gpu import GPUS
from labkit.workload.launch import READ_FROM_ENVIRONMENT

_GAP = re.compile("\0([^\0]*)\0")
_ELSEWHERE = {
    "yaml_cfg": "write what that file says as arguments",
    "heterogeneous_layers_config_path": "labkit has no models whose layers differ that way",
    "heterogeneous_layers_config_encoded_json": "labkit has no models whose layers differ that way",
    "perform_rl_step": "labkit has no reinforcement learning",
}
"""Arguments that make it another program, or that are read from files which may be elsewhere."""
_FILES = ("result_rejected_tracker_filename", "enable_msc", "non_persistent_ckpt_type", "te_precision_config_file")
_FILES_OF_KITCHEN = ("kitchen_config_file", "kitchen_recipe_number")
_AT_LEAST_ONE = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels seq_length "
    "max_position_embeddings micro_batch_size global_batch_size vocab_size make_vocab_size_divisible_by "
    "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size "
    "expert_tensor_parallel_size"
).split()
"""Numbers that Megatron divides by, or takes roots of, before it looks at them."""


def main() -> None:
    """Answer one request after the other until standard input ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # Megatron prints
    from labkit.drivers.trace.surface import fake_cuda

    environment = dict(os.environ)
    with fake_cuda(next(iter(GPUS.values()))), os.fdopen(answers, "w") as stream:
        for line in sys.stdin:
            os.environ.clear()
            os.environ.update(environment)
            request = json.loads(line)
            with fake_cuda(GPUS[request["gpu"]]):
                answer = _answer(request)
            json.dump(answer, stream)
            stream.write("\n")
            stream.flush()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        namespace, parser, given, config, written = read(request)
    except InputError as error:
        return {"error": str(error)}
    return {
        "values": {name: plain(value) for name, value in vars(namespace).items()},
        "given": {name: plain(value) for name, value in given.items()},
        "options": {action.dest: action.option_strings[0] for action in parser._actions},
        "config": plain_config(config),
        "written": written,
    }


def read(
    request: dict[str, Any],
) -> tuple[argparse.Namespace, argparse.ArgumentParser, dict[str, Any], Any, dict[str, list[str]]]:
    """The validated arguments, their parser, those given that are not the default, Megatron's configuration, words.

    The words are those of each argument that was given, by `dest`; a silent one whose value is not known is not read.

    Raises:
        InputError: Megatron refuses them, or they are not all known.
    """
    from megatron.training.argument_utils import core_transformer_config_from_args

    from labkit.drivers.arguments import parse, validate

    for name in [name for name in os.environ if READ_FROM_ENVIRONMENT.fullmatch(name)]:
        del os.environ[name]
    if {"-h", "--help"} & set(request["arguments"]):
        raise InputError("--help prints Megatron's options and trains nothing; leave it out")
    printed = request.get("printed", {})
    sharded = bool({"--use-megatron-fsdp", "--use-torch-fsdp2"} & set(request["arguments"])) or "True" in (
        printed.get("use_megatron_fsdp"),
        printed.get("use_torch_fsdp2"),
    )
    os.environ.update(_environment(request["environment"], sharded=sharded))
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(request["world_size"] or 1)}
    parsers: list[argparse.ArgumentParser] = []
    written: dict[str, list[str]] = {}

    def find(parser: argparse.ArgumentParser) -> list[str]:
        parsers.append(parser)
        given = [*request["arguments"], *printed_words(printed, parser)]
        groups = _known(given, parser, request["silent"])
        written.update((action.dest, words) for action, words in groups if action is not None)
        return [word for _, words in groups for word in words if not any(map(_GAP.search, words))]

    with refusing("Megatron's parser refuses the arguments"):
        namespace = parse(find, lambda message: _shown(message, 400))
    (parser,) = parsers
    given = {name: value for name, value in vars(namespace).items() if value != parser.get_default(name)}
    for name in _AT_LEAST_ONE:
        if isinstance(value := given.get(name), int) and value < 1:
            raise InputError(f"--{name.replace('_', '-')} {value}: should be at least 1")
    for name in (*_FILES, *_FILES_OF_KITCHEN):
        if hasattr(namespace, name):
            setattr(namespace, name, parser.get_default(name))
    if request["world_size"] is None:
        namespace.world_size = _smallest_world(namespace)
    with refusing("Megatron's validator refuses the arguments"):
        validate(namespace)
        config = core_transformer_config_from_args(namespace)
    return namespace, parser, given, config, written


def _environment(environment: dict[str, str], *, sharded: bool) -> dict[str, str]:
    for name, value in environment.items():
        if READ_FROM_ENVIRONMENT.fullmatch(name) and (found := _GAP.search(value)):
            raise InputError(f"{name} needs {found.group(1)}")
    kept = {name: value for name, value in environment.items() if READ_FROM_ENVIRONMENT.fullmatch(name)}
    if not sharded:
        # Launch files leave it to the cluster; what Megatron asks for decides no memory.
        kept.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return kept


def _known(
    words: list[str], parser: argparse.ArgumentParser, silent: list[str]
) -> list[tuple[argparse.Action | None, list[str]]]:
    """Each option and its words, those of silent options whose value is not known with a gap in them.

    Raises:
        InputError: an option does not exist or cannot be imported, or one that matters has a value that is not known.
    """
    options = parser._option_string_actions
    kept: list[tuple[argparse.Action | None, list[str]]] = []
    for group in groups(words):
        name = group[0].partition("=")[0]
        action = options.get(name)
        if name.startswith("--") and action is None:
            raise InputError(f"unknown argument {_shown(name)}{nearest_option(name, options)}")
        if action is not None and action.dest in _ELSEWHERE:
            raise InputError(f"{name} cannot be imported; {_ELSEWHERE[action.dest]}")
        found = _GAP.search(" ".join(group))
        if found and (action is None or not any(fnmatchcase(action.dest, pattern) for pattern in silent)):
            raise InputError(f"{name if action else 'an argument'} needs {found.group(1)}")
        if not found and action is not None:
            check_values(action, group)
        kept.append((action, group))
    return kept


def _smallest_world(namespace: argparse.Namespace) -> int:
    """Ranks that the layout needs at least."""
    pipeline = namespace.pipeline_model_parallel_size
    dense = namespace.tensor_model_parallel_size * namespace.context_parallel_size * pipeline
    expert_tensor = namespace.expert_tensor_parallel_size or namespace.tensor_model_parallel_size
    experts = expert_tensor * namespace.expert_model_parallel_size * pipeline if namespace.num_experts else 1
    return max(math.lcm(dense, experts), 1)


def _shown(text: str, most: int = 80) -> str:
    return shown(_GAP.sub("...", text), most)


def plain(value: Any) -> Any:
    """A value as JSON has it: dtypes by labkit's names, enumerations and functions by their own."""
    import torch

    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype):
        names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "fp8"}
        return names.get(value, str(value))
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return getattr(value, "__name__", None) or type(value).__name__


def plain_config(config: Any) -> dict[str, Any]:
    """A configuration's fields as JSON has them."""
    return {field.name: plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


if __name__ == "__main__":
    main()
