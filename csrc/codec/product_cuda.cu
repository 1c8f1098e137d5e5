// Products of decoded rows on CUDA, in the order of product.h. Of a matrix that is used for many tokens two bits for
// each weight are read per group of tokens, and the group's panel.
#include <algorithm>

#include "base/launch_check.cuh"
#include "codec/coded_kernels.cuh"

namespace torch_offload {
namespace {

constexpr unsigned kBlockThreads = 128;
constexpr unsigned kRowsOfHalf = 4;  // whose sums one lane has side by side
constexpr std::uint32_t kBlockRows = kBlockThreads / kHalfLanes * kRowsOfHalf;
constexpr std::uint32_t kBlockColumns = 32;  // of the transposed product, with so many tiles side by side
constexpr std::uint32_t kBlockTiles = 8;
constexpr std::uint32_t kMaxGridGroups = 65535;

template <unsigned kTokens>
__global__ void __launch_bounds__(kBlockThreads)
    panels_kernel(const ScaledTokens from, std::size_t count, float* panels) {
    const std::size_t step = std::size_t{gridDim.x} * kBlockThreads;
    for (std::size_t i = std::size_t{blockIdx.x} * kBlockThreads + threadIdx.x; i < count; i += step) {
        panels[i] = panel_element<kTokens>(from, i);
    }
}

template <unsigned kTokens>
__global__ void __launch_bounds__(kBlockThreads)
    product_kernel(const __grid_constant__ KernelMatrix matrix, const QuadRows rows, const float* panels,
                   std::uint32_t groups, const ScaledSums y) {
    const std::uint32_t first_row = blockIdx.x * kBlockRows + threadIdx.x / kWarpLanes * (2 * kRowsOfHalf);
    if (first_row >= matrix.rows) return;
    for (std::uint32_t group = blockIdx.y; group < groups; group += gridDim.y) {
        const float* const panel = panels + std::size_t{group} * matrix.columns * kTokens;
        multiply_rows_of_warp<kRowsOfHalf, kTokens>(CudaWarp{}, matrix, rows, first_row, panel, group * kTokens, y);
    }
}

/// A block has 32 columns. Its rows of threads each take a tile; their parts are added in order of the tiles.
template <unsigned kTokens>
__global__ void __launch_bounds__(kBlockColumns* kBlockTiles)
    transposed_kernel(const __grid_constant__ KernelMatrix matrix, const QuadRows rows, const float* panels,
                      std::uint32_t groups, const ScaledSums z) {
    __shared__ float parts[kBlockTiles][kTokens][kBlockColumns];
    const std::uint32_t column = blockIdx.x * kBlockColumns + threadIdx.x;
    const bool is_there = column < matrix.columns;
    for (std::uint32_t group = blockIdx.y; group < groups; group += gridDim.y) {
        const float* const panel = panels + std::size_t{group} * matrix.rows * kTokens;
        float sums[kTokens] = {};
        for (std::uint32_t first = 0; first < matrix.tile_count; first += kBlockTiles) {
            const std::uint32_t tile = first + threadIdx.y;
            float part[kTokens] = {};
            if (is_there && tile < matrix.tile_count) add_tile_column(matrix, rows, tile, column, panel, part);
            for (unsigned t = 0; t < kTokens; ++t) parts[threadIdx.y][t][threadIdx.x] = part[t];
            __syncthreads();
            const std::uint32_t count = min(kBlockTiles, matrix.tile_count - first);
            for (std::uint32_t i = 0; threadIdx.y == 0 && i < count; ++i) {
                for (unsigned t = 0; t < kTokens; ++t) sums[t] = sums[t] + parts[i][t][threadIdx.x];
            }
            __syncthreads();
        }
        for (unsigned t = 0; is_there && threadIdx.y == 0 && t < kTokens; ++t) {
            write_sum(z, group * kTokens + t, column, sums[t]);
        }
    }
}

__global__ void __launch_bounds__(kBlockThreads)
    expand_kernel(const QuadRows from, std::uint32_t columns, const std::uint32_t* order, std::size_t count,
                  std::int8_t* to) {
    const std::size_t step = std::size_t{gridDim.x} * kBlockThreads;
    for (std::size_t i = std::size_t{blockIdx.x} * kBlockThreads + threadIdx.x; i < count; i += step) {
        const std::size_t position = i % columns;
        const std::uint32_t word = from.words[i / columns * from.stride + position / kValuesOfWord];
        to[i - position + (order ? order[position] : position)] =
            static_cast<std::int8_t>(ternary_of(word, position % kValuesOfWord));
    }
}

template <unsigned kTokens>
struct GroupOf {
    static constexpr unsigned kSize = kTokens;
};

/// Calls `use` with the GroupOf that many tokens.
template <typename Use>
void with_group(std::uint32_t group_tokens, Use use) {
    if (group_tokens == 1) return use(GroupOf<1>{});
    if (group_tokens == 2) return use(GroupOf<2>{});
    if (group_tokens == 4) return use(GroupOf<4>{});
    use(GroupOf<8>{});
}

/// Blocks of `piece` rows or columns by the groups of tokens.
dim3 grid_of(std::uint32_t width, std::uint32_t piece, const TokenGroups& groups) {
    return {(width + piece - 1) / piece, std::min(groups.count, kMaxGridGroups), 1};
}

}  // namespace

void launch_panels(const ScaledTokens& from, const TokenGroups& groups, float* panels, cudaStream_t stream) {
    const std::size_t count = std::size_t{groups.count} * groups.group_tokens * from.width;
    with_group(groups.group_tokens, [&](auto group) {
        const auto kernel = &panels_kernel<decltype(group)::kSize>;
        const unsigned blocks = blocks_for(kernel, kBlockThreads, (count + kBlockThreads - 1) / kBlockThreads);
        kernel<<<blocks, kBlockThreads, 0, stream>>>(from, count, panels);
    });
    check_cuda(cudaGetLastError(), "launching the scaling of tokens");
}

void launch_product(const KernelMatrix& matrix, const QuadRows& rows, const float* panels, const TokenGroups& groups,
                    const ScaledSums& y, cudaStream_t stream) {
    const dim3 grid = grid_of(matrix.rows, kBlockRows, groups);
    with_group(groups.group_tokens, [&](auto group) {
        product_kernel<decltype(group)::kSize>
            <<<grid, kBlockThreads, 0, stream>>>(matrix, rows, panels, groups.count, y);
    });
    check_cuda(cudaGetLastError(), "launching a product");
}

void launch_transposed_product(const KernelMatrix& matrix, const QuadRows& rows, const float* panels,
                               const TokenGroups& groups, const ScaledSums& z, cudaStream_t stream) {
    const dim3 grid = grid_of(matrix.columns, kBlockColumns, groups);
    const dim3 block{kBlockColumns, kBlockTiles, 1};
    with_group(groups.group_tokens, [&](auto group) {
        transposed_kernel<decltype(group)::kSize><<<grid, block, 0, stream>>>(matrix, rows, panels, groups.count, z);
    });
    check_cuda(cudaGetLastError(), "launching a transposed product");
}

void launch_expand(const KernelMatrix& matrix, const QuadRows& from, std::int8_t* to, cudaStream_t stream) {
    const std::size_t count = std::size_t{matrix.rows} * matrix.columns;
    const unsigned blocks = blocks_for(expand_kernel, kBlockThreads, (count + kBlockThreads - 1) / kBlockThreads);
    expand_kernel<<<blocks, kBlockThreads, 0, stream>>>(from, matrix.columns, matrix.order, count, to);
    check_cuda(cudaGetLastError(), "launching the expansion of T");
}

}  // namespace torch_offload
