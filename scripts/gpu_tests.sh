#!/bin/sh
# Every test that needs a CUDA device. PYTHON names the interpreter; further arguments go to pytest.
set -e
cd "$(dirname "$0")/.."
PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" -m pytest tests/gpu "$@"
