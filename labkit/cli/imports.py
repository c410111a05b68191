"""`labkit import`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labkit.cli.help import Commands, examples
from labkit.cli.options import GpuOption, ImportOutputOption, WorldSizeOption, path_of
from labkit.cli.output import check_output, say, warn
from labkit.errors import InputError

if TYPE_CHECKING:
    from labkit.importers.imported import Imported

import_app = typer.Typer(cls=Commands, help="Make workloads of what others have.")


@import_app.command(
    "megatron-args",
    epilog=examples(
        "labkit import megatron-args pretrain.sh -o workload.yaml",
        "labkit import megatron-args pretrain.sh --world-size 64 --gpu h200-141gb",
    ),
)
def import_megatron_args(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE|-", show_default=False, help="Launch script, command line, or arguments as YAML or JSON."
        ),
    ],
    output: ImportOutputOption = None,
    world_size: WorldSizeOption = None,
    gpu: GpuOption = None,
) -> None:
    """Make a workload of Megatron-LM's launch arguments; what it cannot express is named on stderr. Runs no script."""
    from labkit.importers.megatron import import_megatron

    if output is not None:
        check_output(output, file)
    imported = import_megatron(None if file == "-" else Path(file), world_size=world_size, gpu=gpu)
    _write_imported(imported, output)


@import_app.command(
    "huggingface",
    epilog=examples(
        "labkit import huggingface config.json --tp 2 --ep 8 -o workload.yaml",
        "labkit import huggingface config.json --model-only -o model.yaml",
    ),
)
def import_huggingface(
    file: Annotated[str, typer.Argument(metavar="CONFIG.json|-", show_default=False, help="A model's config.json.")],
    *,
    output: ImportOutputOption = None,
    model_only: Annotated[
        bool, typer.Option("--model-only", help="The model's fields alone, as in data/models, without a workload.")
    ] = False,
    seq_length: Annotated[
        int | None,
        typer.Option("--seq-length", min=1, max=2**30, help="Tokens of a sequence.", show_default="4096"),
    ] = None,
    micro_batch_size: Annotated[
        int | None, typer.Option("--micro-batch-size", min=1, max=2**20, help="Sequences.", show_default="1")
    ] = None,
    global_batch_size: Annotated[
        int | None,
        typer.Option(
            "--global-batch-size", min=1, max=2**30, help="Sequences.", show_default="one micro-batch a rank and stage"
        ),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option("--world-size", min=1, max=2**20, help="Ranks.", show_default="the fewest for the layout"),
    ] = None,
    tensor: Annotated[int, typer.Option("--tp", min=1, max=2**20, help="Tensor-parallel ranks.")] = 1,
    pipeline: Annotated[int, typer.Option("--pp", min=1, max=2**20, help="Pipeline-parallel ranks.")] = 1,
    context: Annotated[int, typer.Option("--cp", min=1, max=2**20, help="Context-parallel ranks.")] = 1,
    expert: Annotated[int, typer.Option("--ep", min=1, max=2**20, help="Expert-parallel ranks.")] = 1,
    gpu: GpuOption = None,
) -> None:
    """Make a workload of a Hugging Face config.json, with its parameters counted; what it cannot express is named."""
    from labkit.importers.huggingface import Layout
    from labkit.importers.huggingface import import_huggingface as imported_from

    if output is not None:
        check_output(output, file)
    sizes = (seq_length, micro_batch_size, global_batch_size, world_size, tensor, pipeline, context, expert)
    layout = Layout(*sizes, gpu)
    imported = imported_from(None if file == "-" else Path(file), None if model_only else layout)
    _write_imported(imported, output, model_only=model_only)


@import_app.command(
    "bridge",
    epilog=examples(
        "labkit import bridge run_config.yaml -o workload.yaml",
        "labkit import bridge overrides.yaml --config config.json --world-size 16",
    ),
)
def import_bridge(
    file: Annotated[
        str,
        typer.Argument(metavar="RECIPE.yaml|-", show_default=False, help="A recipe, or a run's saved configuration."),
    ],
    *,
    output: ImportOutputOption = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="CONFIG.json", parser=path_of, help="Of the model that the recipe names."),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option("--world-size", min=1, max=2**20, help="Ranks.", show_default="the fewest for the layout"),
    ] = None,
    gpu: GpuOption = None,
) -> None:
    """Make a workload of a Megatron Bridge recipe in YAML; what it cannot express is named. Runs nothing of it."""
    from labkit.importers.bridge import import_bridge as imported_from

    if output is not None:
        check_output(output, file, config)
    imported = imported_from(None if file == "-" else Path(file), config=config, world_size=world_size, gpu=gpu)
    _write_imported(imported, output)


@import_app.command(
    "log",
    epilog=examples(
        "labkit import log train.log -o measured.yaml",
        "labkit import log rank*.log -o measured.yaml --workload workload.yaml",
    ),
)
def import_log(
    logs: Annotated[
        list[Path],
        typer.Argument(metavar="LOG...", show_default=False, help="Of one run: of all its ranks or of some."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE.yaml", parser=path_of, help="Where the measurement goes.")
    ],
    *,
    workload: Annotated[
        Path | None,
        typer.Option(
            "--workload",
            metavar="WORKLOAD.yaml",
            parser=path_of,
            help="What was run.",
            show_default="the arguments that the log prints",
        ),
    ] = None,
    workload_output: Annotated[
        Path | None,
        typer.Option("--write-workload", metavar="FILE.yaml", parser=path_of, help="Also write what was run."),
    ] = None,
    world_size: WorldSizeOption = None,
    gpu: GpuOption = None,
) -> None:
    """Make a recorded measurement of a run's logs, which a study shows beside estimate and trace."""
    from labkit.diagnose.recorded import as_yaml, read_logs, workload_yaml
    from labkit.files import write_atomically

    for path in filter(None, (output, workload_output)):
        check_output(path, *logs, workload)
    if workload_output is not None and workload_output.resolve() == output.resolve():
        raise InputError(f"{output}: is named for the measurement and for the workload; give two names")
    made, notes = read_logs(logs, workload, world_size=world_size, gpu=gpu)
    write_atomically(output, as_yaml(made))
    if workload_output is not None:
        write_atomically(workload_output, workload_yaml(made))
    for note in notes:
        warn(note)


def _write_imported(imported: "Imported", output: Path | None, *, model_only: bool = False) -> None:
    from labkit.files import write_atomically

    text = imported.model_yaml if model_only else imported.yaml
    if output is None:
        say(text.rstrip("\n"))
    else:
        write_atomically(output, text)
    for note in imported.notes:
        warn(note)
