#!/usr/bin/env bash
# Generates pagemill/v1 from protos/. Run with the Python that has grpcio-tools; tests/test_protos.py proves that the result is current.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-.}
mkdir -p "$out/pagemill/v1"
"${PYTHON:-python3}" -m grpc_tools.protoc -I protos --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" protos/pagemill/v1/*.proto
[ -f "$out/pagemill/v1/__init__.py" ] || printf '"""Generated from protos/pagemill/v1; see tools/gen_protos.sh."""\n' > "$out/pagemill/v1/__init__.py"
