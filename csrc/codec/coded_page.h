// The extents of a page: the matrices of one expert, one behind the other. Layer codec: includes base only.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace torch_offload {

/// Finds them by the sizes that they say they have. Nothing else of them is checked; CodedMatrix does that.
/// Throws: CorruptPage unless extents fill the page to its end.
std::vector<std::span<const std::byte>> extents_of(std::span<const std::byte> page);

}  // namespace torch_offload
