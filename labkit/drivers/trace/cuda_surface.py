"""The face of `torch.cuda` on a machine without a GPU: one GPU that runs nothing.

Device tensors are meta tensors (autograd's engine would need a CUDA driver for real or fake "cuda" ones), host
tensors are real. So every request for a tensor on CUDA is answered with a meta tensor, which says that it lies on
`cuda:0`, and every question about the device with the GPU's answer.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import MethodWrapperType, SimpleNamespace
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode

from labkit.drivers.trace.patches import NOTHING, Replacement
from labkit.workload.gpu import Gpu

META = torch.device("meta")
CUDA = torch.device("cuda", 0)


class Stream:
    """Work is done the moment it is issued, but the allocator keeps the blocks of streams apart: streams have names.

    `Stream.current` is the stream of the code that runs, 0 the default one.
    """

    current: "Stream"
    device = CUDA
    priority = 0
    _made = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream_id = self.cuda_stream = Stream._made
        Stream._made += 1

    def __getattr__(self, name: str) -> Callable[..., Self]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.stream_id == other.stream_id

    def __hash__(self) -> int:
        return self.stream_id

    def query(self) -> bool:
        """All work is done."""
        return True


Stream.current = Stream()


class on_stream:
    """`torch.cuda.stream`: one may be entered again when it has been left, as gradient synchronization does."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before = Stream.current
        Stream.current = self._stream or self._before

    def __exit__(self, *exception: object) -> None:
        Stream.current = self._before


class Event:
    """A moment that is over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def query(self) -> bool:
        """All work is done."""
        return True

    def elapsed_time(self, other: Self) -> float:
        """No time passes."""
        return 0.0


class _Generator:
    """The device's random numbers, which nobody draws: any state is its state, and itself one that graphs share."""

    def get_state(self) -> torch.Tensor:
        return _rng_state()

    def set_state(self, state: Any) -> None:
        pass

    graphsafe_set_state = manual_seed = set_state

    def graphsafe_get_state(self) -> Self:
        return self

    clone_state = graphsafe_get_state


class _Device(contextlib.nullcontext[None]):
    """`torch.cuda.device(index)`."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()


def _factory(dtype: torch.dtype) -> type:
    """`torch.cuda.FloatTensor([1.0])` and its like."""

    def new(cls: type, data: Any) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype, device="cuda")

    return type(f"{dtype}Tensor", (), {"__new__": new})


class CudaAsMeta(TorchFunctionMode):
    """Answers requests for tensors on CUDA with meta tensors, and pins no host memory."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if type(function) is MethodWrapperType:  # an attribute is read or set: most of all calls
            return function(*args)
        if function is torch.device:
            return function(*args, **(kwargs or {}))
        if function is torch.Tensor.cuda:
            return args[0].to(META)
        if function is torch.Tensor.cpu and on_device(args[0]) and args[0].dtype.is_floating_point:
            # Initial weights that the optimizer reads again, not numbers that decide anything.
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        if function is torch.Tensor.pin_memory:
            return args[0]
        if kwargs:
            kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
            if type(kwargs.get("device")) is int or _is_cuda(kwargs.get("device")):
                kwargs["device"] = META
        if function is torch.tensor and kwargs and _is_meta_int32(kwargs):
            # Numbers that the host gives, which may be asked back.
            return function(*args, **{**kwargs, "device": "cpu"}).to(META)
        if function is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], META, *args[2:])
        if any(map(_is_cuda, args)):
            args = tuple(META if _is_cuda(argument) else argument for argument in args)
        if function in _OF_DATA and kwargs and kwargs.get("device") is META and not isinstance(args[0], torch.Tensor):
            return _put(function, *args, **kwargs)
        return function(*args, **(kwargs or {}))


_OF_DATA = (torch.tensor, torch.as_tensor, torch.asarray)


def _put(function: Any, *args: Any, requires_grad: bool = False, **kwargs: Any) -> torch.Tensor:
    """A tensor of the host's data: filled there, then copied (`torch/csrc/utils/tensor_new.cpp`).

    On the meta device no operator would tell of it. Numbers that have to be read from the device first are not known.
    """
    put: torch.Tensor
    if any(map(on_device, _tensors(args[0]))):
        put = torch.empty_like(function(*args, **kwargs))
    else:
        put = function(*args, **{**kwargs, "device": "cpu"}).to(META)
    return put.requires_grad_(requires_grad)


def _tensors(data: Any) -> Iterator[torch.Tensor]:
    """Those in nested lists."""
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, (list, tuple)):
        for item in data:
            yield from _tensors(item)


def _is_cuda(device: Any) -> bool:
    if type(device) is torch.device:
        return device.type == "cuda"
    return type(device) is str and device.startswith("cuda")


def _is_meta_int32(options: dict[str, Any]) -> bool:
    return options.get("device") == META and options.get("dtype") == torch.int32


_true_device: Any = torch._C.TensorBase.device


def _reported_device(tensor: torch.Tensor) -> torch.device:
    """`Tensor.device` as the program sees it: operators (inside which no mode is active) see the truth."""
    with torch._C.DisableTorchFunction():
        device: torch.device = _true_device.__get__(tensor)
    return CUDA if device.type == "meta" and torch._C._len_torch_dispatch_stack() else device


_true_meta: Any = torch._C.TensorBase.is_meta


