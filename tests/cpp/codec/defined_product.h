// A product with T as fixed_point.h defines it, by plain loops.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "codec/plane_blocks.h"
#include "codec/ternary_samples.h"

namespace torch_offload {

/// A product with T or its transpose: `to` floats from `from` ones, for some tokens.
struct DefinedProduct {
    std::size_t tokens, from, to;
    TokenType type;
    std::vector<float> inputs = uneven_floats(tokens * from, 1);
    std::vector<float> before = uneven_floats(from, 2);
    std::vector<float> after = uneven_floats(to, 3);
    std::vector<float> actual = std::vector<float>(tokens * to, 55.0F);

    ScaledTokens tokens_from(const std::vector<std::uint32_t>& order = {}) const {
        return {inputs.data(),
                type,
                before.data(),
                order.empty() ? nullptr : order.data(),
                static_cast<std::uint32_t>(tokens),
                static_cast<std::uint32_t>(from)};
    }
    ScaledSums sums_to(const std::vector<std::uint32_t>& order = {}) {
        return {actual.data(),
                type,
                after.data(),
                order.empty() ? nullptr : order.data(),
                static_cast<std::uint32_t>(tokens),
                static_cast<std::uint32_t>(to)};
    }
    /// By the definition of fixed_point.h. `value(i, j)`: T's for output i and input j.
    template <typename Value>
    std::vector<float> expected(Value value) const {
        const int planes = type == TokenType::float32 ? 4 : 3;
        std::vector<float> results;
        for (std::size_t token = 0; token < tokens; ++token) {
            const float* const x = inputs.data() + token * from;
            float most = 0;
            bool is_finite = true;
            for (std::size_t j = 0; j < from; ++j) {
                is_finite = is_finite && std::isfinite(x[j] * before[j]);
                most = std::max(most, std::abs(x[j] * before[j]));
            }
            int exponent = most >= std::numeric_limits<float>::min() ? 0 : -126;
            if (exponent == 0 && is_finite) std::frexp(most, &exponent);
            const int shift = 8 * planes - 2 - exponent;
            for (std::size_t i = 0; i < to; ++i) {
                std::int64_t sum = 0;
                for (std::size_t j = 0; j < from && is_finite; ++j) {
                    const double scaled = std::ldexp(double{x[j] * before[j]}, shift);
                    sum += std::int64_t{value(i, j)} * static_cast<std::int64_t>(std::nearbyint(scaled));
                }
                const float worth = std::ldexp(static_cast<float>(sum), -shift);
                results.push_back(is_finite ? worth * after[i] : std::numeric_limits<float>::quiet_NaN());
            }
        }
        return results;
    }
};

}  // namespace torch_offload
