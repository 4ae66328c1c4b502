#!/usr/bin/env bash
# Says which committed stubs differ from what proto/ makes.
set -euo pipefail
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
tools/make_stubs.sh "$fresh"
if ! diff --recursive --brief --exclude=__init__.py --exclude=__pycache__ "$fresh/streamrl/v1" streamrl/v1; then
  echo "the committed stubs are stale: run \`make stubs\` and commit the result" >&2
  exit 1
fi
