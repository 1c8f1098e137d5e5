// A team of threads that works on one piece: a block of CUDA threads, or a loop on the processor that stands for one.
// What a kernel does is written once, as phases that a team runs, and tested where there is no GPU. Layer optim,
// without torch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/host_device.h"

namespace torch_offload {

inline constexpr std::size_t kTeamLanes = 256;
inline constexpr std::size_t kGroup = 8;  // neighbouring elements that one lane loads at once: 16 bytes of bf16

#ifdef __CUDACC__
/// The threads of a block. All of them must come by.
struct CudaTeam {
    /// Runs `body(lane)` on every lane; what one wrote all see afterwards.
    template <typename Body>
    __device__ void each(Body body) const {
        body(threadIdx.x);
        __syncthreads();
    }
};
#endif

/// Runs the lanes of a phase one after the other. Lanes of one phase must not depend on each other, so that any order
/// has the same result; `stride`, which is odd, chooses one.
struct HostTeam {
    std::size_t stride = 1;

    template <typename Body>
    void each(Body body) const {
        for (std::size_t i = 0; i < kTeamLanes; ++i) body(i * stride % kTeamLanes);
    }
};

/// Joins `values` [kTeamLanes] by halves into the first: 0 with 128, 1 with 129, ...; then 0 with 64.
template <typename Team, typename Value, typename Join>
OFFLOAD_DEVICE inline void join_by_halves(const Team& team, Value* values, Join join) {
    for (std::size_t half = kTeamLanes / 2; half > 0; half /= 2) {
        team.each([&](std::size_t lane) {
            if (lane < half) values[lane] = join(values[lane], values[lane + half]);
        });
    }
}

/// Copies a group in transfers of 16 bytes (8 where its elements are bytes). Pre: both ends are aligned to that.
template <typename T>
OFFLOAD_DEVICE inline void copy_group(const T* from, T* to) noexcept {
#ifdef __CUDA_ARCH__
    if constexpr (sizeof(T) == 1) {
        *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
    } else {
        for (std::size_t i = 0; i < kGroup * sizeof(T) / sizeof(uint4); ++i) {
            reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
        }
    }
#else
    __builtin_memcpy(to, from, kGroup * sizeof(T));
#endif
}

/// The first `count` elements of a group; the others are zero.
template <typename T>
OFFLOAD_DEVICE inline void load_group(const T* from, std::size_t count, bool is_aligned, T (&to)[kGroup]) noexcept {
    if (is_aligned && count == kGroup) return copy_group(from, to);
    for (std::size_t i = 0; i < kGroup; ++i) to[i] = i < count ? from[i] : T{};
}

template <typename T>
OFFLOAD_DEVICE inline void store_group(const T (&from)[kGroup], std::size_t count, bool is_aligned, T* to) noexcept {
    if (is_aligned && count == kGroup) return copy_group(from, to);
    for (std::size_t i = 0; i < kGroup; ++i) {
        if (i < count) to[i] = from[i];
    }
}

/// How many elements of a group that begins at `begin` there are.
OFFLOAD_HOST_DEVICE constexpr std::size_t group_count(std::size_t begin, std::size_t count) noexcept {
    if (begin >= count) return 0;
    return count - begin < kGroup ? count - begin : kGroup;
}

}  // namespace torch_offload
