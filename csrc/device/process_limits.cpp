#include "device/process_limits.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <iterator>

#include "base/check.h"

namespace torch_offload {
namespace {

std::size_t count_mappings() {
    std::ifstream maps("/proc/self/maps");
    return static_cast<std::size_t>(std::count(std::istreambuf_iterator<char>(maps), {}, '\n'));
}

}  // namespace

std::string memory_remedy() {
    std::size_t limit = 0;
    std::ifstream("/proc/sys/vm/max_map_count") >> limit;
    const std::size_t mappings = count_mappings();
    if (limit != 0 && mappings + mappings / 16 >= limit) {
        return concat("the process has ", mappings, " mappings of ", limit,
                      "; raise the limit: sysctl -w vm.max_map_count=", limit * 4);
    }
    return "check the address space limit (ulimit -v) and vm.overcommit_memory";
}

std::string address_limit() {
    rlimit limit{};
    if (::getrlimit(RLIMIT_AS, &limit) != 0) return "a number of bytes that is not known";
    if (limit.rlim_cur == RLIM_INFINITY) return "as many as the system has";
    return concat(limit.rlim_cur, " bytes of them in all");
}

}  // namespace torch_offload
