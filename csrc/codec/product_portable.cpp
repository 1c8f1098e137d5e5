// The products for any processor: the reference that the others are compared with.
#include "codec/product_loops.h"

namespace torch_offload {
namespace {

struct PortableLanes {
    static constexpr std::size_t kRows = 1;
    static constexpr std::size_t kTokens = 2;

    float values[kSumLanes];

    static PortableLanes of_one(float value) noexcept {
        PortableLanes lanes;
        for (float& each : lanes.values) each = value;
        return lanes;
    }
    static PortableLanes zero() noexcept { return of_one(0); }
    static PortableLanes load(const float* from) noexcept {
        PortableLanes lanes;
        for (std::size_t i = 0; i < kSumLanes; ++i) lanes.values[i] = from[i];
        return lanes;
    }
    static void store(const PortableLanes& lanes, float* to) noexcept {
        for (std::size_t i = 0; i < kSumLanes; ++i) to[i] = lanes.values[i];
    }
    static PortableLanes of_ternary(const std::int8_t* from) noexcept {
        PortableLanes lanes;
        for (std::size_t i = 0; i < kSumLanes; ++i) lanes.values[i] = from[i];
        return lanes;
    }
    static PortableLanes plus_product(const PortableLanes& sum, const PortableLanes& left,
                                      const PortableLanes& right) noexcept {
        PortableLanes lanes;
        for (std::size_t i = 0; i < kSumLanes; ++i) lanes.values[i] = sum.values[i] + left.values[i] * right.values[i];
        return lanes;
    }
    static float joined(PortableLanes lanes) noexcept {
        for (std::size_t half = kSumLanes / 2; half > 0; half /= 2) {
            for (std::size_t i = 0; i < half; ++i) lanes.values[i] += lanes.values[i + half];
        }
        return lanes.values[0];
    }
};

}  // namespace

void product_portable(const ProductRows& rows, const TokenPanel& x, TokenPanel& y) noexcept {
    multiply_rows<PortableLanes>(rows, x, y);
}

void transposed_product_portable(const ProductRows& rows, const TokenPanel& g, TokenPanel& z) noexcept {
    multiply_rows_transposed<PortableLanes>(rows, g, z);
}

}  // namespace torch_offload
