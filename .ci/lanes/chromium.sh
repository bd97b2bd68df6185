#!/usr/bin/env bash
# Lane: every page in a real browser (Debian's chromium through playwright), from file://, with axe-core. Own environment.
# budget: 5 min
set -euo pipefail
cd "$(dirname "$0")/../.."

environment=.venv-lanes/chromium
if ! command -v chromium > /dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium > /dev/null
fi
if [ ! -x "$environment/bin/python" ]; then
    python3 -m venv "$environment"
fi
timeout 240 "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "playwright>=1.50" --editable ".[dev]"
if [ ! -f "$environment/package/axe.min.js" ]; then
    (cd "$environment" && npm pack --silent axe-core@4 > /dev/null && tar -xzf axe-core-4*.tgz package/axe.min.js)
fi

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
"$environment/bin/python" -m tests.atlas.sample "$root" > /dev/null
NOON_ROOT="$root" NOON_AXE="$PWD/$environment/package/axe.min.js" \
    timeout 180 "$environment/bin/python" -m pytest -p no:cacheprovider -m lane tests/lanes/test_chromium.py
