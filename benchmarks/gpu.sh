#!/usr/bin/env bash
# Measure on a CUDA card, in at most eight minutes: benchmarks/results gains what was measured.
#
#     bash benchmarks/gpu.sh                 # on a card, with the project and opake installed
#     bash benchmarks/gpu.sh --smoke         # tiny models on a CPU, to try this script; keeps nothing
#
# Each part has a limit of its own, and a part that fails does not stop the others. The last line
# says how many failed.
set -u
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
CONTENDERS="plain dp_sgd dp_sgd_graph dp_kfc_inputs opacus_ghost opake"
failed=0

measure() { # seconds, command
    local limit=$1
    shift
    echo "== $*"
    timeout "$limit" "$@" || { echo "failed or cut off after at most $limit s: $*"; failed=$((failed + 1)); }
}

if [ "${1:-}" = "--smoke" ]; then
    measure 120 $PYTHON benchmarks/noise.py --smoke
    measure 240 $PYTHON benchmarks/speed.py --smoke --no-memory --contenders $CONTENDERS
    measure 240 $PYTHON benchmarks/speed.py --smoke --no-memory --only smoke-cnn --contenders plain dp_sgd_compiled
    echo "$failed parts failed"
    exit $((failed > 0))
fi

$PYTHON -c 'import torch; raise SystemExit(None if torch.cuda.is_available() else "there is no CUDA card")' || exit 2
# ChaCha20 against the vectors of RFC 8439 and the CPU, and what needs a card.
measure 60 $PYTHON -m pytest -q -m gpu tests
measure 40 $PYTHON benchmarks/noise.py --device cuda
for model in wrn-16-4 bert-base gpt2-small vit-b16; do
    measure 50 $PYTHON benchmarks/speed.py --device cuda --only $model --no-memory --rounds 8 --contenders $CONTENDERS
done
# Compiling takes most of the time of these; they have a file of their own.
for model in wrn-16-4 bert-base gpt2-small vit-b16; do
    measure 45 $PYTHON benchmarks/speed.py --device cuda --only $model --no-memory --rounds 8 \
        --contenders plain dp_sgd dp_sgd_compiled --output benchmarks/results/gpu_compiled.json
done
echo "$failed parts failed"
exit $((failed > 0))
