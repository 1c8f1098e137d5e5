// Tokens to planes of bytes, and their products with decoded rows, on CUDA. Of a matrix that is used for many tokens
// two bits for each weight are read per group of tokens, and the group's planes.
#include <algorithm>

#include "codec/product_blocks.cuh"

namespace torch_offload {
namespace {

constexpr unsigned kPlaneThreads = 512;
constexpr unsigned kExpandThreads = 128;
constexpr unsigned kProductWarps = 8;  // of a block
constexpr unsigned kProductThreads = kProductWarps * kWarpLanes;
constexpr std::uint32_t kBlockRows = kProductWarps * kWarpRows;
constexpr std::uint32_t kMinSliceBlocks = 8;      // of 64 values, for a slice to be worth its sums
constexpr std::uint32_t kBlocksPerProcessor = 2;  // that a GPU should have to do
constexpr std::uint32_t kMaxGridGroups = 65535;

/// The greatest of a block's numbers, for all of its threads.
__device__ std::uint32_t greatest_of_block(std::uint32_t own) {
    __shared__ std::uint32_t greatest;
    if (threadIdx.x == 0) greatest = 0;
    __syncthreads();
    own = __reduce_max_sync(~0U, own);
    if (threadIdx.x % kWarpLanes == 0) atomicMax(&greatest, own);
    __syncthreads();
    return greatest;
}

/// Sixteen values of a token, scaled; zeros behind its last.
template <TokenType kType>
__device__ void load_part(const ScaledTokens& from, std::uint32_t token, std::uint32_t part,
                          float (&values)[kLaneValues]) {
#pragma unroll
    for (std::uint32_t i = 0; i < kLaneValues; ++i) {
        const std::uint32_t position = part * kLaneValues + i;
        const std::size_t at = position < from.width ? from.value_at(position) : 0;
        const float value = loaded<kType>(from, std::size_t{token} * from.width + at) * from.scale[at];
        values[i] = position < from.width ? value : 0;
    }
}

__device__ void write_part(const PlaneBlocks& to, std::uint32_t token, std::uint32_t part, const PowerOfTwo& power,
                           const float (&values)[kLaneValues]) {
    LaneBytes bytes[kMaxPlanes];
#pragma unroll
    for (std::uint32_t i = 0; i < kLaneValues; ++i) set_planes(bytes, i, nearest(power.times(values[i])));
    const std::uint32_t lane = token % kGroupTokens * 4 + part % 4;
#pragma unroll
    for (std::uint32_t plane = 0; plane < kMaxPlanes; ++plane) {
        if (plane >= to.planes) break;
        std::byte* const block = to.bytes + to.offset_of(token / kGroupTokens, plane, part / 4);
        const std::uint32_t (&four)[4] = bytes[plane].of;
        reinterpret_cast<uint4*>(block)[lane] = make_uint4(four[0], four[1], four[2], four[3]);
    }
}

/// A block has a token. Those beyond the last one fill its group up with zeros.
template <TokenType kType>
__global__ void __launch_bounds__(kPlaneThreads)
    planes_kernel(const ScaledTokens from, const PlaneBlocks to, const PartialSums partial, std::uint32_t sum_width) {
    allow_next_kernel();
    const std::uint32_t token = blockIdx.x;
    const std::uint32_t parts = to.blocks * (kBlockValues / kLaneValues);
    float values[kLaneValues] = {};
    std::uint32_t most = 0;
    for (std::uint32_t part = threadIdx.x; token < from.tokens && part < parts; part += kPlaneThreads) {
        load_part<kType>(from, token, part, values);
#pragma unroll
        for (const float value : values) most = max(most, magnitude_bits(value));
    }
    most = greatest_of_block(most);
    if (threadIdx.x == 0) to.most_bits[token] = most;
    const FixedPoint fixed(most, to.planes);
    const PowerOfTwo power = fixed.to_integers();
    for (std::uint32_t part = threadIdx.x; part < parts; part += kPlaneThreads) {
        const bool is_any = token < from.tokens && fixed.is_finite();
        if (parts > kPlaneThreads && is_any) load_part<kType>(from, token, part, values);
#pragma unroll
        for (float& value : values) value = is_any ? value : 0;
        write_part(to, token, part, power, values);
    }
    if (partial.slices == 1) return;
    unsigned long long* const sums = partial.sums + std::size_t{token} * sum_width;
    for (std::uint32_t i = threadIdx.x; i < sum_width; i += kPlaneThreads) sums[i] = 0;
    for (std::uint32_t i = threadIdx.x; token == 0 && i < partial.counter_count; i += kPlaneThreads) {
        partial.counters[i] = 0;
    }
}

/// The blocks of 64 values that slice blockIdx.z has.
struct Slice {
    std::uint32_t begin, end;
    __device__ Slice(std::uint32_t blocks, std::uint32_t slices)
        : begin(static_cast<std::uint32_t>(std::uint64_t{blocks} * blockIdx.z / slices)),
          end(static_cast<std::uint32_t>(std::uint64_t{blocks} * (blockIdx.z + 1) / slices)) {}
};

/// A warp has 32 rows and a group of tokens or two.
template <typename Shape>
__global__ void __launch_bounds__(kProductThreads)
    product_kernel(const __grid_constant__ KernelMatrix matrix, const QuadRows rows, const PlaneBlocks x,
                   const SumsTarget y) {
    constexpr std::uint32_t kPlaneTiles = Shape::kGroups * Shape::kPlanes;
    const unsigned lane = threadIdx.x % kWarpLanes;
    const std::uint32_t block_row = blockIdx.x * kBlockRows;
    const std::uint32_t first_row = block_row + threadIdx.x / kWarpLanes * kWarpRows;
    const Slice slice(x.blocks, y.partial.slices);
    const std::size_t stride = x.blocks * kBlockBytes;
    for (std::uint32_t pair = blockIdx.y; pair * Shape::kGroups < x.groups; pair += gridDim.y) {
        const std::uint32_t group = pair * Shape::kGroups;
        const std::byte* const planes = x.bytes + x.offset_of(group, 0, 0);
        CudaWarp::PerLane<IntegerSums<kWarpRowTiles, kPlaneTiles>> sums;
        const auto load = [&](std::uint32_t block) {
            const auto word_at = [&](std::uint32_t row, std::uint32_t word) {
                const std::size_t at = (std::size_t{first_row} + row) * rows.stride + block * kBlockWords + word;
                return first_row + row < matrix.rows ? rows.words[at] : 0;
            };
            return BlockOperands<kPlaneTiles>{
                RowWords::load(word_at, lane),
                PlaneTiles<kPlaneTiles>::load(planes + block * kBlockBytes, stride, lane)};
        };
        add_blocks<kPlaneTiles>(slice.begin, slice.end, load, sums);
        for_row_sums<Shape::kPlanes>(lane, sums.value, [&](std::uint32_t row, std::uint32_t token, const auto& planes) {
            y.add(group * kGroupTokens + token, first_row + row, joined(planes));
        });
        y.finish(pair * gridDim.x + blockIdx.x, gridDim.z, group * kGroupTokens, Shape::kGroups * kGroupTokens,
                 block_row, kBlockRows);
    }
}

/// The warps of a block share 128 columns and a group of tokens, and take blocks of 64 rows in turn.
template <std::uint32_t kPlanes>
__global__ void __launch_bounds__(kProductThreads)
    transposed_kernel(const __grid_constant__ KernelMatrix matrix, const QuadRows rows, const PlaneBlocks g,
                      const SumsTarget z) {
    constexpr std::uint32_t kSums = kGroupTokens * kWarpColumns;
    __shared__ std::int32_t all[kPlanes][kSums];  // the processor adds 32 bits there at once, 64 only in turn
    const TensorWarp warp;
    const unsigned lane = threadIdx.x % kWarpLanes;
    const std::uint32_t first_column = blockIdx.x * kWarpColumns;
    const Slice slice(g.blocks, z.partial.slices);
    const std::size_t stride = g.blocks * kBlockBytes;
    for (std::uint32_t group = blockIdx.y; group < g.groups; group += gridDim.y) {
        for (unsigned i = threadIdx.x; i < kPlanes * kSums; i += kProductThreads) (&all[0][0])[i] = 0;
        __syncthreads();
        const std::byte* const planes = g.bytes + g.offset_of(group, 0, 0);
        CudaWarp::PerLane<IntegerSums<kWarpColumnTiles, kPlanes>> sums;
        for (std::uint32_t block = slice.begin + threadIdx.x / kWarpLanes; block < slice.end; block += kProductWarps) {
            const auto word_at = [&](std::uint32_t row, std::uint32_t word) {
                const std::size_t at_row = std::size_t{block} * kBlockValues + row;
                const std::size_t at_word = first_column / kValuesOfWord + word;
                return at_row < matrix.rows && at_word < rows.stride ? rows.words[at_row * rows.stride + at_word] : 0;
            };
            CudaWarp::PerLane<PlaneTiles<kPlanes>> tiles;
            tiles.value = PlaneTiles<kPlanes>::load(planes + block * kBlockBytes, stride, lane);
            add_columns<kPlanes>(warp, word_at, tiles, sums);
        }
        for_column_sums<kPlanes>(lane, sums.value, [&](std::uint32_t column, std::uint32_t token, const auto& planes) {
#pragma unroll
            for (std::uint32_t i = 0; i < kPlanes; ++i) {
                atomicAdd(&all[i][token * kWarpColumns + column], planes[i]);
            }
        });
        __syncthreads();
        for (unsigned i = threadIdx.x; i < kSums; i += kProductThreads) {
            std::int32_t sums_of_planes[kPlanes];
#pragma unroll
            for (std::uint32_t plane = 0; plane < kPlanes; ++plane) sums_of_planes[plane] = all[plane][i];
            z.add(group * kGroupTokens + i / kWarpColumns, first_column + i % kWarpColumns, joined(sums_of_planes));
        }
        z.finish(group * gridDim.x + blockIdx.x, gridDim.z, group * kGroupTokens, kGroupTokens, first_column,
                 kWarpColumns);
        __syncthreads();
    }
}

__global__ void __launch_bounds__(kExpandThreads)
    expand_kernel(const QuadRows from, std::uint32_t columns, const std::uint32_t* order, std::size_t count,
                  std::int8_t* to) {
    const std::size_t step = std::size_t{gridDim.x} * kExpandThreads;
    for (std::size_t i = std::size_t{blockIdx.x} * kExpandThreads + threadIdx.x; i < count; i += step) {
        const std::size_t position = i % columns;
        const std::uint32_t word = from.words[i / columns * from.stride + position / kValuesOfWord];
        const auto value = static_cast<std::int32_t>(word << (30 - 2 * (position % kValuesOfWord))) >> 30;
        to[i - position + (order ? order[position] : position)] = static_cast<std::int8_t>(value);
    }
}

std::uint32_t processor_count() {
    int device = 0;
    int processors = 0;
    check_cuda(cudaGetDevice(&device), "asking for the current device");
    check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
               "asking for its processors");
    return static_cast<std::uint32_t>(processors);
}

/// As many slices of `blocks` as give a GPU enough to do.
PartialSums sums_for(std::uint32_t pieces, std::uint32_t groups, std::uint32_t blocks) {
    const std::size_t there = std::size_t{pieces} * groups;
    const std::uint32_t wanted = quotient_up(kBlocksPerProcessor * processor_count(), there);
    const std::uint32_t most = std::max(1U, blocks / kMinSliceBlocks);
    return {.counter_count = static_cast<std::uint32_t>(there), .slices = std::clamp(wanted, 1U, most)};
}

}  // namespace

