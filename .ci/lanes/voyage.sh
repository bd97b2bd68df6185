#!/usr/bin/env bash
# The main job, whole: the miniature from a clean root, then its answers are checked.
# budget: 12 min
set -euo pipefail
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
.venv/bin/noon run experiments/miniature.py --root "$root"
.venv/bin/noon run experiments/miniature.py --root "$root"
NOON_ROOT="$root" .venv/bin/python -m pytest -q tests/lanes/test_voyage.py
