// Products of many tokens on tensor cores. The warps of a block share 16 rows and take blocks of 64 columns in turn;
// their sums are added in order of the warps, so a token's result does not depend on how many come with it.
#include "base/launch_check.cuh"
#include "codec/coded_kernels.cuh"

namespace torch_offload {
namespace {

constexpr unsigned kBlockWarps = 8;
constexpr unsigned kBlockThreads = kBlockWarps * kWarpLanes;
constexpr std::uint32_t kMaxTiles = 8;  // of 8 tokens that a block takes at once

struct CudaTensorWarp : CudaWarp {
    template <unsigned kTiles>
    __device__ void multiply_add(const PerLane<MmaRowsOperand>& left, const PerLane<MmaTokensOperand>& right,
                                 PerLane<MmaSums<kTiles>>& sums, unsigned tile) const {
        const std::uint32_t (&a)[4] = left.value.of;
        const std::uint32_t (&b)[2] = right.value.of;
        float (&c)[4] = sums.value.of[tile];
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
};

template <unsigned kTiles>
__global__ void __launch_bounds__(kBlockThreads)
    product_kernel(const __grid_constant__ KernelMatrix matrix, const QuadRows rows, const SplitPanel panel,
                   const ScaledSums y) {
    constexpr unsigned kTokens = kTiles * kMmaTokens;
    __shared__ float parts[kBlockWarps][kMmaRows][kTokens];
    const unsigned own = threadIdx.x / kWarpLanes;
    const std::uint32_t first_row = blockIdx.x * kMmaRows;
    const std::uint32_t first_token = blockIdx.y * kTokens;
    CudaWarp::PerLane<MmaSums<kTiles>> sums;
    for (std::uint32_t block = own; block < panel.stride / kMmaColumns; block += kBlockWarps) {
        add_mma_block<kTiles>(CudaTensorWarp{}, matrix, rows, first_row, panel, first_token, block, sums);
    }
    for_mma_sums(threadIdx.x % kWarpLanes, sums.value,
                 [&](unsigned row, unsigned token, float sum) { parts[own][row][token] = sum; });
    __syncthreads();
    for (unsigned i = threadIdx.x; i < kMmaRows * kTokens; i += kBlockThreads) {
        const unsigned row = i % kMmaRows;
        const unsigned token = i / kMmaRows;
        float sum = 0;
        for (unsigned warp = 0; warp < kBlockWarps; ++warp) sum += parts[warp][row][token];
        if (first_row + row < matrix.rows) write_sum(y, first_token + token, first_row + row, sum);
    }
}

__global__ void __launch_bounds__(kBlockThreads)
    split_kernel(const ScaledTokens from, std::size_t count, const SplitPanel to) {
    const std::size_t step = std::size_t{gridDim.x} * kBlockThreads;
    for (std::size_t i = std::size_t{blockIdx.x} * kBlockThreads + threadIdx.x; i < count; i += step) {
        const std::size_t token = i / to.stride;
        const std::size_t position = i % to.stride;
        const bool is_there = token < from.tokens && position < from.width;
        const std::size_t column = is_there ? from.value_at(position) : 0;
        write_split(to, i, is_there ? from.values[token * from.width + column] * from.scale[column] : 0);
    }
}

std::uint32_t tiles_of(std::uint32_t tokens) noexcept {
    std::uint32_t tiles = 1;
    while (tiles < kMaxTiles && tiles * kMmaTokens < tokens) tiles *= 2;
    return tiles;
}

}  // namespace

std::uint32_t padded_mma_tokens(std::uint32_t tokens) noexcept {
    const std::uint32_t piece = tiles_of(tokens) * kMmaTokens;
    return (tokens + piece - 1) / piece * piece;
}

void launch_split(const ScaledTokens& from, const SplitPanel& to, cudaStream_t stream) {
    const std::size_t count = padded_mma_tokens(from.tokens) * to.stride;
    const unsigned blocks = blocks_for(split_kernel, kBlockThreads, (count + kBlockThreads - 1) / kBlockThreads);
    split_kernel<<<blocks, kBlockThreads, 0, stream>>>(from, count, to);
    check_cuda(cudaGetLastError(), "launching the split of tokens");
}

void launch_mma_product(const KernelMatrix& matrix, const QuadRows& rows, const SplitPanel& panel, const ScaledSums& y,
                        cudaStream_t stream) {
    const std::uint32_t tiles = tiles_of(y.tokens);
    const dim3 grid{(matrix.rows + kMmaRows - 1) / kMmaRows, padded_mma_tokens(y.tokens) / (tiles * kMmaTokens), 1};
    if (tiles == 1) product_kernel<1><<<grid, kBlockThreads, 0, stream>>>(matrix, rows, panel, y);
    if (tiles == 2) product_kernel<2><<<grid, kBlockThreads, 0, stream>>>(matrix, rows, panel, y);
    if (tiles == 4) product_kernel<4><<<grid, kBlockThreads, 0, stream>>>(matrix, rows, panel, y);
    if (tiles == 8) product_kernel<8><<<grid, kBlockThreads, 0, stream>>>(matrix, rows, panel, y);
    check_cuda(cudaGetLastError(), "launching a product on tensor cores");
}

}  // namespace torch_offload
