"""What a launch says that no other field of a workload does."""

import re
import shlex
from collections.abc import Iterator
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from labkit.errors import nearest
from labkit.workload.base import Many, Part
from labkit.workload.megatron_options import OPTIONS

READ_FROM_ENVIRONMENT = re.compile(r"(NVTE|NCCL|CUDA_DEVICE|CUDA_GRAPHS|CUBLAS|MAMBA|PYTORCH_(CUDA_)?ALLOC)_\w+")
"""Variables that Megatron's validator, Megatron Core, Transformer Engine or PyTorch read, and that load nothing."""
FIELD_OF_VARIABLE = {
    "CUBLAS_WORKSPACE_CONFIG": "training.cublas_workspace_config",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "training.kernels.deterministic_attention",
    "PYTORCH_CUDA_ALLOC_CONF": "training.allocator",
    "PYTORCH_ALLOC_CONF": "training.allocator",
}
"""Variables that another field of a workload says."""
RESERVED_ALONE = ("--empty-unused-memory-level",)
"""Options that decide what the allocator reserves, and no peak of what is allocated."""
_OPTION = re.compile(r"--[A-Za-z0-9]+([-_][A-Za-z0-9]+)*")


def _option(text: str) -> str:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"a quote is not closed in {text[:80]!r}") from error
    if not words or not _OPTION.fullmatch(words[0].partition("=")[0]):
        raise ValueError("should be an option and its values, such as '--fp8-format hybrid'")
    option = words[0].partition("=")[0]
    if option not in OPTIONS:
        raise ValueError(f"Megatron-LM 0.19 has no {option[:80]}{nearest(option[:80], OPTIONS)}")
    if any(word.startswith("--") for word in words[1:]):
        raise ValueError(f"should be one option with its values, not several: {text[:80]!r}")
    return text


def _variable(text: str) -> str:
    name, equals, _ = text.partition("=")
    if not equals:
        raise ValueError("should be NAME=value")
    if not READ_FROM_ENVIRONMENT.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is no variable that Megatron, Transformer Engine or PyTorch reads for this")
    if name in FIELD_OF_VARIABLE:
        raise ValueError(f"{name} is what {FIELD_OF_VARIABLE[name]} says; set it there")
    return text


_Text = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]*$", max_length=4000)]


class Launch(Part):
    """Arguments of Megatron-LM and variables beyond the fields: traced as they are, not priced by an estimate."""

    arguments: Many[Annotated[_Text, AfterValidator(_option)]] = Field(default=(), max_length=500)
    """Each an option of Megatron-LM with its values: `--log-params-norm`, `--fp8-format hybrid`."""
    environment: Many[Annotated[_Text, AfterValidator(_variable)]] = Field(default=(), max_length=100)
    """Each `NAME=value`."""

    @property
    def not_priced(self) -> list[str]:
        """The arguments that may decide the peak, which an estimate leaves out."""
        return [option for option in self.arguments if not option.startswith(RESERVED_ALONE)]

    @property
    def options(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Each option and its values, as `--option value` or `--option=value` says them."""
        for text in self.arguments:
            word, *values = shlex.split(text)
            option, joined, value = word.partition("=")
            yield option, (value, *values) if joined else tuple(values)

    @property
    def words(self) -> list[str]:
        """The arguments as a command line has them."""
        return [word for option in self.arguments for word in shlex.split(option)]

    @property
    def variables(self) -> dict[str, str]:
        """The environment as a mapping."""
        pairs = (text.partition("=") for text in self.environment)
        return {name: value for name, _, value in pairs}
