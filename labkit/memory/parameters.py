"""How many parameters a model has, by the tables that an estimate sums up."""

from labkit.memory.units import chunks
from labkit.memory.weights import elements, weights
from labkit.workload import Batch, Model, Parallelism, Workload
from labkit.workload.training import Kernels, Training


def parameter_count(model: Model, kernels: Kernels | None = None, *, padded: bool = True) -> int:
    """Elements of all parameters, shared ones once, on one rank.

    `padded`: with the rows that Megatron pads the vocabulary by. Biases that balance experts are no parameters.

    Raises:
        InputError: they are more than an integer of 64 bits can count.
    """
    if not padded:
        model = model.model_copy(update={"make_vocab_size_divisible_by": 1})
    workload = Workload(
        model=model,
        parallelism=Parallelism(world_size=1),
        batch=Batch(seq_length=4096, global_batch_size=1),
        training=Training(kernels=kernels or Kernels()),
    )
    return sum(elements(weights(chunk)) for chunk in chunks(workload, 0))


def without_prediction(model: Model) -> Model:
    """The model without its layers of multi-token prediction."""
    pattern = model.hybrid_layer_pattern
    pattern = None if pattern is None else pattern.partition("/")[0]
    return model.model_copy(update={"mtp_num_layers": None, "hybrid_layer_pattern": pattern})


def expert_biases(model: Model) -> int:
    """Biases by which routers balance experts: buffers in fp32, which published counts may include."""
    moe = model.mixture_of_experts
    if moe is None or not moe.moe_router_enable_expert_bias:
        return 0
    return moe.num_moe_experts * sum(layer.mlp == "moe" for layer in model.layers)
