#!/usr/bin/env bash
# Lane: a small train step compiled for a described GB200 and TPU, by the compilers of the extras. Own environment, no accelerator.
# budget: 9 min
set -euo pipefail
cd "$(dirname "$0")/../.."

environment=.venv-lanes/rehearsal
compilers=("jax-cuda13-plugin==0.10.2" "jax-cuda13-pjrt==0.10.2" "nvidia-cuda-nvcc>=13,<14" "nvidia-nvvm>=13,<14")

if [ ! -x "$environment/bin/python" ]; then
    python3 -m venv "$environment"
fi
timeout 480 "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "jax==0.10.2" --editable ".[dev,rehearse-tpu]"
# Without their dependencies: a rehearsal needs the compiler alone.
timeout 240 "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "${compilers[@]}"

export JAX_PLATFORMS=cpu
timeout 180 "$environment/bin/python" -m pytest -p no:cacheprovider -m lane tests/lanes/test_rehearsal.py
