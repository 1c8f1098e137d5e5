// Whatever the bytes are, decoding ends with values or with CorruptPage, the same by every instruction set, and so do
// the tables for kernels; both ask for no more memory than the file, the tables and 64 rows account for.
#include <algorithm>
#include <optional>
#include <vector>

#include "base/check.h"
#include "codec/kernel_matrix.h"
#include "codec/ternary_samples.h"
#include "fuzz/fuzzed_extent.h"

namespace torch_offload {
namespace {

constexpr std::size_t kMaxValues = 1 << 16;

std::size_t order_bytes(const CodedMatrix& matrix) { return matrix.columns() * sizeof(std::uint32_t); }

std::size_t most_bytes_of_reading(const CodedMatrix& matrix) {
    const std::size_t panel_bytes = kRansLanes * (matrix.columns() + kRowSlack + 64);
    return matrix.tiles().size() * (panel_bytes + 1024) + order_bytes(matrix) + 4096;
}

/// Those that a header can say before some tile is refused: each row of TUN12 has a codeword.
std::size_t most_rows(const CodedMatrix& matrix) {
    std::size_t rows = 0;
    for (const CodedTile& tile : matrix.tiles()) {
        rows += tile.coder == Coder::tun12 ? std::min<std::size_t>(tile.row_count, tile.size_bytes) : tile.row_count;
    }
    return rows;
}

/// Whether there are tables for kernels. `coder_tables`: those that the matrix was opened with.
bool has_tables(std::span<const std::byte> extent, const CodedMatrix& matrix, CoderTables& coder_tables) {
    constexpr std::size_t kClassBytes = kFrequencyTotal * sizeof(std::uint32_t) + word_table_bytes(true);
    const std::size_t pairs = (matrix.columns() + 2 * kSliceColumns - 1) / (2 * kSliceColumns);
    const std::size_t row_bytes = sizeof(std::uint32_t) + pairs * (sizeof(std::uint32_t) + sizeof(std::uint16_t));
    const std::size_t table_bytes = matrix.header().classes.size() * kClassBytes +
                                    matrix.tiles().size() * sizeof(KernelTile) + most_rows(matrix) * row_bytes +
                                    order_bytes(matrix);
    // Once alone, once behind the others, which may move for that.
    const AllocationLimit limit(most_bytes_of_header(extent) + most_bytes_of_reading(matrix) + 6 * table_bytes);
    try {
        const KernelTables tables(extent, coder_tables);
    } catch (const CorruptPage&) {
        return false;
    } catch (const InvalidArgument&) {
        return false;
    }
    return true;
}

/// The values, or nothing where they are refused.
std::optional<std::vector<std::int8_t>> outcome(const CodedMatrix& matrix, InstructionSet set) {
    std::vector<std::int8_t> values(matrix.rows() * matrix.columns());
    const AllocationLimit limit(most_bytes_of_reading(matrix));
    try {
        matrix.decode(values.data(), set);
    } catch (const CorruptPage&) {
        return std::nullopt;
    }
    return values;
}

void open_and_decode(std::span<const std::byte> extent) {
    CoderTables coder_tables;
    std::optional<CodedMatrix> matrix;
    {
        const AllocationLimit limit(most_bytes_of_opening(extent));
        matrix.emplace(extent, coder_tables);
    }
    if (most_rows(*matrix) > kMaxValues / matrix->columns()) return;
    const bool is_for_kernels = has_tables(extent, *matrix, coder_tables);
    if (matrix->rows() > kMaxValues / matrix->columns()) return require(!is_for_kernels, "rows have codewords");
    const auto expected = outcome(*matrix, InstructionSet::portable);
    const bool has_qmoe = std::ranges::find(matrix->tiles(), Coder::qmoe, &CodedTile::coder) != matrix->tiles().end();
    require(is_for_kernels == (expected && !has_qmoe), "there are tables for kernels where there are values");
    for (const InstructionSet set : available_sets()) {
        require(outcome(*matrix, set) == expected, "every instruction set decodes the same");
    }
}

}  // namespace
}  // namespace torch_offload

extern "C" int LLVMFuzzerInitialize(int*, char***) {
    torch_offload::QmoeDictionary::shared();  // made once, whatever is read: no limit is meant for it
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
    const torch_offload::FuzzedExtent extent({bytes, size});
    try {
        torch_offload::open_and_decode(extent.bytes());
    } catch (const torch_offload::CorruptPage&) {
    }
    return 0;
}
