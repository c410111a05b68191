"""Quantized tensors as Transformer Engine's compiled half makes them: FP8 data, transposes and scales without values.

The classes and their bookkeeping are Transformer Engine's own Python; here are the functions behind it. Sources, of
version 2.20: `transformer_engine/pytorch/csrc/quantizer.cpp` (`create_tensor`, `convert_and_update_tensor`), which
`Quantizer.inner_tensor_specs` restates in Python for all recipes but delayed scaling, and
`csrc/extensions/{cast,normalization,activation,bias,transpose,swizzle,gemm}.cpp`.

Left out: single numbers that current scaling needs while it quantizes (512 bytes each), and the partial sums of a
fused bias gradient.
"""

from collections.abc import Sequence
from functools import cache
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from labkit.drivers.trace.work import launched

_BULK_DATA_ALIGNMENT, _BULK_SCALE_ALIGNMENT = 256, 16
"""Of each tensor's data and scales in the buffer of many (`bulk_allocate_*_tensors`, cast.cpp)."""


@cache
def _classes() -> SimpleNamespace:
    """Transformer Engine's, which import the module that these functions stand in for."""
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage
    from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage

    return SimpleNamespace(
        delayed=Float8Quantizer,
        tensorwise=Float8CurrentScalingQuantizer,
        blockwise=Float8BlockQuantizer,
        mxfp8=MXFP8Quantizer,
        blockwise_storage=Float8BlockwiseQTensorStorage,
        mxfp8_storage=MXFP8TensorStorage,
    )


def _format_of(quantizer: Any) -> Any:
    """The class whose Python says what `quantizer` allocates: delayed scaling allocates what current scaling does.

    Raises:
        NotImplementedError: a format whose shapes are not here.
    """
    classes = _classes()
    if isinstance(quantizer, classes.delayed):
        return classes.tensorwise
    if isinstance(quantizer, (classes.tensorwise, classes.blockwise, classes.mxfp8)):
        return type(quantizer)
    raise NotImplementedError(f"the trace has no shapes for tensors quantized by {type(quantizer).__name__}")


