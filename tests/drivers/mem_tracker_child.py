"""Traces with PyTorch's `MemTracker` active too: `python -m tests.drivers.mem_tracker_child FOLDER`.

Of each `WORKLOAD.json` in the folder, and each moment at which a phase begins, `WORKLOAD.seen.json` gets what
MemTracker has counted and the ledger's rows. A trace is a fork of the process that has done the imports.
"""

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed._tools import mem_tracker

from labkit import Workload
from labkit.ledger import rounded

META = torch.device("meta")


class Theirs(mem_tracker.MemTracker):
    """MemTracker, told where Megatron keeps gradients: in buffers, not in `.grad`."""

    def _track_module_params_and_buffers(self, module: Any, install_grad_hooks: bool = True) -> tuple[int, int]:
        if not isinstance(module.buffers, list):
            return super()._track_module_params_and_buffers(module, install_grad_hooks)
        # Megatron's DistributedDataParallel has a list of gradient buffers where modules have a method.
        for buffer in (*module.buffers, *module.expert_parallel_buffers):
            self._update_and_maybe_create_winfos(buffer.grad_data, mem_tracker._MemRefType.GRAD)
        return 0, 0


def _as_on_cuda(self: Any) -> int:
    """`_WeakRefInfo._calculate_mem_consumed`, which rounds up for devices of type cuda alone."""
    return rounded(self.size * self.element_size)


def main(folder: Path) -> None:
    """Trace each workload of the folder."""
    mem_tracker._WeakRefInfo._calculate_mem_consumed = _as_on_cuda  # type: ignore[method-assign]
    process = multiprocessing.get_context("fork").Process
    with Theirs() as theirs:
        # Imported here: the trace's `resize_` then goes through theirs.
        from labkit.drivers.trace.worker import _prepare

        _prepare()
        for path in sorted(folder.iterdir()):
            workload = Workload.from_mapping(json.loads(path.read_text(encoding="utf-8")))
            child = process(target=compare, args=(theirs, workload, path.with_suffix(".seen.json")))
            child.start()
            child.join()


def compare(theirs: Theirs, workload: Workload, result: Path) -> None:
    """Trace two steps and write what both trackers say."""
    from labkit.drivers.trace import cublas
    from labkit.drivers.trace.session import trace_here

    snapshots: list[tuple[int, str, dict[str, int]]] = []

    def on_phase(iteration: int, phase: str) -> None:
        if phase == "forward":
            theirs.reset_mod_stats()  # it follows a model through one iteration
        snapshots.append((iteration, phase, _named(theirs.get_tracker_snapshot())))

    ledger = trace_here(workload, on_phase=on_phase).ledger
    their_peak = theirs.get_tracker_snapshot("peak")[META]["Total"]
    moments = [
        {"iteration": iteration, "phase": phase, "theirs": counted, "rows": ledger.at(moment.clock - 1).rows}
        for (iteration, phase, counted), moment in zip(snapshots, ledger.moments, strict=True)
    ]
    peak = ledger.peak(blocks=False)
    workspaces = ledger.at(peak.clock).where(lambda row: row.tensor.startswith(cublas.PRODUCER))
    compared = {"our_peak": peak.bytes, "their_peak": their_peak, "cublas": workspaces.total(), "moments": moments}
    result.write_text(json.dumps(compared), encoding="utf-8")


def _named(snapshot: dict[torch.device, dict[Any, int]]) -> dict[str, int]:
    return {str(getattr(name, "value", name)): count for name, count in snapshot.get(META, {}).items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
