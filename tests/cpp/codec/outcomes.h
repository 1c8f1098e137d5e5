// What coded matrices come to: T and its products by each set of kernels, and the products as product.h documents them.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/check.h"
#include "codec/product.h"
#include "codec/ternary_samples.h"

namespace torch_offload {

inline TokenPanel panel_of(const std::vector<float>& values, std::size_t tokens) {
    TokenPanel panel(tokens, values.size() / tokens);
    panel.fill(values.data());
    return panel;
}

inline std::vector<std::uint32_t> bits_of(const TokenPanel& panel) {
    std::vector<std::uint32_t> bits;
    for (std::size_t i = 0; i < panel.tokens(); ++i) {
        for (std::size_t j = 0; j < panel.width(); ++j) bits.push_back(std::bit_cast<std::uint32_t>(panel.token(i)[j]));
    }
    return bits;
}

/// y = T x as product.h says, one addition after the other. `order`: the column that lies in each position, if they are
/// not in their own.
inline std::vector<std::uint32_t> forward_formula(const Matrix& matrix, const TokenPanel& x,
                                                  std::span<const std::uint32_t> order = {}) {
    TokenPanel y(x.tokens(), matrix.rows);
    for (std::size_t token = 0; token < x.tokens(); ++token) {
        for (std::size_t row = 0; row < matrix.rows; ++row) {
            float sums[kSumLanes] = {};
            for (std::size_t position = 0; position < matrix.columns; ++position) {
                const std::size_t column = order.empty() ? position : order[position];
                const float weight = matrix.values[row * matrix.columns + column];
                sums[position % kSumLanes] += weight * x.token(token)[column];
            }
            for (const std::size_t half : {8, 4, 2, 1}) {
                for (std::size_t i = 0; i < half; ++i) sums[i] += sums[i + half];
            }
            y.token(token)[row] = sums[0];
        }
    }
    return bits_of(y);
}

/// z = T^T g as product.h says.
inline std::vector<std::uint32_t> transposed_formula(const Matrix& matrix, std::size_t rows_per_tile,
                                                     const TokenPanel& g) {
    TokenPanel z(g.tokens(), matrix.columns);
    for (std::size_t token = 0; token < g.tokens(); ++token) {
        for (std::size_t column = 0; column < matrix.columns; ++column) {
            for (std::size_t first = 0; first < matrix.rows; first += rows_per_tile) {
                float part = 0;
                for (std::size_t row = first; row < std::min(matrix.rows, first + rows_per_tile); ++row) {
                    part += static_cast<float>(matrix.values[row * matrix.columns + column]) * g.token(token)[row];
                }
                z.token(token)[column] += part;
            }
        }
    }
    return bits_of(z);
}

/// T, the bits of T x and of T^T g. Where decoding is refused there are no values, but the words of the error.
struct Outcome {
    std::vector<std::int8_t> values;
    std::vector<std::uint32_t> sums;
    std::vector<std::uint32_t> transposed_sums;
    std::string error;
    std::string error_of_sums;
    std::string error_of_transposed_sums;

    bool operator==(const Outcome&) const = default;
};

/// What a matrix is multiplied by.
struct Inputs {
    std::size_t tokens;
    std::vector<float> x;
    TokenPanel g;

    Inputs(std::size_t rows, std::size_t columns, std::size_t tokens_wanted, std::uint32_t seed)
        : tokens(tokens_wanted),
          x(uneven_floats(tokens * columns, seed)),
          g(panel_of(uneven_floats(tokens * rows, seed + 1), tokens)) {}
};

/// What a set of kernels comes to.
inline Outcome outcome_by(InstructionSet set, const CodedMatrix& coded, const Inputs& inputs) {
    Outcome outcome;
    const auto refused_by = [](auto&& work) -> std::string {
        try {
            work();
        } catch (const CorruptPage& error) {
            return error.what();
        }
        return {};
    };
    outcome.error = refused_by([&] { outcome.values = decoded(coded, set); });
    outcome.error_of_sums = refused_by([&] {
        TokenPanel x(inputs.tokens, coded.columns());
        x.fill(inputs.x.data(), nullptr, coded.column_order());
        TokenPanel y(inputs.tokens, coded.rows());
        multiply(coded, x, y, set);
        outcome.sums = bits_of(y);
    });
    outcome.error_of_transposed_sums = refused_by([&] {
        TokenPanel z(inputs.tokens, coded.columns());
        multiply_transposed(coded, inputs.g, z, set);
        const std::vector<float> ones(coded.columns(), 1.0F);
        std::vector<float> in_matrix(inputs.tokens * coded.columns());
        z.write(in_matrix.data(), ones.data(), coded.column_order());
        outcome.transposed_sums = bits_of(panel_of(in_matrix, inputs.tokens));
    });
    return outcome;
}

/// What all of them have to come to for `coded` if it is a matrix of these values.
inline Outcome outcome_of(const Matrix& matrix, const CodedMatrix& coded, const Inputs& inputs) {
    return {matrix.values,
            forward_formula(matrix, panel_of(inputs.x, inputs.tokens), coded.column_order()),
            transposed_formula(matrix, coded.header().rows_per_tile, inputs.g),
            {},
            {},
            {}};
}

}  // namespace torch_offload
