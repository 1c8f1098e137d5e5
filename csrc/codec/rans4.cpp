#include "codec/rans4.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace torch_offload {
namespace {

/// Reads a row per lane at once.
class Rans4Reader : public TileReader {
public:
    Rans4Reader(const RansColumns<RansSlots>& columns, const RansStream& stream, std::size_t rows,
                Rans4Kernel* kernel) noexcept
        : columns_(columns), stream_(stream), rows_left_(rows), kernel_(kernel) {}

    std::size_t rows_at_once() const noexcept override { return kRansLanes; }
    void read(std::size_t count, const TernaryRows& to) override {
        OFFLOAD_CHECK(kernel_(columns_, stream_, count, to), CorruptPage, "a RANS4 tile's words end ", rows_left_,
                      " rows too early");
        const std::size_t padded = (columns_.column_count + 63) / 64 * 64;
        for (std::size_t lane = 0; lane < count; ++lane) {
            std::fill_n(to.row(lane) + columns_.column_count, padded - columns_.column_count, std::int8_t{0});
        }
        rows_left_ -= count;
        if (rows_left_ > 0) return;
        const bool is_at_start = std::all_of(std::begin(stream_.states), std::end(stream_.states),
                                             [](std::uint32_t state) { return state == kRansFloor; });
        OFFLOAD_CHECK(is_at_start && stream_.word == stream_.end, CorruptPage,
                      "a RANS4 tile's states do not end where they began, or words are left");
    }

private:
    const RansColumns<RansSlots>& columns_;
    RansStream stream_;
    std::size_t rows_left_;
    Rans4Kernel* kernel_;
};

}  // namespace

Rans4Decoder::Rans4Decoder(std::size_t columns, ColumnClasses classes,
                           const std::vector<SymbolFrequencies>& frequencies) {
    columns_ = {columns, std::move(classes), {}};
    for (const SymbolFrequencies& one : frequencies) columns_.tables.push_back(slots_of(one));
}

std::unique_ptr<TileReader> Rans4Decoder::open(std::span<const std::byte> bytes, std::size_t rows,
                                               InstructionSet set) const {
    const std::size_t lanes = std::min(rows, kRansLanes);
    const std::size_t state_bytes = lanes * sizeof(std::uint32_t);
    OFFLOAD_CHECK(bytes.size() >= state_bytes && bytes.size() % sizeof(std::uint16_t) == 0, CorruptPage,
                  "a RANS4 tile of ", bytes.size(), " bytes cannot hold ", lanes, " states and 16-bit words");
    RansStream stream;
    std::fill_n(stream.states, kRansLanes, kRansFloor);
    std::memcpy(stream.states, bytes.data(), state_bytes);
    stream.word = bytes.data() + state_bytes;
    stream.end = bytes.data() + bytes.size();
    Rans4Kernel* kernel = rans4_rows_portable;
    if (set == InstructionSet::avx2) kernel = rans4_rows_avx2;
    if (set == InstructionSet::avx512) kernel = rans4_rows_avx512;
    return std::make_unique<Rans4Reader>(columns_, stream, rows, kernel);
}

}  // namespace torch_offload
