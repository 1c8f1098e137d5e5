#!/usr/bin/env bash
# Runs a command and adds to build/phases.txt, which .ci/run prints, what it took: seconds, of them on how many cores
# (less than there are: something waited). Nothing where it took no time.
# phase.sh NAME COMMAND ARGUMENT...
set -uo pipefail
cd "$(dirname "$0")/.." || exit
phases="$PWD/build/phases.txt"
cd "$OLDPWD" || exit
name="$1"
shift
TIMEFORMAT="%R %U %S"
spent=$(mktemp)
{ time "$@" 2>&3; } 3>&2 2> "$spent"
status=$?
mkdir -p "$(dirname "$phases")"
awk -v name="$name" -v status=$status '{
    if ($1 < 1 && status == 0) exit
    printf "%6.0f s %5.2f cores  %s%s\n", $1, ($2 + $3) / $1, name, status == 0 ? "" : " (failed: " status ")"
}' "$spent" >> "$phases"
rm -f "$spent"
exit $status
