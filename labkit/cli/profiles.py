"""`labkit profile`."""

from typing import TYPE_CHECKING, Annotated

import typer

from labkit.cli.help import Commands, examples
from labkit.cli.options import ProfilesOption, StoreOption, StudyArgument, WorkloadArgument, source_of
from labkit.cli.output import say
from labkit.cli.studies import open_study

if TYPE_CHECKING:
    from labkit.memory.profiles import Observation, Profiles

profile_app = typer.Typer(cls=Commands, help="Keep measured peaks: they may raise an estimate, never lower it.")


_MOST_MEASURED_BYTES = 2**40
"""More than any GPU has."""


@profile_app.command(
    "add",
    epilog=examples(
        "labkit profile add workload.yaml --profiles profiles \\",
        "    --peak-allocated-bytes 61203283968 --source 'node 7, 2026-11-30'",
    ),
)
def profile_add(
    workload: WorkloadArgument,
    profiles: ProfilesOption,
    peak_allocated_bytes: Annotated[
        int,
        typer.Option(
            min=1,
            max=_MOST_MEASURED_BYTES,
            metavar="BYTES",
            help="torch.cuda.max_memory_allocated, the largest over all ranks.",
        ),
    ],
    source: Annotated[str, typer.Option(metavar="TEXT", parser=source_of, help="Who measured it, on what, when.")],
) -> None:
    """Keep a peak that was measured on GPUs."""
    from labkit.memory.profiles import Observation, Profiles
    from labkit.workload import Workload

    observation = Observation(
        workload=Workload.load(workload),
        peak_allocated_bytes=peak_allocated_bytes,
        certainty="measured",
        source=source,
    )
    _learn(Profiles(profiles), observation)


@profile_app.command("learn", epilog=examples("labkit profile learn moonlight-16b --profiles profiles"))
def profile_learn(study: StudyArgument, profiles: ProfilesOption, store: StoreOption = None) -> None:
    """Keep every peak that a study has traced, and those published beside it."""
    from labkit.memory.profiles import Profiles

    known = Profiles(profiles)
    for observation in open_study(study, store).results().observations:
        _learn(known, observation)


def _learn(known: "Profiles", observation: "Observation") -> None:
    """Keep a peak, and say so: of what it is, and where it lies."""
    say(f"{observation}: {known.learn(observation)}")
