#!/bin/sh
# Makes .venv, exactly what requirements.lock names plus labkit itself (editable); does nothing when it already is.
#
# .venv/installed.lock is a copy of the lock, written when its last package is in. Where it is absent (an install that
# was interrupted) or differs, .venv is made anew: half an environment is never repaired, only replaced.
set -eu
cd "$(dirname "$0")/.."

# A constraints file in the user's pip configuration has no say here; an index, proxy or certificate there has.
export PIP_CONSTRAINT=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1

# Two makes in one checkout (a report in one terminal, the tests in another) must not install into each other.
if command -v flock >/dev/null; then
    exec 9>.venv.lock
    flock 9
fi

venv=.venv
if ! cmp -s requirements.lock "$venv/installed.lock" || ! "$venv/bin/python" -c '' 2>/dev/null; then
    python=$(sh scripts/find_python.sh)
    echo "Making $venv with $python (about 6 GB; a few minutes the first time)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    # The lock is complete and hashed, so nothing is left to resolve: --no-deps.
    if command -v uv >/dev/null; then
        uv pip install --python "$venv/bin/python" --no-deps --require-hashes -r requirements.lock
    else
        # Someone who watches wants to see 3 GB arrive; a log does not.
        quiet=--quiet
        [ ! -t 1 ] || quiet=
        "$venv/bin/python" -m pip install ${quiet:+"$quiet"} --no-input --no-deps --require-hashes -r requirements.lock
    fi
    cp requirements.lock "$venv/installed.lock.part"
    mv "$venv/installed.lock.part" "$venv/installed.lock"
fi

# Hatchling is in the lock: the build needs no isolation, so no network.
"$venv/bin/python" -m pip install --quiet --no-input --no-deps --no-build-isolation --editable .
touch "$venv/stamp"
