// Every kernel over coded matrices against its definition, without torch: codec_program COLUMNS... checks
// matrices that wide, of all coders. Small ones are for compute-sanitizer. Exits with 1 and a line per difference.
#include <cuda_runtime.h>

#include <bit>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "codec/coded_kernels.cuh"
#include "codec/defined_product.h"
#include "codec/kernel_samples.h"
#include "device_copy.cuh"

namespace torch_offload {
namespace {

constexpr std::size_t kRows = 67;
constexpr std::size_t kRowsPerTile = 30;

/// A coded matrix on the device, decoded there.
struct Sample {
    Matrix values;
    KernelSample host;
    CodedMatrix opened;
    DeviceCopy<std::byte> extent;
    DeviceCopy<std::byte> tables;
    DeviceCopy<std::byte> word_tables;
    DeviceCopy<std::uint32_t> words;
    KernelMatrix matrix;
    QuadRows rows;

    Sample(const Matrix& from, const EncodeOptions& options)
        : values(from),
          host(encode(from.view(), options)),
          opened(host.extent()),
          extent({host.extent().begin(), host.extent().end()}, 0),
          tables({host.tables().bytes().begin(), host.tables().bytes().end()}, 0),
          word_tables(host.words().bytes(), 0),
          words(std::vector<std::uint32_t>(kRows * quad_row_words(from.columns)), 0),
          matrix(host.tables().placed(extent.get(), tables.get(), host.words().at(word_tables.get()))),
          rows{words.get(), quad_row_words(from.columns)} {
        if (host.tables().has(Coder::tun12)) launch_tun12_decode(matrix, rows, nullptr);
        if (host.tables().has(Coder::rans4)) launch_rans4_decode(matrix, rows, nullptr);
    }
};

/// A product on the device.
struct DeviceProduct {
    DefinedProduct host;
    DeviceCopy<float> inputs, before, after;
    ScaledTokens from;
    ScaledSums to;
    PlaneBlocks planes = {};  // without pointers

    /// `from_order`, `to_order`: on the device.
    DeviceProduct(const DefinedProduct& of, const std::uint32_t* from_order, const std::uint32_t* to_order)
        : host(of),
          inputs(host.inputs, 0),
          before(host.before, 0),
          after(host.after, 0),
          from(host.tokens_from()),
          to(host.sums_to()) {
        from.values = inputs.get();
        from.type = TokenType::float32;
        from.scale = before.get();
        from.order = from_order;
        to.type = TokenType::float32;
        to.scale = after.get();
        to.order = to_order;
        planes = plane_blocks_for(from.tokens, from.width, from.type);
    }

    /// What `launch` writes from planes of the inputs, cut as `partial` says.
    template <typename Launch>
    std::vector<float> actual(const std::string& what, PartialSums partial, Launch launch) const {
        PlaneBlocks placed = planes;
        std::vector<std::byte> none(planes.size_bytes());
        std::vector<unsigned long long> no_sums(partial.sum_count(planes.groups, to.width) + 1);
        std::vector<std::uint32_t> no_counts(planes.groups * kGroupTokens);
        std::vector<std::uint32_t> no_counters(partial.counter_count);
        std::vector<float> values(host.tokens * host.to);
        const DeviceCopy bytes(none, 0);
        const DeviceCopy sums(no_sums, 0);
        const DeviceCopy counts(no_counts, 0);
        const DeviceCopy counters(no_counters, 0);
        const DeviceCopy results(values, 0);
        placed.bytes = bytes.get();
        placed.most_bits = counts.get();
        partial.sums = sums.get();
        partial.counters = counters.get();
        ScaledSums target = to;
        target.values = results.get();
        launch_planes(from, placed, partial, to.width, nullptr);
        launch(placed, partial, target);
        check_cuda(cudaDeviceSynchronize(), what.c_str());
        expect(results.back(values) & bytes.back(none) & sums.back(no_sums) & counts.back(no_counts) &
                   counters.back(no_counters),
               what + " wrote beside what is its own");
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
    const std::size_t columns = sample.values.columns;
    const DeviceProduct one({tokens, columns, kRows, TokenType::float32}, sample.matrix.order, nullptr);
    const auto expected = one.host.expected(
        [&](std::size_t row, std::size_t column) { return sample.values.values[row * columns + column]; });
    const auto decoded = one.actual(what, product_sums(sample.matrix, one.planes),
                                    [&](const PlaneBlocks& x, const PartialSums& partial, const ScaledSums& y) {
                                        launch_product(sample.matrix, sample.rows, x, partial, y, nullptr);
                                    });
    expect(have_equal_bits(decoded, expected), what + ": product");
    if (sample.host.tables().has(Coder::rans4)) return;
    const auto direct = one.actual(what, codeword_product_sums(sample.matrix),
                                   [&](const PlaneBlocks& x, const PartialSums& partial, const ScaledSums& y) {
                                       launch_codeword_product(sample.matrix, x, partial, y, nullptr);
                                   });
    expect(have_equal_bits(direct, expected), what + ": product of codewords");
}

void check_transposed(const Sample& sample, std::size_t tokens, const std::string& what) {
    const std::size_t columns = sample.values.columns;
    const DeviceProduct one({tokens, kRows, columns, TokenType::float32}, nullptr, sample.matrix.order);
    const auto expected = one.host.expected(
        [&](std::size_t column, std::size_t row) { return sample.values.values[row * columns + column]; });
    const auto actual = one.actual(what, transposed_product_sums(sample.matrix, one.planes),
                                   [&](const PlaneBlocks& g, const PartialSums& partial, const ScaledSums& z) {
                                       launch_transposed_product(sample.matrix, sample.rows, g, partial, z, nullptr);
                                   });
    expect(have_equal_bits(actual, expected), what + ": transposed product");
}

void check(const Matrix& matrix, const EncodeOptions& options, const std::string& what) {
    const Sample sample(matrix, options);
    check_decoded(sample, what);
    for (const std::size_t tokens : {1, 2, 3, 8, 20, 70}) {
        check_forward(sample, tokens, what);
        check_transposed(sample, tokens, what);
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
