#!/usr/bin/env bash
# Generates streamrl/v1 from proto/. The generator's version is what makes the stubs load on every protobuf
# runtime from 5.29 to 7: newer generators write stubs that older runtimes refuse. It needs a venv of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-.}
venv=.venv-stubs
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet grpcio-tools==1.71.2 mypy-protobuf==3.6.0 setuptools==80.9.0
"$venv/bin/python" -m grpc_tools.protoc -I proto --plugin=protoc-gen-mypy="$venv/bin/protoc-gen-mypy" \
  --plugin=protoc-gen-mypy_grpc="$venv/bin/protoc-gen-mypy_grpc" \
  --python_out="$out" --grpc_python_out="$out" --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" \
  proto/streamrl/v1/*.proto
