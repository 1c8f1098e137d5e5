// Every kernel over coded matrices against those for processors, without torch: codec_program COLUMNS... checks
// matrices that wide, of all coders. Small ones are for compute-sanitizer. Exits with 1 and a line per difference.
#include <cuda_runtime.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "codec/coded_kernels.cuh"
#include "codec/kernel_samples.h"
#include "codec/product.h"
#include "device_copy.cuh"

namespace torch_offload {
namespace {

constexpr std::size_t kRows = 67;
constexpr std::size_t kRowsPerTile = 30;

/// One side of a product: its floats, and where they lie in it, if not in their own positions.
struct Side {
    std::size_t width;
    std::vector<std::uint32_t> order = {};
    const std::uint32_t* device_order = nullptr;
};

/// A coded matrix on the device, decoded there.
struct Sample {
    Matrix values;
    KernelSample host;
    CodedMatrix opened;
    DeviceCopy<std::byte> extent;
    DeviceCopy<std::byte> tables;
    DeviceCopy<std::uint32_t> words;
    KernelMatrix matrix;
    QuadRows rows;

    Sample(const Matrix& from, const EncodeOptions& options)
        : values(from),
          host(encode(from.view(), options)),
          opened(host.extent()),
          extent({host.extent().begin(), host.extent().end()}, 0),
          tables({host.tables().bytes().begin(), host.tables().bytes().end()}, 0),
          words(std::vector<std::uint32_t>(kRows * quad_row_words(from.columns)), 0),
          matrix(host.tables().placed(extent.get(), tables.get())),
          rows{words.get(), quad_row_words(from.columns)} {
        if (host.tables().has(Coder::tun12)) launch_tun12_decode(matrix, rows, nullptr);
        if (host.tables().has(Coder::rans4)) launch_rans4_decode(matrix, rows, nullptr);
    }
    Side by_column() const { return {values.columns, opened.column_order(), matrix.order}; }
    static Side by_row() { return {kRows}; }
};

/// Inputs of a product, on both sides.
struct Inputs {
    std::uint32_t tokens;
    Side from_side, to_side;
    std::vector<float> x, before, after;
    DeviceCopy<float> device_x, device_before, device_after;

    Inputs(std::size_t token_count, Side from, Side to)
        : tokens(static_cast<std::uint32_t>(token_count)),
          from_side(std::move(from)),
          to_side(std::move(to)),
          x(uneven_floats(token_count * from_side.width, 1)),
          before(uneven_floats(from_side.width, 2)),
          after(uneven_floats(to_side.width, 3)),
          device_x(x, 0),
          device_before(before, 0),
          device_after(after, 0) {}

    ScaledTokens from() const {
        return {.values = device_x.get(),
                .scale = device_before.get(),
                .order = from_side.device_order,
                .tokens = tokens,
                .width = static_cast<std::uint32_t>(from_side.width)};
    }
    ScaledSums to(float* sums) const {
        return {.values = sums,
                .scale = device_after.get(),
                .order = to_side.device_order,
                .tokens = tokens,
                .width = static_cast<std::uint32_t>(to_side.width)};
    }

