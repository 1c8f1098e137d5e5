// The products for any processor.
#include <cmath>
#include <cstring>

#include "codec/product_forward.h"
#include "codec/product_transposed.h"

namespace torch_offload {
namespace {

// Compilers have these for any processor.
using EightBytes [[gnu::vector_size(8), gnu::may_alias]] = std::int8_t;
using EightShorts [[gnu::vector_size(16)]] = std::int16_t;
using FourInts [[gnu::vector_size(16), gnu::may_alias, gnu::aligned(4)]] = std::int32_t;

/// Bytes are kept as 16 bits. Which four of them a sum takes, two of each half, only interleave() and four_bytes() are
/// asked to agree on.
struct PortableLanes {
    static constexpr std::size_t kBytes = 16;
    static constexpr std::size_t kPlanes = 2;
    static constexpr std::size_t kMinTokens = 2;

    struct Bytes {
        EightShorts low;
        EightShorts high;
    };
    using Sums = FourInts;

    static Sums zero() noexcept { return Sums{}; }
    static Sums load(const std::int32_t* from) noexcept { return *reinterpret_cast<const FourInts*>(from); }
    static void store(Sums lanes, std::int32_t* to) noexcept { *reinterpret_cast<FourInts*>(to) = lanes; }
    /// Two products fit 16 bits: no more than 512. Both halves of 32 bits are added, whichever comes first here.
    static Sums plus_products(Sums lanes, const Bytes& weights, const Bytes& bytes) noexcept {
        const auto twos = reinterpret_cast<FourInts>(weights.low * bytes.low + weights.high * bytes.high);
        return lanes + ((twos << 16) >> 16) + (twos >> 16);
    }
    static void join(const Sums (&lanes)[kRowsTogether], std::int32_t* to) noexcept {
        for (std::size_t i = 0; i < kRowsTogether; ++i) to[i] = lanes[i][0] + lanes[i][1] + lanes[i][2] + lanes[i][3];
    }
    static Bytes no_weights() noexcept { return {EightShorts{}, EightShorts{}}; }
    static Bytes weights(const std::int8_t* from) noexcept {
        const Bytes values = bytes(from);
        return {values.low + 1, values.high + 1};
    }
    static Bytes bytes(const std::int8_t* from) noexcept {
        EightBytes low;
        EightBytes high;
        std::memcpy(&low, from, sizeof(low));
        std::memcpy(&high, from + 8, sizeof(high));
        return {__builtin_convertvector(low, EightShorts), __builtin_convertvector(high, EightShorts)};
    }
    static Bytes four_bytes(const std::int8_t* from) noexcept {
        EightBytes eight{};
        std::memcpy(&eight, from, 4);
        const EightShorts four = __builtin_convertvector(eight, EightShorts);
        return {__builtin_shufflevector(four, four, 0, 1, 0, 1, 0, 1, 0, 1),
                __builtin_shufflevector(four, four, 2, 3, 2, 3, 2, 3, 2, 3)};
    }
    /// Two rows of a column side by side, in order of the columns; two in each half.
    static void interleave(const Bytes (&rows)[kRowsTogether], Bytes (&to)[kRowsTogether]) noexcept {
        to[0] = {first_halves(rows[0].low, rows[1].low), first_halves(rows[2].low, rows[3].low)};
        to[1] = {second_halves(rows[0].low, rows[1].low), second_halves(rows[2].low, rows[3].low)};
        to[2] = {first_halves(rows[0].high, rows[1].high), first_halves(rows[2].high, rows[3].high)};
        to[3] = {second_halves(rows[0].high, rows[1].high), second_halves(rows[2].high, rows[3].high)};
    }
    static void list(const std::int8_t* row, std::size_t count, ColumnLists& lists) noexcept {
        std::size_t plus = 0;
        std::size_t minus = 0;
        for (std::size_t i = 0; i < count; ++i) {
            lists.plus.columns[plus] = lists.minus.columns[minus] = static_cast<std::uint16_t>(i);
            plus += row[i] > 0;
            minus += row[i] < 0;
        }
        lists.plus.count = plus;
        lists.minus.count = minus;
    }
    static void round(const float* from, const PowerOfTwo& power, std::int32_t* to) noexcept {
        for (std::size_t i = 0; i < kBytes / 4; ++i) {
            to[i] = static_cast<std::int32_t>(std::lrint(power.times(from[i])));
        }
    }

private:
    static EightShorts first_halves(EightShorts first, EightShorts second) noexcept {
        return __builtin_shufflevector(first, second, 0, 8, 1, 9, 2, 10, 3, 11);
    }
    static EightShorts second_halves(EightShorts first, EightShorts second) noexcept {
        return __builtin_shufflevector(first, second, 4, 12, 5, 13, 6, 14, 7, 15);
    }
};

}  // namespace

constexpr ProductKernels kPortableProducts = {write_token<PortableLanes>, multiply_rows<PortableLanes>,
                                              multiply_rows_transposed<PortableLanes>, PortableLanes::kMinTokens};

}  // namespace torch_offload
