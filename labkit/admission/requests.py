"""What is to be run: requests, and which of them stay together."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from operator import index
from pathlib import Path
from typing import Annotated, Any, NamedTuple, SupportsIndex

from pydantic import Field, ValidationError

from labkit.errors import InputError
from labkit.files import read_regular
from labkit.workload.base import Part
from labkit.workload.files import text_of, unique_pairs
from labkit.workload.runtime import Outputs
from labkit.workload.workload import first_problem

MOST_REQUESTS = 2**14
_MAXIMUM_BYTES = 16 * 2**20
_MOST_TOKENS = 2**28


class Request(Part):
    """A sequence that is to go through the model.

    >>> Request(length=9216, prefix="prompt 7", shared_prefix=2048).length
    9216
    """

    length: Annotated[int, Field(gt=0, le=_MOST_TOKENS)]
    """Tokens, those it shares included."""
    prefix: str | None = Field(default=None, min_length=1, max_length=200)
    """Requests of one name begin with the same tokens."""
    shared_prefix: Annotated[int, Field(gt=0)] | None = None
    """How many those are, the same for all of them."""
    group: str | None = Field(default=None, min_length=1, max_length=200)
    """Requests of one name go into one micro-batch or nowhere."""
    no_grad: bool | None = None
    """A pass without gradients; None: as the template says."""
    outputs: Outputs | None = None
    """What the pass hands back; None: as the template says."""

    @property
    def kind(self) -> tuple[bool | None, Outputs | None]:
        """Which pass it needs: those of one micro-batch need the same."""
        return self.no_grad, self.outputs


def requests_of(
    given: Iterable[Request | Mapping[str, Any] | SupportsIndex], source: str = "requests"
) -> list[Request]:
    """Requests from requests, mappings of their fields, or bare lengths.

    Raises:
        InputError: one of them is wrong, or what they say together.
    """
    if not isinstance(given, Iterable):
        raise InputError(f"{source}: should be a list of lengths or requests")
    given = list(islice(given, MOST_REQUESTS + 1))
    if not given:
        raise InputError(f"{source}: there are none; give at least one length")
    if len(given) > MOST_REQUESTS:
        raise InputError(f"{source}: more than are decided on at once; give at most {MOST_REQUESTS}")
    found = [each if isinstance(each, Request) else _request(each, f"{source}[{at}]") for at, each in enumerate(given)]
    for at, each in enumerate(found):
        where = f"{source}[{at}]"
        if (each.prefix is None) != (each.shared_prefix is None):
            raise InputError(
                f"{where}: prefix, its name, and shared_prefix, its tokens, go together; give both or neither"
            )
        if each.shared_prefix is not None and each.shared_prefix >= each.length:
            raise InputError(
                f"{where}: some of its {each.length} tokens must follow the prefix; use at most {each.length - 1}"
            )
    kinds: dict[str, tuple[int, object]] = {}
    prefixes: dict[str, tuple[int, int | None]] = {}
    for at, each in enumerate(found):
        if each.prefix is not None:
            first, tokens = prefixes.setdefault(each.prefix, (at, each.shared_prefix))
            if tokens != each.shared_prefix:
                raise InputError(
                    f"{source}[{at}]: prefix {each.prefix!r} has {each.shared_prefix} tokens here and {tokens} in "
                    f"{source}[{first}]; give both the number that they share, or two names"
                )
        if each.group is not None:
            first, kind = kinds.setdefault(each.group, (at, each.kind))
            if kind != each.kind:
                raise InputError(
                    f"{source}[{at}]: group {each.group!r} has passes of two kinds (see {source}[{first}]), and a "
                    "micro-batch is one pass; use two groups"
                )
    return found


def _request(given: object, where: str) -> Request:
    if isinstance(given, SupportsIndex) and not isinstance(given, bool):
        given = {"length": index(given)}  # also of arrays and tensors
    if not isinstance(given, Mapping):
        raise InputError(f"{where}: should be a length or a mapping of {', '.join(Request.model_fields)}")
    try:
        return Request.model_validate(dict(given))
    except ValidationError as error:
        raise InputError(f"{where}: {first_problem(Request, error)}") from None


def read_requests(path: Path | None, standard_input: Any = None) -> list[Request]:
    """Requests from a JSON file, or from standard input: a list, or an object with one under `requests`.

    Raises:
        InputError: it cannot be read, is no such JSON, or a request is wrong.
    """
    source = "standard input" if path is None else str(path)
    if path is None:
        text = text_of(lambda: standard_input.read(_MAXIMUM_BYTES + 1), source)
    else:
        text = text_of(lambda: read_regular(path, _MAXIMUM_BYTES), source)
    if len(text) > _MAXIMUM_BYTES:
        raise InputError(f"{source}: larger than {_MAXIMUM_BYTES / 2**20:g} MiB")
    try:
        data = json.loads(text, object_pairs_hook=unique_pairs(source))
    except (ValueError, RecursionError) as error:
        reason = (
            str(error) if isinstance(error, json.JSONDecodeError) else "its values are nested or long beyond reading"
        )
        raise InputError(f"{source}: not JSON ({reason})") from None
    if isinstance(data, dict):
        unknown = sorted(set(data) - {"requests"})
        if unknown or "requests" not in data:
            raise InputError(f"{source}: should be a list of requests, or an object with one under 'requests'")
        data = data["requests"]
    if not isinstance(data, list):
        raise InputError(f"{source}: should be a list of requests, or an object with one under 'requests'")
    return requests_of(data, source)


class Item(NamedTuple):
    """Requests that stay together."""

    positions: tuple[int, ...]
    """In the list of requests."""
    lengths: tuple[int, ...]
    prefix: str | None
    """Of all of them; None where they share none."""
    group: str | None


def items_of(requests: Sequence[Request], positions: Iterable[int]) -> list[Item]:
    """The requests at these positions as what cannot be divided, in their order."""
    members: dict[object, list[int]] = {}
    for at in positions:
        group = requests[at].group
        members.setdefault(at if group is None else group, []).append(at)
    found = []
    for together in members.values():
        first = requests[together[0]]
        shared = {requests[at].prefix for at in together}
        lengths = tuple([requests[at].length for at in together])
        found.append(Item(tuple(together), lengths, first.prefix if len(shared) == 1 else None, first.group))
    return found
