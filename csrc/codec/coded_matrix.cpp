#include "codec/coded_matrix.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace torch_offload {
namespace {

constexpr std::align_val_t kPanelAlignment{64};

bool has(const ExtentHeader& header, Coder coder) {
    return std::ranges::find(header.tiles, coder, &CodedTile::coder) != header.tiles.end();
}

ExtentDecoders decoders_alone(const ExtentHeader& header) {
    CoderTables tables(kMaxClasses);
    return {header, tables};
}

void copy_row(const std::int8_t* from, std::span<const std::uint32_t> order, std::span<std::int8_t> to) noexcept {
    if (order.empty()) std::memcpy(to.data(), from, to.size());
    for (std::size_t position = 0; position < order.size(); ++position) to[order[position]] = from[position];
}

}  // namespace

ExtentDecoders::ExtentDecoders(const ExtentHeader& header, CoderTables& tables) {
    if (has(header, Coder::tun12)) {
        std::vector<SharedTunstallWords> words;
        for (const TunstallClass& one : header.tunstall) words.push_back(tables.words_of(one));
        tun12_ = std::make_unique<Tun12Decoder>(header.columns, header.classes, std::move(words));
    }
    if (has(header, Coder::rans4)) {
        rans4_ = std::make_unique<Rans4Decoder>(header.columns, header.classes, header.frequencies);
    }
    if (has(header, Coder::qmoe)) qmoe_ = std::make_unique<QmoeCoder>(header.columns);
}

const TileDecoder& ExtentDecoders::of(Coder coder) const noexcept {
    if (coder == Coder::tun12) return tun12();
    return coder == Coder::rans4 ? static_cast<const TileDecoder&>(*rans4_) : *qmoe_;
}

CodedMatrix::CodedMatrix(std::span<const std::byte> extent)
    : extent_(extent), header_(read_header(extent)), decoders_(decoders_alone(header_)) {}

CodedMatrix::CodedMatrix(std::span<const std::byte> extent, CoderTables& tables)
    : extent_(extent), header_(read_header(extent)), decoders_(header_, tables) {}

std::unique_ptr<TileReader> CodedMatrix::read(const CodedTile& tile, InstructionSet set) const {
    return decoders_.of(tile.coder).open(extent_.subspan(tile.offset_bytes, tile.size_bytes), tile.row_count, set);
}

Tun12Reader CodedMatrix::read_tun12(const CodedTile& tile, InstructionSet set) const {
    return decoders_.tun12().open_rows(extent_.subspan(tile.offset_bytes, tile.size_bytes), tile.row_count, set);
}

void CodedMatrix::decode(std::int8_t* to, InstructionSet set) const {
    const std::vector<std::uint32_t> order = column_order();
    for (const CodedTile& tile : tiles()) {
        for_rows_of(*this, tile, set, 1, [&](std::size_t first, std::size_t count, const TernaryRows& rows) {
            std::int8_t* const there = to + (tile.first_row + first) * columns();
            for (std::size_t i = 0; i < count; ++i) {
                copy_row(rows.row(i), order, std::span(there + i * columns(), columns()));
            }
        });
    }
}

RowPanel::RowPanel(std::size_t rows, std::size_t columns) {
    rows_.stride = (columns + kRowSlack + 63) / 64 * 64;
    const std::size_t size_bytes = rows * rows_.stride;
    values_.reset(static_cast<std::int8_t*>(operator new[](size_bytes, kPanelAlignment)));
    std::memset(values_.get(), 0, size_bytes);
    rows_.values = values_.get();
}

void RowPanel::Free::operator()(std::int8_t* values) const noexcept { operator delete[](values, kPanelAlignment); }

}  // namespace torch_offload
