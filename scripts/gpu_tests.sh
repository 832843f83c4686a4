#!/bin/sh
# Run all tests that need a CUDA device. PYTHON is the interpreter; arguments are passed to pytest.
# Needs pytest. The engine's tests also need pytest-asyncio and are skipped without it.
# AGENTGYM_CHAT_MODEL is a folder with SmolLM2-135M-Instruct, to compare engine and learner on real weights.
# AGENTGYM_GC_THRESHOLD=1 collects garbage at every allocation (tests/gpu/conftest.py).
set -e
python="${PYTHON:-python3}"
[ -n "$AGENTGYM_CHAT_MODEL" ] || echo "AGENTGYM_CHAT_MODEL is not set: agreement on real weights is skipped" >&2
"$python" -c "import pytest_asyncio" 2>/dev/null ||
    echo "pytest-asyncio is not installed: the native engine's tests are skipped (pip install pytest-asyncio)" >&2
cd "$(dirname "$0")/.."
PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m pytest tests/gpu "$@"
