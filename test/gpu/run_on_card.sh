#!/bin/bash
# Runs the GPU tests and the kernels' tests on a CUDA host that has the installed CUDA profile, unpacked in a folder:
# its env.sh sets up the interpreter, its project/ is this repository. Sends and fetches nothing.
#   usage: run_on_card.sh FOLDER PIECE         one of the pieces below, each made to take less than nine minutes
#          run_on_card.sh FOLDER FILE...       these test files, named from the repository's root
#          run_on_card.sh --list               the pieces and their files
# Each file runs in a process of its own, AT_ONCE files at a time (default 1; a file may start twenty engines at once).
# Under $OUT (default: card-tests): FILE.log, and summary.txt with one line per file and the least free host memory.
# Exit status: 0 if no test failed. SECONDS_AT_MOST (default 540) bounds the call; a file that it cuts off fails.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

pieces=(
  "sgl-kernel/tests/test_tree_verify.py sgl-kernel/tests/test_tree_build.py sgl-kernel/tests/test_tree_build_paths.py sgl-kernel/tests/test_tree_accept.py sgl-kernel/tests/test_tree_commit.py sgl-kernel/tests/test_tree_step.py sgl-kernel/tests/test_library.py sgl-kernel/tests/test_kernel_report.py"
  "sgl-kernel/tests/test_tree_recurrent.py sgl-kernel/tests/test_index_logits.py sgl-kernel/tests/test_store_index_keys.py"
  "test/gpu/test_ddtree_cuda.py"
  "test/gpu/test_ddtree_features_cuda.py"
  "test/gpu/test_ddtree_sampling_cuda.py test/gpu/test_ddtree_memory_cuda.py test/gpu/test_ddtree_warm_up_cuda.py"
  "test/gpu/test_ddtree_backends_cuda.py test/gpu/test_ddtree_drafters_cuda.py"
  "test/gpu/test_ddtree_hybrid_cuda.py"
  "test/gpu/test_graph_guard_backends.py test/gpu/test_graph_guard_instruments.py test/gpu/test_graph_guard_indexer.py test/gpu/test_graph_guard_models.py test/gpu/test_graph_guard_ops.py"
)
# The last piece: what no other names, so that a new file is not forgotten.
rest=$(cd "$here" && for file in test/gpu/test_*.py sgl-kernel/tests/test_*.py; do
  case " ${pieces[*]} " in *" $file "*) ;; *) echo "$file" ;; esac
done)
pieces+=("$(echo $rest)")

if [ "${1:-}" = --list ]; then
  for i in "${!pieces[@]}"; do echo "$((i + 1)): ${pieces[i]}"; done
  exit 0
fi
if [ $# -lt 2 ] || [ ! -r "$1/env.sh" ]; then
  echo "usage: expected FOLDER with env.sh and project/, then a piece (1 to ${#pieces[@]}) or files; got: $*" >&2
  exit 2
fi
folder=$(realpath "$1")
shift
if [[ $# -eq 1 && $1 =~ ^[0-9]+$ ]]; then
  if [ "$1" -lt 1 ] || [ "$1" -gt ${#pieces[@]} ]; then
    echo "PIECE: expected 1 to ${#pieces[@]}, got $1" >&2
    exit 2
  fi
  read -ra files <<<"${pieces[$1 - 1]}"
else
  files=("$@")
fi

out=${OUT:-card-tests}
mkdir -p "$out"
out=$(realpath "$out")
# shellcheck disable=SC1091
source "$folder/env.sh"
cd "$folder/project" || exit 2
export PYTHONPATH=$PWD:$PWD/test # `tools` and `support`; sglang and sgl_kernel are the installed ones
deadline=$((SECONDS + ${SECONDS_AT_MOST:-540})) failed=0 running=0

# Prints the least available host memory, in GiB, until it is killed: one line whenever it falls.
watch_memory() {
  local least=999999999999 now
  while now=$(awk '/MemAvailable/ { print $2 }' /proc/meminfo); do
    [ "$now" -lt "$least" ] && least=$now && awk -v kib="$now" 'BEGIN { printf "%.1f\n", kib / 1048576 }'
    sleep 0.5
  done
}

run_file() {
  local file=$1 log began=$SECONDS status closing
  log=$out/$(basename "$file" .py).log
  timeout --signal=INT --kill-after=10 $((deadline > SECONDS ? deadline - SECONDS : 1)) \
    python -m pytest -ra --tb=short -p no:cacheprovider --durations=5 "$file" >"$log" 2>&1
  status=$?
  closing=$(grep -aE '[0-9]+ (passed|failed|skipped|error)|no tests ran' "$log" | tail -1 | tr -d '=')
  echo "$file: ${closing:-no closing line} (exit $status, $((SECONDS - began)) s)" | tee -a "$out/summary.txt"
  return $status
}

wait_for_one() {
  wait -n || failed=1
  running=$((running - 1))
}

watch_memory >"$out/memory" &
watcher=$!
for file in "${files[@]}"; do
  [ $running -lt "${AT_ONCE:-1}" ] || wait_for_one
  run_file "$file" &
  running=$((running + 1))
done
while [ $running -gt 0 ]; do wait_for_one; done
kill $watcher
echo "at least $(tail -1 "$out/memory") GiB of host memory free" | tee -a "$out/summary.txt"
rm -f "$out/memory"
exit $failed
