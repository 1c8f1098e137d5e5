#include "codec/coded_matrix.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace torch_offload {
namespace {

constexpr std::align_val_t kPanelAlignment{64};

std::vector<Coder> coders_in(const ExtentHeader& header) {
    std::vector<Coder> used;
    for (const CodedTile& tile : header.tiles) {
        if (std::find(used.begin(), used.end(), tile.coder) == used.end()) used.push_back(tile.coder);
    }
    return used;
}

}  // namespace

ExtentCoders::ExtentCoders(const ExtentHeader& header, std::span<const Coder> used) {
    for (const Coder coder : used) {
        switch (coder) {
            case Coder::tun12:
                tun12_ = std::make_unique<Tun12Coder>(header.columns, header.classes, header.tunstall);
                break;
            case Coder::rans4:
                rans4_ = std::make_unique<Rans4Coder>(header.columns, header.classes, header.frequencies);
                break;
            case Coder::qmoe:
                qmoe_ = std::make_unique<QmoeCoder>(header.columns);
                break;
        }
    }
}

const TileCoder& ExtentCoders::of(Coder coder) const noexcept {
    if (coder == Coder::tun12) return *tun12_;
    return coder == Coder::rans4 ? static_cast<const TileCoder&>(*rans4_) : *qmoe_;
}

CodedMatrix::CodedMatrix(std::span<const std::byte> extent)
    : extent_(extent), header_(read_header(extent)), coders_(header_, coders_in(header_)) {}

std::unique_ptr<TileReader> CodedMatrix::read(const CodedTile& tile, InstructionSet set) const {
    return coders_.of(tile.coder).open(extent_.subspan(tile.offset_bytes, tile.size_bytes), tile.row_count, set);
}

void CodedMatrix::decode(std::int8_t* to, InstructionSet set) const {
    for (const CodedTile& tile : tiles()) {
        const auto reader = read(tile, set);
        const std::size_t step = std::min(reader->rows_at_once(), tile.row_count);
        const RowPanel panel(step, columns());
        for (std::size_t row = 0; row < tile.row_count; row += step) {
            const std::size_t count = std::min(step, tile.row_count - row);
            reader->read(count, panel.rows());
            for (std::size_t i = 0; i < count; ++i) {
                std::memcpy(to + (tile.first_row + row + i) * columns(), panel.rows().row(i), columns());
            }
        }
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
