#!/usr/bin/env bash
# Twenty faults on purpose: fourteen on a run of one process, six on a gang of two; nothing may be lost, repeated or changed.
# budget: 8 min
set -euo pipefail
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
.venv/bin/noon drill experiments/drill.py --kills 14 --seed 7 --stage small --root "$root"
.venv/bin/noon drill experiments/drill.py --kills 6 --seed 7 --stage pair --root "$root"
