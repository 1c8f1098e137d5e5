// Whatever an extent is that has tables for kernels, what they do on a loop that stands for a warp has the values of
// the portable code, and sums with the bits of their definition, whichever order the lanes take. Bytes that change
// afterwards, as those of a page may while a kernel reads it, are decoded inside the result.
#include <algorithm>
#include <bit>
#include <optional>
#include <vector>

#include "base/check.h"
#include "codec/defined_product.h"
#include "codec/host_kernels.h"
#include "codec/kernel_samples.h"
#include "fuzz/fuzzed_extent.h"

namespace torch_offload {
namespace {

constexpr std::size_t kMaxValues = 1 << 13;
constexpr std::size_t kTokens = 9;  // two groups

bool have_same_bits(const std::vector<float>& left, const std::vector<float>& right) {
    return std::ranges::equal(left, right, {}, std::bit_cast<std::uint32_t, float>,
                              std::bit_cast<std::uint32_t, float>);
}

bool are_values_of(const std::vector<std::uint32_t>& words, const CodedMatrix& matrix) {
    std::vector<std::int8_t> values(matrix.rows() * matrix.columns());
    matrix.decode(values.data(), InstructionSet::portable);
    const std::vector<std::uint32_t> order = matrix.column_order();
    const std::size_t stride = quad_row_words(matrix.columns());
    for (std::size_t i = 0; i < values.size(); ++i) {
        const std::size_t row = i / matrix.columns();
        const std::size_t position = i % matrix.columns();
        const std::uint32_t word = words[row * stride + position / kValuesOfWord];
        const std::size_t column = order.empty() ? position : order[position];
        const std::uint32_t two = word >> 2 * (position % kValuesOfWord) & 3;
        if (static_cast<std::int8_t>(two == 3 ? -1 : two) != values[row * matrix.columns() + column]) return false;
    }
    return true;
}

void multiply_both_ways(const CodedMatrix& opened, const KernelMatrix& matrix, std::vector<std::uint32_t>& words) {
    std::vector<std::int8_t> values(opened.rows() * opened.columns());
    opened.decode(values.data(), InstructionSet::portable);
    const auto value = [&](std::size_t row, std::size_t column) { return values[row * opened.columns() + column]; };
    const std::vector<std::uint32_t> order = opened.column_order();
    const QuadRows rows{words.data(), quad_row_words(opened.columns())};
    DefinedProduct forward{kTokens, opened.columns(), opened.rows(), TokenType::bfloat16};
    const HostPlanes x(forward.tokens_from(order));
    multiply_quads(matrix, rows, x.planes, forward.sums_to(), HostTensorWarp{{3}});
    require(have_same_bits(forward.actual, forward.expected(value)), "sums have the bits of their definition");
    DefinedProduct back{kTokens, opened.rows(), opened.columns(), TokenType::float32};
    const HostPlanes g(back.tokens_from());
    multiply_quads_transposed(matrix, rows, g.planes, back.sums_to(order), HostTensorWarp{{5}});
    const auto z = back.expected([&](std::size_t column, std::size_t row) { return value(row, column); });
    require(have_same_bits(back.actual, z), "transposed sums have the bits of their definition");
}

void open_and_run(std::span<const std::byte> extent) {
    CoderTables coder_tables;
    const CodedMatrix opened(extent, coder_tables);
    if (opened.rows() > kMaxValues / opened.columns()) return;
    std::optional<KernelTables> tables;
    try {
        tables.emplace(extent, coder_tables);
    } catch (const InvalidArgument&) {
        return;  // of the dictionary of QMoE
    }
    const SampleWordTables word_tables(*tables, coder_tables);
    const WordTables words_at = word_tables.at(word_tables.bytes().data());
    const KernelMatrix matrix = tables->placed(extent.data(), tables->bytes().data(), words_at);
    std::vector<std::uint32_t> words = quad_words_of(matrix);
    require(are_values_of(words, opened), "a warp decodes the values of the portable code");
    require(quad_words_of(matrix, HostWarp{7}) == words, "any order of lanes decodes the same");
    multiply_both_ways(opened, matrix, words);

    ExtentBuffer changed(extent.size());
    std::ranges::copy(extent, changed.bytes().begin());
    for (std::uint32_t i = 0; i < matrix.tile_count; ++i) {
        const auto tile = changed.bytes().subspan(matrix.tiles[i].offset_bytes, matrix.tiles[i].size_bytes);
        std::ranges::reverse(tile);
        for (std::byte& byte : tile) byte ^= std::byte{0x5A};
    }
    quad_words_of(tables->placed(changed.bytes().data(), tables->bytes().data(), words_at));
}

}  // namespace
}  // namespace torch_offload

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
    const torch_offload::FuzzedExtent extent({bytes, size});
    try {
        torch_offload::open_and_run(extent.bytes());
    } catch (const torch_offload::CorruptPage&) {
    }
    return 0;
}
