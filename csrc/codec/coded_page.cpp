#include "codec/coded_page.h"

#include "base/check.h"
#include "codec/extent.h"

namespace torch_offload {

std::vector<std::span<const std::byte>> extents_of(std::span<const std::byte> page) {
    std::vector<std::span<const std::byte>> extents;
    for (std::size_t offset = 0; offset < page.size();) {
        const std::size_t size_bytes = said_extent_bytes(page.subspan(offset));
        extents.push_back(page.subspan(offset, size_bytes));
        offset += size_bytes;
    }
    OFFLOAD_CHECK(!extents.empty(), CorruptPage, "a coded page of no bytes");
    return extents;
}

}  // namespace torch_offload
