"""The Vega libraries as one script, made once and kept in the user's cache: making it takes seconds."""

import base64
import gzip
import hashlib
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Final

import vl_convert
from platformdirs import user_cache_path

from labkit.files import write_atomically

VEGALITE_VERSION: Final = "6.4"
"""Of the libraries in a report; what charts may use is Vega-Lite 5, which it also understands."""


def vega_bundle(cache: Path | None = None) -> str:
    """JavaScript that defines `vegaEmbed`, `vegaLite` and `vega`.

    Args:
        cache: folder to keep it in; the user's cache by default. A folder that cannot be written is done without.
    """
    folder = user_cache_path("labkit") if cache is None else cache
    kept = folder / f"vega-{VEGALITE_VERSION}-{version('vl-convert-python')}.js"
    with suppress(OSError, UnicodeDecodeError):
        digest, _, script = kept.read_text(encoding="utf-8").partition("\n")
        if digest == _digest(script):
            return script
    made: str = vl_convert.javascript_bundle(vl_version=VEGALITE_VERSION)  # type: ignore[call-arg]
    script = made.replace("\r", "\n")  # the cache is read with universal newlines
    with suppress(OSError):  # it is made again next time
        write_atomically(kept, f"{_digest(script)}\n{script}")
    return script


def packed(script: str) -> str:
    """A script as base64 of gzip, less than half as long; `assets/report.js` unpacks it."""
    return base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode()


def _digest(script: str) -> str:
    return f"// {hashlib.sha256(script.encode()).hexdigest()}"
