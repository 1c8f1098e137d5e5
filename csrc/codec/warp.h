// A warp of CUDA threads, or a loop on the processor that stands for one. What a kernel does with a coded matrix is
// written once, as phases that a warp runs, and tested where there is no GPU. Layer codec: includes base only.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace torch_offload {

inline constexpr unsigned kWarpLanes = 32;
/// Half a warp works on a row: as many lanes as product.h has sums.
inline constexpr unsigned kHalfLanes = 16;

/// The number of the lowest bit. Pre: there is one; so below.
OFFLOAD_HOST_DEVICE inline unsigned lowest_bit(std::uint32_t bits) noexcept {
#ifdef __CUDA_ARCH__
    return static_cast<unsigned>(__ffs(static_cast<int>(bits))) - 1;
#else
    return static_cast<unsigned>(__builtin_ctz(bits));
#endif
}
OFFLOAD_HOST_DEVICE inline unsigned lowest_bit(std::uint64_t bits) noexcept {
#ifdef __CUDA_ARCH__
    return static_cast<unsigned>(__ffsll(static_cast<long long>(bits))) - 1;
#else
    return static_cast<unsigned>(__builtin_ctzll(bits));
#endif
}
OFFLOAD_HOST_DEVICE inline unsigned highest_bit(std::uint32_t bits) noexcept {
#ifdef __CUDA_ARCH__
    return 31 - static_cast<unsigned>(__clz(static_cast<int>(bits)));
#else
    return 31 - static_cast<unsigned>(__builtin_clz(bits));
#endif
}
OFFLOAD_HOST_DEVICE inline unsigned highest_bit(std::uint64_t bits) noexcept {
#ifdef __CUDA_ARCH__
    return 63 - static_cast<unsigned>(__clzll(static_cast<long long>(bits)));
#else
    return 63 - static_cast<unsigned>(__builtin_clzll(bits));
#endif
}
OFFLOAD_HOST_DEVICE inline unsigned bit_count(std::uint32_t bits) noexcept {
#ifdef __CUDA_ARCH__
    return static_cast<unsigned>(__popc(bits));
#else
    return static_cast<unsigned>(__builtin_popcount(bits));
#endif
}

/// sum + ternary * value. The product is exact, so a fused operation has the bits of two.
OFFLOAD_HOST_DEVICE inline float plus_product(float sum, float ternary, float value) noexcept {
#ifdef __CUDA_ARCH__
    return __fmaf_rn(ternary, value, sum);
#else
    return sum + ternary * value;
#endif
}

#ifdef __CUDACC__
/// The lanes of a warp. All of them must come by, with the same arguments but for what is said to be a lane's own.
struct CudaWarp {
    /// A value of each lane's own, in its register.
    template <typename Value>
    struct PerLane {
        Value value{};
        __device__ Value& operator[](unsigned) { return value; }
        __device__ const Value& operator[](unsigned) const { return value; }
    };

    /// Runs `body(lane)` on every lane; what one wrote to shared memory all see afterwards.
    template <typename Body>
    __device__ void each(Body body) const {
        body(threadIdx.x % kWarpLanes);
        __syncwarp();
    }
    /// Bit i says what lane i says.
    template <typename Predicate>
    __device__ std::uint32_t ballot(Predicate predicate) const {
        return __ballot_sync(~0U, predicate(threadIdx.x % kWarpLanes));
    }
    /// The value that lane `source(lane)` of the same half has.
    template <typename Value, typename Source>
    __device__ PerLane<Value> of_half(const PerLane<Value>& values, Source source) const {
        return {__shfl_sync(~0U, values.value, static_cast<int>(source(threadIdx.x % kWarpLanes)), kHalfLanes)};
    }
    /// Sets bits of a word in shared memory, where other lanes may be setting some as well.
    __device__ static void set_bits(std::uint32_t& word, std::uint32_t bits) { atomicOr(&word, bits); }
};
#endif

/// Runs the lanes of a phase one after the other. Lanes of one phase must not depend on each other, so that any order
/// has the same result; `stride`, which is odd, chooses one.
struct HostWarp {
    unsigned stride = 1;

    template <typename Value>
    struct PerLane {
        Value values[kWarpLanes]{};
        Value& operator[](unsigned lane) { return values[lane]; }
        const Value& operator[](unsigned lane) const { return values[lane]; }
    };

    template <typename Body>
    void each(Body body) const {
        for (unsigned i = 0; i < kWarpLanes; ++i) body(i * stride % kWarpLanes);
    }
    template <typename Predicate>
    std::uint32_t ballot(Predicate predicate) const {
        std::uint32_t bits = 0;
        for (unsigned lane = 0; lane < kWarpLanes; ++lane) bits |= std::uint32_t{predicate(lane)} << lane;
        return bits;
    }
    template <typename Value, typename Source>
    PerLane<Value> of_half(const PerLane<Value>& values, Source source) const {
        PerLane<Value> moved;
        for (unsigned lane = 0; lane < kWarpLanes; ++lane) {
            moved[lane] = values[lane / kHalfLanes * kHalfLanes + source(lane) % kHalfLanes];
        }
        return moved;
    }
    static void set_bits(std::uint32_t& word, std::uint32_t bits) { word |= bits; }
};

template <typename Warp, typename Value>
using PerLane = typename Warp::template PerLane<Value>;

/// Of each lane: the sum over the lanes of its half up to itself.
template <typename Warp>
OFFLOAD_DEVICE PerLane<Warp, std::uint32_t> prefix_sums(const Warp& warp, PerLane<Warp, std::uint32_t> sums) {
    for (unsigned distance = 1; distance < kHalfLanes; distance *= 2) {
        const auto below = warp.of_half(sums, [&](unsigned lane) { return (lane - distance) % kHalfLanes; });
        warp.each([&](unsigned lane) { sums[lane] += lane % kHalfLanes >= distance ? below[lane] : 0; });
    }
    return sums;
}

/// Joins the sums of each half as product.h says (0 with 8, ...); lane 0 of a half has the result.
template <typename Warp>
OFFLOAD_DEVICE PerLane<Warp, float> joined_sums(const Warp& warp, PerLane<Warp, float> sums) {
    for (unsigned half = kHalfLanes / 2; half > 0; half /= 2) {
        const auto above = warp.of_half(sums, [&](unsigned lane) { return (lane + half) % kHalfLanes; });
        warp.each([&](unsigned lane) { sums[lane] += above[lane]; });
    }
    return sums;
}

}  // namespace torch_offload
