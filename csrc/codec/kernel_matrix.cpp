#include "codec/kernel_matrix.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "codec/ternary.h"

namespace torch_offload {
namespace {

constexpr std::size_t kSectionAlignment = 16;
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

/// Values of T as two bits each.
std::uint64_t packed(std::span<const std::int8_t> values) {
    std::uint64_t word = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
        word |= std::uint64_t{quad_code(static_cast<std::uint8_t>(values[i]))} << 2 * i;
    }
    return word;
}

std::span<const std::int8_t> values_of(const TunstallWords& words, std::size_t codeword) {
    const std::int8_t* const word = words.words() + codeword * words.word_bytes();
    return {word, static_cast<std::size_t>(word[words.word_bytes() - 1])};
}

bool is_wide(const TunstallClass& coded) { return coded.limit != WordLimit::w31; }

std::uint32_t codeword_at(std::span<const std::byte> tile, std::size_t index) {
    const std::size_t at = index * 3 / 2;
    const auto two = std::to_integer<std::uint32_t>(tile[at]) | std::to_integer<std::uint32_t>(tile[at + 1]) << 8;
    return two >> index % 2 * 4 & 4095;
}

/// Codewords of a row, one after the other, by the columns that they begin at.
class RowWalk {
public:
    RowWalk(const ExtentHeader& header, CoderTables& tables) : columns_(header.columns) {
        for (std::size_t i = 0; i < header.classes.size(); ++i) {
            classes_.push_back({end_column(header.classes, i, header.columns), tables.words_of(header.tunstall[i])});
        }
    }
    /// Calls `use(slice, count, skipped)` for each slice of a row whose first codeword is `first`: how many codewords
    /// are before that which has the slice's first column, and how many of its columns are before the slice.
    template <typename Use>
    void for_slices(std::span<const std::byte> tile, std::size_t first, Use use) const {
        std::size_t column = 0;
        std::size_t count = 0;
        std::size_t its_class = 0;
        for (std::size_t slice = 0; slice * kSliceColumns < columns_; ++slice) {
            while (true) {
                while (column >= classes_[its_class].end) ++its_class;
                const std::uint32_t codeword = codeword_at(tile, first + count);
                const bool is_rest = codeword == kRestCodeword;
                const std::size_t length = is_rest ? columns_ : values_of(*classes_[its_class].words, codeword).size();
                const std::size_t begin = slice * kSliceColumns;
                if (is_rest || begin < column + length) {
                    use(slice, count, is_rest ? 0 : begin - column);
                    break;
                }
                column += length;
                ++count;
            }
        }
    }

private:
    struct Class {
        std::size_t end;
        SharedTunstallWords words;
    };
    std::size_t columns_;
    std::vector<Class> classes_;
};

/// From [rows, pairs] to [pairs, rows], so that lanes that have rows side by side read what lies side by side.
template <typename Start>
std::vector<Start> by_pairs(const std::vector<Start>& by_rows, std::size_t pairs) {
    std::vector<Start> all(by_rows.size());
    const std::size_t rows = by_rows.size() / pairs;
    for (std::size_t i = 0; i < all.size(); ++i) all[i % pairs * rows + i / pairs] = by_rows[i];
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

void check_shape(const ExtentHeader& header) {
    OFFLOAD_CHECK(std::max(header.rows, header.columns) <= kMaxSummands, InvalidArgument,
                  "kernels for CUDA multiply matrices of up to ", kMaxSummands, " rows and columns, not of ",
                  header.rows, " x ", header.columns, ": code the matrix in parts");
    OFFLOAD_CHECK(header.extent_bytes / sizeof(std::uint32_t) < kNoRow, InvalidArgument,
                  "kernels for CUDA read extents of less than 16 GiB, not of ", header.extent_bytes,
                  " bytes: code the matrix in parts");
}

}  // namespace

std::vector<std::byte> word_table_of(const TunstallClass& coded, CoderTables& tables) {
    const SharedTunstallWords words = tables.words_of(coded);
    std::vector<std::byte> table(word_table_bytes(is_wide(coded)));
    const std::span<std::byte> counts = std::span(table).last(kCodewordCount);
    const auto put = [&](std::size_t index, std::uint64_t values) {
        std::memcpy(table.data() + index * sizeof(values), &values, sizeof(values));
    };
    for (std::size_t codeword = 0; codeword < kRestCodeword; ++codeword) {
        const std::span<const std::int8_t> values = values_of(*words, codeword);
        const std::size_t in_first = std::min<std::size_t>(values.size(), kValuesOfFirst);
        put(codeword, packed(values.first(in_first)));
        if (is_wide(coded)) put(kCodewordCount + codeword, packed(values.subspan(in_first)));
        counts[codeword] = static_cast<std::byte>(values.size());
    }
    counts[kRestCodeword] = static_cast<std::byte>(kRestCount);
    return table;
}

KernelTables::KernelTables(std::span<const std::byte> extent, CoderTables& tables) {
    const CodedMatrix matrix(extent, tables);
    const ExtentHeader& header = matrix.header();
    check_shape(header);
    shape_.rows = static_cast<std::uint32_t>(header.rows);
    shape_.columns = static_cast<std::uint32_t>(header.columns);
    shape_.extent_words = static_cast<std::uint32_t>(header.extent_bytes / sizeof(std::uint32_t));
    shape_.tile_count = static_cast<std::uint32_t>(header.tiles.size());
    shape_.class_count = static_cast<std::uint32_t>(header.classes.size());
    take_tiles(matrix);
    take_classes(header);
    if (has_tun12_) take_slices(matrix, extent, tables);
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

void KernelTables::take_classes(const ExtentHeader& header) {
    for (std::size_t i = 0; i < header.classes.size(); ++i) {
        const std::size_t end = end_column(header.classes, i, header.columns);
        KernelClass& one = shape_.classes[i];
        one.end_column = static_cast<std::uint32_t>(end);
        one.end_quad = static_cast<std::uint32_t>((end + kQuad - 1) / kQuad);
        if (has_tun12_) {
            one.is_wide = is_wide(header.tunstall[i]);
            word_classes_.push_back(header.tunstall[i]);
        }
        if (has_rans4_) symbol_offsets_.push_back(append(bytes_, symbols_of(header.frequencies[i])));
    }
}

void KernelTables::take_slices(const CodedMatrix& matrix, std::span<const std::byte> extent, CoderTables& tables) {
    const RowWalk walk(matrix.header(), tables);
    const RowPanel panel(1, matrix.columns());
    const std::size_t pairs = (matrix.columns() + 2 * kSliceColumns - 1) / (2 * kSliceColumns);
    std::vector<std::uint32_t> row_words;
    std::vector<std::uint32_t> starts;  // [rows, pairs] until all rows are known to be there
    std::vector<std::uint16_t> seconds;
    for (const CodedTile& tile : matrix.tiles()) {
        row_words.resize(tile.first_row, kNoRow);
        starts.resize(tile.first_row * pairs);
        seconds.resize(tile.first_row * pairs);
        if (tile.coder != Coder::tun12) continue;
        // Opening refuses more rows than a tile has codewords, before there is room for them here.
        Tun12Reader reader = matrix.read_tun12(tile, best_instruction_set());
        for (std::size_t row = 0; row < tile.row_count; ++row) {
            const std::size_t first = reader.next_codeword();
            reader.read(1, panel.rows());
            const auto nibble_of = [&](std::size_t index) {
                return tile.offset_bytes * 2 + index * kNibblesOfCodeword;
            };
            const std::size_t row_word = nibble_of(first) / kNibblesOfWord;
            row_words.push_back(static_cast<std::uint32_t>(row_word));
            std::size_t count_of_pair = 0;
            walk.for_slices(extent.subspan(tile.offset_bytes), first,
                            [&](std::size_t slice, std::size_t count, std::size_t skipped) {
                                if (slice % 2 == 1) {
                                    const std::size_t more = count - count_of_pair;
                                    seconds.push_back(static_cast<std::uint16_t>(more * kSkipUnit + skipped));
                                    return;
                                }
                                const std::size_t nibbles = nibble_of(first + count) - row_word * kNibblesOfWord;
                                starts.push_back(static_cast<std::uint32_t>(nibbles * kSkipUnit + skipped));
                                count_of_pair = count;
                            });
            seconds.resize(starts.size());
        }
    }
    row_words.resize(matrix.rows(), kNoRow);
    starts.resize(matrix.rows() * pairs);
    seconds.resize(matrix.rows() * pairs);
    row_words_offset_ = append(bytes_, row_words);
    slice_starts_offset_ = append(bytes_, by_pairs(starts, pairs));
    second_starts_offset_ = append(bytes_, by_pairs(seconds, pairs));
}

KernelMatrix KernelTables::placed(const std::byte* extent, const std::byte* tables,
                                  const WordTables& words) const noexcept {
    KernelMatrix matrix = shape_;
    matrix.extent = extent;
    matrix.tiles = reinterpret_cast<const KernelTile*>(tables + tiles_offset_);
    if (has_order_) matrix.order = reinterpret_cast<const std::uint32_t*>(tables + order_offset_);
    if (has_tun12_) {
        matrix.row_words = reinterpret_cast<const std::uint32_t*>(tables + row_words_offset_);
        matrix.slice_starts = reinterpret_cast<const std::uint32_t*>(tables + slice_starts_offset_);
        matrix.second_starts = reinterpret_cast<const std::uint16_t*>(tables + second_starts_offset_);
    }
    for (std::size_t i = 0; i < word_classes_.size(); ++i) {
        matrix.classes[i].words = reinterpret_cast<const std::uint64_t*>(words[i]);
    }
    for (std::size_t i = 0; i < symbol_offsets_.size(); ++i) {
        matrix.classes[i].symbols = reinterpret_cast<const std::uint32_t*>(tables + symbol_offsets_[i]);
    }
    return matrix;
}

}  // namespace torch_offload
