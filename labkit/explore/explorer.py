"""`Explorer`: a workload's memory in JupyterLab, as its choices are changed."""

import threading
import time
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from labkit.errors import InputError, LabkitError
from labkit.explore.confirm import Confirmation
from labkit.explore.state import Choice, Starts, controls, picked, values
from labkit.explore.static import static_html, static_text
from labkit.explore.texts import as_python, as_yaml
from labkit.explore.view import listed, picture, settled, theme
from labkit.workload import Workload
from labkit.workload.workload import shown

_QUIET_SECONDS = 0.25
"""Without a change, before the ledger is written for a choice."""


def _asset(name: str) -> str:
    return (files("labkit.explore") / "assets" / name).read_text(encoding="utf-8")


class Explorer(anywidget.AnyWidget):
    """Pick a model, a layout, lengths, recompute and training, and see the peak of the fullest rank at once.

    Args:
        workload: what to start from: a workload, its file, or the name of one that ships with labkit; None for the
            first of these.

    Raises:
        InputError: the workload is none, cannot be read, or breaks a rule.

    `workload` is the choice as it stands. Only the estimator runs; "confirm with a trace" starts a worker process.
    """

    _esm = _asset("explorer.js")
    _css = _asset("explorer.css")

    options = traitlets.Dict().tag(sync=True)
    """What there is to pick from, and the colours; never changes."""
    choice = traitlets.Dict().tag(sync=True)
    """From the front end: `seq`, `start` and `fields` (`labkit.explore.state.Choice`)."""
    answer = traitlets.Dict().tag(sync=True)
    """To it: the `seq` that is answered, the controls' `values`, `findings`, whether it `can_run`, milliseconds."""
    picture = traitlets.Dict().tag(sync=True)
    """What the last choice that can run comes to (`labkit.explore.view`)."""
    tracing = traitlets.Dict().tag(sync=True)
    """See `labkit.explore.confirm.Confirmation`."""

    _settling: threading.Timer | None = None
    _confirmation: Confirmation | None = None

    def __init__(self, workload: Workload | str | Path | None = None) -> None:
        given = Workload.load(workload) if isinstance(workload, str | Path) else workload
        if given is not None:
            if not isinstance(given, Workload):
                raise InputError(f"explorer: {shown(given)} is no workload; give one, its file, or the name of one")
            given.checked()
        self._starts = Starts(given)
        self._picked = Choice(self._starts.default)
        self._shown: Workload | None = None
        """What the picture is of."""
        self._lock = threading.Lock()
        """Of what is shown."""
        self._settler = threading.Lock()
        """One ledger at a time: it takes a second of the kernel's turns."""
        self._confirmation = Confirmation(self._told)
        super().__init__()
        self.options = {**controls(), "starts": self._starts.listed, "theme": theme()}
        self._answer(self._picked, 0)
        self.observe(self._chosen, "choice")
        self.on_msg(self._asked)

    @property
    def workload(self) -> Workload:
        """What is picked.

        Raises:
            InputError: it breaks a rule.
        """
        found = picked(self._picked, self._starts)
        if found.workload is None:
            raise InputError(f"explorer: {found.findings[0].field}: {found.findings[0].reason}")
        return found.workload.checked("explorer")

    def close(self) -> None:
        """End the widget and what it runs."""
        self._stop_settling()
        if self._confirmation is not None:  # else the workload was refused
            self._confirmation.close()
        super().close()

    def _chosen(self, change: Mapping[str, Any]) -> None:
        message = change["new"]
        seq = message.get("seq")
        if not isinstance(seq, int):
            return
        try:
            choice = Choice.of(message)
            self._answer(choice, seq)
        except LabkitError as error:
            self.answer = {**self.answer, "seq": seq, "can_run": False, "findings": [], "problem": str(error)}
        else:
            self._picked = choice

    def _answer(self, choice: Choice, seq: int) -> None:
        """Say what comes of a choice, and if it can run show it."""
        began = time.perf_counter()
        found = picked(choice, self._starts)
        shown = None if found.workload is None or not found.can_run else _pictured(found.workload)
        answer = {
            "seq": seq,
            "start": choice.start,
            "can_run": shown is not None,
            "findings": listed(found.findings),
            "values": values(found.workload or self._starts.workload(choice.start)),
            "milliseconds": round(1e3 * (time.perf_counter() - began), 1),
        }
        with self._lock, self.hold_sync():
            self.answer = answer
            if shown is not None:
                self._shown = found.workload
                self.picture = {**shown, "seq": seq}
        if shown is not None:
            self._stop_settling()
            self._settling = threading.Timer(_QUIET_SECONDS, self._settle)
            self._settling.daemon = True
            self._settling.start()

    def _stop_settling(self) -> None:
        if self._settling is not None:
            self._settling.cancel()

    def _settle(self) -> None:
        """Give the picture the ledger's figures, unless another has come meanwhile."""
        with self._settler:
            shown, picture = self._shown, self.picture
            if shown is None or picture["settled"]:
                return
            found = _settled(shown)
            with self._lock:
                if self._shown is shown:
                    self.picture = {**self.picture, **found}

    def _told(self, state: dict[str, Any]) -> None:
        self.tracing = state

    def _asked(self, _widget: object, content: object, _buffers: object) -> None:
        """A button was pressed, if the front end sent what its buttons do."""
        if not isinstance(content, Mapping) or not isinstance(content.get("do"), str):
            return
        what, confirmation = content.get("do"), self._confirmation
        assert confirmation is not None
        if what == "cancel":
            confirmation.cancel()
            return
        try:
            workload = self.workload
        except LabkitError as error:
            self.send({"said": str(error)})
            return
        if what == "trace":
            confirmation.start(workload)
        elif what in _TEXTS:
            name = "".join(each if each.isalnum() or each in "-_." else "-" for each in workload.model.name)[:80]
            self.send({"text": _TEXTS[what](workload), "kind": what, "name": name, "id": content.get("id")})

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The widget, and beside it what stands where no kernel is."""
        self._settle()
        shown = {"text/html": static_html(self.picture), "text/plain": static_text(self.picture)}
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return shown, {}
        data, metadata = bundle
        return {**data, **shown}, metadata


_TEXTS = {"yaml": as_yaml, "python": as_python}


@lru_cache(maxsize=64)
def _pictured(workload: Workload) -> dict[str, Any]:
    return picture(workload)


@lru_cache(maxsize=64)
def _settled(workload: Workload) -> dict[str, Any]:
    return settled(workload)
