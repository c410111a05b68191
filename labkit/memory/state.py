"""What is alive between steps: parameters, their buffers (`labkit.memory.buffers`), the optimizer's part."""

from collections.abc import Sequence

from labkit.ledger import rounded
from labkit.memory.book import Book, Entry
from labkit.memory.buffers import Buffer, buffers
from labkit.memory.layers.prefix_tree import tree_tensors
from labkit.memory.library import built_with
from labkit.memory.optimizer import ShardedOptimizer
from labkit.memory.tape import DTYPE_BYTES, Parameter, Value
from labkit.memory.units import Chunk
from labkit.memory.weights import About, Act, Block, Tensors, elements, those, weights
from labkit.workload import Workload
from labkit.workload.behaviour import takes_workspace_when_built


class State:
    """Opens and closes the entries of one rank's static state."""

    def __init__(self, chunks: Sequence[Chunk], workload: Workload, stage: int = 0) -> None:
        """Of pipeline rank `stage`, which has these model chunks."""
        training = workload.training
        of_chunks = [weights(chunk) for chunk in chunks]
        self._weights = [block for blocks in of_chunks for block in blocks]
        elements(self._weights)
        self._buffers = [
            buffer
            for index, blocks in enumerate(of_chunks)
            for buffer in buffers(blocks, workload, bucketed=stage == index == 0)
            if training.steps_optimizer
        ]
        self._workspace_bytes = training.workspaces
        self._takes_workspace = takes_workspace_when_built(training.software) and not training.kernels.local
        self.workspaces: set[str] = set()
        """Keys of the library workspaces taken while the model was built (`labkit.memory.library`)."""
        self._batch = [] if training.lora is None else [*tree_tensors(workload)]
        """What the `lora` runtime's caller has on the device before a step."""
        self._gathers = training.data_parallel.use_distributed_optimizer
        self._dtype = training.precision
        self._gradient_dtype = "fp32" if training.data_parallel.grad_reduce_in_fp32 else self._dtype
        self._optimizer = ShardedOptimizer(self._buffers, workload, self._gradient_dtype)

    def set_up(self, book: Book) -> None:
        """Build the model, move what is gathered into DDP's buffers, make the main parameters."""
        builds, wide = Act("open", "parameter", self._dtype), Act("open", "fp32 parameter", "fp32")
        base, adapters = self._base_and_adapters()
        before, after, found = self._first_built_with(base)
        converted = those(before, self._is_converted)
        book.each(self._parameters(those(before, lambda each: not self._is_converted(each))), [builds])
        for key, workspace in found:
            # Later ones find it there.
            self.workspaces.add(key)
            self._open_workspace(book, workspace)
        book.each(self._parameters(after), [builds])
        book.each(self._parameters(converted), [wide, builds, wide._replace(verb="close")])
        for tensor in self._batch:
            name, shape, dtype = tensor
            book.open(Entry(name, shape, dtype, tensor.bytes, "batch", "input", lifetime="state"))
        book.each(self._parameters(adapters), [builds])
        for buffer in self._buffers:
            if self._gathers:
                self._open_buffer(book, buffer, "param_data", self._dtype, "parameters")
            self._open_buffer(book, buffer, "grad_data", self._gradient_dtype, "gradients")
            if self._gathers:
                book.each(self._parameters(buffer.parameters), [builds._replace(verb="close")])
        self._optimizer.set_up(book)

    def _base_and_adapters(self) -> tuple[Sequence[Block], Sequence[Block]]:
        """A frozen base is built whole before its adapters."""
        if not self._batch:
            return self._weights, ()
        return those(self._weights, lambda each: not each.trainable), those(self._weights, lambda each: each.trainable)

    def _first_built_with(
        self, blocks: Sequence[Block]
    ) -> tuple[Sequence[Block], Sequence[Block], list[tuple[str, Value]]]:
        """The parameters up to the first that takes a workspace as it is built, the others, and what it takes."""
        if not self._takes_workspace:
            return blocks, (), []
        for index, block in enumerate(blocks):
            for position, part in enumerate(block.flat, start=1):
                if found := built_with(part.parameter, self._workspace_bytes):
                    first, others = block.repeats[:1], block.repeats[1:]
                    before = Block(block.parts[:position], first, block.layers)
                    after = Block(block.parts[position:], first, block.layers)
                    repeated = Block(block.parts, others, block.layers)
                    return [*blocks[:index], before], [after, repeated, *blocks[index + 1 :]], found
        return blocks, [], []

    def _is_converted(self, parameter: Parameter) -> bool:
        """A `torch.nn.Embedding` is built in fp32 on the host and moved; `Float16Module` makes the weight of it."""
        return self._dtype != "fp32" and parameter.name.endswith("position_embeddings.weight")

    def _parameters(self, blocks: Sequence[Block]) -> Tensors:
        return Tensors(blocks, self._about)

    def _about(self, parameter: Parameter, numel: int, act: Act) -> About:  # noqa: ARG002
        module, _, name = parameter.name.rpartition(".")
        moves = self._gathers and bool(self._buffers) and parameter.trainable
        goes = moves or act.dtype != self._dtype
        return About(name, parameter.shape, module, "parameters", parameter.layer, "transient" if goes else "state")

    def _open_workspace(self, book: Book, workspace: Value) -> None:
        about = workspace.name, workspace.shape, workspace.dtype, workspace.bytes
        book.open(Entry(*about, "", "library", lifetime="workspace"))

    def _open_buffer(self, book: Book, buffer: Buffer, name: str, dtype: str, kind: str) -> None:
        nbytes = rounded(buffer.numel * DTYPE_BYTES[dtype])
        # `megatron.training.get_model` wraps the model on a stream of its own.
        book.open(Entry(name, (buffer.numel,), dtype, nbytes, buffer.name, kind, lifetime="state", stream=1))

    def zero_gradients(self, book: Book) -> None:
        """Start of a step."""
        self._optimizer.zero_gradients(book)

    def sync_gradients(self, book: Book) -> None:
        """After backward, gradients of replicated parameters are concatenated and summed over tensor-parallel ranks.

        Source: `finalize_model_grads._allreduce_non_tensor_model_parallel_grads`.
        """
        numel = elements(those(self._weights, lambda each: each.replicated and each.trainable))
        if numel:
            nbytes = rounded(numel * DTYPE_BYTES[self._gradient_dtype])
            entry = Entry("replicated gradients", (numel,), self._gradient_dtype, nbytes, "grad_sync", "gradients")
            book.close(book.open(entry))

    def step(self, book: Book) -> None:
        """The optimizer's step."""
        self._optimizer.step(book)
