#!/usr/bin/env bash
# Everything that only a GPU can tell, in one command and under ten minutes: does it build, are the
# numbers right, does compute-sanitizer find anything, how fast is it.
#
#   benchmarks/gpu.sh [FOLDER]        results go there; default: benchmarks/results
#   PYTHON=python3.12 benchmarks/gpu.sh
#
# Each step has a time limit and writes as it goes: what was done when one is stopped stays. The exit
# status is the number of steps that failed.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
out=${1:-benchmarks/results}
mkdir -p "$out"
summary=$out/gpu.txt
: >"$summary"
failed=0

# step NAME SECONDS COMMAND...: what it prints goes to gpu-NAME.log.
step() {
  local name=$1 limit=$2 begin=$SECONDS
  shift 2
  if timeout "$limit" "$@" >"$out/gpu-$name.log" 2>&1; then
    local state=ok
  else
    local state="FAILED ($?)"
    failed=$((failed + 1))
  fi
  printf '%-32s %5d s  %s\n' "$name" $((SECONDS - begin)) "$state" | tee -a "$summary"
  [ "$state" = ok ] || tail -n 15 "$out/gpu-$name.log"
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee -a "$summary"
step build 240 "$python" -m pip install --quiet --no-build-isolation --no-deps --editable .
step what-there-is 60 "$python" -m trifuse
step tests 180 "$python" -m pytest tests/test_gpu.py -q -rf --durations=10

# One size of each kernel: every access in bounds, every race between threads of a block.
small='test_attention and float32-everything or test_attention and bfloat16-everything'
small="$small or test_lstm and bfloat16-everything or test_lstm and bfloat16-plain"
small="$small or of_any_width and 1000-bfloat16"
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    step "$tool" 90 compute-sanitizer --tool "$tool" --error-exitcode 1 --target-processes all \
      "$python" -m pytest tests/test_gpu.py -q -k "($small) and cuda"
  done
else
  echo "compute-sanitizer is not there" | tee -a "$summary"
fi

for operator in dropout_add_layer_norm attention lstm; do
  for backend in triton cuda; do
    step "$operator-$backend" 75 "$python" -m trifuse.benchmarks "$operator" --quick \
      --device cuda --backend "$backend" \
      --json "$out/$operator-gpu-$backend.json" --plot "$out/$operator-gpu-$backend.png"
    cat "$out/gpu-$operator-$backend.log" >>"$summary"
  done
done
cat "$summary"
exit "$failed"
