#!/usr/bin/env bash
# Everything that only a machine with an NVIDIA GPU can show, in one go: build, correctness, memory and race checks, speed.
# Needs torch, nvcc, pybind11, ninja, pytest, hypothesis, peft, transformers; no network. About ten minutes.
#
#   bash benchmarks/gpu_check.sh [OUT]        OUT: where the whole log and the results go; default build/gpu_check
#
# benchmarks/README.md says what each line means. Every step runs, whatever became of the one before; the exit status is
# the number of steps that failed.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-build/gpu_check}
mkdir -p "$out"
failed=0
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD"
export LORA_STREAM_CUDA=1 TORCH_CUDA_ARCH_LIST="${TORCH_CUDA_ARCH_LIST:-9.0}"

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo 'gpu_check: torch sees no CUDA device here' >&2
  exit 99
fi

step() {  # name, seconds at most, command...
  local name=$1 limit=$2 begin=$SECONDS
  shift 2
  echo "== $name"
  timeout --kill-after=10 "$limit" "$@" > "$out/$name.log" 2>&1
  local status=$?
  tail -n "${LINES_SHOWN:-6}" "$out/$name.log"
  [ $status -eq 0 ] || failed=$((failed + 1))
  echo "{\"step\": \"$name\", \"status\": $status, \"seconds\": $((SECONDS - begin))}"
}

# Into the source tree, not into the environment.
step build 240 "$python" setup.py build_ext --inplace
step correctness 200 "$python" -m pytest tests/gpu -q --maxfail=20 --no-header -p no:cacheprovider
if sanitizer=$(command -v compute-sanitizer); then
  small='test_every_layout or statistics or in_place or itself or pinned_host or infinities'
  for tool in memcheck racecheck; do
    step "$tool" 100 "$sanitizer" --tool "$tool" --error-exitcode 9 \
      "$python" -m pytest tests/gpu/test_ops.py -q -x --no-header -p no:cacheprovider -k "$small"
  done
else
  echo 'no compute-sanitizer here'
fi
LINES_SHOWN=40 step speed 300 "$python" benchmarks/bench_cuda.py --repeats "${REPEATS:-5}"
echo "{\"gpu_check\": \"$out\", \"failed_steps\": $failed}"
exit $failed
