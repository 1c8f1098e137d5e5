// What blocks of threads share that multiply planes of tokens: the tensor cores' instruction, and how sums leave a
// block. Layer codec, for .cu sources only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "base/launch_check.cuh"
#include "codec/coded_kernels.cuh"

namespace torch_offload {

inline std::uint32_t quotient_up(std::size_t count, std::size_t by) {
    return static_cast<std::uint32_t>((count + by - 1) / by);
}

struct TensorWarp : CudaWarp {
    template <std::uint32_t kTiles, std::uint32_t kPlaneTiles>
    __device__ void multiply_add(const PerLane<RowsOperand>& rows, const PerLane<PlaneTiles<kPlaneTiles>>& planes,
                                 unsigned half, PerLane<IntegerSums<kTiles, kPlaneTiles>>& sums, std::uint32_t tile,
                                 std::uint32_t plane_tile) const {
        const std::uint32_t (&a)[4] = rows.value.of;
        const std::uint32_t (&b)[4] = planes.value.of[plane_tile].of;
        std::int32_t (&c)[4] = sums.value.of[tile][plane_tile];
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[2 * half]), "r"(b[2 * half + 1]));
    }
};

/// A kernel that was launched beside the one before it waits for what that one writes.
__device__ inline void wait_for_former_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/// The next kernel may begin with what does not need this one.
__device__ inline void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Adds blocks [begin, end) of 64 values: `load(block)` gives a lane's BlockOperands. None are brought ahead: on an
/// H100 more warps, for which there are registers then, hide more of the time that takes.
template <std::uint32_t kPlaneTiles, typename Load>
__device__ void add_blocks(std::uint32_t begin, std::uint32_t end, Load load,
                           CudaWarp::PerLane<IntegerSums<kWarpRowTiles, kPlaneTiles>>& sums) {
#pragma unroll 1
    for (std::uint32_t block = begin; block < end; ++block) {
        const CudaWarp::PerLane<BlockOperands<kPlaneTiles>> operands{load(block)};
        add_rows<kPlaneTiles>(TensorWarp{}, operands, sums);
    }
}

template <TokenType kType>
__device__ float loaded(const ScaledTokens& from, std::size_t at) {
    if constexpr (kType == TokenType::bfloat16) {
        return __bfloat162float(static_cast<const __nv_bfloat16*>(from.values)[at]);
    } else if constexpr (kType == TokenType::float16) {
        return __half2float(static_cast<const __half*>(from.values)[at]);
    } else {
        return static_cast<const float*>(from.values)[at];
    }
}
__device__ inline void store(const ScaledSums& to, std::size_t at, float value) {
    if (to.type == TokenType::bfloat16) {
        static_cast<__nv_bfloat16*>(to.values)[at] = __float2bfloat16_rn(value);
    } else if (to.type == TokenType::float16) {
        static_cast<__half*>(to.values)[at] = __float2half_rn(value);
    } else {
        static_cast<float*>(to.values)[at] = value;
    }
}

/// Where the sums of a product go.
struct SumsTarget {
    ScaledSums to;
    const std::uint32_t* most_bits;
    std::uint32_t planes;
    PartialSums partial;

    __device__ bool has(std::uint32_t token, std::uint32_t position) const {
        return token < to.tokens && position < to.width;
    }
    __device__ void write(std::uint32_t token, std::uint32_t position, std::int64_t sum) const {
        const std::size_t at = to.value_at(position);
        const FixedPoint fixed(most_bits[token], planes);
        store(to, std::size_t{token} * to.width + at, fixed.of_sum(sum) * to.scale[at]);
    }
    /// What one block has of a sum. Others may have more.
    __device__ void add(std::uint32_t token, std::uint32_t position, std::int64_t sum) const {
        if (!has(token, position)) return;
        if (partial.slices == 1) return write(token, position, sum);
        atomicAdd(partial.sums + std::size_t{token} * to.width + position, static_cast<unsigned long long>(sum));
    }
    /// All threads of a block come by when they have added; the last of `blocks` to do so writes `positions` of
    /// `tokens`.
    __device__ void finish(std::uint32_t counter, std::uint32_t blocks, std::uint32_t first_token, std::uint32_t tokens,
                           std::uint32_t first_position, std::uint32_t positions) const {
        if (partial.slices == 1) return;
        __shared__ bool is_last;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) is_last = atomicAdd(partial.counters + counter, 1U) + 1 == blocks;
        __syncthreads();
        if (!is_last) return;
        __threadfence();
        for (std::uint32_t i = threadIdx.x; i < tokens * positions; i += blockDim.x) {
            const std::uint32_t token = first_token + i / positions;
            const std::uint32_t position = first_position + i % positions;
            if (!has(token, position)) continue;
            write(token, position,
                  static_cast<std::int64_t>(__ldcg(partial.sums + std::size_t{token} * to.width + position)));
        }
    }
};

template <std::uint32_t kPlaneCount, std::uint32_t kGroupCount>
struct ProductShape {
    static constexpr std::uint32_t kPlanes = kPlaneCount;
    static constexpr std::uint32_t kGroups = kGroupCount;  // side by side
};
/// Calls `use` with the ProductShape of some planes: two groups of float32 tokens would not fit a thread's registers.
template <typename Use>
void with_shape_of(const PlaneBlocks& tokens, Use use) {
    if (tokens.planes == kPlanesOfFloat) return use(ProductShape<kPlanesOfFloat, 1>{});
    tokens.groups == 1 ? use(ProductShape<kPlanesOfHalf, 1>{}) : use(ProductShape<kPlanesOfHalf, kPairedGroups>{});
}

}  // namespace torch_offload
