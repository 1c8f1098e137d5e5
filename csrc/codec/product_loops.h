// The loops of the products, over vectors of one instruction set: internal linkage, no standard headers. They have the
// order of product.h. Layer codec: includes base only.
//
// `Lanes` holds kSumLanes floats: zero(), load(), store(), of_ternary(), of_one(), plus_product(), joined(). It also
// says how many rows and tokens fit its registers.
#pragma once

#include "codec/product.h"

namespace torch_offload {
namespace {

/// kRows x kTokens sums side by side: each value of T and of x is loaded once for all of them.
template <typename Lanes, std::size_t kRows, std::size_t kTokens>
inline void multiply_block(const ProductRows& rows, std::size_t row, const TokenPanel& x, std::size_t token,
                           TokenPanel& y) noexcept {
    Lanes sums[kRows][kTokens];
    const std::int8_t* values[kRows];
    const float* inputs[kTokens];
    for (std::size_t r = 0; r < kRows; ++r) {
        values[r] = rows.values + (row + r) * rows.stride;
        for (std::size_t t = 0; t < kTokens; ++t) sums[r][t] = Lanes::zero();
    }
    for (std::size_t t = 0; t < kTokens; ++t) inputs[t] = x.token(token + t);
    for (std::size_t column = 0; column < rows.columns; column += kSumLanes) {
        Lanes weights[kRows];
#pragma GCC unroll 8
        for (std::size_t r = 0; r < kRows; ++r) weights[r] = Lanes::of_ternary(values[r] + column);
#pragma GCC unroll 8
        for (std::size_t t = 0; t < kTokens; ++t) {
            const Lanes input = Lanes::load(inputs[t] + column);
#pragma GCC unroll 8
            for (std::size_t r = 0; r < kRows; ++r) sums[r][t] = Lanes::plus_product(sums[r][t], weights[r], input);
        }
    }
    for (std::size_t t = 0; t < kTokens; ++t) {
        float* const to = y.token(token + t) + rows.first_row + row;
        for (std::size_t r = 0; r < kRows; ++r) to[r] = Lanes::joined(sums[r][t]);
    }
}

template <typename Lanes, std::size_t kTokens>
inline void multiply_tokens(const ProductRows& rows, const TokenPanel& x, std::size_t token, TokenPanel& y) noexcept {
    std::size_t row = 0;
    for (; row + Lanes::kRows <= rows.count; row += Lanes::kRows) {
        multiply_block<Lanes, Lanes::kRows, kTokens>(rows, row, x, token, y);
    }
    for (; row < rows.count; ++row) multiply_block<Lanes, 1, kTokens>(rows, row, x, token, y);
}

template <typename Lanes>
inline void multiply_rows(const ProductRows& rows, const TokenPanel& x, TokenPanel& y) noexcept {
    std::size_t token = 0;
    for (; token + Lanes::kTokens <= x.tokens(); token += Lanes::kTokens) {
        multiply_tokens<Lanes, Lanes::kTokens>(rows, x, token, y);
    }
    for (; token < x.tokens(); ++token) multiply_tokens<Lanes, 1>(rows, x, token, y);
}

/// Adds kRows rows, one after the other, to the sums of kTokens tokens.
template <typename Lanes, std::size_t kRows, std::size_t kTokens>
inline void add_rows(const ProductRows& rows, std::size_t row, const TokenPanel& g, std::size_t token,
                     TokenPanel& z) noexcept {
    Lanes factors[kTokens][kRows];
    for (std::size_t t = 0; t < kTokens; ++t) {
        const float* const from = g.token(token + t) + rows.first_row + row;
        for (std::size_t r = 0; r < kRows; ++r) factors[t][r] = Lanes::of_one(from[r]);
    }
    const std::int8_t* const values = rows.values + row * rows.stride;
    for (std::size_t column = 0; column < rows.columns; column += kSumLanes) {
        Lanes weights[kRows];
#pragma GCC unroll 8
        for (std::size_t r = 0; r < kRows; ++r) weights[r] = Lanes::of_ternary(values + r * rows.stride + column);
#pragma GCC unroll 8
        for (std::size_t t = 0; t < kTokens; ++t) {
            float* const to = z.token(token + t) + column;
            Lanes sum = Lanes::load(to);
#pragma GCC unroll 8
            for (std::size_t r = 0; r < kRows; ++r) sum = Lanes::plus_product(sum, weights[r], factors[t][r]);
            Lanes::store(sum, to);
        }
    }
}

template <typename Lanes, std::size_t kTokens>
inline void add_tokens(const ProductRows& rows, const TokenPanel& g, std::size_t token, TokenPanel& z) noexcept {
    std::size_t row = 0;
    for (; row + Lanes::kRows <= rows.count; row += Lanes::kRows) {
        add_rows<Lanes, Lanes::kRows, kTokens>(rows, row, g, token, z);
    }
    for (; row < rows.count; ++row) add_rows<Lanes, 1, kTokens>(rows, row, g, token, z);
}

template <typename Lanes>
inline void multiply_rows_transposed(const ProductRows& rows, const TokenPanel& g, TokenPanel& z) noexcept {
    std::size_t token = 0;
    for (; token + Lanes::kTokens <= g.tokens(); token += Lanes::kTokens) {
        add_tokens<Lanes, Lanes::kTokens>(rows, g, token, z);
    }
    for (; token < g.tokens(); ++token) add_tokens<Lanes, 1>(rows, g, token, z);
}

}  // namespace
}  // namespace torch_offload
