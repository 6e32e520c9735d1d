#!/usr/bin/env bash
# One night: makes the runs of a recipe in a folder of tonight, compares each with the best night so
# far, and writes what a pull request is told. Other arguments go to `tunerd run`.
#
#     recipes/nightly.sh recipes/nightly.yaml --only resnet50
#
# TUNERD_NIGHTLY  the folder that is kept between nights; `nightly` if not set
# TUNERD_NIGHT    tonight's name; the date if not set. The same night goes on where it stopped.
#
#     nightly/2026-01-31/summary.json, report.md and a run folder for each run
#     nightly/base/RUN    a link to the best night; delete it to begin anew, as after a new driver
#
# Ends with the code of `tunerd run`, 0 also where a run found no gain or cannot tell; with 10
# without a recipe, and with 13 without tunerd.
set -euo pipefail
if [ $# = 0 ]; then
    echo "usage: recipes/nightly.sh RECIPE [FLAG OF tunerd run]..." >&2
    exit 10
fi
if ! command -v tunerd >/dev/null; then
    echo "recipes/nightly.sh: tunerd is not on the PATH; activate where it is installed," \
        "as by: . .venv/bin/activate" >&2
    exit 13
fi
recipe=$1
shift

mkdir -p "${TUNERD_NIGHTLY:-nightly}"
kept=$(cd "${TUNERD_NIGHTLY:-nightly}" && pwd)
night=$kept/${TUNERD_NIGHT:-$(date -u +%F)}
mkdir -p "$night"

code=0
tunerd run "$recipe" --json \
    --set "out=$night/{name}" \
    --set "gate.base=$kept/base/{name}" \
    --set gate.base-follows=true \
    "$@" >"$night/summary.json" || code=$?

# Each run beside its base: what there is of it, also of a run that failed.
: >"$night/report.md"
for run in "$night"/*/; do
    [ -f "$run/store.sqlite" ] || continue
    runs=("${run%/}")
    base=$kept/base/$(basename "$run")
    if [ -e "$base" ] && ! [ "$base" -ef "$run" ]; then
        runs=("$base" "${run%/}")
    fi
    tunerd report "${runs[@]}" --format markdown >>"$night/report.md"
done

[ "$code" -le 2 ] || exit "$code"
