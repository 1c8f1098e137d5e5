// RANS4: four values of a row as one symbol, 64 rows as 64 interleaved lanes. FORMAT.md has the bytes.
// Layer codec: includes base only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "codec/column_class.h"
#include "codec/rans_model.h"
#include "codec/tile_coder.h"

namespace torch_offload {

inline constexpr std::size_t kRansLanes = 64;
/// States are at least this between symbols, and exactly this behind the last one.
inline constexpr std::uint32_t kRansFloor = 1U << 16;

/// The columns, with what one direction knows of each class.
template <typename Table>
struct RansColumns {
    std::size_t column_count = 0;
    ColumnClasses classes;
    std::vector<Table> tables;  // one per class

    std::size_t quad_count() const noexcept { return (column_count + kQuad - 1) / kQuad; }
    /// Where the quads of a class end: a quad belongs to the class of its first column.
    std::size_t end_quad(std::size_t index) const noexcept {
        return index + 1 < classes.size() ? (classes[index + 1].first_column + kQuad - 1) / kQuad : quad_count();
    }
};

/// Lane i holds rows i, i + 64, ... of the tile, one after the other.
/// Source: Duda, arXiv 1311.2540; interleaved lanes after Giesen, arXiv 1402.3392.
class Rans4Encoder : public TileEncoder {
public:
    /// `frequencies` has one entry per class of columns.
    Rans4Encoder(std::size_t columns, ColumnClasses classes, const std::vector<SymbolFrequencies>& frequencies);

    /// Throws: InvalidArgument if a symbol of the tile has no frequency.
    std::vector<std::byte> encode(const TernaryView& tile, InstructionSet set) const override;

private:
    RansColumns<RansIntervals> columns_;
};

class Rans4Decoder : public TileDecoder {
public:
    Rans4Decoder(std::size_t columns, ColumnClasses classes, const std::vector<SymbolFrequencies>& frequencies);

    std::unique_ptr<TileReader> open(std::span<const std::byte> bytes, std::size_t rows,
                                     InstructionSet set) const override;

private:
    RansColumns<RansSlots> columns_;
};

/// A tile being decoded. Words are 16 bits, at any address.
struct RansStream {
    std::uint32_t states[kRansLanes] = {};
    const std::byte* word = nullptr;
    const std::byte* end = nullptr;  // kTileSlackBytes behind it may be read
};

/// Decodes the next rows, one per lane, from lane 0 on. False: the words end before the rows do. The last symbol may
/// reach behind the last column: the caller clears what is there.
/// One kernel per instruction set, one per source file. Pre: the set is available.
using Rans4Kernel = bool(const RansColumns<RansSlots>&, RansStream&, std::size_t lanes, const TernaryRows& to) noexcept;
Rans4Kernel rans4_rows_portable;
Rans4Kernel rans4_rows_avx2;
Rans4Kernel rans4_rows_avx512;

/// A tile being coded, last symbol first.
struct RansGrowth {
    /// Of lane i at kRansLanes - 1 - i: words come in order of the registers. Lanes without a row are left alone.
    std::uint32_t states[kRansLanes] = {};
    /// Where the next word goes. A decoder takes them from the last to the first.
    std::uint16_t* word = nullptr;
};
/// Words behind the last one that kernels may overwrite.
inline constexpr std::size_t kRansWordSlack = 16;

/// Codes up to kRansLanes rows, one per lane, behind whose rows all others are coded. False: four values have no
/// frequency. Every kernel gives the same words. Pre: the set is available; room for a word per symbol and the slack.
using Rans4EncodeKernel = bool(const RansColumns<RansIntervals>&, RansGrowth&, const TernaryView& rows) noexcept;
Rans4EncodeKernel rans4_encode_portable;
Rans4EncodeKernel rans4_encode_avx2;
Rans4EncodeKernel rans4_encode_avx512;

}  // namespace torch_offload