def on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of the trace's device, whoever asks."""
    with torch._C.DisableTorchFunction():
        meta: bool = _true_meta.__get__(tensor)
    return meta


def _reported_as_meta(tensor: torch.Tensor) -> bool:
    """`Tensor.is_meta` as the program sees it, which has no such tensors."""
    return on_device(tensor) and not torch._C._len_torch_dispatch_stack()


_true_wrapper: Any = torch.Tensor._make_wrapper_subclass


def _made_of_tensors(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
    """A tensor without memory of its own, around others: on the meta device where those are."""
    if type(device) is int or _is_cuda(device):
        device = META
    wrapper: torch.Tensor = _true_wrapper(*args, device=device, **kwargs)
    return wrapper


_TYPE_NAMES = {
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.float32: "torch.cuda.FloatTensor",
    torch.float64: "torch.cuda.DoubleTensor",
    torch.int64: "torch.cuda.LongTensor",
}


def _tensor_type(original: Any) -> Callable[..., Any]:
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs) if args or kwargs or not on_device(self) else _TYPE_NAMES[self.dtype]

    return type_


def _keeping_attributes(apply: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    """`Module._apply`, after which parameters have the attributes they had.

    From host to CUDA it moves a parameter's data. Host and meta tensors are too different for that: it makes new
    parameters, without what Megatron has noted on the old ones (`sequence_parallel`, `allreduce`).
    """

    def run(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        noted = {name: vars(tensor).copy() for name, tensor in module._parameters.items() if tensor is not None}
        applied = apply(module, *args, **kwargs)
        for name, attributes in noted.items():
            vars(module._parameters[name]).update(attributes)
        return applied

    return run


def replacements(gpu: Gpu) -> Iterator[Replacement]:
    """What `torch.cuda` and `torch.Tensor` say about the device while a trace runs on `gpu`."""
    major, minor = gpu.compute_capability
    properties = SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        multi_processor_count=gpu.multiprocessors,
        total_memory=gpu.total_memory_bytes,
        warp_size=32,
    )
    default = Stream.current
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_capability": gpu.compute_capability,
        "get_device_name": gpu.name,
        "is_current_stream_capturing": False,
        "is_bf16_supported": True,
        "default_stream": default,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "set_device": None,
        "synchronize": None,
        "empty_cache": None,
        "manual_seed": None,
        "manual_seed_all": None,
        "set_rng_state": None,
        "_lazy_init": None,
    }
    for name, answer in answers.items():
        yield Replacement(torch.cuda, name, _always(answer), NOTHING)
    yield Replacement(torch.nn.Module, "_apply", _keeping_attributes(torch.nn.Module._apply), NOTHING)
    yield Replacement(torch.cuda, "default_generators", (_Generator(),), NOTHING)
    yield Replacement(torch.cuda, "get_rng_state", _rng_state, "nothing: the state is a host tensor")
    yield Replacement(torch.cuda, "current_stream", lambda device=None: Stream.current, NOTHING)
    yield Replacement(torch.cuda, "stream", on_stream, NOTHING)
    yield Replacement(torch.cuda, "device", _Device, NOTHING)
    yield Replacement(torch.cuda, "Stream", Stream, NOTHING)
    yield Replacement(torch.cuda, "Event", Event, NOTHING)
    yield Replacement(torch, "Event", Event, NOTHING)
    for name in ("range_push", "range_pop"):
        yield Replacement(torch.cuda.nvtx, name, _always(None), NOTHING)
    for name, dtype in (
        ("FloatTensor", torch.float32),
        ("IntTensor", torch.int32),
        ("LongTensor", torch.int64),
        ("ByteTensor", torch.uint8),
    ):
        yield Replacement(torch.cuda, name, _factory(dtype), "one tensor of the data")
    # A function mode is off while it handles a call, and so would be all through a backward it had handled.
    yield Replacement(torch.autograd, "has_torch_function", _always(False), NOTHING)
    # Transformer Engine compares addresses to find tensors that share memory: those of meta tensors are all 0.
    yield Replacement(torch.UntypedStorage, "data_ptr", _address, NOTHING)
    yield Replacement(torch.Tensor, "device", property(_reported_device), NOTHING)
    yield Replacement(torch.Tensor, "is_cuda", property(on_device), NOTHING)
    yield Replacement(torch.Tensor, "is_meta", property(_reported_as_meta), NOTHING)
    yield Replacement(torch.Tensor, "_make_wrapper_subclass", _made_of_tensors, NOTHING)
    yield Replacement(torch.Tensor, "type", _tensor_type(torch.Tensor.type), "a copy, when given a type")
    yield Replacement(torch.Tensor, "record_stream", _always(None), "nothing: it delays the reuse of the block")


def read_scalar(tensor: torch.Tensor) -> bool | int | float:
    """`aten::_local_scalar_dense`: the value of a tensor that the program reads; zero for one on the device.

    A step reads gradient norms, overflow flags and token counts; zero means nothing to clip, nothing overflowed.
    """
    if not on_device(tensor):
        value: bool | int | float = torch.ops.aten._local_scalar_dense(tensor)
        return value
    if tensor.dtype == torch.bool:
        return False
    return 0.0 if tensor.dtype.is_floating_point else 0


_true_address: Any = torch.UntypedStorage.data_ptr


def _address(storage: torch.UntypedStorage) -> int:
    address: int = _true_address(storage)
    return address or storage._cdata


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer


def _rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8)
