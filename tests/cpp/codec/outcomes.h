// What coded matrices come to: T and its products by each set of kernels, and the products as product.h documents them.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
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

/// A token's integers and the power of two of a unit, by the words of fixed_point.h and none of its code.
struct TokenFormula {
    std::vector<std::int64_t> integers;
    int unit = 0;
    bool is_finite = true;

    TokenFormula(std::span<const float> values, unsigned planes) {
        int above = -126;  // 2^above is above all magnitudes
        for (const float value : values) {
            is_finite = is_finite && std::isfinite(value);
            if (std::isfinite(value) && value != 0) above = std::max(above, std::ilogb(value) + 1);
        }
        unit = above - (8 * static_cast<int>(planes) - 2);
        for (const float value : values) {
            integers.push_back(is_finite ? std::llrint(std::ldexp(double{value}, -unit)) : 0);
        }
    }

    float of_sum(std::int64_t sum) const {
        if (!is_finite) return std::numeric_limits<float>::quiet_NaN();
        return static_cast<float>(std::ldexp(double{static_cast<float>(sum)}, unit));
    }
};

/// y = T x as product.h says, one addition after the other.
inline std::vector<std::uint32_t> forward_formula(const Matrix& matrix, const TokenPanel& x, unsigned planes) {
    TokenPanel y(x.tokens(), matrix.rows);
    for (std::size_t token = 0; token < x.tokens(); ++token) {
        const TokenFormula formula({x.token(token), x.width()}, planes);
        for (std::size_t row = 0; row < matrix.rows; ++row) {
            std::int64_t sum = 0;
            for (std::size_t column = 0; column < matrix.columns; ++column) {
                sum += matrix.values[row * matrix.columns + column] * formula.integers[column];
            }
            y.token(token)[row] = formula.of_sum(sum);
        }
    }
    return bits_of(y);
}

/// z = T^T g as product.h says.
inline std::vector<std::uint32_t> transposed_formula(const Matrix& matrix, const TokenPanel& g, unsigned planes) {
    Matrix transposed{matrix.columns, matrix.rows, std::vector<std::int8_t>(matrix.values.size())};
    for (std::size_t row = 0; row < matrix.rows; ++row) {
        for (std::size_t column = 0; column < matrix.columns; ++column) {
            transposed.values[column * matrix.rows + row] = matrix.values[row * matrix.columns + column];
        }
    }
    return forward_formula(transposed, g, planes);
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
    unsigned planes;
    std::vector<float> x;
    TokenPanel g;

    Inputs(std::size_t rows, std::size_t columns, std::size_t tokens_wanted, std::uint32_t seed)
        : tokens(tokens_wanted),
          planes(seed % 2 ? kPlanesOfHalf : kPlanesOfFloat),
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
        multiply(coded, TokenPlanes(x, inputs.planes, set), y, set);
        outcome.sums = bits_of(y);
    });
    outcome.error_of_transposed_sums = refused_by([&] {
        TokenPanel z(inputs.tokens, coded.columns());
        multiply_transposed(coded, TokenPlanes(inputs.g, inputs.planes, set), z, set);
        const std::vector<float> ones(coded.columns(), 1.0F);
        std::vector<float> in_matrix(inputs.tokens * coded.columns());
        z.write(in_matrix.data(), ones.data(), coded.column_order());
        outcome.transposed_sums = bits_of(panel_of(in_matrix, inputs.tokens));
    });
    return outcome;
}

/// What all of them have to come to for a coded matrix of these values.
inline Outcome outcome_of(const Matrix& matrix, const Inputs& inputs) {
    return {matrix.values,
            forward_formula(matrix, panel_of(inputs.x, inputs.tokens), inputs.planes),
            transposed_formula(matrix, inputs.g, inputs.planes),
            {},
            {},
            {}};
}

}  // namespace torch_offload
