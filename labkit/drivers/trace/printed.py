"""The arguments that a run's log prints, as the words of a command line that Megatron's parser reads again.

`megatron.training.arguments._print_args` prints every argument after validation, as text. What differs from the
parser's default is given again, but for what the validator sets and then refuses to be given.
"""

import argparse
import ast
import re
from collections.abc import Iterator, Mapping

_SET_BY_THE_VALIDATOR = frozenset(
    "encoder_seq_length encoder_num_layers start_weight_decay end_weight_decay virtual_pipeline_model_parallel_size "
    "rank world_size local_rank inference_cuda_graph_scope".split()
)
_DERIVED = {
    "overlap_p2p_comm": ("virtual_pipeline_model_parallel_size", "None"),
    "align_param_gather": ("virtual_pipeline_model_parallel_size", "None"),
    "tensor_parallel_num_weight_shards": ("gtp_weight_remat_size", "1"),
    "expert_tensor_parallel_num_weight_shards": ("expert_gtp_weight_remat_size", "1"),
}
"""What the validator sets by itself where another argument has a value."""
_DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.uint8": "fp8"}
_ENUMERATION = re.compile(r"[A-Z][A-Za-z]{2,60}\.(\w{1,60})")
_ENTRIES = re.compile(r"<[A-Z][A-Za-z]{2,60}\.(\w{1,60}): ")
_LONGEST = 2**14
"""Characters of a value; a list of layers has some hundreds."""


def words(values: Mapping[str, str], parser: argparse.ArgumentParser) -> list[str]:
    """The command line that those values, by `dest`, come from."""
    return [word for action in parser._actions for word in _words(action, values.get(action.dest), values)]


def _words(action: argparse.Action, text: str | None, values: Mapping[str, str]) -> Iterator[str]:
    if text is None or len(text) > _LONGEST or not action.option_strings or text == str(action.default):
        return
    if action.dest in _SET_BY_THE_VALIDATOR:
        return
    because, value = _DERIVED.get(action.dest, ("", ""))
    if because in values and values[because] == value:
        return
    option = next((each for each in action.option_strings if each.startswith("--")), action.option_strings[0])
    if isinstance(action, argparse.BooleanOptionalAction):
        negative = next(each for each in action.option_strings if each.startswith("--no-"))
        yield from {"True": [option], "False": [negative]}.get(text, [])
    elif action.nargs == 0:
        if text == str(action.const):
            yield option
    elif text != "None":
        found = list(_values(action, text))
        if found:
            yield from (option, *found)


def _values(action: argparse.Action, text: str) -> Iterator[str]:
    """The words behind an option."""
    if action.nargs in ("+", "*") or isinstance(action.nargs, int):
        yield from _listed(text)
    else:
        yield "".join(text.split()) if text.startswith("[") else _plain(text)


def _plain(text: str) -> str:
    """A value as the parser takes it: a dtype's or an enumeration's entry by name."""
    found = _ENUMERATION.fullmatch(text)
    return _DTYPES.get(text, found[1] if found else text)


def _listed(text: str) -> list[str]:
    """The entries of a list; the validator makes one value of some lists."""
    if text.startswith("[<"):
        return _ENTRIES.findall(text)
    try:
        listed = ast.literal_eval(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [text]
    return [_plain(str(each)) for each in listed] if isinstance(listed, list | tuple) else [text]
