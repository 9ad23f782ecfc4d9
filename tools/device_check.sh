#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks and measures the GPU backend on this machine's GPU, in under five minutes, and prints what
# it saw: how memory can be shared, random rounds against the CPU, graphs, a sanitizer, times.
set -uo pipefail

usage() {
  cat <<'TEXT'
Usage: tools/device_check.sh [--program FILE] [--out DIR]

  --program  a device_check built before; else it is built here, for this machine's GPU, which needs
             nvcc, CMake and Ninja
  --out      where the output is kept (build/device_check)
TEXT
}

program=
out=
while (($#)); do
  case $1 in
    --program) program=${2:-}; shift 2 || shift ;;
    --out) out=${2:-}; shift 2 || shift ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
  esac
done
if [[ $program ]]; then program=$(realpath -- "$program") || exit 2; fi
if [[ $out ]]; then out=$(realpath -m -- "$out"); fi
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
out=${out:-build/device_check}
mkdir -p "$out"
rm -f "$out"/*.txt

# Kernels that wait for each other must all be loaded before one of them runs, and each stream needs
# a queue of its own.
export CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32

readonly total=285  # seconds for all of it
status=0
# step NAME SECONDS COMMAND...: runs it under a limit; the output is kept and shown. What would begin
# too late is left out.
step() {
  local name=$1 limit=$2 begin=$SECONDS
  shift 2
  if ((limit > total - SECONDS)); then limit=$((total - SECONDS)); fi
  if ((limit < 5)); then
    echo "$name: no time left, left out" | tee -a "$out/summary.txt"
    return 0
  fi
  timeout --kill-after=5 "$limit" "$@" >"$out/$name.txt" 2>&1
  local result=$?
  sed 's/^/  /' "$out/$name.txt" | tail -n 30
  if ((result != 0)); then status=1; fi
  printf '%-28s %-7s %4d s\n' "$name" "$([[ $result == 0 ]] && echo passed || echo "FAILED ($result)")" \
    $((SECONDS - begin)) | tee -a "$out/summary.txt"
  return "$result"
}

: >"$out/summary.txt"
if [[ -z $program ]]; then
  if ! nvidia-smi >/dev/null 2>&1; then
    echo "device_check: expected a GPU with its driver, got none (nvidia-smi failed)" >&2
    exit 1
  fi
  arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d '.')
  step build 90 bash -c "cmake --preset device -DCMAKE_CUDA_ARCHITECTURES=${arch:-90}-real &&
    cmake --build build/device --parallel $(nproc) --target device_check" || exit 1
  program=build/device/tests_cpp/device_check/device_check
fi

# Nothing else may spin where streams do not run at the same time.
step probe 30 "$program" probe ranks=8 || exit 1
for ranks in 2 4 8; do
  step "rounds-$ranks" 30 "$program" rounds ranks=$ranks tokens=64 hidden=7168 rounds=30
done
step rounds-by-expert 30 "$program" rounds ranks=8 tokens=64 hidden=7168 layout=expert_major rounds=20
step graph 30 "$program" rounds ranks=8 tokens=64 hidden=7168 graph=1 rounds=50
step graph-by-expert 30 "$program" rounds ranks=4 tokens=33 hidden=1344 layout=expert_major graph=1 rounds=50
# NCCL: one rank, then several on this GPU, which NCCL has from 2.30 on and calls experimental: its
# refusal is printed, and is no failure.
nccl=$(python3 - 2>/dev/null <<'PYTHON'
import importlib.util, pathlib
for folder in importlib.util.find_spec("nvidia.nccl").submodule_search_locations:
    print(pathlib.Path(folder) / "lib" / "libnccl.so.2")
PYTHON
)
if [[ $(timeout 30 "$program" nccl ranks=1 tokens=1 hidden=1 "library=$nccl" 2>&1) == *"expected libnccl"* ]]; then
  echo "NCCL: not installed, left out" | tee -a "$out/summary.txt"
else
  step nccl-1 40 "$program" nccl ranks=1 tokens=64 hidden=7168 "library=$nccl"
  for ranks in 2 4; do
    before=$status
    NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=8 step "nccl-$ranks" 60 "$program" nccl ranks=$ranks \
      tokens=64 hidden=7168 "library=$nccl"
    status=$before
  done
fi
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    step "$tool" 40 compute-sanitizer --tool "$tool" --error-exitcode 1 "$program" rounds ranks=2 \
      tokens=8 hidden=128 experts=8 top_k=2 rounds=2 timeout_ms=20000
  done
else
  echo "compute-sanitizer: not installed, left out" | tee -a "$out/summary.txt"
fi
for tokens in 1 8 32 128; do
  step "bench-$tokens" 20 "$program" bench ranks=8 tokens=$tokens hidden=7168 experts=256 rounds=200
done
step bench-4096 40 "$program" bench ranks=8 tokens=4096 hidden=7168 experts=256 rounds=20
step bench-by-expert 30 "$program" bench ranks=8 tokens=128 hidden=7168 experts=256 rounds=100 layout=expert_major
if python3 -c 'import flashinfer, torch; torch.cuda.init()' 2>/dev/null; then
  # The first use may compile its kernels.
  # So that many of its blocks may wait for those that do not fit: no failure of ours.
  before=$status
  for tokens in 1 128 4096; do
    step "flashinfer-$tokens" 60 python3 tools/device_check_flashinfer.py --tokens "$tokens"
  done
  status=$before
else
  echo "flashinfer: not installed, left out" | tee -a "$out/summary.txt"
fi

echo
grep -hs '^flashinfer:' "$out"/flashinfer-*.txt
grep -hs '^nccl:' "$out"/nccl-*.txt
grep -h '^bench:' "$out"/bench-*.txt
cat "$out/summary.txt"
exit "$status"
