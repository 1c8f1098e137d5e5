#include "autograd/coded_linear.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/util/string_view.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "autograd/coded_arguments.h"
#include "autograd/error_bridge.h"
#include "codec/coded_matrix.h"
#include "codec/coded_page.h"
#include "codec/coder_tables.h"
#include "codec/encode.h"
#include "codec/product.h"

namespace torch_offload {
namespace {

/// Tokens multiplied by one decoding of a matrix: enough for decoding to be a small part, few enough for their planes
/// and sums to stay in the second cache.
constexpr std::int64_t kTokensAtOnce = 64;

/// The process's own: experts have alike odds, and an operator has no other place for what outlives a call.
CoderTables& shared_tables() {
    static CoderTables tables;
    return tables;
}

CodedMatrix matrix_of(const at::Tensor& page, std::int64_t index) {
    const std::vector<std::span<const std::byte>> extents = extents_of(page_bytes(page));
    TORCH_CHECK_INDEX(index >= 0 && static_cast<std::size_t>(index) < extents.size(), "a coded page of ",
                      extents.size(), " matrices has none of number ", index);
    return CodedMatrix(extents[static_cast<std::size_t>(index)], shared_tables());
}

/// One side of a product: what its floats are multiplied by, and where they lie in panels.
struct Side {
    const at::Tensor& scale;
    std::span<const std::uint32_t> order = {};
};

/// As many as tokens of this type need.
unsigned planes_of(const at::Tensor& tokens) {
    return tokens.scalar_type() == at::kFloat ? kPlanesOfFloat : kPlanesOfHalf;
}

/// `tokens`: [tokens, width] floats.
TokenPlanes integers_of(const at::Tensor& tokens, const Side& side, unsigned planes) {
    TokenPanel panel(static_cast<std::size_t>(tokens.size(0)), static_cast<std::size_t>(tokens.size(1)));
    panel.fill(tokens.const_data_ptr<float>(), side.scale.const_data_ptr<float>(), side.order);
    return {panel, planes};
}

void multiply_in_parallel(const CodedMatrix& matrix, const TokenPlanes& x, TokenPanel& y) {
    const std::span<const CodedTile> tiles = matrix.tiles();
    at::parallel_for(0, static_cast<std::int64_t>(tiles.size()), 1, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t i = first; i < last; ++i) multiply_tile(matrix, tiles[static_cast<std::size_t>(i)], x, y);
    });
}

/// Each thread has sums of its own, which are added in whatever order threads end.
void multiply_transposed_in_parallel(const CodedMatrix& matrix, const TokenPlanes& g, TokenPanel& z) {
    const std::span<const CodedTile> tiles = matrix.tiles();
    std::optional<ColumnSums> sums;
    std::mutex adding;
    at::parallel_for(0, static_cast<std::int64_t>(tiles.size()), 1, [&](std::int64_t first, std::int64_t last) {
        ColumnSums part(g.tokens(), g.planes(), matrix.columns());
        for (std::int64_t i = first; i < last; ++i) {
            multiply_tile_transposed(matrix, tiles[static_cast<std::size_t>(i)], g, part);
        }
        const std::lock_guard lock(adding);
        if (sums) return sums->add(part);
        sums = std::move(part);
    });
    sums->write(g, z);  // there is a tile
}

/// Multiplies tokens of `from`, [tokens, width] floats, by what `multiply` does to their planes.
template <typename Multiply>
at::Tensor multiplied(const at::Tensor& from, unsigned planes, const Side& before, const Side& after,
                      Multiply multiply) {
    const std::int64_t width = after.scale.numel();
    at::Tensor result = at::empty({from.size(0), width}, from.options());
    for (std::int64_t first = 0; first < from.size(0); first += kTokensAtOnce) {
        const std::int64_t count = std::min(kTokensAtOnce, from.size(0) - first);
        const TokenPlanes tokens = integers_of(from.narrow(0, first, count), before, planes);
        TokenPanel product(tokens.tokens(), static_cast<std::size_t>(width));
        multiply(tokens, product);
        product.write(result.mutable_data_ptr<float>() + first * width, after.scale.const_data_ptr<float>(),
                      after.order);
    }
    return result;
}

CoderChoice choice_named(c10::string_view name) {
    constexpr std::array<std::pair<c10::string_view, CoderChoice>, 4> kChoices = {
        {{"tun12", CoderChoice::tun12},
         {"rans4", CoderChoice::rans4},
         {"qmoe", CoderChoice::qmoe},
         {"smallest", CoderChoice::smallest}}};
    for (const auto& [known, choice] : kChoices) {
        if (known == name) return choice;
    }
    TORCH_CHECK_VALUE(false, "encode_ternary: coder is tun12, rans4, qmoe or smallest, got ", name);
}

std::size_t tiles_of(Coder coder, const ExtentHeader& header) {
    return static_cast<std::size_t>(std::ranges::count(header.tiles, coder, &CodedTile::coder));
}

}  // namespace

