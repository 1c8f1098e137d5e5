// A coded matrix as kernels for CUDA are told of it: checked on the host, with tables as flat arrays. Layer codec:
// includes base only.
//
// A kernel needs beside the extent's bytes what its header says, the tables of its classes, and where the rows of TUN12
// begin, which have no marks in a tile. All of this is found out once, on the host, and lies in one array of bytes that
// is copied to the device. A kernel never reads outside of the extent, the tables and its own result, whatever has
// become of the extent's bytes since they were checked; if they have changed, its values are any values.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/host_device.h"
#include "codec/coded_matrix.h"
#include "codec/coder_tables.h"

namespace torch_offload {

/// The words of a class of TUN12: for each codeword 64 bits with two for each of its values, as quad_code has them, the
/// first lowest; if words have more than 31 values (`is_wide`) as much again for each codeword, with those from the
/// 32nd on; then a byte for each codeword, how many values it has. Of kRestCodeword that is kRestCount.
inline constexpr std::size_t kCodewordCount = 4096;
inline constexpr std::uint32_t kValuesOfFirst = 32;
inline constexpr std::uint32_t kRestCount = 255;
OFFLOAD_HOST_DEVICE constexpr std::size_t word_table_bytes(bool is_wide) noexcept {
    return kCodewordCount * ((is_wide ? 2 : 1) * sizeof(std::uint64_t) + 1);
}

/// The table of a class. Matrices of equal odds can share it.
std::vector<std::byte> word_table_of(const TunstallClass& coded, CoderTables& tables);
/// Where kernels find that of each class, on a multiple of 16.
using WordTables = std::array<const std::byte*, kMaxClasses>;

/// Columns that a lane decodes: the tables say for each row where they begin.
inline constexpr std::uint32_t kSliceColumns = 256;
/// More columns than there can be between a codeword's first and that of a slice that begins in it.
inline constexpr std::uint32_t kSkipUnit = 64;
inline constexpr std::uint32_t kNibblesOfWord = 8;
inline constexpr std::uint32_t kNibblesOfCodeword = 3;
inline constexpr std::uint32_t kNoRow = ~0U;

/// No sum of so many products of T and a plane (fixed_point.h) is too great for 32 bits.
inline constexpr std::size_t kMaxSummands = (std::size_t{1} << 24) - 1;

struct KernelTile {
    std::uint64_t offset_bytes = 0;  // in the extent, a multiple of 8
    std::uint32_t size_bytes = 0;
    std::uint32_t first_row = 0;
    std::uint32_t row_count = 0;
    Coder coder = Coder::tun12;
};

struct KernelClass {
    std::uint32_t end_column = 0;
    std::uint32_t end_quad = 0;
    bool is_wide = false;
    const std::uint64_t* words = nullptr;    // word_table_bytes(is_wide), if any tile is of TUN12
    const std::uint32_t* symbols = nullptr;  // [kSymbolCount] as symbols_of has them, if any tile is of RANS4
};

/// What a kernel takes by value. Borrows the extent and the tables, both in the memory that the kernel reads.
struct KernelMatrix {
    std::uint32_t rows = 0;
    std::uint32_t columns = 0;
    std::uint32_t tile_count = 0;
    std::uint32_t class_count = 0;
    KernelClass classes[kMaxClasses];
    std::uint32_t extent_words = 0;  // of 32 bits
    const std::byte* extent = nullptr;
    const KernelTile* tiles = nullptr;     // [tile_count]
    const std::uint32_t* order = nullptr;  // [columns] as CodedMatrix::column_order, if they are not in their own
    /// [rows]: the 32-bit word of the extent in which a row of TUN12 begins; kNoRow of other coders.
    const std::uint32_t* row_words = nullptr;
    /// [pairs of slices, rows]: where the codeword begins that has a pair's first column: half bytes from the row's
    /// first word, times kSkipUnit, and the columns from the codeword's first to the pair's.
    const std::uint32_t* slice_starts = nullptr;
    /// [pairs of slices, rows]: the same of the pair's second slice, in codewords from there. A slice that begins in
    /// what is the rest of the row has no columns before it.
    const std::uint16_t* second_starts = nullptr;
};

/// Owns the tables of one matrix.
class KernelTables {
public:
    /// Checks the extent and decodes every row once, so that no kernel meets rows that end too early or too late.
    /// `tables`: as CodedMatrix takes them.
    /// Throws: CorruptPage as CodedMatrix and its readers do; InvalidArgument if a tile is coded with the dictionary of
    ///         QMoE, or has more than 1 GiB, or if there are 2^24 rows or columns and more: there are no kernels for
    ///         these.
    KernelTables(std::span<const std::byte> extent, CoderTables& tables);

    bool has(Coder coder) const noexcept { return coder == Coder::tun12 ? has_tun12_ : has_rans4_; }
    /// What has to be where kernels read.
    std::span<const std::byte> bytes() const noexcept { return bytes_; }
    /// The classes whose word tables have to be there as well: all, or none without TUN12.
    std::span<const TunstallClass> word_classes() const noexcept { return word_classes_; }
    /// For kernels. `extent` and `tables`: where the extent's bytes and bytes() are, both on a multiple of 16. `words`:
    /// of word_classes().
    KernelMatrix placed(const std::byte* extent, const std::byte* tables, const WordTables& words) const noexcept;

private:
    void take_classes(const ExtentHeader& header);
    void take_tiles(const CodedMatrix& matrix);
    void take_slices(const CodedMatrix& matrix, std::span<const std::byte> extent, CoderTables& tables);

    KernelMatrix shape_;  // without pointers
    std::vector<TunstallClass> word_classes_;
    std::vector<std::size_t> symbol_offsets_;  // of each class, if any tile is of RANS4
    std::size_t tiles_offset_ = 0;
    std::size_t row_words_offset_ = 0;
    std::size_t slice_starts_offset_ = 0;
    std::size_t second_starts_offset_ = 0;
    std::size_t order_offset_ = 0;
    bool has_order_ = false;
    bool has_tun12_ = false;
    bool has_rans4_ = false;
    std::vector<std::byte> bytes_;
};

/// Rows of T with two bits for each value, as quad_code has them: value i of a row in bits 2 (i mod 16) and above of
/// word i / 16. Kernels put rows there that more than one of them reads, or one more than once.
struct QuadRows {
    std::uint32_t* words = nullptr;  // [rows, stride], zero behind the last column
    std::size_t stride = 0;          // words from one row to the next, a multiple of 4
};
inline constexpr std::uint32_t kValuesOfWord = 16;
/// The stride of rows that have that many columns.
inline constexpr std::size_t quad_row_words(std::size_t columns) noexcept { return (columns + 63) / 64 * 4; }

}  // namespace torch_offload
