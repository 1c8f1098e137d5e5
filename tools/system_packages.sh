#!/usr/bin/env bash
# Makes sure that what the build needs from the system is there. Asks the system first, so that a second run needs no
# network; installs with apt-get only what is missing and only as root; otherwise names it.
# system_packages.sh [PYTHON [fuzz|fault]]: with `fuzz`, also what the fuzzers are built with; with `fault`, also the
# file systems that the fault programme pages to.
set -euo pipefail

python="${1:-python3}"
missing=()

needs_command() { command -v "$1" > /dev/null || missing+=("$2"); }
needs_library() { pkg-config --exists "$1" 2> /dev/null || missing+=("$2"); }

needs_command g++ g++
needs_command cmake cmake
needs_command ninja ninja-build
needs_command pkg-config pkg-config
needs_command fio fio
needs_library liburing liburing-dev
needs_library libxxhash libxxhash-dev
needs_library gtest libgtest-dev

fuzz_probe='extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }'
[ "${2:-}" != fuzz ] || echo "$fuzz_probe" | clang++ -x c++ -fsanitize=fuzzer,address - -o /dev/null 2> /dev/null || missing+=(clang)

if [ "${2:-}" = fault ]; then
    PATH="$PATH:/usr/sbin:/sbin" # where only root looks
    needs_command mkfs.xfs xfsprogs
    needs_command mkfs.btrfs btrfs-progs
    needs_command bindfs bindfs
fi

# The fuzzers' library has a package of its own where clang is split up: libclang-rt-14-dev of Debian 12.
clang_library() {
    local version
    version="$(apt-cache depends clang | sed -n 's/.*Depends: clang-\([0-9]*\)$/\1/p')"
    apt-cache pkgnames "libclang-rt-$version-dev" | grep -x "libclang-rt-$version-dev" || true
}

if ! command -v "$python" > /dev/null; then
    missing+=(python3 python3-venv python3-dev)
else
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "Python 3.11 or newer is needed for the tests and the demo, $python is $("$python" --version)." >&2
        echo "Name another one: make PYTHON=python3.12 ..." >&2
        exit 1
    }
    "$python" -c 'import ensurepip, venv' 2> /dev/null || missing+=(python3-venv)
    "$python" -c 'import os, sysconfig, sys
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || missing+=(python3-dev)
fi

if [ ${#missing[@]} -eq 0 ]; then
    exit 0
fi
if [ "$(id -u)" -eq 0 ] && command -v apt-get > /dev/null; then
    echo "installing system packages: ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    if [[ " ${missing[*]} " == *" clang "* ]]; then
        library="$(clang_library)"
        missing+=(${library:+"$library"})
    fi
    apt-get install -y -qq --no-install-recommends "${missing[@]}"
else
    echo "These system packages are missing (Debian's names). Install them and run make again:" >&2
    echo "    sudo apt-get install ${missing[*]}" >&2
    exit 1
fi
