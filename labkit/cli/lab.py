"""`labkit lab`: JupyterLab on the notebooks that ship with labkit."""

import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from labkit.cli.output import warn
from labkit.errors import InputError
from labkit.files import shipped_directory, temporary_folder

_FIRST = "recompute_study.py"
"""The notebook that opens."""
_OVERRIDES = Path(__file__).with_name("jupyterlab_overrides.json")
_KERNEL, _SHOWN = "python3", "Python 3 (ipykernel)"
"""What the notebooks ask for."""


def lab(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FOLDER|OPTION",
            show_default="this folder",
            help="Where to work; further options, such as --ServerApp.password=..., go to jupyter lab as they are.",
        ),
    ] = None,
    *,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open a browser; not over ssh, where the address will do.")
    ] = True,
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65535, help="Where it listens; if taken, the next.", show_default="8888"),
    ] = None,
    ip: Annotated[
        str | None,
        typer.Option("--ip", metavar="ADDRESS", help="On which of this machine's addresses.", show_default="localhost"),
    ] = None,
) -> None:
    """Open the notebooks in JupyterLab, where .py files are notebooks and run in this environment.

    They lie in the folder's `notebooks`; those that are not there yet are copied, what is there stays as it is.
    """
    words = arguments or []
    folder, options = _folder(words), [word for word in words if word.startswith("-")]
    home = folder if (folder / _FIRST).is_file() else folder / "notebooks"
    if home.exists() and not home.is_dir():
        raise InputError(f"{home}: is a file, where the notebooks would go; give another folder")
    copied = list(bring_notebooks(home))
    if copied:
        warn(f"copied into {home}: {', '.join(copied)}")
    given = {"--port": port, "--ip": ip}
    options += [f"{name}={value}" for name, value in given.items() if value is not None]
    options += [] if browser else ["--no-browser"]
    with temporary_folder("labkit-lab-") as temporary:
        os.environ.update(jupyter_environment(temporary))
        from jupyterlab.labapp import LabApp

        LabApp.launch_instance(server_arguments(folder, home / _FIRST, options))
    _end()


def _end() -> NoReturn:
    """End this process, whose server has stopped and cleaned up.

    Jupyter stops its event loop with tasks in it, and AnyIO's worker threads, which read files for it, wait for such a
    task's end: an interpreter that waits for its threads would never end.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _folder(words: Sequence[str]) -> Path:
    """The one folder among what was given."""
    named = [word for word in words if not word.startswith("-")]
    if len(named) > 1:
        raise InputError(f"{named[1]}: one folder is enough; give options of jupyter lab as --NAME=VALUE")
    stated = named[0] if named else "."
    folder = Path(stated)
    if not stated or not folder.is_dir():
        raise InputError(f"{stated or 'an empty name'}: there is no such folder")
    return folder.resolve()


def bring_notebooks(home: Path) -> Iterator[str]:
    """Copy the notebooks that `home` does not have yet; names those.

    Raises:
        OSError: it cannot be written.
    """
    for source in sorted(shipped_directory("notebooks").glob("*.py")):
        place = home / source.name
        if not place.exists() and not place.is_symlink():
            home.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, place)
            yield source.name


def jupyter_environment(folder: Path) -> dict[str, str]:
    """Environment in which Jupyter runs this interpreter and opens .py files as notebooks.

    Settings are JupyterLab's defaults from here on, as `default_setting_overrides` in a folder `labconfig`: what users
    choose in the settings editor stays above them.

    Args:
        folder: Empty; what Jupyter reads is written there.
    """
    from labkit.report.kernel import kernel_environment

    settings = folder / "config" / "labconfig"
    settings.mkdir(parents=True)
    shutil.copyfile(_OVERRIDES, settings / "default_setting_overrides.json")
    known = os.environ.get("JUPYTER_CONFIG_PATH")
    configured = os.pathsep.join([str(settings.parent), *([known] if known else [])])
    return kernel_environment(folder / "data", _KERNEL, _SHOWN) | {"JUPYTER_CONFIG_PATH": configured}


def server_arguments(folder: Path, first: Path, options: Iterable[str]) -> list[str]:
    """What `jupyter lab` is told: the folder, the notebook that opens, and the options as they are."""
    from urllib.parse import quote

    root = [] if os.geteuid() else ["--allow-root"]  # whoever is root here has chosen to be
    opens = quote(first.relative_to(folder).as_posix())
    return [f"--ServerApp.root_dir={folder}", f"--LabApp.default_url=/lab/tree/{opens}", *root, *options]
