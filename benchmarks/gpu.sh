#!/usr/bin/env bash
# Everything that needs a GPU, in one command and under ten minutes: the build, the tests,
# compute-sanitizer (memcheck, racecheck and synccheck of each operator's CUDA kernels) and the
# benchmarks.
#
#   benchmarks/gpu.sh [FOLDER [PART...]]      results go to FOLDER; default: benchmarks/results
#
# Parts: build, tests, sanitizer, dropout_add_layer_norm, lstm, gru (RNNs too), bert, attention;
# default: all, in this order. Environment: LIMIT, seconds for everything (default 570); PYTHON.
#
# On a machine that is available for minutes only, one call with a folder is enough:
# `benchmarks/gpu.sh results`, with 600 seconds. It needs torch with CUDA, Triton, pip, setuptools (77
# or later), nvcc and a C++ compiler, pytest and hypothesis for the tests, rich and matplotlib for the
# benchmarks. Where ninja or pybind11 is missing, it installs them; without a network ninja must be
# there, and pybind11 is then torch's own. With pytest-xdist the tests run in parallel; with
# pytest-timeout none of them hangs; without transformers its model is replaced by ours. The build is
# kept, so a second call can run further parts: `benchmarks/gpu.sh results lstm bert`.
#
# Every step has a time limit. FOLDER gets, as they come: gpu.txt, a line for each step and then the
# tables; gpu.log, the output of the steps; NAME-gpu.json, a benchmark's figures, written after each
# case; gpu-pictures.tar.gz. The exit status is the number of steps that failed or were left out.
set -uom pipefail  # -m: without job control, background steps could not be interrupted
repository=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$repository/benchmarks/results}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$repository" || exit

python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
limit=${LIMIT:-570}
parts=${*:2}
parts=${parts:-build tests sanitizer dropout_add_layer_norm lstm gru bert attention}
operators=(attention dropout_add_layer_norm lstm gru)  # gru: the tests of RNNs too
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
: >"$out/gpu.log"
: >"$out/gpu.txt"

export PATH=$PATH:/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer
export PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1
gpu() { nvidia-smi --query-gpu="$1" --format=csv,noheader | head -n 1; }
gpu name,driver_version,memory.total,compute_cap | tee -a "$out/gpu.txt"
architecture=$(gpu compute_cap)  # build machine code for this GPU only
[ -n "$architecture" ] && export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-$architecture}

# step NAME SECONDS COMMAND...: runs a command; interrupts it when its time or the total is over.
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
  # The build is not isolated, so it takes what is installed.
  "$python" -c 'import ninja, pybind11' >/dev/null 2>&1 ||
    timeout 60 "$python" -m pip install --quiet --retries 1 --timeout 10 ninja 'pybind11>=3' \
      >>"$out/gpu.log" 2>&1
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

# Correctness: these steps run in parallel, since nothing is timed.
pytest=("$python" -m pytest tests/cuda/test_gpu.py -vv -rf)
if wants tests; then
  # Most of the time goes into compiling Triton's kernels for each call. Tests are handed out one by
  # one, since some take a minute; with pytest-timeout a test that hangs ends its process.
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
    # Each CUDA kernel: every access in bounds (memcheck), no races between threads of a block in
    # shared memory (racecheck), no invalid use of barriers (synccheck); the last two skip what they
    # can't follow. Each operator and tool has a process of its own, since no process continues after
    # an error. torch's allocator cache is off, since an access out of a tensor but within a cached
    # block would count as in bounds.
    # racecheck gets attention's kernels for other GPUs: it reports every value that one warp writes,
    # another reads, and a barrier in shared memory (mbarrier) orders, as Hopper's kernels do.
    for operator in "${operators[@]}"; do
      for tool in memcheck racecheck synccheck; do
        [ "$tool-$operator" = racecheck-attention ] && capability=8.0 || capability=
        TRIFUSE_CUDA_CAPABILITY=$capability PYTORCH_NO_CUDA_MEMORY_CACHING=1 step "$tool-$operator" 150 \
          compute-sanitizer --tool "$tool" --error-exitcode 1 --report-api-errors no \
          --target-processes all "${pytest[@]}" -k "test_each_kernel and $operator" &
      done
    done
  else
    echo "compute-sanitizer is not there" | tee -a "$out/gpu.txt"
  fi
fi
wait

# Speed. Triton's kernels are timed by themselves if the CUDA kernels hang, or if a kernel of ours
# crashes the process or the GPU: a status that is neither a failed case (1) nor a timeout (124).
for name in dropout_add_layer_norm lstm gru bert attention; do
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
for name in dropout_add_layer_norm lstm gru bert attention; do
  for log in "$work/$name.log" "$work/$name-triton.log"; do
    [ -e "$log" ] && cat "$log"
  done
done | tee -a "$out/gpu.txt"
cat "$work/steps.txt"
[ -e "$work/failed" ] && exit "$(wc -l <"$work/failed")"
exit 0
