#!/usr/bin/env bash
# The C++ compiler, which reads torch's headers once for all files of the extension that include them:
#   CXX=tools/precompiled_cxx.sh pip install --no-build-isolation .
# Whatever else it is asked to do, the compiler named by OFFLOAD_CXX (c++) does unchanged.
set -euo pipefail

compiler="${OFFLOAD_CXX:-c++}"
source=""
output=""
flags=()
for ((i = 1; i <= $#; i++)); do
    case "${!i}" in
        -c | -MMD) ;;
        -MF) ((i += 1)) ;;
        -o) ((i += 1)) && output="${!i}" ;;
        *.cpp) source="${!i}" ;;
        *) flags+=("${!i}") ;;
    esac
done

case "$source" in
    */csrc/autograd/*.cpp | */csrc/bindings/*.cpp | */csrc/optim/*_operator.cpp) ;;
    *) exec "$compiler" "$@" ;;
esac

# Beside the objects, in a folder of its own for each version of torch; another one for other flags.
folder="${output%%/csrc/*}/precompiled"
mkdir -p "$folder"
header="$folder/torch-$(printf '%s\n' "$compiler" "${flags[@]}" | cksum | cut -d ' ' -f 1).h"
make_header() {
    for name in ATen/core/Tensor.h ATen/core/dispatch/Dispatcher.h ATen/core/ivalue.h ATen/core/stack.h ATen/Parallel.h \
        ATen/ops/empty.h c10/core/GradMode.h algorithm functional memory mutex vector; do
        echo "#include <$name>"
    done > "$header"
    "$compiler" "${flags[@]}" -x c++-header "$header" -o "$header.part" && mv "$header.part" "$header.gch"
}
exec 9> "$header.lock"
flock 9
[ -f "$header.gch" ] || make_header
exec 9>&-
exec "$compiler" -include "$header" "$@"
