// Ternary matrices for tests: random ones, and those that coders find hard; and floats to multiply them by.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "codec/coded_matrix.h"
#include "codec/encode.h"
#include "codec/ternary.h"

namespace torch_offload {

/// A ternary matrix that owns its values.
struct Matrix {
    std::size_t rows = 0;
    std::size_t columns = 0;
    std::vector<std::int8_t> values;

    TernaryView view() const noexcept { return {values.data(), rows, columns}; }
};

/// Zeros with probability `zero`, and as many +1 as -1 of the rest on average, or the share `plus` of it.
inline Matrix random_matrix(std::size_t rows, std::size_t columns, double zero, std::uint64_t seed, double plus = 0.5) {
    Matrix matrix{rows, columns, std::vector<std::int8_t>(rows * columns)};
    std::mt19937_64 random(seed);
    const auto below = [](double share) { return static_cast<std::uint64_t>(share * 4294967296.0); };
    const std::uint64_t zero_end = below(zero);
    const std::uint64_t plus_end = below(zero + (1 - zero) * plus);
    for (std::int8_t& value : matrix.values) {
        const std::uint64_t drawn = random() >> 32;
        value = static_cast<std::int8_t>(drawn < zero_end ? 0 : (drawn < plus_end ? 1 : -1));
    }
    return matrix;
}

inline Matrix filled_matrix(std::size_t rows, std::size_t columns, std::int8_t value) {
    return {rows, columns, std::vector<std::int8_t>(rows * columns, value)};
}

/// Runs of equal values, of `length` on average, that go on from row to row.
inline Matrix matrix_of_runs(std::size_t rows, std::size_t columns, std::size_t length, std::uint64_t seed) {
    Matrix matrix = filled_matrix(rows, columns, 0);
    std::mt19937_64 random(seed);
    std::int8_t value = 0;
    for (std::int8_t& each : matrix.values) {
        if (random() % length == 0) value = static_cast<std::int8_t>(static_cast<int>(random() % 3) - 1);
        each = value;
    }
    return matrix;
}

/// Columns whose share of zeros is anything.
inline Matrix uneven_columns(std::size_t rows, std::size_t columns, std::uint64_t seed) {
    Matrix matrix = filled_matrix(rows, columns, 0);
    std::mt19937_64 random(seed);
    for (std::size_t column = 0; column < columns; ++column) {
        const std::uint64_t zeros_of_100 = random() % 101;
        for (std::size_t row = 0; row < rows; ++row) {
            if (random() % 100 < zeros_of_100) continue;
            matrix.values[row * columns + column] = random() % 2 ? 1 : -1;
        }
    }
    return matrix;
}

/// Has columns sorted into classes whatever that costs.
inline void sort_columns(const Matrix& matrix, std::size_t most_classes, EncodeOptions& options) {
    SortedColumns sorted = sorted_columns(matrix.view(), most_classes);
    options.classes = std::move(sorted.classes);
    options.order = std::move(sorted.order);
}

/// Of many magnitudes, so that every other order of a sum gives other bits.
inline std::vector<float> uneven_floats(std::size_t count, std::uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& value : values) value = normal(random) * std::ldexp(1.0F, static_cast<int>(random() % 20) - 10);
    return values;
}

inline std::vector<std::int8_t> decoded(const CodedMatrix& coded, InstructionSet set) {
    std::vector<std::int8_t> values(coded.rows() * coded.columns(), 77);
    coded.decode(values.data(), set);
    return values;
}

inline std::vector<InstructionSet> available_sets() {
    std::vector<InstructionSet> sets;
    for (const auto set : {InstructionSet::portable, InstructionSet::avx2, InstructionSet::avx512}) {
        if (is_available(set)) sets.push_back(set);
    }
    return sets;
}

inline constexpr CoderChoice kChoices[] = {CoderChoice::tun12, CoderChoice::rans4, CoderChoice::qmoe,
                                           CoderChoice::smallest};

inline std::string name_of(CoderChoice choice) {
    constexpr const char* kNames[] = {"tun12", "rans4", "qmoe", "smallest"};
    return kNames[static_cast<std::size_t>(choice)];
}

}  // namespace torch_offload