    template <typename Multiply>
    std::vector<float> expected(Multiply multiply) const {
        TokenPanel in(tokens, from_side.width);
        in.fill(x.data(), before.data(), from_side.order);
        TokenPanel out(tokens, to_side.width);
        multiply(in, out);
        std::vector<float> sums(tokens * to_side.width);
        out.write(sums.data(), after.data(), to_side.order);
        return sums;
    }
    /// What `launch` writes, with panels of the inputs.
    template <typename Launch>
    std::vector<float> actual(const std::string& what, Launch launch) const {
        const TokenGroups groups = groups_of(tokens);
        const DeviceCopy panels(std::vector<float>(groups.count * groups.group_tokens * from_side.width), 0);
        const DeviceCopy sums(std::vector<float>(tokens * to_side.width), 0);
        launch_panels(from(), groups, panels.get(), nullptr);
        launch(panels.get(), groups, to(sums.get()));
        check_cuda(cudaDeviceSynchronize(), what.c_str());
        std::vector<float> values(tokens * to_side.width);
        expect(sums.back(values), what + " wrote beside its sums");
        return values;
    }
};

bool have_equal_bits(const std::vector<float>& left, const std::vector<float>& right) {
    for (std::size_t i = 0; i < left.size(); ++i) {
        if (std::bit_cast<std::uint32_t>(left[i]) != std::bit_cast<std::uint32_t>(right[i])) return false;
    }
    return left.size() == right.size();
}

void check_decoded(const Sample& sample, const std::string& what) {
    const std::vector<std::int8_t> none(sample.values.values.size());
    const DeviceCopy to(none, 0);
    launch_expand(sample.matrix, sample.rows, to.get(), nullptr);
    check_cuda(cudaDeviceSynchronize(), "decoding");
    std::vector<std::uint32_t> words(kRows * sample.rows.stride);
    std::vector<std::int8_t> actual = none;
    expect(sample.words.back(words) & to.back(actual), what + ": decoding wrote beside its rows");
    expect(actual == sample.values.values, what + ": T");
}

void check_forward(const Sample& sample, std::size_t tokens, const std::string& what) {
    const Inputs inputs(tokens, sample.by_column(), sample.by_row());
    const auto expected = inputs.expected([&](const TokenPanel& x, TokenPanel& y) { multiply(sample.opened, x, y); });
    const auto decoded = inputs.actual(what, [&](const float* panels, const TokenGroups& groups, const ScaledSums& y) {
        launch_product(sample.matrix, sample.rows, panels, groups, y, nullptr);
    });
    expect(have_equal_bits(decoded, expected), what + ": product");
    if (sample.host.tables().has(Coder::rans4) || tokens > kMaxGroupTokens) return;
    const auto direct = inputs.actual(what, [&](const float* panel, const TokenGroups& groups, const ScaledSums& y) {
        launch_codeword_product(sample.matrix, panel, groups.group_tokens, y, nullptr);
    });
    expect(have_equal_bits(direct, expected), what + ": product of codewords");
}

void check_transposed(const Sample& sample, std::size_t tokens, const std::string& what) {
    const Inputs inputs(tokens, sample.by_row(), sample.by_column());
    const auto expected =
        inputs.expected([&](const TokenPanel& g, TokenPanel& z) { multiply_transposed(sample.opened, g, z); });
    const auto actual = inputs.actual(what, [&](const float* panels, const TokenGroups& groups, const ScaledSums& z) {
        launch_transposed_product(sample.matrix, sample.rows, panels, groups, z, nullptr);
    });
    expect(have_equal_bits(actual, expected), what + ": transposed product");
}

/// To 2^-14 of the sum of magnitudes.
void check_tensor_cores(const Sample& sample, std::size_t tokens, const std::string& what) {
    const Inputs inputs(tokens, sample.by_column(), sample.by_row());
    const std::size_t stride = sample.rows.stride * kValuesOfWord;
    const std::vector<std::uint16_t> none(padded_mma_tokens(inputs.tokens) * stride);
    const DeviceCopy high(none, 0), low(none, 0);
    const auto actual = inputs.actual(what, [&](const float*, const TokenGroups&, const ScaledSums& y) {
        const SplitPanel panel{high.get(), low.get(), stride};
        launch_split(inputs.from(), panel, nullptr);
        launch_mma_product(sample.matrix, sample.rows, panel, y, nullptr);
    });
    std::vector<std::uint16_t> halves = none;
    expect(high.back(halves) & low.back(halves), what + ": the split wrote beside its panel");
    for (std::size_t i = 0; i < actual.size(); ++i) {
        const std::size_t token = i / kRows, row = i % kRows;
        double sum = 0, magnitude = 0;
        for (std::size_t c = 0; c < sample.values.columns; ++c) {
            const double term = double{inputs.x[token * sample.values.columns + c] * inputs.before[c]} *
                                sample.values.values[row * sample.values.columns + c] * inputs.after[row];
            sum += term;
            magnitude += std::abs(term);
        }
        if (std::abs(actual[i] - sum) > magnitude / 16384) return expect(false, what + ": tensor cores");
    }
}

void check(const Matrix& matrix, const EncodeOptions& options, const std::string& what) {
    const Sample sample(matrix, options);
    check_decoded(sample, what);
    for (const std::size_t tokens : {1, 2, 3, 8, 20, 70}) {
        check_forward(sample, tokens, what);
        check_transposed(sample, tokens, what);
        check_tensor_cores(sample, tokens, what);
    }
}

void check(std::size_t columns) {
    for (const CoderChoice coder : {CoderChoice::tun12, CoderChoice::rans4, CoderChoice::smallest}) {
        const std::string what = name_of(coder) + ", " + std::to_string(columns) + " columns";
        EncodeOptions in_place{.coder = coder, .rows_per_tile = kRowsPerTile};
        for (std::size_t first = 20; first < columns && in_place.classes.size() < 6; first += 37) {
            in_place.classes.push_back({first});
        }
        for (const double zeros : {0.7, 0.99}) check(random_matrix(kRows, columns, zeros, columns), in_place, what);
        const Matrix uneven = uneven_columns(kRows, columns, columns);
        EncodeOptions sorted{.coder = coder, .rows_per_tile = kRowsPerTile};
        sort_columns(uneven, 6, sorted);
        check(uneven, sorted, what + ", sorted");
    }
}

}  // namespace
}  // namespace torch_offload

int main(int argument_count, char** arguments) try {
    for (int i = 1; i < argument_count; ++i) torch_offload::check(std::strtoull(arguments[i], nullptr, 10));
    std::printf("%d widths, %d differences\n", argument_count - 1, torch_offload::differences);
    return argument_count > 1 && torch_offload::differences == 0 ? 0 : 1;
} catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
}
