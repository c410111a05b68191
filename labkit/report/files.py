"""Where a report may be written."""

from pathlib import Path

from labkit.errors import InputError


def check_output(path: Path) -> None:
    """Refuse to replace anything that is not a report: a folder, a device, somebody's input.

    Raises:
        InputError: the name does not end in `.html`, or what stands there is no regular file.
    """
    if path.is_dir():
        raise InputError(f"{path}: is a folder; give the report a file name")
    if path.suffix != ".html":
        raise InputError(f"{path}: a report's name ends in .html")
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: is no regular file; give the report another name")
    if path.parent.exists() and not path.parent.is_dir():
        raise InputError(f"{path.parent}: is no folder; give the report another place")
