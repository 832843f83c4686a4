#!/bin/sh
# Every test that needs a CUDA device. PYTHON names the interpreter; further arguments go to pytest.
# Needs pytest and, for the engine's tests, pytest-asyncio: those are skipped without it.
# AGENTGYM_CHAT_MODEL names a folder with SmolLM2-135M-Instruct, on which engine and learner are compared, too.
# AGENTGYM_GC_THRESHOLD=1 collects garbage at every allocation (tests/gpu/conftest.py).
set -e
python="${PYTHON:-python3}"
[ -n "$AGENTGYM_CHAT_MODEL" ] || echo "AGENTGYM_CHAT_MODEL is not set: agreement on real weights is skipped" >&2
"$python" -c "import pytest_asyncio" 2>/dev/null ||
    echo "pytest-asyncio is not installed: the native engine's tests are skipped (pip install pytest-asyncio)" >&2
cd "$(dirname "$0")/.."
PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m pytest tests/gpu "$@"
