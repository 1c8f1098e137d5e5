// The products for any processor.
#include <cmath>

#include "codec/product_forward.h"
#include "codec/product_transposed.h"

namespace torch_offload {
namespace {

struct PortableLanes {
    static constexpr std::size_t kBytes = 16;
    static constexpr std::size_t kPlanes = 1;

    struct Bytes {
        std::int8_t of[kBytes];
    };

    struct Sums {
        std::int32_t of[4];
    };

    static Sums zero() noexcept { return {}; }
    static Sums load(const std::int32_t* from) noexcept { return {{from[0], from[1], from[2], from[3]}}; }
    static void store(const Sums& lanes, std::int32_t* to) noexcept {
        for (std::size_t i = 0; i < 4; ++i) to[i] = lanes.of[i];
    }
    static Sums plus_products(const Sums& lanes, const Bytes& weights, const Bytes& bytes) noexcept {
        Sums result = lanes;
        for (std::size_t i = 0; i < kBytes; ++i) result.of[i / 4] += weights.of[i] * bytes.of[i];
        return result;
    }
    /// Sums of four lanes each to four numbers.
    static void join(const Sums (&lanes)[kRowsTogether], std::int32_t* to) noexcept {
        for (std::size_t i = 0; i < kRowsTogether; ++i) {
            to[i] = lanes[i].of[0] + lanes[i].of[1] + lanes[i].of[2] + lanes[i].of[3];
        }
    }
    static Bytes no_weights() noexcept { return {}; }
    static Bytes weights(const std::int8_t* from) noexcept {
        Bytes bytes;
        for (std::size_t i = 0; i < kBytes; ++i) bytes.of[i] = static_cast<std::int8_t>(from[i] + 1);
        return bytes;
    }
    static Bytes bytes(const std::int8_t* from) noexcept {
        Bytes bytes;
        for (std::size_t i = 0; i < kBytes; ++i) bytes.of[i] = from[i];
        return bytes;
    }
    static Bytes four_bytes(const std::int8_t* from) noexcept {
        Bytes bytes;
        for (std::size_t i = 0; i < kBytes; ++i) bytes.of[i] = from[i % 4];
        return bytes;
    }
    /// Rows to columns: the four bytes of a column side by side, in order of the columns.
    static void interleave(const Bytes (&rows)[kRowsTogether], Bytes (&to)[kRowsTogether]) noexcept {
        for (std::size_t i = 0; i < kBytes * kRowsTogether; ++i) to[i / kBytes].of[i % kBytes] = rows[i % 4].of[i / 4];
    }
    static void round(const float* from, const PowerOfTwo& power, std::int32_t* to) noexcept {
        for (std::size_t i = 0; i < kBytes / 4; ++i)
            to[i] = static_cast<std::int32_t>(std::lrint(power.times(from[i])));
    }
};

}  // namespace

constexpr ProductKernels kPortableProducts = {write_token<PortableLanes>, multiply_rows<PortableLanes>,
                                              multiply_rows_transposed<PortableLanes>};

}  // namespace torch_offload
