// A warp of CUDA threads, or a loop on the processor that stands for one. What a kernel does with a coded matrix is
// written once, as phases that a warp runs, and tested where there is no GPU. Layer codec: includes base only.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace torch_offload {

inline constexpr unsigned kWarpLanes = 32;

/// The number of the highest bit. Pre: there is one.
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
    /// The same where no lane looks at what another one writes.
    template <typename Body>
    __device__ void alone(Body body) const {
        body(threadIdx.x % kWarpLanes);
    }
    /// Bit i says what lane i says.
    template <typename Predicate>
    __device__ std::uint32_t ballot(Predicate predicate) const {
        return __ballot_sync(~0U, predicate(threadIdx.x % kWarpLanes));
    }
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
    template <typename Body>
    void alone(Body body) const {
        each(body);
    }
    template <typename Predicate>
    std::uint32_t ballot(Predicate predicate) const {
        std::uint32_t bits = 0;
        for (unsigned lane = 0; lane < kWarpLanes; ++lane) bits |= std::uint32_t{predicate(lane)} << lane;
        return bits;
    }
};

template <typename Warp, typename Value>
using PerLane = typename Warp::template PerLane<Value>;

}  // namespace torch_offload
