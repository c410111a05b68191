"""Which phase of a step a Python traceback is in, and which layer: as for stack traces of memory snapshots."""

import re
from collections import deque
from collections.abc import Sequence

from labkit.diagnose.facts import Phase
from labkit.diagnose.lines import Line
from labkit.diagnose.snapshot_frames import described, moment_of, site_of
from labkit.snapshot import Frame

BEGINS = "Traceback (most recent call last)"
KEY = 'File "'
"""In every line of a frame."""
_FRAME = re.compile(r'File "([^"]{1,1000})", line (\d{1,9}), in ([\w<>.]{1,200})')
_MOST_FRAMES = 300
_LAYERS = (
    "megatron/core/transformer/",
    "megatron/core/models/",
    "megatron/core/ssm/",
    "megatron/core/tensor_parallel/",
)
_PHASES: dict[str, Phase] = {"recompute": "backward", "unknown": ""}


class Traceback:
    """The frames of one rank's last traceback."""

    def __init__(self) -> None:
        self._frames: deque[Frame] = deque(maxlen=_MOST_FRAMES)

    def see(self, line: Line) -> None:
        """Take a line in."""
        if BEGINS in line.text:
            self._frames.clear()
        for found in _FRAME.finditer(line.text):
            self._frames.append(Frame(found[1], int(found[2]), found[3]))

    @property
    def _stack(self) -> Sequence[Frame]:
        """The innermost frame first."""
        return list(reversed(self._frames))

    @property
    def phase(self) -> Phase:
        """Of the step; empty without a traceback, or where its functions do not say."""
        moment = moment_of(self._stack) if self._frames else "unknown"
        return _PHASES.get(moment, moment)  # type: ignore[arg-type]  # a moment that is no phase has one there

    @property
    def replays(self) -> bool:
        """Whether backward was running a forward again."""
        return bool(self._frames) and moment_of(self._stack) == "recompute"

    @property
    def place(self) -> str:
        """The innermost function of a layer of Megatron's, `megatron/core/transformer/moe/experts.py:123 forward`."""
        stack = self._stack
        layer = next((frame for frame in stack if any(each in frame.file for each in _LAYERS)), None)
        if layer is not None:
            return described(layer)
        return site_of(stack).place if stack else ""