PartialSums product_sums(const KernelMatrix& matrix, const PlaneBlocks& x) {
    std::uint32_t pairs = 0;
    with_shape_of(x, [&](auto shape) { pairs = x.groups / decltype(shape)::kGroups; });
    return sums_for(quotient_up(matrix.rows, kBlockRows), pairs, x.blocks);
}

PartialSums transposed_product_sums(const KernelMatrix& matrix, const PlaneBlocks& g) {
    return sums_for(quotient_up(matrix.columns, kWarpColumns), g.groups, g.blocks);
}

void launch_planes(const ScaledTokens& from, const PlaneBlocks& to, const PartialSums& partial, std::uint32_t width,
                   cudaStream_t stream) {
    const auto kernel = from.type == TokenType::bfloat16  ? &planes_kernel<TokenType::bfloat16>
                        : from.type == TokenType::float16 ? &planes_kernel<TokenType::float16>
                                                          : &planes_kernel<TokenType::float32>;
    kernel<<<to.groups * kGroupTokens, kPlaneThreads, 0, stream>>>(from, to, partial, width);
    check_cuda(cudaGetLastError(), "launching the planes of tokens");
}

void launch_product(const KernelMatrix& matrix, const QuadRows& rows, const PlaneBlocks& x, const PartialSums& partial,
                    const ScaledSums& y, cudaStream_t stream) {
    const SumsTarget target{y, x.most_bits, x.planes, partial};
    with_shape_of(x, [&](auto shape) {
        using Shape = decltype(shape);
        const dim3 grid{quotient_up(matrix.rows, kBlockRows), std::min(x.groups / Shape::kGroups, kMaxGridGroups),
                        partial.slices};
        product_kernel<Shape><<<grid, kProductThreads, 0, stream>>>(matrix, rows, x, target);
    });
    check_cuda(cudaGetLastError(), "launching a product");
}

