"""Hold labkit's rules against Megatron Core's own: random workloads, judged by both.

`python benchmarks/differential.py --cases 20000 --seed 1`

Each case is a real `Workload`, rules unapplied, drawn over everything that `TransformerConfig` looks at and a workload
can say, fields and launch arguments alike. Megatron's verdicts come from its own code, on the way that every driver
takes (`labkit.drivers.arguments`, `labkit.drivers.build.transformer_config`): its parser, its validator, its
`TransformerConfig`. Three things must hold in every case:

1. `TransformerConfig` refuses the workload exactly if labkit has an error whose authority is `TransformerConfig`;
2. an error whose authority is `validate_args` is one that Megatron-LM's validator refuses;
3. what the validator refuses, labkit has an error for.

Megatron's validator often refuses first. `TransformerConfig` is then asked about what the validator, with its own
checks taken out, makes of the arguments. Prints how often each of `TransformerConfig`'s checks spoke, and each
disagreement with the fewest changes that show it. Exit code 1 if there is one.
"""

import argparse
import ast
import contextlib
import copy
import inspect
import itertools
import json
import logging
import os
import sys
import textwrap
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from benchmarks.drawn_workloads import Changes, Draw, workload_of
from benchmarks.running import Parser, at_least_one
from labkit.drivers.environment import variables
from labkit.drivers.trace.surface import fake_cuda
from labkit.errors import InputError
from labkit.workload import Workload
from labkit.workload.finding import Authority
from labkit.workload.gpu import GPUS


class Verdict(NamedTuple):
    """What Megatron says of a workload: empty where it accepts it."""

    validator: str
    config: str
    site: str
    """Where `TransformerConfig` refuses it: file and line."""


class Difference(NamedTuple):
    """A workload on which labkit and Megatron do not agree."""

    what: str
    changes: Changes
    verdict: Verdict
    errors: tuple[str, ...]


class Megatron:
    """Megatron's verdicts, in a process that holds it; use it inside `fake_cuda`."""

    def __init__(self) -> None:
        from megatron.core import utils
        from megatron.training import arguments

        self._utils = utils  # which asks for the version of Transformer Engine once
        parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        arguments.add_megatron_arguments = lambda _: parser  # 900 options take a while, and are always the same
        self._without_checks = _without_checks(arguments.validate_args)

    def verdict(self, workload: Workload) -> Verdict:
        """What its validator and its configuration say of a workload."""
        from labkit.drivers.arguments import stated_arguments, validate

        self._utils._te_version = Version(workload.training.software.transformer_engine)
        with _environment(workload), Path(os.devnull).open("w") as nothing, contextlib.redirect_stdout(nothing):
            stated = stated_arguments(workload, num_microbatches=max(1, workload.num_microbatches))
            arguments = copy.deepcopy(stated)
            refused = _refusal(lambda: validate(arguments))
            if refused:
                arguments = stated
            config, site = self._configured(workload, arguments, checked=not refused)
        return Verdict(refused, config, site)

    def _configured(self, workload: Workload, arguments: argparse.Namespace, *, checked: bool) -> tuple[str, str]:
        from labkit.drivers.build import transformer_config

        try:
            if not checked:
                self._without_checks(
                    arguments
                )  # what still refuses here are functions that `TransformerConfig` has too
            transformer_config(workload, arguments)
        except (AssertionError, ValueError, NotImplementedError, TypeError, KeyError, IndexError) as error:
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "megatron" in frame.filename]
            return _said(error), f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
        return "", ""


