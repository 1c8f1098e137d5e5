// Whatever the bytes are, products end with sums or with CorruptPage, the same bits by every instruction set, and ask
// for no more memory than decoding.
#include <bit>
#include <optional>
#include <vector>

#include "base/check.h"
#include "codec/product.h"
#include "codec/ternary_samples.h"
#include "fuzz/fuzzed_extent.h"

namespace torch_offload {
namespace {

constexpr std::size_t kMaxValues = 1 << 15;

TokenPanel panel(std::size_t tokens, std::size_t width) {
    TokenPanel made(tokens, width);
    for (std::size_t t = 0; t < tokens; ++t) {
        for (std::size_t i = 0; i < width; ++i) made.token(t)[i] = static_cast<float>((i * 7 + t) % 13) - 6.3F;
    }
    return made;
}

std::vector<std::uint32_t> bits_of(const TokenPanel& panel) {
    std::vector<std::uint32_t> bits;
    for (std::size_t t = 0; t < panel.tokens(); ++t) {
        for (std::size_t i = 0; i < panel.width(); ++i) bits.push_back(std::bit_cast<std::uint32_t>(panel.token(t)[i]));
    }
    return bits;
}

using Product = void(const CodedMatrix&, const TokenPlanes&, TokenPanel&, InstructionSet);

/// The sums, or nothing where they are refused.
std::optional<std::vector<std::uint32_t>> outcome(const CodedMatrix& matrix, Product* product, const TokenPanel& from,
                                                  std::size_t width, InstructionSet set) {
    TokenPanel to(from.tokens(), width);
    const std::size_t panel_bytes = kRansLanes * (matrix.columns() + kRowSlack + 64);
    const TokenPlanes planes(from, kMaxPlanes, set);
    const std::size_t sums_bytes = to.tokens() * kMaxPlanes * to.stride() * sizeof(std::int32_t);
    try {
        const AllocationLimit limit(matrix.tiles().size() * (panel_bytes + 1024) + sums_bytes + 4096);
        product(matrix, planes, to, set);
    } catch (const CorruptPage&) {
        return std::nullopt;
    }
    return bits_of(to);
}

void open_and_multiply(std::span<const std::byte> extent) {
    const CodedMatrix matrix(extent);
    if (matrix.rows() > kMaxValues / matrix.columns()) return;
    const std::size_t tokens = 1 + matrix.rows() % 3;
    const TokenPanel by_column = panel(tokens, matrix.columns());
    const TokenPanel by_row = panel(tokens, matrix.rows());
    const auto forward = outcome(matrix, multiply, by_column, matrix.rows(), InstructionSet::portable);
    const auto back = outcome(matrix, multiply_transposed, by_row, matrix.columns(), InstructionSet::portable);
    require(forward.has_value() == back.has_value(), "both products refuse the same");
    for (const InstructionSet set : available_sets()) {
        require(outcome(matrix, multiply, by_column, matrix.rows(), set) == forward, "sums have the same bits");
        require(outcome(matrix, multiply_transposed, by_row, matrix.columns(), set) == back,
                "transposed sums have the same bits");
    }
}

}  // namespace
}  // namespace torch_offload

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
    const torch_offload::FuzzedExtent extent({bytes, size});
    try {
        torch_offload::open_and_multiply(extent.bytes());
    } catch (const torch_offload::CorruptPage&) {
    }
    return 0;
}
