"""labkit: what one rank of a Megatron Core training job holds in GPU memory, and what to recompute.

>>> import labkit
>>> workload = labkit.Workload.load("data/workloads/moonlight-16b.yaml")
>>> estimate = labkit.estimate(workload)  # milliseconds, no GPU, no torch
>>> trace = labkit.trace(workload)  # real Megatron Core code over tensors without data, no GPU  # doctest: +SKIP
>>> labkit.Explorer(workload)  # in a notebook: what other choices come to, as they are picked  # doctest: +SKIP
>>> study = labkit.Study.load("data/studies/moonlight-16b.yaml")  # doctest: +SKIP
"""

TYPE_CHECKING = False
"""As `typing` has it, which is not imported here: `__main__` answers Ctrl-C only once this module is there."""
if TYPE_CHECKING:
    from labkit.drivers.trace.driver import trace
    from labkit.explore import Explorer
    from labkit.memory.estimate import estimate
    from labkit.study import Study
    from labkit.workload import Workload

__version__ = "0.1.0"
__all__ = ["Explorer", "Study", "Workload", "__version__", "estimate", "trace"]

_HOMES = {
    "Explorer": "labkit.explore",
    "Study": "labkit.study",
    "Workload": "labkit.workload",
    "estimate": "labkit.memory.estimate",
    "trace": "labkit.drivers.trace.driver",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use, so that `import labkit` costs nothing (PEP 562)."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'labkit' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
