// Coding of tiles by RANS4: blocks of rows from the last to the first, whose words are turned round at the end.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "base/check.h"
#include "codec/rans4.h"

namespace torch_offload {
namespace {

Rans4EncodeKernel* kernel_of(InstructionSet set) noexcept {
    if (set == InstructionSet::avx512) return rans4_encode_avx512;
    return set == InstructionSet::avx2 ? rans4_encode_avx2 : rans4_encode_portable;
}

}  // namespace

Rans4Encoder::Rans4Encoder(std::size_t columns, ColumnClasses classes,
                           const std::vector<SymbolFrequencies>& frequencies) {
    columns_ = {columns, std::move(classes), {}};
    for (const SymbolFrequencies& one : frequencies) columns_.tables.push_back(intervals_of(one));
}

std::vector<std::byte> Rans4Encoder::encode(const TernaryView& tile, InstructionSet set) const {
    Rans4EncodeKernel* const kernel = kernel_of(set);
    const auto buffer =
        std::make_unique_for_overwrite<std::uint16_t[]>(kRansLanes * columns_.quad_count() + kRansWordSlack);
    RansGrowth growth;
    std::fill_n(growth.states, kRansLanes, kRansFloor);
    std::vector<std::uint16_t> words;
    for (std::size_t end = tile.rows; end > 0;) {
        const std::size_t first = (end - 1) / kRansLanes * kRansLanes;
        growth.word = buffer.get();
        OFFLOAD_CHECK(kernel(columns_, growth, tile.rows_from(first, end - first)), InvalidArgument,
                      "a tile has four values that its coder has no frequency for");
        words.insert(words.end(), buffer.get(), growth.word);
        end = first;
    }
    const std::size_t lanes = std::min(tile.rows, kRansLanes);
    const std::size_t state_bytes = lanes * sizeof(std::uint32_t);
    std::ranges::reverse(growth.states);
    std::ranges::reverse(words);
    std::vector<std::byte> bytes(state_bytes + words.size() * sizeof(std::uint16_t));
    std::memcpy(bytes.data(), growth.states, state_bytes);
    if (!words.empty()) std::memcpy(bytes.data() + state_bytes, words.data(), bytes.size() - state_bytes);
    return bytes;
}

}  // namespace torch_offload
