// The dictionary code of QMoE, as the baseline that ours are compared with. FORMAT.md has the bytes.
// Layer codec: includes base only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "codec/tile_coder.h"

namespace torch_offload {

/// The fixed dictionary: 65,536 sequences of up to 14 pairs of values, the most probable ones where each value is 0
/// with probability 0.885 and +1 and -1 are equally probable. With a sequence it has all that begin it.
/// Source: Frantar and Alistarh, "QMoE", arXiv 2310.16795, section 4.
class QmoeDictionary {
public:
    static constexpr std::size_t kPairKinds = 9;
    static constexpr std::size_t kMaxPairs = 14;
    static constexpr std::size_t kEntryCount = 65536;
    static constexpr std::uint32_t kNoEntry = UINT32_MAX;
    static constexpr std::size_t kWordBytes = 32;

    /// The only one there is: it depends on nothing, so it is made at the first call and never changes.
    static const QmoeDictionary& shared();

    /// The entry that continues `entry` (kNoEntry: the empty one) by a pair, or kNoEntry.
    std::uint32_t continued(std::uint32_t entry, std::size_t pair) const noexcept {
        return next_[(entry + 1) * kPairKinds + pair];  // kNoEntry + 1 is 0
    }
    const std::int8_t* word(std::size_t entry) const noexcept { return words_.data() + entry * kWordBytes; }
    std::size_t pair_count(std::size_t entry) const noexcept { return pair_counts_[entry]; }

private:
    QmoeDictionary();

    std::vector<std::uint32_t> next_;        // [1 + kEntryCount, kPairKinds]
    std::vector<std::int8_t> words_;         // [kEntryCount, kWordBytes]
    std::vector<std::uint8_t> pair_counts_;  // [kEntryCount]
};

/// Codes by the longest entry that fits. As QMoE stores it: 16 bits per codeword, a 32-bit offset and two bf16 grid
/// values per row.
class QmoeCoder : public TileEncoder, public TileDecoder {
public:
    explicit QmoeCoder(std::size_t columns) : columns_(columns) {}

    std::vector<std::byte> encode(const TernaryView& tile, InstructionSet set) const override;
    std::unique_ptr<TileReader> open(std::span<const std::byte> bytes, std::size_t rows,
                                     InstructionSet set) const override;

private:
    std::size_t columns_;
    const QmoeDictionary& dictionary_ = QmoeDictionary::shared();
};

}  // namespace torch_offload
