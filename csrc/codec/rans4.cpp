#include "codec/rans4.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "codec/little_endian.h"

namespace torch_offload {
namespace {

/// Reads a row per lane at once.
class Rans4Reader : public TileReader {
public:
    Rans4Reader(const RansColumns& columns, const RansStream& stream, std::size_t rows, Rans4Kernel* kernel) noexcept
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
    const RansColumns& columns_;
    RansStream stream_;
    std::size_t rows_left_;
    Rans4Kernel* kernel_;
};

/// Symbols of up to 64 rows, by position and lane.
class CodeBlock {
public:
    CodeBlock(const TernaryView& rows, std::size_t quads) : codes_(quads * kRansLanes) {
        for (std::size_t lane = 0; lane < rows.rows; ++lane) {
            const std::int8_t* row = rows.row(lane);
            const std::size_t whole = rows.columns / kQuad;
            for (std::size_t i = 0; i < whole; ++i) {
                codes_[i * kRansLanes + lane] = static_cast<std::uint8_t>(
                    quad_code(load_number<std::uint32_t>(reinterpret_cast<const std::byte*>(row + i * kQuad))));
            }
            if (whole < quads) {
                codes_[whole * kRansLanes + lane] =
                    static_cast<std::uint8_t>(quad_at(row, whole * kQuad, rows.columns));
            }
        }
    }
    const std::uint8_t* at(std::size_t quad) const noexcept { return codes_.data() + quad * kRansLanes; }

private:
    std::vector<std::uint8_t> codes_;  // [quads, kRansLanes]
};

/// States that grow by symbols and give words away, last symbol first: words go in front of those that are there.
struct Growing {
    std::uint32_t states[kRansLanes];
    std::uint16_t* first_word;

    /// One symbol for each of `lanes` lanes, from the last on. False: one of them has no frequency.
    bool take(const std::uint8_t* codes, std::size_t lanes, const RansStep* steps) noexcept {
        bool has_frequency = true;
        for (std::size_t lane = lanes; lane-- > 0;) {
            const RansStep& step = steps[codes[lane]];
            std::uint32_t state = states[lane];
            has_frequency &= step.limit > 0;
            const std::uint32_t gives = state >= step.limit ? 1 : 0;
            first_word[-1] = static_cast<std::uint16_t>(state);
            first_word -= gives;
            state >>= 16 * gives;
            states[lane] = step.grown(state);
        }
        return has_frequency;
    }
};

}  // namespace

Rans4Coder::Rans4Coder(std::size_t columns, ColumnClasses classes, const std::vector<SymbolFrequencies>& frequencies) {
    columns_ = {columns, std::move(classes), {}};
    for (const SymbolFrequencies& one : frequencies) {
        columns_.slots.push_back(slots_of(one));
        steps_.push_back(steps_of(one));
    }
}

std::vector<std::byte> Rans4Coder::encode(const TernaryView& tile) const {
    const std::size_t quads = columns_.quad_count();
    std::vector<std::uint16_t> room(kRansLanes * quads + 1);
    std::vector<std::vector<std::uint16_t>> words((tile.rows + kRansLanes - 1) / kRansLanes);
    Growing growing;
    std::fill_n(growing.states, kRansLanes, kRansFloor);
    bool has_frequencies = true;
    for (std::size_t block = words.size(); block-- > 0;) {
        growing.first_word = room.data() + room.size();
        const std::size_t lanes = std::min(kRansLanes, tile.rows - block * kRansLanes);
        const CodeBlock codes(tile.rows_from(block * kRansLanes, lanes), quads);
        std::size_t quad = quads;
        for (std::size_t i = columns_.classes.size(); i-- > 0;) {
            const std::size_t begin = i > 0 ? columns_.end_quad(i - 1) : 0;
            while (quad > begin) has_frequencies &= growing.take(codes.at(--quad), lanes, steps_[i].data());
        }
        words[block].assign(growing.first_word, room.data() + room.size());
    }
    OFFLOAD_CHECK(has_frequencies, InvalidArgument, "a tile has four values that its coder has no frequency for");
    std::vector<std::byte> bytes;
    const auto append = [&](const auto* first, std::size_t count) {
        const auto from = std::as_bytes(std::span(first, count));
        bytes.insert(bytes.end(), from.begin(), from.end());
    };
    append(growing.states, std::min(tile.rows, kRansLanes));
    for (const std::vector<std::uint16_t>& of_block : words) append(of_block.data(), of_block.size());
    return bytes;
}

std::unique_ptr<TileReader> Rans4Coder::open(std::span<const std::byte> bytes, std::size_t rows,
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
