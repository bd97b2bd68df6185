#!/usr/bin/env bash
# Lane: checkpoints in an object store, a real server that speaks S3 on this machine. Own environment.
# budget: 6 min
set -euo pipefail
cd "$(dirname "$0")/../.."

environment=.venv-lanes/objectstore
if [ ! -x "$environment/bin/python" ]; then
    python3 -m venv "$environment"
fi
# Two steps: the store's client pins botocore, and looking for a version that suits all at once takes pip minutes.
install=("$environment/bin/python" -m pip install --quiet --disable-pip-version-check)
timeout 150 "${install[@]}" "s3fs>=2026.9" "moto[s3]>=5" "boto3<1.44" flask flask-cors
timeout 120 "${install[@]}" --editable ".[dev]"

export JAX_PLATFORMS=cpu
timeout 80 "$environment/bin/python" -m pytest -p no:cacheprovider -m lane tests/lanes/test_objectstore.py
