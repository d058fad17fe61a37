#!/usr/bin/env bash
# Everything that only a GPU can tell, in one command and under ten minutes: does it build, are the
# numbers right, does compute-sanitizer find anything, how fast is it.
#
#   benchmarks/gpu.sh [FOLDER [PART...]]      results go to FOLDER; default: benchmarks/results
#
# Parts: build, tests, sanitizer, dropout_add_layer_norm, lstm, bert, attention; default: all, in this
# order. Environment: LIMIT, seconds for everything (default 570); PYTHON.
#
# On a machine that is there for minutes, give it one call and a folder, `benchmarks/gpu.sh results`,
# and 600 seconds. It needs no network: torch with CUDA, Triton, pip, setuptools (77 or later), nvcc
# and a C++ compiler, pytest and hypothesis for the tests, rich and matplotlib for the benchmarks. With
# pytest-xdist the tests run side by side, with pytest-timeout none of them hangs; without
# transformers its model is replaced by ours. What was built stays, so that a second call goes on:
# `benchmarks/gpu.sh results lstm bert`.
#
# Every step has a time limit. FOLDER gets, as they come: gpu.txt, a line for each step and then the
# tables; gpu.log, what steps printed; NAME-gpu.json, the figures of a benchmark, written after each
# case; gpu-pictures.tar.gz. The exit status is the number of steps that failed or were left out.
set -uom pipefail  # with jobs of their own: else what runs beside could not be interrupted
repository=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$repository/benchmarks/results}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$repository" || exit

python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
limit=${LIMIT:-570}
parts=${*:2}
parts=${parts:-build tests sanitizer dropout_add_layer_norm lstm bert attention}
operators=(attention dropout_add_layer_norm lstm)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
: >"$out/gpu.log"
: >"$out/gpu.txt"

export PATH=$PATH:/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer
export PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1
gpu() { nvidia-smi --query-gpu="$1" --format=csv,noheader | head -n 1; }
gpu name,driver_version,memory.total,compute_cap | tee -a "$out/gpu.txt"
architecture=$(gpu compute_cap)  # machine code for this one alone
[ -n "$architecture" ] && export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-$architecture}

# step NAME SECONDS COMMAND...: interrupted when its time, or that for everything, is over.
step() {
  local name=$1 most=$(($2 < limit - SECONDS ? $2 : limit - SECONDS)) begin=$SECONDS
  local state=ok status=0
  shift 2
  if [ "$most" -lt 2 ]; then
    state="left out: no time" status=124
  else
    timeout --signal=INT --kill-after=10 "$most" "$@" >"$work/$name.log" 2>&1 || status=$?
    [ "$status" = 0 ] || state="FAILED ($status)"
  fi
  printf '%-32s %5d s  %s\n' "$name" $((SECONDS - begin)) "$state" | tee -a "$out/gpu.txt"
  if [ -e "$work/$name.log" ]; then
    { echo "=== $name: $*"; cat "$work/$name.log"; } >>"$out/gpu.log"
    [ "$state" = ok ] || tail -n 15 "$work/$name.log"
  fi
  [ "$state" = ok ] || echo "$name" >>"$work/failed"
  return "$status"
}

wants() { [[ " $parts " == *" $1 "* ]]; }

if wants build; then
  step build 240 "$python" -m pip install --quiet --no-build-isolation --no-deps --editable .
fi
cat >"$work/what_there_is.py" <<'END'
import setuptools, sys, torch, trifuse.__main__
from trifuse import backends

print(trifuse.__main__.report())
print("setuptools", setuptools.__version__, "cuDNN", torch.backends.cudnn.version())
sys.exit(None if backends._CUDA_OPERATORS else "the build holds no CUDA kernels")
END
step what-there-is 60 "$python" "$work/what_there_is.py"

# Right or wrong: side by side, as nothing is timed.
pytest=("$python" -m pytest tests/test_gpu.py -vv -rf)
if wants tests; then
  # Most of the time goes into compiling Triton's kernels for each call. Tests are dealt one by one,
  # as some take a minute; with pytest-timeout one that doesn't end takes its process with it.
  workers=$("$python" -c 'import os, xdist; print("--maxschedchunk=1 -n", min(12, os.cpu_count()))' \
    2>/dev/null)
  # shellcheck disable=SC2086
  PYTEST_TIMEOUT=150 step tests 180 "${pytest[@]}" --durations=10 -o timeout_method=thread \
    $workers &
  for operator in "${operators[@]}"; do
    {
      step "kernels-$operator" 120 "${pytest[@]}" -k "test_each_kernel and $operator"
      [ $? -ge 124 ] && touch "$work/$operator.hangs"
    } &
  done
fi
if wants sanitizer; then
  if command -v compute-sanitizer >/dev/null; then
    # Each CUDA kernel: every access in bounds, no races between threads of a block. A process for
    # each operator, as none goes on after an error; and memory of its own for each tensor, as what
    # torch would keep for the next ones is in bounds too.
    for operator in "${operators[@]}"; do
      for tool in memcheck racecheck; do
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 step "$tool-$operator" 150 \
          compute-sanitizer --tool "$tool" --error-exitcode 1 --report-api-errors no \
          --target-processes all "${pytest[@]}" -k "test_each_kernel and $operator" &
      done
    done
  else
    echo "compute-sanitizer is not there" | tee -a "$out/gpu.txt"
  fi
fi
wait

# How fast. Triton's kernels are timed by themselves where CUDA's don't end, or should one of ours take
# the process or the GPU down, which is neither a case that failed (1) nor time that ran out (124).
for name in dropout_add_layer_norm lstm bert attention; do
  wants "$name" || continue
  benchmark=("$python" -m trifuse.benchmarks "$name" --quick --device cuda)
  status=2
  if [ ! -e "$work/$name.hangs" ]; then
    step "$name" 200 "${benchmark[@]}" --json "$out/$name-gpu.json" --plot "$work/$name-gpu.png"
    status=$?
  fi
  case $status in
    0 | 1 | 124) ;;
    *) step "$name-triton" 100 "${benchmark[@]}" --backend triton \
      --json "$work/$name-triton-gpu.json" --plot "$work/$name-triton-gpu.png" ;;
  esac
  more=("$work"/*-gpu.*)
  [ -e "${more[0]}" ] && tar -czf "$out/gpu-pictures.tar.gz" -C "$work" "${more[@]##*/}"
done
cp "$out/gpu.txt" "$work/steps.txt"
for name in dropout_add_layer_norm lstm bert attention; do
  for log in "$work/$name.log" "$work/$name-triton.log"; do
    [ -e "$log" ] && cat "$log"
  done
done | tee -a "$out/gpu.txt"
cat "$work/steps.txt"
[ -e "$work/failed" ] && exit "$(wc -l <"$work/failed")"
exit 0
