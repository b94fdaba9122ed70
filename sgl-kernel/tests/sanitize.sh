#!/bin/bash
# Runs a program of kernels once, then again under each tool of compute-sanitizer. Needs a GPU and the program, which
# `ninja NAME_sanitize` builds (NAME: tree_verify, tree, tree_recurrent or indexer):
#   tests/sanitize.sh BUILD_FOLDER/tree_verify_sanitize [LOG_FOLDER]
set -uo pipefail
binary=${1:?"sanitize.sh: expected the path of the program"}
logs=${2:-$(mktemp -d)}
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
[ -x "$binary" ] || { echo "sanitize.sh: no program $binary: build its target first"; exit 2; }
[ -x "$sanitizer" ] || { echo "sanitize.sh: no compute-sanitizer on PATH or in /usr/local/cuda/bin"; exit 2; }

failed=0
"$binary" >"$logs/sanitize_plain.log" 2>&1 || failed=1
echo "plain: $(tail -1 "$logs/sanitize_plain.log")"
for tool in memcheck racecheck initcheck synccheck; do
  log=$logs/sanitize_$tool.log
  SECONDS=0
  if "$sanitizer" --tool "$tool" --error-exitcode 9 "$binary" >"$log" 2>&1; then
    status=clean
  else
    status="FAILED (exit $?)"
    failed=1
  fi
  echo "$tool: $status, ${SECONDS} s, $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -1)"
done
exit $failed
