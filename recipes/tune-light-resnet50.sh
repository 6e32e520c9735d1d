#!/usr/bin/env bash
# Tunes ResNet-50 (a real graph, random weights) for 40% of a GPU: two slices of each GPU.
# Needs `pip install 'tunerd[cuda]'` in the active environment. Flags are added to `tunerd tune`:
#
#     recipes/tune-light-resnet50.sh --budget 20m --out runs/longer
set -euo pipefail
cd "$(dirname "$0")/.."
tunerd doctor
[ -f models/light_resnet50.onnx ] || scripts/make_models light_resnet50
exec tunerd tune models/light_resnet50.onnx --gpu-pct 40 --budget 5m --seed 0 "$@"
