// Whatever the bytes are, decoding ends with values or with CorruptPage, the same by every instruction set, and asks
// for no more memory than the file, the tables and 64 rows account for.
#include <optional>
#include <vector>

#include "base/check.h"
#include "codec/ternary_samples.h"
#include "fuzz/fuzzed_extent.h"

namespace torch_offload {
namespace {

constexpr std::size_t kMostValues = 1 << 16;

/// The values, or nothing where they are refused.
std::optional<std::vector<std::int8_t>> outcome(const CodedMatrix& matrix, InstructionSet set) {
    std::vector<std::int8_t> values(matrix.rows() * matrix.columns());
    const std::size_t panel_bytes = kRansLanes * (matrix.columns() + kRowSlack + 64);
    const std::size_t order_bytes = matrix.columns() * sizeof(std::uint32_t);
    const AllocationLimit limit(matrix.tiles().size() * (panel_bytes + 1024) + order_bytes + 4096);
    try {
        matrix.decode(values.data(), set);
    } catch (const CorruptPage&) {
        return std::nullopt;
    }
    return values;
}

void open_and_decode(std::span<const std::byte> extent) {
    std::optional<CodedMatrix> matrix;
    {
        const AllocationLimit limit(most_bytes_of_opening(extent));
        matrix.emplace(extent);
    }
    if (matrix->rows() > kMostValues / matrix->columns()) return;
    const auto expected = outcome(*matrix, InstructionSet::portable);
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
