"""What the optimizer holds of a rank's shards, and what its step holds for a moment.

Sources: Megatron Core `optimizer/distrib_optimizer.py`, `optimizer/optimizer.py`
(`Float16OptimizerWithFloat16Params`); Transformer Engine `pytorch/optimizers/fused_adam.py` and `fused_sgd.py`.
"""

from collections.abc import Iterator, Sequence

from labkit.ledger import rounded
from labkit.memory.book import Book, Entry
from labkit.memory.buffers import Buffer
from labkit.memory.tape import DTYPE_BYTES, Parameter
from labkit.memory.weights import About, Act, Tensors
from labkit.workload import Workload
from labkit.workload.training import Optimizer


class ShardedOptimizer:
    """The optimizer over one rank's shards: main parameters, copies of gradients, moments.

    A shard is the stretch of a parameter whose optimizer state this rank holds: all of it without a distributed
    optimizer.
    """

    def __init__(self, buffers: Sequence[Buffer], workload: Workload, gradient_dtype: str) -> None:
        """Of the shards of some buffers."""
        self._choice = workload.training.optimizer
        self._dtype = workload.training.precision
        # Parameters in fp32 are main parameters themselves.
        self._copies_parameters = not self._choice.main_params_in_te and self._dtype != "fp32"
        self._copies_gradients = self._copies_parameters and gradient_dtype != "fp32"
        # One optimizer for the dense parameters and one for the experts; in each, matrices are the first group of
        # parameters and vectors the second.
        groups = {expert: [each.groups for each in buffers if each.expert == expert] for expert in (False, True)}
        self._optimizers = [
            [
                Tensors([block for blocks in alike for block in blocks], self._about)
                for alike in zip(*of_all, strict=True)
            ]
            for of_all in groups.values()
        ]
        self._has_copies = False
        self._has_stepped = False

    def _about(self, parameter: Parameter, numel: int, act: Act) -> About:
        return About(act.name, (numel,), parameter.name, "optimizer", parameter.layer, act.lifetime)

    @property
    def _groups(self) -> Iterator[Tensors]:
        return (group for groups in self._optimizers for group in groups)

    def set_up(self, book: Book) -> None:
        """Main parameters, where Megatron holds them: `clone().float()` of each shard."""
        if not self._copies_parameters:
            return
        clone = Act("open", "parameter copy", self._dtype)
        for shards in self._groups:
            book.each(shards, [clone, Act("open", "main_param", "fp32", "state"), clone._replace(verb="close")])

    def zero_gradients(self, book: Book) -> None:
        """Start of a step: the last step's copies of the gradients go (`zero_grad`)."""
        for shards in self._groups if self._has_copies else ():
            book.each(shards, [_GRADIENT._replace(verb="close")])
        self._has_copies = False

    def step(self, book: Book) -> None:
        """Copy the gradients to fp32 where Megatron holds the main parameters (`prepare_grads`), then step."""
        for shards in self._groups if self._copies_gradients else ():
            book.each(shards, [_GRADIENT])
        self._has_copies = self._copies_gradients
        for groups in self._optimizers:
            self._step_groups(book, [group for group in groups if group.sizes])
        self._has_stepped = True

    def _step_groups(self, book: Book, groups: Sequence[Tensors]) -> None:
        """`FusedAdam.step`: states appear in the first one; narrow ones are copied to fp32 for the kernel and back.

        The copies of a group stay in the arguments of the last kernel (`tensor_lists`) until the next group's.
        """
        copies = [Act("open", f"fp32 {name}", "fp32") for name in self._unscaled]
        done = [copy._replace(verb="close") for copy in copies]
        held: Tensors | None = None
        for group in groups:
            if not self._has_stepped:
                self._make_scales(book, group)
            book.each(group, copies if self._has_stepped else [*self._making_states(), *copies])
            if held is not None:
                book.each(held, done)
            held = group
            for name, dtype in self._unscaled.items():
                if dtype == "bf16":
                    # `_apply_scale`: `scaled_state.copy_(unscaled_state.bfloat16())`
                    narrow = Act("open", f"narrow {name}", dtype)
                    book.each(group, [narrow, narrow._replace(verb="close")])
        if held is not None:
            book.each(held, done)

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

    def _making_states(self) -> list[Act]:
        """`FusedAdam.initialize_state`."""
        acts = [Act("open", name, dtype, "state") for name, dtype in self._states.items()]
        if self._states.get("master_param", "int16") != "int16":
            # `master = param.clone().detach().float()` on its way into the state.
            clone, master = Act("open", "parameter copy", self._dtype), Act("open", "fp32 parameter copy", "fp32")
            acts += [clone, master, clone._replace(verb="close"), master._replace(verb="close")]
        return acts

    def _make_scales(self, book: Book, shards: Tensors) -> None:
        """One fp32 scalar for each state whose values are not fp32 (remainders are bits of fp32 ones)."""
        narrow = sum(dtype in ("bf16", "fp16") for dtype in self._states.values())
        count = narrow * sum(shards.sizes.values())
        if count:
            nbytes = rounded(DTYPE_BYTES["fp32"]) * count
            about = "state scales", (1,), "fp32", nbytes, "optimizer", "optimizer"
            book.open(Entry(*about, lifetime="state", number=count))


_GRADIENT = Act("open", "fp32 gradient", "fp32")


def _states(choice: Optimizer) -> dict[str, str]:
    if choice.optimizer == "sgd":
        return {"momentum_buffer": "fp32"}
    moments: dict[str, str] = {"exp_avg": choice.exp_avg_dtype, "exp_avg_sq": choice.exp_avg_sq_dtype}
    if not choice.main_params_in_te:
        return moments
    remainders = choice.store_param_remainders and choice.main_params_dtype == "fp32"
    # With remainders it keeps the low 16 bits beside each bf16 parameter, else the whole main parameter.
    return {**moments, "master_param": "int16" if remainders else choice.main_params_dtype}
