#!/usr/bin/env bash
# One complete measurement on one H200-class GPU, in under 8 minutes beside the installation: the profile, its log and
# its picture, written to hw_profiles/. Further arguments go to specsim measure.
#
#   experiments/measure/h200.sh                      qwen3-8b
#   MODEL=qwen3-14b experiments/measure/h200.sh      another preset, or a config.json
#   experiments/measure/h200.sh --dry-run            a tiny model on the CPU: only to see that everything is in place
#
# PYTHON names the interpreter (default python3); if it lacks what is needed, .venv-measure is made on top of it.
# OUT names another folder.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
model=${MODEL:-qwen3-8b}
out=${OUT:-$here/hw_profiles}
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}

if ! "$python" -c 'import torch, specsim.cli' 2>/dev/null; then
  "$python" -m venv --system-site-packages "$here/.venv-measure"
  python=$here/.venv-measure/bin/python
  "$python" -m pip install --quiet torch "$here"
fi

mkdir -p "$out"
if [ "${1:-}" = --dry-run ]; then
  shift
  exec "$python" -m specsim measure --out "$out/dry-run.json" --device cpu --threads 1 \
    --hidden 32 --layers 2 --heads 4 --kv-heads 2 --head-dim 8 --intermediate 48 --vocab 64 \
    --tokens 1,2,4,8 --contexts 16,64 --max-seqs 4 --rounds 3 "$@"
fi

# Without a GPU there is no point in going on; clocks are noted before and after by the measurement itself.
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw --format=csv || true
name=$(basename "$model" .json)-h200
exec timeout 480 "$python" -m specsim measure --model "$model" --device cuda --dtype bfloat16 --gamma 7 \
  --minutes 6.5 --device-memory 141 --name "$name" --out "$out/$name.json" "$@"