def _without_checks(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with `pass` for every `assert` and `raise`: what it works out, without its refusals."""

    class Silent(ast.NodeTransformer):
        def visit_Assert(self, _: ast.Assert) -> ast.Pass:
            return ast.Pass()

        def visit_Raise(self, _: ast.Raise) -> ast.Pass:
            return ast.Pass()

    tree = ast.fix_missing_locations(Silent().visit(ast.parse(textwrap.dedent(inspect.getsource(function)))))
    names: dict[str, Any] = {}
    exec(compile(tree, inspect.getfile(function), "exec"), function.__globals__, names)  # noqa: S102 (Megatron's own)
    silent: Callable[..., Any] = names[function.__name__]
    return silent


@contextlib.contextmanager
def _environment(workload: Workload) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ.update(RANK="0", WORLD_SIZE=str(workload.parallelism.world_size), **variables(workload))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _refusal(work: Callable[[], object]) -> str:
    try:
        work()
    except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever it is, it is a refusal)
        return _said(error)
    return ""


def _said(error: BaseException) -> str:
    from labkit.drivers.options import said

    return said(error) or type(error).__name__


class Tally:
    """What became of the cases."""

    def __init__(self) -> None:
        self.cases = 0
        self.configured = Counter[str]()
        self.sites = Counter[str]()
        self.validator = Counter[str]()
        self.rules = Counter[tuple[str, str, str]]()
        self.differences: list[Difference] = []

    def __str__(self) -> str:
        accepted, refused = self.configured["accepted"], self.configured["refused"]
        return (
            f"{self.cases} workloads: TransformerConfig accepts {accepted} and refuses {refused}; "
            f"{len(self.differences)} disagreements"
        )


def differences(megatron: Megatron, changes: Changes) -> tuple[list[Difference], Verdict, Workload]:
    """Where labkit and Megatron do not agree on a case."""
    workload = workload_of(changes)
    errors = [finding for finding in workload.findings if finding.severity == "error"]
    said = tuple(f"[{error.authority}] {error}" for error in errors)
    verdict = megatron.verdict(workload)
    found: list[Difference] = []
    of_config = any(error.authority is Authority.CONFIG for error in errors)
    if of_config and not verdict.config:
        found.append(
            Difference("labkit says that TransformerConfig refuses it, which it does not", changes, verdict, said)
        )
    if verdict.config and not of_config:
        found.append(Difference("TransformerConfig refuses it, and labkit does not say so", changes, verdict, said))
    if any(error.authority is Authority.ARGUMENTS for error in errors) and not verdict.validator:
        found.append(Difference("labkit says that validate_args refuses it, which it does not", changes, verdict, said))
    if verdict.validator and not errors:
        found.append(Difference("validate_args refuses it, and labkit does not", changes, verdict, said))
    return found, verdict, workload


def smallest(megatron: Megatron, difference: Difference) -> Difference:
    """The same difference with as few changes as one at a time can be left out."""
    changed = True
    while changed:
        changed = False
        for path in list(difference.changes):
            fewer = {
                other: value
                for other, value in difference.changes.items()
                if other != path and not other.startswith(f"{path}.")
            }
            try:
                found, *_ = differences(megatron, fewer)
            except (InputError, ZeroDivisionError):
                continue
            again = next((each for each in found if each.what == difference.what), None)
            if again is not None:
                difference, changed = again, True
    return difference


def compare(megatron: Megatron, seed: int, first: int, cases: int, most: int = 20) -> Tally:
    """Judge so many cases, from number `first` on; up to `most` differences are made small."""
    tally = Tally()
    for number in itertools.count(first):
        if tally.cases == cases:
            break
        changes = Draw(seed, number).case()
        try:
            found, verdict, workload = differences(megatron, changes)
        except InputError as error:
            # An option whose value is none, or that a field says: labkit's own word, and nothing to ask Megatron.
            tally.validator[f"not launched: {error}"[:100]] += 1
            continue
        tally.cases += 1
        tally.configured["refused" if verdict.config else "accepted"] += 1
        if verdict.config:
            tally.sites[verdict.site] += 1
        if verdict.validator:
            tally.validator[verdict.validator[:100]] += 1
        for finding in workload.findings:
            if finding.severity == "error":
                tally.rules[finding.authority, finding.field, _without_numbers(finding.reason)] += 1
        for each in found:
            if len(tally.differences) < most:
                print(f"case {number}:", _shown(smallest(megatron, each)), flush=True)
            tally.differences.append(each)
    return tally


def _without_numbers(text: str) -> str:
    return " ".join("N" if word.strip("(),-").isdigit() else word for word in text.split())


def _shown(difference: Difference) -> str:
    lines = [difference.what, f"  changes: {json.dumps(difference.changes)}"]
    lines += [
        f"  {name}: {said or 'accepts'}"
        for name, said in zip(("validate_args", "TransformerConfig"), difference.verdict, strict=False)
    ]
    lines += [f"  labkit: {error}" for error in difference.errors] or ["  labkit: no error"]
    return "\n".join(lines)


def _checks() -> Iterator[tuple[str, str]]:
    """Every check in Megatron's configuration: file and line, and its text."""
    import megatron.core

    core = Path(megatron.core.__path__[0])
    for name in ("model_parallel_config.py", "transformer/transformer_config.py", "transformer/cuda_graph_config.py"):
        tree = ast.parse((core / name).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Assert):
                yield f"{Path(name).name}:{node.lineno}", ast.unparse(node.test)
            elif isinstance(node, ast.Raise) and node.exc is not None:
                yield f"{Path(name).name}:{node.lineno}", ast.unparse(node.exc)


def report(tally: Tally) -> None:
    """Print how often each of Megatron's checks and each of labkit's rules spoke."""
    spoken = dict(tally.sites)
    print("\nhits  TransformerConfig's check")
    for site, text in sorted(_checks(), key=lambda check: (check[0].split(":")[0], int(check[0].split(":")[1]))):
        print(f"{spoken.pop(site, 0):5d}  {site}  {' '.join(text.split())[:110]}")
    for site, hits in spoken.items():
        print(f"{hits:5d}  {site}")
    print("\nhits  labkit's rule")
    for (authority, field, reason), hits in sorted(tally.rules.items()):
        print(f"{hits:5d}  [{authority}] {field}: {reason[:120]}")
    print("\nhits  validate_args")
    for said, hits in tally.validator.most_common():
        print(f"{hits:5d}  {said}")
    print()


def main() -> int:
    """Run the command line."""
    parser = Parser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cases", type=at_least_one, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--brief", action="store_true", help="disagreements and the last line alone")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable()
    began = time.monotonic()
    with fake_cuda(GPUS["h100-80gb"]):
        megatron = Megatron()
        tally = compare(megatron, arguments.seed, arguments.first, arguments.cases)
    if not arguments.brief:
        report(tally)
    print(f"{tally}, in {time.monotonic() - began:.0f} s")
    return 1 if tally.differences else 0


if __name__ == "__main__":
    sys.exit(main())
