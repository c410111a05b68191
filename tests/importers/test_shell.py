"""Scripts as text: what a shell would make of them, and what it cannot know; hostile ones end in one sentence."""

import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.errors import InputError
from labkit.importers.shell import commands, gaps

PRINTING = """
A=1
B="two words"
NAMES=( --a $A '--b c' # a comment
  "--d=$B" \\
  --e )
NAMES+=(--f "${A}x" ${MISSING:-"dash it"} ${B:+set} $((2 * A + 6 / 4)))
BARE="--one 1  --two 2"
BARE="$BARE --three"
BARE+=" --four \\
  4"
show() { local inner=1; }
show
printf '<%s>\\n' "${NAMES[@]}" ${NAMES[0]} $BARE "$BARE" a\\ b 'single $A' "dou\\$ble" pre"mid"'post' ${B} "" x$A"y z"$A
"""


def words(script: str) -> list[str]:
    return list(commands(script, "script")[-1].words)


def test_words_are_those_of_bash() -> None:
    real = subprocess.run(["bash", "-c", PRINTING], capture_output=True, text=True, check=True).stdout
    assert [f"<{word}>" for word in words(PRINTING)[2:]] == real.removesuffix("\n").split("\n")


def test_a_scripts_own_arguments_are_no_words() -> None:
    for arguments in ('"$@"', "$@", '"${@}"', '"$*"'):
        assert words(f"echo --a 1 {arguments}")[:3] == ["echo", "--a", "1"]
    assert words('echo --a 1 "$@" --b "" ')[1:] == ["--a", "1", "--b", ""]


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20), min_size=1))
@settings(max_examples=200, deadline=None)
def test_quoted_words_come_back(argv: list[str]) -> None:
    assert words(f"echo {shlex.join(argv)}") == ["echo", *argv]


@given(st.text(st.sampled_from("aA1 \t\n\"'\\$`(){}[]@*#;&|<>=+-:?~!"), max_size=60))
@settings(max_examples=500, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        commands(text, "script")
    except InputError:
        return


def test_nothing_is_executed(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    script = f"X=$(touch {trap}); Y=`touch {trap}`; touch {trap}; cat <(touch {trap}); echo $X ${{Y:=$(touch {trap})}}"
    (reason, *_) = gaps(words(script)[1])
    assert reason.startswith("what `touch /")
    assert reason.endswith("` prints, and nothing is run here")
    assert not trap.exists()


def test_what_is_not_known_says_why() -> None:
    script = "if true; then\n  A=1\nfi\n[ -e x ] && B=2\nC=${1}\nD=4; unset D\n"
    script += "echo $A $B $C $D ${E[3]} ${F%/*} $(ls) $((D+1))"
    reasons = [gaps(word)[0] for word in words(script)[1:]]
    only = "sets only in some cases (write the case you mean without if or loop)"
    assert reasons == [
        f"$A, which line 2 {only}",
        f"$B, which line 4 {only}",
        "${1}, which is given when the script is called",
        "$D, which is not set",
        "$E[3], which is not set",
        "${F%/*}, which is not worked out here",
        "what `ls` prints, and nothing is run here",
        "$((D+1)), which is not worked out here",
    ]


def test_redirections_heredocs_and_comments_are_no_words() -> None:
    script = "cat <<EOF > out\n$(rm -rf /) ' unclosed\nEOF\nrun a#b --x 1 2>&1 >>log &> all | tee out # run --no"
    assert [command.words for command in commands(script, "script")] == [
        ("cat",),
        ("run", "a#b", "--x", "1"),
        ("tee", "out"),
    ]


def test_environment_is_what_was_exported() -> None:
    script = "A=1\nexport B=2 C=3\nexport A\nD=4\nE=5 run --x"
    assert dict(commands(script, "script")[-1].environment) == {"A": "1", "B": "2", "C": "3", "E": "5"}


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("echo 'open", "script: a ' quote is never closed"),
        ('echo "open', 'script: a " quote is never closed'),
        ("A=(1 2", "script: ( is never closed"),
        ("echo ${A", "script: { is never closed"),
        ("A=xxxxxxxxxxxxxxxx\n" + "A=$A$A\n" * 60, "script: line 18: A grows beyond 1048576 characters"),
        ("A=(1)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 60, "script: line 22: A grows beyond 1048576 characters"),
        ("A=" + "x" * 10**6 + "\necho " + "$A" * 100, "script: its variables stand for more than 32 MiB of text"),
        ("echo " + "${A:-" * 60 + "}" * 60, "script: nested deeper than 40 levels"),
    ],
    ids=["quote", "double", "array", "brace", "doubling", "doubling-array", "repeating", "nesting"],
)
def test_hostile_scripts_end_in_one_sentence(script: str, sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        commands(script, "script")
    assert str(refused.value) == sentence
