// A ternary matrix in its coded extent: opened, read tile by tile, decoded. Layer codec: includes base only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/instruction_set.h"
#include "codec/coder_tables.h"
#include "codec/extent.h"
#include "codec/qmoe.h"
#include "codec/rans4.h"
#include "codec/tile_coder.h"
#include "codec/tun12.h"

namespace torch_offload {

/// The decoders of one extent, with the tables that its header asks for.
class ExtentDecoders {
public:
    ExtentDecoders(const ExtentHeader& header, CoderTables& tables);
    /// Pre: a tile has this coder.
    const TileDecoder& of(Coder coder) const noexcept;
    /// Pre: a tile is of TUN12.
    const Tun12Decoder& tun12() const noexcept { return *tun12_; }

private:
    std::unique_ptr<Tun12Decoder> tun12_;
    std::unique_ptr<Rans4Decoder> rans4_;
    std::unique_ptr<QmoeCoder> qmoe_;
};

/// A view of a coded extent that has been checked. Borrows the extent's bytes, which must not change.
/// Threads: any; tiles do not depend on one another.
class CodedMatrix {
public:
    /// Throws: CorruptPage unless `extent` is, to the byte, what was written.
    explicit CodedMatrix(std::span<const std::byte> extent);
    /// With tables that are made once for all extents opened with the same `tables`, which need not outlive this.
    CodedMatrix(std::span<const std::byte> extent, CoderTables& tables);

    std::size_t rows() const noexcept { return header_.rows; }
    std::size_t columns() const noexcept { return header_.columns; }
    std::span<const CodedTile> tiles() const noexcept { return header_.tiles; }
    const ExtentHeader& header() const noexcept { return header_; }
    /// Which column of T lies in each position of the decoded rows, [columns()]; empty if all lie in their own.
    std::vector<std::uint32_t> column_order() const {
        return columns_in_order(header_.order, header_.classes, header_.columns);
    }

    /// Rows with their columns in the order of column_order().
    /// Throws: CorruptPage if the tile cannot have its rows.
    std::unique_ptr<TileReader> read(const CodedTile& tile, InstructionSet set) const;
    /// The same of a tile of TUN12, for those who ask where rows begin.
    Tun12Reader read_tun12(const CodedTile& tile, InstructionSet set) const;
    /// All of T, its columns in their own order, the same for every instruction set.
    /// `to`: [rows(), columns()], row-major.
    /// Throws: CorruptPage where bytes are no rows; what has been decoded until then is in `to`.
    void decode(std::int8_t* to, InstructionSet set = best_instruction_set()) const;

private:
    std::span<const std::byte> extent_;
    ExtentHeader header_;
    ExtentDecoders decoders_;
};

/// Room for the rows that a reader gives at once.
class RowPanel {
public:
    RowPanel(std::size_t rows, std::size_t columns);
    const TernaryRows& rows() const noexcept { return rows_; }

private:
    struct Free {
        void operator()(std::int8_t* values) const noexcept;
    };
    std::unique_ptr<std::int8_t[], Free> values_;
    TernaryRows rows_;
};

/// Reads a tile from its first row to its last, in rounds of at least `fewest` rows but for the last one, and has
/// `use(first, count, rows)` take those of each: `count` from row `first` of the tile on.
/// Pre: `fewest` is a divisor or a multiple of what the tile's coder reads at once.
/// Throws: CorruptPage where bytes are no rows.
template <typename Use>
void for_rows_of(const CodedMatrix& matrix, const CodedTile& tile, InstructionSet set, std::size_t fewest, Use use) {
    const auto reader = matrix.read(tile, set);
    const std::size_t step = std::min<std::size_t>(std::max(reader->rows_at_once(), fewest), tile.row_count);
    const RowPanel panel(step, matrix.columns());
    for (std::size_t row = 0; row < tile.row_count; row += step) {
        const std::size_t count = std::min<std::size_t>(step, tile.row_count - row);
        reader->read(count, panel.rows());
        use(row, count, panel.rows());
    }
}

}  // namespace torch_offload
