#!/bin/sh
# Prints the path of a Python that can build labkit's environment: 3.12, else 3.13.
#
# A name on PATH proves nothing (a pyenv shim exists for versions that are not selected; Debian's python3 may lack
# venv), so every candidate is run. $PYTHON, when set, is the only candidate: what the user named is never replaced.
set -eu

# Prints "MAJOR.MINOR PATH" if the candidate runs and can make an environment with pip, else nothing.
probe() {
    # ssl to install, sqlite3 and ctypes for Jupyter: a Python compiled without them fails only much later.
    "$1" -I -c '
import ctypes, ensurepip, sqlite3, ssl, sys, venv
print("%d.%d" % sys.version_info[:2], sys.executable)
' 2>/dev/null </dev/null || true
}

candidates() {
    for name in python3.12 python3 python3.13 python; do
        command -v "$name" || true
    done
    for root in "$(pyenv root 2>/dev/null || true)" "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
        [ -n "$root" ] || continue
        for version in 3.12 3.13; do
            # Newest last in the glob's order; any patch release will do.
            for python in "$root/versions/$version"*/bin/python; do
                [ ! -x "$python" ] || echo "$python"
            done
        done
    done
    for version in 3.12 3.13; do
        uv python find --no-project --no-python-downloads "$version" 2>/dev/null || true
    done
    base=$(conda info --base 2>/dev/null || true)
    for python in "${CONDA_PREFIX:-}/bin/python" "$base/bin/python" "$base"/envs/*/bin/python; do
        [ ! -x "$python" ] || echo "$python"
    done
}

if [ -n "${PYTHON:-}" ]; then
    found=$(probe "$PYTHON")
    case $found in
    "3.12 "* | "3.13 "*)
        echo "${found#* }"
        exit 0
        ;;
    esac
    echo "PYTHON=$PYTHON cannot be used: labkit needs a Python 3.12 or 3.13 with venv, ensurepip, ssl, sqlite3 and" \
        "ctypes, and this one is ${found:-not that (or does not run)}." >&2
    exit 1
fi

second_choice=
seen=
# A here-document, not a pipe: the loop must be able to end the script.
while IFS= read -r candidate; do
    found=$(probe "$candidate")
    seen="$seen${found:+, $found}"
    case $found in
    "3.12 "*)
        echo "${found#* }"
        exit 0
        ;;
    "3.13 "*) second_choice=${second_choice:-${found#* }} ;;
    esac
done <<END
$(candidates)
END

if [ -n "$second_choice" ]; then
    echo "$second_choice"
    exit 0
fi
echo "No Python 3.12 or 3.13 with venv was found on PATH, in pyenv, uv or conda (found: ${seen#, }): install one" \
    "(apt install python3.12-venv, pyenv install 3.12, uv python install 3.12, or conda create -n py312 python=3.12)" \
    "or name one: make env PYTHON=/path/to/python3.12" >&2
exit 1
