"""What importing charts and notebooks would do for two seconds, put off to when it is asked for.

Altair and nbformat import jsonschema, which imports `rfc3987_syntax` (JupyterLab brings it) to check IRIs; that
compiles a grammar as it is imported. Neither has an IRI to check.
"""

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

_NAME = "rfc3987_syntax"


def put_off_iris() -> None:
    """Have jsonschema import a stand-in that loads the real module at the first IRI."""
    if _NAME not in sys.modules and find_spec(_NAME) is not None:
        stand_in = ModuleType(_NAME)
        vars(stand_in)["is_valid_syntax"] = _is_valid_syntax
        sys.modules[_NAME] = stand_in


def _is_valid_syntax(term: str, value: str) -> bool:
    valid: bool = _real().is_valid_syntax(term, value)
    return valid


@cache
def _real() -> ModuleType:
    del sys.modules[_NAME]
    return import_module(_NAME)
