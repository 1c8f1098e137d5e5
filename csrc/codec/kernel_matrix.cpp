#include "codec/kernel_matrix.h"

#include "base/check.h"

namespace torch_offload {
namespace {

constexpr std::size_t kSectionAlignment = 16;
constexpr std::size_t kCodewordCount = 4096;
constexpr std::size_t kMaxTileBytes = std::size_t{1} << 30;  // so that three times a codeword's number fits 32 bits

/// Behind what is there, on a multiple of 16. Returns where that is.
template <typename Element>
std::size_t append(std::vector<std::byte>& to, const std::vector<Element>& elements) {
    const std::size_t offset = (to.size() + kSectionAlignment - 1) / kSectionAlignment * kSectionAlignment;
    const std::span<const std::byte> bytes = std::as_bytes(std::span(elements));
    to.resize(offset);
    to.insert(to.end(), bytes.begin(), bytes.end());
    return offset;
}

template <typename Bits>
std::vector<SignedWord<Bits>> signed_words(const TunstallWords& words) {
    std::vector<SignedWord<Bits>> all(kCodewordCount);
    for (std::size_t codeword = 0; codeword < kRestCodeword; ++codeword) {
        const std::int8_t* const word = words.words() + codeword * words.word_bytes();
        const auto length = static_cast<std::size_t>(word[words.word_bytes() - 1]);
        const Bits end = Bits{1} << length;
        all[codeword] = {end, end};
        for (std::size_t i = 0; i < length; ++i) {
            if (word[i] > 0) all[codeword].plus |= Bits{1} << i;
            if (word[i] < 0) all[codeword].minus |= Bits{1} << i;
        }
    }
    return all;
}

/// Reads all rows of a tile, for what its reader throws.
void check_rows(const CodedMatrix& matrix, const CodedTile& tile) {
    for_rows_of(matrix, tile, best_instruction_set(), 1, [](std::size_t, std::size_t, const TernaryRows&) {});
}

void check_tile(const CodedTile& tile) {
    OFFLOAD_CHECK(tile.coder != Coder::qmoe, InvalidArgument,
                  "kernels for CUDA read TUN12 and RANS4, not the dictionary of QMoE, which is there to be compared "
                  "with: code the matrix again");
    OFFLOAD_CHECK(tile.size_bytes <= kMaxTileBytes, InvalidArgument, "kernels for CUDA read tiles of up to ",
                  kMaxTileBytes, " bytes, not of ", tile.size_bytes, ": code the matrix in tiles of fewer rows");
}

}  // namespace

KernelTables::KernelTables(std::span<const std::byte> extent, CoderTables& tables) {
    const CodedMatrix matrix(extent, tables);
    const ExtentHeader& header = matrix.header();
    shape_.rows = static_cast<std::uint32_t>(header.rows);
    shape_.columns = static_cast<std::uint32_t>(header.columns);
    shape_.rows_per_tile = static_cast<std::uint32_t>(header.rows_per_tile);
    shape_.tile_count = static_cast<std::uint32_t>(header.tiles.size());
    shape_.class_count = static_cast<std::uint32_t>(header.classes.size());
    take_tiles(matrix);
    take_classes(header, tables);
    if (has_tun12_) take_first_words(matrix);
    const std::vector<std::uint32_t> order = matrix.column_order();
    has_order_ = !order.empty();
    if (has_order_) order_offset_ = append(bytes_, order);
}

void KernelTables::take_tiles(const CodedMatrix& matrix) {
    std::vector<KernelTile> tiles;
    tiles.reserve(matrix.tiles().size());
    for (const CodedTile& tile : matrix.tiles()) {
        check_tile(tile);
        if (tile.coder == Coder::rans4) check_rows(matrix, tile);
        (tile.coder == Coder::rans4 ? has_rans4_ : has_tun12_) = true;
        tiles.push_back({tile.offset_bytes, static_cast<std::uint32_t>(tile.size_bytes), tile.first_row, tile.row_count,
                         tile.coder});
    }
    tiles_offset_ = append(bytes_, tiles);
}

void KernelTables::take_classes(const ExtentHeader& header, CoderTables& tables) {
    for (std::size_t i = 0; i < header.classes.size(); ++i) {
        const std::size_t end = end_column(header.classes, i, header.columns);
        ClassOffsets offsets;
        KernelClass& one = shape_.classes[i];
        one.end_column = static_cast<std::uint32_t>(end);
        one.end_quad = static_cast<std::uint32_t>((end + kQuad - 1) / kQuad);
        if (has_tun12_) {
            const SharedTunstallWords words = tables.words_of(header.tunstall[i]);
            const bool is_short = header.tunstall[i].limit == WordLimit::w31;
            one.word_bytes = is_short ? sizeof(SignedWord<std::uint32_t>) : sizeof(SignedWord<std::uint64_t>);
            offsets.words = is_short ? append(bytes_, signed_words<std::uint32_t>(*words))
                                     : append(bytes_, signed_words<std::uint64_t>(*words));
        }
        if (has_rans4_) offsets.slots = append(bytes_, slots_of(header.frequencies[i]));
        class_offsets_.push_back(offsets);
    }
}

void KernelTables::take_first_words(const CodedMatrix& matrix) {
    const RowPanel panel(1, matrix.columns());
    std::vector<std::uint32_t> first_words;
    for (const CodedTile& tile : matrix.tiles()) {
        if (tile.coder != Coder::tun12) continue;
        // Opening refuses more rows than a tile has codewords, before there is room for them here.
        Tun12Reader reader = matrix.read_tun12(tile, best_instruction_set());
        first_words.resize(tile.first_row + tile.row_count);
        for (std::size_t row = 0; row < tile.row_count; ++row) {
            first_words[tile.first_row + row] = static_cast<std::uint32_t>(reader.next_codeword());
            reader.read(1, panel.rows());
        }
    }
    first_words.resize(matrix.rows());
    first_words_offset_ = append(bytes_, first_words);
}

KernelMatrix KernelTables::placed(const std::byte* extent, const std::byte* tables) const noexcept {
    KernelMatrix matrix = shape_;
    matrix.extent = extent;
    matrix.tiles = reinterpret_cast<const KernelTile*>(tables + tiles_offset_);
    if (has_order_) matrix.order = reinterpret_cast<const std::uint32_t*>(tables + order_offset_);
    if (has_tun12_) matrix.first_words = reinterpret_cast<const std::uint32_t*>(tables + first_words_offset_);
    for (std::size_t i = 0; i < class_offsets_.size(); ++i) {
        if (has_tun12_) matrix.classes[i].words = tables + class_offsets_[i].words;
        if (has_rans4_) {
            matrix.classes[i].slots = reinterpret_cast<const std::uint32_t*>(tables + class_offsets_[i].slots);
        }
    }
    return matrix;
}

}  // namespace torch_offload
