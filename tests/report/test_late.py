"""Charts and notebooks import without the grammar of IRIs, and IRIs are still checked."""

import subprocess
import sys
from pathlib import Path


def test_a_grammar_is_compiled_when_an_iri_is_checked_and_not_before() -> None:
    script = (
        "import sys\nimport labkit.report\nfrom jsonschema import FormatChecker\n"
        "assert 'lark' not in sys.modules\n"
        "print([FormatChecker().conforms(iri, 'iri') for iri in ('http://ö.de/x', 'http://ö.de/x y', 'http://a/')])\n"
        "assert 'lark' in sys.modules"
    )
    root = Path(__file__).parents[2]
    said = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert (said.returncode, said.stdout, said.stderr) == (0, "[True, False, True]\n", "")