at::Tensor coded_linear(const at::Tensor& x, const at::Tensor& page, std::int64_t index, const at::Tensor& row_scale,
                        const at::Tensor& column_scale) {
    return across_torch([&] {
        const CodedMatrix matrix = matrix_of(page, index);
        const CodedScales scales(matrix.rows(), matrix.columns(), row_scale, column_scale);
        const at::Tensor from = coded_tokens("x", x, matrix.columns());
        const std::vector<std::uint32_t> order = matrix.column_order();
        const auto product = [&](const TokenPlanes& in, TokenPanel& out) { multiply_in_parallel(matrix, in, out); };
        return tokens_like(x, multiplied(from, planes_of(x), {scales.columns, order}, {scales.rows}, product));
    });
}

at::Tensor coded_linear_transposed(const at::Tensor& g, const at::Tensor& page, std::int64_t index,
                                   const at::Tensor& row_scale, const at::Tensor& column_scale) {
    return across_torch([&] {
        const CodedMatrix matrix = matrix_of(page, index);
        const CodedScales scales(matrix.rows(), matrix.columns(), row_scale, column_scale);
        const at::Tensor from = coded_tokens("g", g, matrix.rows());
        const std::vector<std::uint32_t> order = matrix.column_order();
        const auto product = [&](const TokenPlanes& in, TokenPanel& out) {
            multiply_transposed_in_parallel(matrix, in, out);
        };
        return tokens_like(g, multiplied(from, planes_of(g), {scales.rows}, {scales.columns, order}, product));
    });
}

at::Tensor encode_ternary(const at::Tensor& values, at::IntArrayRef classes, c10::string_view coder,
                          std::int64_t most_classes) {
    TORCH_CHECK_TYPE(values.scalar_type() == at::kChar, "encode_ternary: values are int8, got ", values.scalar_type());
    TORCH_CHECK_VALUE(values.dim() == 2, "encode_ternary: values are [rows, columns], got sizes ", values.sizes());
    EncodeOptions options;
    options.coder = choice_named(coder);
    options.thread_count = static_cast<std::size_t>(at::get_num_threads());
    options.classes.clear();
    for (const std::int64_t first : classes) options.classes.push_back({static_cast<std::size_t>(first)});
    TORCH_CHECK_VALUE(most_classes >= 1, "encode_ternary: most_classes is at least 1, got ", most_classes);
    const at::Tensor dense = values.contiguous();
    return across_torch([&] {
        const ExtentBuffer extent =
            encode_sorted({dense.const_data_ptr<std::int8_t>(), static_cast<std::size_t>(dense.size(0)),
                           static_cast<std::size_t>(dense.size(1))},
                          static_cast<std::size_t>(most_classes), options);
        at::Tensor page =
            at::empty({static_cast<std::int64_t>(extent.bytes().size())}, values.options().dtype(at::kByte));
        std::memcpy(page.mutable_data_ptr(), extent.bytes().data(), extent.bytes().size());
        return page;
    });
}

at::Tensor decode_ternary(const at::Tensor& page, std::int64_t index) {
    return across_torch([&] {
        const CodedMatrix matrix = matrix_of(page, index);
        at::Tensor values =
            at::empty({static_cast<std::int64_t>(matrix.rows()), static_cast<std::int64_t>(matrix.columns())},
                      page.options().dtype(at::kChar));
        matrix.decode(values.mutable_data_ptr<std::int8_t>());
        return values;
    });
}

std::int64_t count_zeros(const at::Tensor& page, std::int64_t index) {
    return across_torch([&] {
        const CodedMatrix matrix = matrix_of(page, index);
        std::int64_t zeros = 0;
        for (const CodedTile& tile : matrix.tiles()) {
            const auto count_rows = [&](std::size_t, std::size_t count, const TernaryRows& rows) {
                for (std::size_t i = 0; i < count; ++i) {
                    zeros += std::count(rows.row(i), rows.row(i) + matrix.columns(), std::int8_t{0});
                }
            };
            for_rows_of(matrix, tile, best_instruction_set(), 1, count_rows);
        }
        return zeros;
    });
}

at::Tensor coded_extents(const at::Tensor& page) {
    return across_torch([&] {
        const std::span<const std::byte> bytes = page_bytes(page);
        const std::vector<std::span<const std::byte>> extents = extents_of(bytes);
        at::Tensor lines = at::empty({static_cast<std::int64_t>(extents.size()), 9}, page.options().dtype(at::kLong));
        auto* to = lines.mutable_data_ptr<std::int64_t>();
        for (const std::span<const std::byte> extent : extents) {
            const ExtentHeader header = read_header(extent);
            const auto offset_bytes = static_cast<std::size_t>(extent.data() - bytes.data());
            for (const std::size_t number : {offset_bytes, header.extent_bytes, header.coded_bytes, header.rows,
                                             header.columns, header.classes.size(), tiles_of(Coder::tun12, header),
                                             tiles_of(Coder::rans4, header), tiles_of(Coder::qmoe, header)}) {
                *to++ = static_cast<std::int64_t>(number);
            }
        }
        return lines;
    });
}

}  // namespace torch_offload
