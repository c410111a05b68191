"""Tapes of one form share a script: it must be the one that each of them would play by itself."""

from collections.abc import Iterator

import pytest

from labkit.memory.layers.sizes import Sizes
from labkit.memory.player import play
from labkit.memory.script import Script
from labkit.memory.tape import Tape
from labkit.memory.units import Recorder, Unit, chunks
from labkit.workload import Workload
from tests.memory.grid import NAMES, workload


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)])
def test_a_shared_script_is_what_the_tape_plays_by_itself(every: int) -> None:
    """Over the grid in one process, each workload also at another length and half as wide in tensor ranks."""
    seen: set[int] = set()
    shared = units = 0
    for case in (each for name in NAMES[::every] for each in _near(workload(name))):
        training = case.training
        fused = training.kernels.gradient_accumulation_fusion and training.runtime == "megatron"
        found = [unit for stage in range(case.parallelism.pp) for unit in _units(case, stage)]
        for unit in {id(unit.tape): unit for unit in found}.values():
            own = play(
                unit.tape,
                list(unit.regions),
                workspaces=training.workspaces,
                fused_weight_gradients=fused,
                gradient_held=unit.script.gradient_out_held,
                gradient_viewed=unit.script.gradient_out_viewed,
                input_held=unit.script.input_held,
                differentiates=training.differentiates,
            )
            assert _content(unit.script) == _content(own), case
            units += 1
            shared += id(unit.script) in seen
            seen.add(id(unit.script))
    assert shared > units / 4


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)])
def test_what_is_recorded_without_experts_is_the_same_with_them(every: int) -> None:
    """Layouts that differ in experts and data-parallel ranks alone share those tapes."""
    for case in map(workload, NAMES[::every]):
        alone = Recorder(case, Sizes.of(case))
        for stage in range(case.parallelism.pp):
            units = [unit for chunk in alone.chunks(case.recompute, stage) for unit in chunk.units]
            for own, unit in zip(units, _units(case, stage), strict=True):
                assert _recorded(own.tape) == _recorded(unit.tape), case


def _near(case: Workload) -> Iterator[Workload]:
    yield case
    batch = case.batch.model_copy(update={"seq_length": case.batch.seq_length * 2})
    wider = case.parallelism.model_copy(
        update={"tensor_model_parallel_size": case.parallelism.tp * 2, "world_size": case.parallelism.world_size * 2}
    )
    for change in ({"batch": batch}, {"parallelism": wider}):
        near = case.model_copy(update=change)
        if not any(finding.severity == "error" for finding in near.findings):
            yield near


def _units(case: Workload, stage: int) -> list[Unit]:
    return [unit for chunk in chunks(case, stage) for unit in chunk.units]


def _recorded(tape: Tape) -> tuple[object, ...]:
    tensors = [(each.name, each.shape, each.dtype, each.module, each.bytes, each.certainty) for each in tape.tensors]
    work = [(op.flops, op.communicated_bytes) for op in tape.ops]
    return tape.form, tensors, tape.parameters, work


def _content(script: Script) -> tuple[object, ...]:
    held = script.input_held, script.output_held, script.gradient_out_held, script.gradient_in_held
    ends = script.output, script.gradient_in, held
    return script.slots, script.forward, script.backward, ends