def _specs(quantizer: Any, shape: Sequence[int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each buffer of a quantized tensor, by name of the attribute."""
    specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = _format_of(quantizer).inner_tensor_specs(
        quantizer, tuple(shape)
    )
    return specs


def _assembled(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, buffers: dict[str, Tensor]) -> Any:
    metadata = _format_of(quantizer).storage_metadata(quantizer, dtype)
    context = {
        "cls": metadata["cls"],
        "is_tensor": not quantizer.internal,
        "requires_grad": False,
        "nontensor_kwargs": metadata["nontensor_kwargs"],
    }
    return metadata["cls"].__tensor_unflatten__(buffers, context, shape, None)


def create_tensor(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any = "cuda") -> Any:
    """`Quantizer::create_tensor`: data and scales of the directions the quantizer is to be used in (`quantizer.cpp`).

    Delayed scaling computes the inverse of its scale, one number, anew for every tensor.
    """
    delayed = isinstance(quantizer, _classes().delayed)
    buffers = {
        name: torch.reciprocal(quantizer.scale)
        if delayed and name == "_scale_inv"
        else torch.empty(size, dtype=kind, device=device)
        for name, (size, kind) in _specs(quantizer, shape).items()
    }
    return _assembled(quantizer, shape, dtype, buffers)


def create_empty_quantized_tensor(
    quantizer: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: Any,
    pin_memory: bool,
) -> Any:
    """`Quantizer.make_empty` (`cast.cpp`)."""
    return create_tensor(quantizer, shape, dtype, device)


def _coerce(quantizer: Any, tensor: Any) -> None:
    """`Quantizer::convert_and_update_tensor`: make the buffers that are missing, drop those not to be used."""
    specs = _specs(quantizer, tensor.shape)
    for name, _ in tensor._INNER_TENSORS:
        present = getattr(tensor, name)
        if name in specs and present is None:
            size, kind = specs[name]
            setattr(tensor, name, torch.empty(size, dtype=kind, device=tensor.device))
        elif name not in specs and present is not None:
            setattr(tensor, name, None)
    if hasattr(tensor, "_transpose_invalid"):
        tensor._transpose_invalid = "_transpose" not in specs


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    """Cast into a new tensor, or into `output` with its buffers made to fit (`cast.cpp`)."""
    source = tensor.contiguous()
    if output is None:
        output = create_tensor(quantizer, source.shape, source.dtype, source.device)
    else:
        _coerce(quantizer, output)
    launched(0, source, buffers([output], True), buffers([output], False))
    return output


def dequantize(input: Any, otype: Any) -> Tensor:
    """A tensor in high precision (`cast.cpp`)."""
    from transformer_engine.pytorch.constants import TE_DType_To_Torch

    output = torch.empty(input.shape, dtype=TE_DType_To_Torch[otype], device=input.device)
    launched(0, buffers([input], True) or buffers([input], False), output)
    return output


def bgrad_quantize(grad_output: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """(sum over rows, quantized gradient) (`bias.cpp`)."""
    bias = torch.empty(grad_output.shape[-1], dtype=grad_output.dtype, device=grad_output.device)
    return bias, quantize(grad_output, quantizer)


def split_quantize(
    tensor: Tensor, split_sections: Sequence[int], quantizers: Sequence[Any], disable_bulk_allocation: bool = False
) -> list[Any]:
    """Rows of `tensor` in groups, each quantized on its own (`cast.cpp`).

    With blocks of scales, all groups of one direction are views of one buffer, which lives as long as any of them.
    """
    width, classes = tensor.shape[-1], _classes()
    shapes = [(rows, *tensor.shape[1:-1], width) for rows in split_sections]
    bulk = not disable_bulk_allocation and any(
        all(isinstance(quantizer, kind) for quantizer in quantizers) for kind in (classes.blockwise, classes.mxfp8)
    )
    if bulk:
        groups = _empty_groups(quantizers, shapes, tensor.dtype, tensor.device)
    else:
        groups = [
            create_tensor(quantizer, shape, tensor.dtype, tensor.device)
            for quantizer, shape in zip(quantizers, shapes, strict=True)
        ]
    launched(0, tensor, buffers(groups, True), buffers(groups, False), launches=1 if bulk else len(groups))
    return groups


def _empty_groups(
    quantizers: Sequence[Any], shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: Any
) -> list[Any]:
    """`create_tensor` for each shape, what is for one direction in one buffer (`bulk_allocate_*_tensors`, cast.cpp)."""
    views: list[dict[str, Tensor]] = [{} for _ in shapes]
    specs = [_specs(quantizers[0], shape) for shape in shapes]
    for direction in ("rowwise", "columnwise"):
        if f"_{direction}_data" in specs[0]:
            _bulk(specs, views, direction, device)
    return [
        _assembled(quantizer, shape, dtype, parts)
        for quantizer, shape, parts in zip(quantizers, shapes, views, strict=True)
    ]


def _bulk(
    specs: Sequence[dict[str, tuple[tuple[int, ...], torch.dtype]]],
    views: Sequence[dict[str, Tensor]],
    direction: str,
    device: Any,
) -> None:
    """One buffer of bytes for the data of all groups, then their scales; views of it are added to `views`."""
    places: list[tuple[int, str, int, int]] = []
    size = 0
    for name, alignment in (
        (f"_{direction}_data", _BULK_DATA_ALIGNMENT),
        (f"_{direction}_scale_inv", _BULK_SCALE_ALIGNMENT),
    ):
        for number, spec in enumerate(specs):
            shape, dtype = spec[name]
            size = -(-size // alignment) * alignment
            places.append((number, name, size, size + prod(shape) * dtype.itemsize))
            size = places[-1][-1]
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    for number, name, start, end in places:
        shape, dtype = specs[number][name]
        views[number][name] = buffer[start:end].view(dtype).view(shape)


def fp8_transpose(input: Tensor, otype: Any, output: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """The last dimension first, contiguous (`transpose.cpp`)."""
    launched(0, input, input)
    out = output if out is None else out
    return (
        out
        if out is not None
        else torch.empty(input.shape[-1], *input.shape[:-1], dtype=torch.uint8, device=input.device)
    )


def swap_first_dims(tensor: Tensor, out: Tensor | None = None) -> Tensor:
    """The first two dimensions swapped, contiguous (`transpose.cpp`)."""
    launched(0, tensor, tensor)
    first, second, *rest = tensor.shape
    return torch.empty(second, first, *rest, dtype=tensor.dtype, device=tensor.device) if out is None else out


def output(
    quantizer: Any, out: Any, shape: Sequence[int], dtype: torch.dtype, device: Any, fused: Sequence[str]
) -> Any:
    """What a kernel writes: `out`, or a new tensor in high precision or as `quantizer` has it.

    It casts to the formats in `fused` (names of `_classes`) itself; for others there is a tensor in high precision
    for a moment, which is cast.
    """
    if quantizer is None:
        return torch.empty(shape, dtype=dtype, device=device) if out is None else out
    if out is None:
        out = create_tensor(quantizer, shape, dtype, device)
    if not isinstance(quantizer, tuple(getattr(_classes(), name) for name in fused)):
        written = torch.empty(shape, dtype=dtype, device=device)
        launched(0, written, written, buffers([out], True), buffers([out], False))
    return out


def _is_quantized(tensor: Any) -> bool:
    """Whether it is a `QuantizedTensorStorage`, a tensor or not."""
    return hasattr(tensor, "get_data_tensors")


def high_precision(tensor: Any) -> torch.dtype:
    """The dtype a tensor stands for."""
    dtype: torch.dtype = tensor._dtype if _is_quantized(tensor) else tensor.dtype
    return dtype


def buffers(tensors: Sequence[Any], rowwise: bool) -> list[Tensor]:
    """The data of tensors, quantized or not, that a kernel touches in one direction."""
    found = (
        tensor.get_data_tensors(rowwise_data=rowwise, columnwise_data=not rowwise) if _is_quantized(tensor) else tensor
        for tensor in tensors
    )
    return [tensor for tensor in found if tensor is not None]


def rearrange_scales(operands: Sequence[Any], rowwise: bool) -> None:
    """What a product makes of its operands' scales for a moment (`swizzle.cpp`).

    MXFP8: the scales in the order the tensor cores read them, unless they are. Blocks of 128 from Blackwell on, which
    has no such kernels: scales of MXFP8, one for each 32 elements of a row, for rows in multiples of 128.
    """
    size = sum(_rearranged_bytes(operand, rowwise) for operand in operands)
    if size:
        torch.empty(size, dtype=torch.uint8, device=operands[0].device)


def _rearranged_bytes(tensor: Any, rowwise: bool) -> int:
    if not _is_quantized(tensor):
        return 0
    classes = _classes()
    direction = "_rowwise" if rowwise else "_columnwise"
    if isinstance(tensor, classes.mxfp8_storage) and not tensor._with_gemm_swizzled_scales:
        return int(getattr(tensor, f"{direction}_scale_inv").numel())
    if isinstance(tensor, classes.blockwise_storage) and torch.cuda.get_device_capability() >= (10, 0):
        data = getattr(tensor, f"{direction}_data")
        rows, columns = prod(data.shape[:-1]), data.shape[-1]
        return int(-(-rows // 128) * 128 * -(-columns // 128) * 4)
    return 0


FUNCTIONS: dict[str, Any] = {
    "create_empty_quantized_tensor": create_empty_quantized_tensor,
    "quantize": quantize,
    "dequantize": dequantize,
    "bgrad_quantize": bgrad_quantize,
    "split_quantize": split_quantize,
    "fp8_transpose": fp8_transpose,
    "swap_first_dims": swap_first_dims,
}
