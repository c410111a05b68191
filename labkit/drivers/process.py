"""Processes of this very labkit: what imports Megatron Core does so in one of its own."""

import os
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def own_module(name: str) -> tuple[list[str], dict[str, str]]:
    """Command and environment that run a module of this labkit."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # -P: the user's directory may hold files named like modules.
    return [sys.executable, "-P", "-m", name], {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
