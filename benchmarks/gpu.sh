#!/usr/bin/env bash
# Tests and times the CUDA path on this machine: needs torch with CUDA, no model and no network, and
# less than 8 minutes.
#
#     benchmarks/gpu.sh [FOLDER]
#
# FOLDER (by default artifacts/gpu) gets costs.parquet, which `entmtp simulate BANK --costs` takes,
# the same of the engine without graphs, and gpu.json. PYTHON names another interpreter.
set -uo pipefail
folder="$(realpath -m "${1:-$(dirname "$0")/../artifacts/gpu}")"
cd "$(dirname "$0")/.." || exit 1
python="${PYTHON:-.venv/bin/python}"
[ -x "$python" ] || python="$(command -v python3)"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

"$python" -m pytest -q -rP tests/gpu
tested=$?
"$python" benchmarks/gpu.py --out "$folder" || exit $?
exit $tested
