#!/usr/bin/env bash
# free_space.sh FOLDER MEBIBYTES: fails with a message when the disk under FOLDER has less free.
set -euo pipefail

free_mb="$(df -Pm "$1" | awk 'NR == 2 {print $4}')"
if [ "$free_mb" -lt "$2" ]; then
    echo "The environment for the newer torch needs $2 MiB on the disk of $(realpath "$1"), $free_mb MiB are free." >&2
    exit 1
fi