void launch_transposed_product(const KernelMatrix& matrix, const QuadRows& rows, const PlaneBlocks& g,
                               const PartialSums& partial, const ScaledSums& z, cudaStream_t stream) {
    const dim3 grid{quotient_up(matrix.columns, kWarpColumns), std::min(g.groups, kMaxGridGroups), partial.slices};
    const SumsTarget target{z, g.most_bits, g.planes, partial};
    const auto kernel =
        g.planes == kPlanesOfHalf ? &transposed_kernel<kPlanesOfHalf> : &transposed_kernel<kPlanesOfFloat>;
    kernel<<<grid, kProductThreads, 0, stream>>>(matrix, rows, g, target);
    check_cuda(cudaGetLastError(), "launching a transposed product");
}

void launch_expand(const KernelMatrix& matrix, const QuadRows& from, std::int8_t* to, cudaStream_t stream) {
    const std::size_t count = std::size_t{matrix.rows} * matrix.columns;
    const unsigned blocks = blocks_for(expand_kernel, kExpandThreads, (count + kExpandThreads - 1) / kExpandThreads);
    expand_kernel<<<blocks, kExpandThreads, 0, stream>>>(from, matrix.columns, matrix.order, count, to);
    check_cuda(cudaGetLastError(), "launching the expansion of T");
}

}  // namespace torch_offload
