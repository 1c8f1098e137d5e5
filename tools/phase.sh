#!/usr/bin/env bash
# Runs a command and adds what it took to build/phases.txt, which .ci/run prints.
# phase.sh NAME COMMAND ARGUMENT...
set -uo pipefail
cd "$(dirname "$0")/.." || exit
phases="$PWD/build/phases.txt"
cd "$OLDPWD" || exit
name="$1"
shift
started=$SECONDS
"$@"
status=$?
mkdir -p "$(dirname "$phases")"
printf '%6d s  %s%s\n' $((SECONDS - started)) "$name" "$([ $status -eq 0 ] || echo " (failed: $status)")" >> "$phases"
exit $status
