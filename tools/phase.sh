#!/usr/bin/env bash
# Runs a command and adds what it took to build/phases.txt, which .ci/run prints, unless it took no time.
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
took=$((SECONDS - started))
[ $took -gt 0 ] || [ $status -ne 0 ] || exit 0
printf '%6d s  %s%s\n' $took "$name" "$([ $status -eq 0 ] || echo " (failed: $status)")" >> "$phases"
exit $status
