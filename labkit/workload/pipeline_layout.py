"""Megatron's notation for layers placed by hand on pipeline stages: `Et*3|(tt|)*29,m|L`.

Source: Megatron Core `transformer/pipeline_parallel_layer_layout.py`, `PipelineParallelLayerLayout`.
"""

import re

LONGEST = 100_000
"""Characters of a layout that is written out; more is taken for a mistake."""
_LONGEST_TEXT = 4000


def layout_stages(text: str) -> tuple[str, ...]:
    """The stages, virtual ones included, each as its symbols: E embedding, t layer, m multi-token prediction, L loss.

    Raises:
        ValueError: another symbol, or more characters than can be meant.

    >>> layout_stages("Et*2|(t|)*2,mL")
    ('Ett', 't', 't', 'mL')
    """
    if len(text) > _LONGEST_TEXT:
        raise ValueError(f"it has more than {_LONGEST_TEXT} characters")
    unrolled = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        found = re.findall(pattern, unrolled)
        if any(len(times) > 6 for _, times in found) or sum(len(part) * int(n) for part, n in found) > LONGEST:
            raise ValueError("it repeats more than can be meant")
        unrolled = re.sub(pattern, lambda match: match[1] * int(match[2]), unrolled)
    unknown = sorted(set(unrolled) - set("EtmL|"))
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no symbol; there are E, t, m, L, |, and (...)*n")
    return tuple(unrolled.split("|"))
