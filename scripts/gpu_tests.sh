#!/bin/sh
# Every test that needs a CUDA device. PYTHON names the interpreter; further arguments go to pytest.
# AGENTGYM_CHAT_MODEL names a folder with SmolLM2-135M-Instruct, on which engine and learner are compared, too.
set -e
[ -n "$AGENTGYM_CHAT_MODEL" ] || echo "AGENTGYM_CHAT_MODEL is not set: agreement on real weights is skipped" >&2
cd "$(dirname "$0")/.."
PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" -m pytest tests/gpu "$@"
