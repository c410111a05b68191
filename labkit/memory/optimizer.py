"""What the optimizer holds of a rank's shards, and what its step holds for a moment.

Sources: Megatron Core `optimizer/distrib_optimizer.py`, `optimizer/optimizer.py`
(`Float16OptimizerWithFloat16Params`); Transformer Engine `pytorch/optimizers/fused_adam.py` and `fused_sgd.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from labkit.ledger import Lifetime, rounded
from labkit.memory.book import Book
from labkit.memory.tape import DTYPE_BYTES, Parameter
from labkit.workload import Workload
from labkit.workload.training import Optimizer


@dataclass(frozen=True, slots=True)
class Shard:
    """The stretch of a parameter whose optimizer state this rank holds: all of it without a distributed optimizer."""

    parameter: Parameter
    numel: int


class ShardedOptimizer:
    """The optimizer over one rank's shards: main parameters, copies of gradients, moments."""

    def __init__(self, shards: Sequence[Shard], workload: Workload, gradient_dtype: str) -> None:
        self._choice = workload.training.optimizer
        self._dtype = workload.training.precision
        self._copies_gradients = not self._choice.main_params_in_te and gradient_dtype != "fp32"
        # One optimizer for the dense parameters and one for the experts; in each, matrices (with weight decay) are
        # the first group of parameters and vectors the second.
        self._optimizers = [
            [
                [
                    shard
                    for shard in shards
                    if shard.parameter.expert == expert and (len(shard.parameter.shape) > 1) == matrices
                ]
                for matrices in (True, False)
            ]
            for expert in (False, True)
        ]
        self._gradient_copies: list[int] = []
        self._has_stepped = False

    @property
    def _shards(self) -> Iterator[Shard]:
        return (shard for groups in self._optimizers for group in groups for shard in group)

    def set_up(self, book: Book) -> None:
        """Main parameters, where Megatron holds them: `clone().float()` of each shard."""
        if self._choice.main_params_in_te:
            return
        for shard in self._shards:
            clone = _open(book, shard, "parameter copy", self._dtype, "transient")
            _open(book, shard, "main_param", "fp32", "state")
            book.close(clone)

    def zero_gradients(self, book: Book) -> None:
        """Start of a step: the last step's copies of the gradients go (`zero_grad`)."""
        for number in self._gradient_copies:
            book.close(number)
        self._gradient_copies.clear()

    def step(self, book: Book) -> None:
        """Copy the gradients to fp32 where Megatron holds the main parameters (`prepare_grads`), then step."""
        if self._copies_gradients:
            self._gradient_copies = [_open(book, shard, "fp32 gradient", "fp32", "transient") for shard in self._shards]
        for groups in self._optimizers:
            self._step_groups(book, groups)
        if not self._has_stepped:
            self._has_stepped = True
            self._make_scales(book)

    def _step_groups(self, book: Book, groups: Sequence[Sequence[Shard]]) -> None:
        """`FusedAdam.step`: states appear in the first one; narrow ones are copied to fp32 for the kernel and back.

        The copies of a group stay in the arguments of the last kernel (`tensor_lists`) until the next group's.
        """
        held: list[int] = []
        for group in filter(None, groups):
            copies = []
            for shard in group:
                if not self._has_stepped:
                    self._make_states(book, shard)
                copies += [_open(book, shard, f"fp32 {name}", "fp32", "transient") for name in self._unscaled]
            for number in held:
                book.close(number)
            held = copies
            for name, dtype in self._unscaled.items():
                if dtype == "bf16":
                    # `_apply_scale`: `scaled_state.copy_(unscaled_state.bfloat16())`
                    for shard in group:
                        book.close(_open(book, shard, f"narrow {name}", dtype, "transient"))
        for number in held:
            book.close(number)

    @property
    def _states(self) -> dict[str, str]:
        """Names and dtypes of what is kept of a shard."""
        return _states(self._choice)

    @property
    def _unscaled(self) -> dict[str, str]:
        """States that the step copies to fp32: narrow ones, but for moments that are both of bf16 (`fuse_unscale`)."""
        fused = self._choice.exp_avg_dtype == self._choice.exp_avg_sq_dtype == "bf16"
        return {
            name: dtype for name, dtype in self._states.items() if dtype == "fp16" or (dtype == "bf16" and not fused)
        }

    def _make_states(self, book: Book, shard: Shard) -> None:
        """`FusedAdam.initialize_state`."""
        for name, dtype in self._states.items():
            _open(book, shard, name, dtype, "state")
        if self._states.get("master_param", "int16") != "int16":
            # `master = param.clone().detach().float()` on its way into the state.
            clone = _open(book, shard, "parameter copy", self._dtype, "transient")
            master = _open(book, shard, "fp32 parameter copy", "fp32", "transient")
            book.close(clone)
            book.close(master)

    def _make_scales(self, book: Book) -> None:
        """One fp32 scalar for each state whose values are not fp32 (remainders are bits of fp32 ones)."""
        narrow = sum(dtype in ("bf16", "fp16") for dtype in self._states.values())
        count = narrow * sum(1 for _ in self._shards)
        if count:
            nbytes = rounded(DTYPE_BYTES["fp32"]) * count
            book.open(
                "state scales",
                (1,),
                "fp32",
                nbytes,
                module="optimizer",
                kind="optimizer",
                lifetime="state",
                count=count,
            )


def _states(choice: Optimizer) -> dict[str, str]:
    if choice.optimizer == "sgd":
        return {"momentum_buffer": "fp32"}
    moments: dict[str, str] = {"exp_avg": choice.exp_avg_dtype, "exp_avg_sq": choice.exp_avg_sq_dtype}
    if not choice.main_params_in_te:
        return moments
    remainders = choice.store_param_remainders and choice.main_params_dtype == "fp32"
    # With remainders it keeps the low 16 bits beside each bf16 parameter, else the whole main parameter.
    return {**moments, "master_param": "int16" if remainders else choice.main_params_dtype}


def _open(book: Book, shard: Shard, name: str, dtype: str, lifetime: Lifetime) -> int:
    return book.open(
        name,
        (shard.numel,),
        dtype,
        rounded(shard.numel * DTYPE_BYTES[dtype]),
        module=shard.parameter.name,
        kind="optimizer",
        layer=shard.parameter.layer,
        lifetime=lifetime,
    )
