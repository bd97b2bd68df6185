#!/usr/bin/env bash
# Lane: an exported model under the real transformers library on CPU, and our dense families against its Llama and Qwen3. Own environment.
# budget: 9 min
set -euo pipefail
cd "$(dirname "$0")/../.."

environment=.venv-lanes/transformers
packages=("torch==2.13.0" "transformers>=5,<6" "jax==0.10.2")

if [ ! -x "$environment/bin/python" ]; then
    python3 -m venv "$environment"
fi
timeout 480 "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}" --editable ".[dev]"

export HF_HUB_OFFLINE=1 JAX_PLATFORMS=cpu HF_HOME="$PWD/$environment/cache"
timeout 180 "$environment/bin/python" -m pytest -p no:cacheprovider -m lane tests/lanes/test_transformers.py tests/lanes/test_llama.py
