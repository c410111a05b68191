"""The Vega libraries as one script, made once and kept in the user's cache: making it takes seconds."""

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
    """JavaScript that defines `vegaEmbed`, `vegaLite` and `vega`, free of `</script`.

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
    script = made.replace("</script", "<\\/script").replace("\r", "\n")
    with suppress(OSError):  # it is made again next time
        write_atomically(kept, f"{_digest(script)}\n{script}")
    return script


def _digest(script: str) -> str:
    return f"// {hashlib.sha256(script.encode()).hexdigest()}"
