// Coded extents: the header, the checksum and where the tiles lie. FORMAT.md has the bytes. Layer codec: includes base
// only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "codec/column_class.h"
#include "codec/column_order.h"
#include "codec/rans_model.h"
#include "codec/tile_coder.h"
#include "codec/tun12.h"

namespace torch_offload {

inline constexpr std::uint32_t kExtentVersion = 1;
inline constexpr std::size_t kExtentAlignment = 4096;
inline constexpr std::size_t kMaxRows = std::size_t{1} << 30;
inline constexpr std::size_t kMaxColumns = std::size_t{1} << 24;

/// Rows [first_row, first_row + row_count) and the bytes they are coded in. Twice as large as the least that a tile has
/// in an extent, so that a header takes no more than twice the file, whoever wrote it.
struct CodedTile {
    Coder coder = Coder::tun12;
    std::uint32_t first_row = 0;
    std::uint32_t row_count = 0;
    std::size_t offset_bytes = 0;  // in the extent
    std::size_t size_bytes = 0;
};
static_assert(sizeof(CodedTile) <= 32);

/// All that a header says. What a coder is told of each class is there if a tile has that coder.
struct ExtentHeader {
    std::size_t rows = 0;
    std::size_t columns = 0;
    std::size_t rows_per_tile = 0;
    ColumnClasses classes;
    ColumnOrder order;
    std::vector<TunstallClass> tunstall;         // per class, or empty
    std::vector<SymbolFrequencies> frequencies;  // per class, or empty
    std::vector<CodedTile> tiles;
    std::size_t coded_bytes = 0;   // header and tiles, without what fills the last 4 KiB
    std::size_t extent_bytes = 0;  // a multiple of kExtentAlignment
};

/// Memory for an extent, aligned for direct I/O. Move-only.
class ExtentBuffer {
public:
    /// Zeros. Pre: size_bytes is a multiple of kExtentAlignment.
    explicit ExtentBuffer(std::size_t size_bytes);

    std::span<std::byte> bytes() noexcept { return {bytes_.get(), size_bytes_}; }
    std::span<const std::byte> bytes() const noexcept { return {bytes_.get(), size_bytes_}; }

private:
    struct Free {
        void operator()(std::byte* bytes) const noexcept;
    };
    std::unique_ptr<std::byte[], Free> bytes_;
    std::size_t size_bytes_;
};

/// Puts header and tiles into an extent with a checksum. Of `header.tiles` the offsets and sizes are found here.
/// Pre: `tiles` [header.tiles.size()] are the tiles' bytes.
ExtentBuffer build_extent(ExtentHeader header, const std::vector<std::vector<std::byte>>& tiles);

/// Reads and checks everything: the checksum first, then each number against the others.
/// After it every tile lies inside the extent, with kTileSlackBytes behind it.
/// Throws: CorruptPage if anything is not as FORMAT.md says.
ExtentHeader read_header(std::span<const std::byte> extent);

/// The size that the extent at the front of `bytes` says it has. Nothing else of it is checked.
/// Throws: CorruptPage unless it begins one that ends inside `bytes`.
std::size_t said_extent_bytes(std::span<const std::byte> bytes);

}  // namespace torch_offload
