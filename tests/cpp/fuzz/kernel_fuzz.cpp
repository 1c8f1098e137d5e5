// Whatever an extent is that has tables for kernels, what they do on a loop that stands for a warp has the values and
// the bits of the portable code, whichever order the lanes take. Bytes that change afterwards, as those of a page may
// while a kernel reads it, are decoded inside the result.
#include <algorithm>
#include <bit>
#include <optional>
#include <vector>

#include "base/check.h"
#include "codec/host_kernels.h"
#include "codec/product.h"
#include "fuzz/fuzzed_extent.h"

namespace torch_offload {
namespace {

constexpr std::size_t kMaxValues = 1 << 13;
constexpr unsigned kTokens = 4;
constexpr unsigned kGroupTokens = 2;  // two groups

/// What a product is made of, and what it gives.
struct Product {
    std::vector<float> inputs;
    std::vector<float> ones;
    std::vector<float> outputs;
    std::uint32_t from_width;
    std::uint32_t to_width;
    const std::uint32_t* from_order;
    const std::uint32_t* to_order;

    Product(std::size_t from, std::size_t to, const std::uint32_t* order_from, const std::uint32_t* order_to)
        : inputs(kTokens * from),
          ones(std::max(from, to), 1.0F),
          outputs(kTokens * to),
          from_width(static_cast<std::uint32_t>(from)),
          to_width(static_cast<std::uint32_t>(to)),
          from_order(order_from),
          to_order(order_to) {
        for (std::size_t i = 0; i < inputs.size(); ++i) inputs[i] = static_cast<float>(i * 7 % 13) - 6.3F;
    }

    ScaledTokens from() const { return {inputs.data(), ones.data(), from_order, kTokens, from_width}; }
    ScaledSums to() {
        std::ranges::fill(outputs, 55.0F);
        return {outputs.data(), ones.data(), to_order, kTokens, to_width};
    }
    bool has_bits_of(const std::vector<float>& expected) const {
        return std::ranges::equal(outputs, expected, {}, std::bit_cast<std::uint32_t, float>,
                                  std::bit_cast<std::uint32_t, float>);
    }
    /// The sums of the portable code.
    template <typename Multiply>
    std::vector<float> expected(const std::vector<std::uint32_t>& order_from,
                                const std::vector<std::uint32_t>& order_to, Multiply multiply) const {
        TokenPanel in(kTokens, from_width);
        in.fill(inputs.data(), ones.data(), order_from);
        TokenPanel out(kTokens, to_width);
        multiply(in, out);
        std::vector<float> values(outputs.size());
        out.write(values.data(), ones.data(), order_to);
        return values;
    }
};

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
        if (ternary_of(word, position % kValuesOfWord) != values[row * matrix.columns() + column]) return false;
    }
    return true;
}

void multiply_both_ways(const CodedMatrix& opened, const KernelMatrix& matrix, std::vector<std::uint32_t>& words,
                        bool is_tun12) {
    const std::vector<std::uint32_t> order = opened.column_order();
    const std::uint32_t* const columns = order.empty() ? nullptr : order.data();
    const QuadRows rows{words.data(), quad_row_words(opened.columns())};
    Product forward(opened.columns(), opened.rows(), columns, nullptr);
    const std::vector<float> y = forward.expected(order, {}, [&](const TokenPanel& from, TokenPanel& to) {
        multiply(opened, from, to, InstructionSet::portable);
    });
    multiply_quads<4, kGroupTokens>(matrix, rows, forward.from(), forward.to(), HostWarp{3});
    require(forward.has_bits_of(y), "sums of decoded rows have the bits of the portable code");
    if (is_tun12) {
        multiply_codewords<kTokens>(matrix, forward.from(), forward.to(), HostWarp{5});
        require(forward.has_bits_of(y), "sums of codewords have the bits of the portable code");
    }
    Product back(opened.rows(), opened.columns(), nullptr, columns);
    const std::vector<float> z = back.expected({}, order, [&](const TokenPanel& from, TokenPanel& to) {
        multiply_transposed(opened, from, to, InstructionSet::portable);
    });
    multiply_quads_transposed<kGroupTokens>(matrix, rows, back.from(), back.to());
    require(back.has_bits_of(z), "transposed sums have the bits of the portable code");
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
    const KernelMatrix matrix = tables->placed(extent.data(), tables->bytes().data());
    std::vector<std::uint32_t> words = quad_words_of(matrix);
    require(are_values_of(words, opened), "a warp decodes the values of the portable code");
    require(quad_words_of(matrix, HostWarp{7}) == words, "any order of lanes decodes the same");
    multiply_both_ways(opened, matrix, words, tables->has(Coder::tun12) && !tables->has(Coder::rans4));

    ExtentBuffer changed(extent.size());
    std::ranges::copy(extent, changed.bytes().begin());
    for (std::uint32_t i = 0; i < matrix.tile_count; ++i) {
        const auto tile = changed.bytes().subspan(matrix.tiles[i].offset_bytes, matrix.tiles[i].size_bytes);
        std::ranges::reverse(tile);
        for (std::byte& byte : tile) byte ^= std::byte{0x5A};
    }
    quad_words_of(tables->placed(changed.bytes().data(), tables->bytes().data()));
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
