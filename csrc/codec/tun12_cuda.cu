// TUN12 on CUDA. A lane decodes 256 columns of a row, with the words of the class in shared memory; a block has 32 rows
// of up to 4096 columns, or 64 of up to 2048, and multiplies them by planes of tokens before they leave it. Read are
// the codewords, once, and per block the words of each class that it meets: 36 KiB, or 68 KiB of long ones.
#include <cuda_pipeline.h>

#include <array>
#include <cstdint>
#include <mutex>
#include <type_traits>

#include "codec/product_blocks.cuh"
#include "codec/tun12_slices.h"

namespace torch_offload {
namespace {

constexpr std::size_t kKnownDevices = 64;
constexpr std::uint32_t kSliceBlocks = kSliceColumns / kBlockValues;
constexpr std::uint32_t kWarps = 16;  // of a block; each has a slice of 32 rows
constexpr unsigned kThreads = kWarps * kWarpLanes;
constexpr std::uint32_t kMaxRowTiles = 2;  // of 32 rows, of a block
/// From one word of all rows to the next: lanes that read four words of eight rows meet 32 banks.
constexpr std::uint32_t kRowStride = kWarpRows + 8;
static_assert(kWarpRows == kWarpLanes);

/// What a block has in shared memory, before the words of a class.
struct BlockRoom {
    std::uint32_t rows[kWarps][kRoomWords][kRowStride];
    std::uint32_t slots[kWarps][kSlotWords][kWarpLanes];
    /// The processor adds 32 bits there at once, 64 only in turn.
    std::int32_t sums[kPlanesOfHalf][kPairedGroups * kGroupTokens][kMaxRowTiles * kWarpRows];
};
static_assert(sizeof(BlockRoom) % sizeof(uint4) == 0 && word_table_bytes(false) % sizeof(uint4) == 0);
static_assert(kPlanesOfFloat * kGroupTokens <= kPlanesOfHalf * kPairedGroups * kGroupTokens);

__device__ BlockRoom& block_room() {
    extern __shared__ uint4 shared[];
    return *reinterpret_cast<BlockRoom*>(shared);
}

/// How the warps of a block share its rows and columns: slices of so many columns for each tile of rows.
struct BlockShape {
    std::uint32_t row_tiles;

    __host__ __device__ std::uint32_t slices() const { return kWarps / row_tiles; }
    __host__ __device__ std::uint32_t rows() const { return row_tiles * kWarpRows; }
    __host__ __device__ std::uint32_t columns() const { return slices() * kSliceColumns; }
    __device__ std::uint32_t own_slice() const { return blockIdx.y * slices() + threadIdx.x / kWarpLanes % slices(); }
    /// The first row of the warp's, counted from the block's.
    __device__ std::uint32_t own_row() const { return threadIdx.x / kWarpLanes / slices() * kWarpRows; }
};

/// Begins to bring the words of a class to shared memory. All threads of a block come by together, here and below.
__device__ void begin_words(const KernelClass& one) {
    auto* const to = reinterpret_cast<uint4*>(&block_room() + 1);
    const auto* const from = reinterpret_cast<const uint4*>(one.words);
    for (std::size_t i = threadIdx.x; i < word_table_bytes(one.is_wide) / sizeof(uint4); i += kThreads) {
        __pipeline_memcpy_async(to + i, from + i, sizeof(uint4));
    }
    __pipeline_commit();
}
__device__ const std::uint64_t* brought_words() {
    __pipeline_wait_prior(0);
    __syncthreads();
    return reinterpret_cast<const std::uint64_t*>(&block_room() + 1);
}

/// Whether a codeword of the class may have columns from `begin` on, and before `end`.
__device__ bool may_meet(const KernelMatrix& matrix, std::uint32_t index, std::uint32_t begin, std::uint32_t end) {
    const std::uint32_t first = index > 0 ? matrix.classes[index - 1].end_column : 0;
    return first < end && begin < matrix.classes[index].end_column + kSkipUnit;
}

/// Words are read where they are if a processor has no room for them.
template <bool kIsStaged>
__device__ const std::uint64_t* words_of(const KernelClass& one) {
    return kIsStaged ? brought_words() : one.words;
}

/// Decodes a slice of each thread's row to the warp's block_room().rows. Returns whether there is such a row of TUN12.
template <bool kIsStaged>
__device__ bool decode_slice(const KernelMatrix& matrix, const BlockShape& shape) {
    const std::uint32_t block_begin = blockIdx.y * shape.columns();
    const std::uint32_t block_end = min(block_begin + shape.columns(), matrix.columns);
    const std::uint32_t begin = min(shape.own_slice() * kSliceColumns, matrix.columns);
    const std::uint32_t end = min(begin + kSliceColumns, matrix.columns);
    const unsigned warp = threadIdx.x / kWarpLanes;
    const unsigned lane = threadIdx.x % kWarpLanes;
    std::uint32_t index = 0;
    while (!may_meet(matrix, index, block_begin, block_end)) ++index;
    if (kIsStaged) begin_words(matrix.classes[index]);
    const std::uint32_t row = blockIdx.x * shape.rows() + shape.own_row() + lane;
    const SliceStart start = SliceStart::of(matrix, row, begin < end ? shape.own_slice() : 0);
    CodewordReader reader(matrix, start, &block_room().slots[warp][0][lane]);
    SliceWriter writer(&block_room().rows[warp][0][lane], kRowStride, start.skipped);
    std::uint32_t column = start.is_there && begin < end ? begin - start.skipped : end;
    column = take_class(matrix, index, words_of<kIsStaged>(matrix.classes[index]), column, end, reader, writer);
    while (++index < matrix.class_count && may_meet(matrix, index, block_begin, block_end)) {
        __syncthreads();
        if (kIsStaged) begin_words(matrix.classes[index]);
        column = take_class(matrix, index, words_of<kIsStaged>(matrix.classes[index]), column, end, reader, writer);
    }
    writer.finish(end - begin);
    __syncwarp();
    return start.is_there;
}

template <typename Shape, bool kIsStaged>
__global__ void __launch_bounds__(kThreads, 1)
    product_kernel(const __grid_constant__ KernelMatrix matrix, const PlaneBlocks x, const BlockShape shape,
                   const SumsTarget y) {
    constexpr std::uint32_t kPlanes = Shape::kPlanes;
    constexpr std::uint32_t kPlaneTiles = Shape::kGroups * kPlanes;
    constexpr std::uint32_t kTokens = Shape::kGroups * kGroupTokens;
    decode_slice<kIsStaged>(matrix, shape);
    wait_for_former_kernel();
    auto* const sums = reinterpret_cast<std::int32_t (*)[kTokens][kMaxRowTiles * kWarpRows]>(block_room().sums);
    const unsigned lane = threadIdx.x % kWarpLanes;
    const std::uint32_t begin = min(shape.own_slice() * kSliceBlocks, x.blocks);
    const std::uint32_t end = min(begin + kSliceBlocks, x.blocks);
    const auto* const rows = block_room().rows[threadIdx.x / kWarpLanes] + kGuardWords;
    for (std::uint32_t first_token = 0; first_token < y.to.tokens; first_token += kTokens) {
        for (unsigned i = threadIdx.x; i < kPlanes * kTokens * kMaxRowTiles * kWarpRows; i += kThreads) {
            (&sums[0][0][0])[i] = 0;
        }
        __syncthreads();
        const std::byte* const planes = x.bytes + x.offset_of(first_token / kGroupTokens, 0, 0);
        CudaWarp::PerLane<IntegerSums<kWarpRowTiles, kPlaneTiles>> own;
        const auto load = [&](std::uint32_t block) {
            const auto word_at = [&](std::uint32_t row, std::uint32_t word) {
                return rows[(block - begin) * kBlockWords + word][row];
            };
            return BlockOperands<kPlaneTiles>{
                RowWords::load(word_at, lane),
                PlaneTiles<kPlaneTiles>::load(planes + block * kBlockBytes, x.blocks * kBlockBytes, lane, kPlanes,
                                              y.to.tokens - first_token)};
        };
        add_blocks<kPlaneTiles>(begin, end, load, own);
        for_row_sums<kPlanes>(lane, own.value, [&](std::uint32_t row, std::uint32_t token, const auto& all) {
#pragma unroll
            for (std::uint32_t i = 0; i < kPlanes; ++i) atomicAdd(&sums[i][token][shape.own_row() + row], all[i]);
        });
        __syncthreads();
        for (std::uint32_t i = threadIdx.x; i < kTokens * shape.rows(); i += kThreads) {
            const std::uint32_t token = i / shape.rows();
            const std::uint32_t row = i % shape.rows();
            std::int32_t all[kPlanes];
#pragma unroll
            for (std::uint32_t plane = 0; plane < kPlanes; ++plane) all[plane] = sums[plane][token][row];
            y.add(first_token + token, blockIdx.x * shape.rows() + row, joined(all));
        }
        __syncthreads();
    }
    y.finish(blockIdx.x, gridDim.y, 0, y.to.tokens, blockIdx.x * shape.rows(), shape.rows());
}

template <bool kIsStaged>
__global__ void __launch_bounds__(kThreads, 1)
    decode_kernel(const __grid_constant__ KernelMatrix matrix, const BlockShape shape, const QuadRows to) {
    const std::uint32_t rows_there = __ballot_sync(~0U, decode_slice<kIsStaged>(matrix, shape));
    const std::uint32_t first_row = blockIdx.x * shape.rows() + shape.own_row();
    const std::size_t first_word = std::size_t{shape.own_slice()} * kSliceWords;
    const auto* const rows = block_room().rows[threadIdx.x / kWarpLanes] + kGuardWords;
    for (std::uint32_t i = threadIdx.x % kWarpLanes; i < kWarpRows * kSliceWords; i += kWarpLanes) {
        const std::uint32_t row = i / kSliceWords;
        const std::uint32_t word = i % kSliceWords;
        if ((rows_there >> row & 1) == 0 || first_word + word >= to.stride) continue;
        to.words[(std::size_t{first_row} + row) * to.stride + first_word + word] = rows[word][row];
    }
}

std::size_t staged_bytes(const KernelMatrix& matrix) {
    bool is_wide = false;
    for (const KernelClass& one : matrix.classes) is_wide = is_wide || one.is_wide;
    return sizeof(BlockRoom) + word_table_bytes(is_wide);
}

constexpr std::size_t kOwnBytes = 64;  // of shared memory, that kernels have beside what they ask for: more than enough

int current_device() {
    int device = 0;
    check_cuda(cudaGetDevice(&device), "asking for the current device");
    return device;
}

/// What the current device can do for the kernels here; asked for once.
struct DeviceTraits {
    std::size_t shared_bytes = 0;  // that a kernel may ask for
    /// Kernels can wait for the one before: on compute capability 9.0 and up, if what runs there was compiled for it.
    bool can_wait = false;

    static DeviceTraits of(int device) {
        int shared_bytes = 0;
        check_cuda(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                   "asking for its shared memory");
        cudaFuncAttributes attributes{};
        check_cuda(cudaFuncGetAttributes(&attributes, product_kernel<ProductShape<kPlanesOfHalf, 1>, true>),
                   "asking what a kernel was compiled for");
        return {static_cast<std::size_t>(shared_bytes) - kOwnBytes, attributes.ptxVersion >= 90};
    }
    static DeviceTraits current() {
        static std::array<std::once_flag, kKnownDevices> flags;
        static std::array<DeviceTraits, kKnownDevices> known;
        const int device = current_device();
        const auto index = static_cast<std::size_t>(device);
        if (index >= kKnownDevices) return of(device);
        std::call_once(flags[index], [&] { known[index] = of(device); });
        return known[index];
    }
};

/// What a kernel may ask for belongs to it and the device, not to a launch: it is always the most, said once.
template <auto kKernel>
void allow_shared_memory() {
    static std::array<std::once_flag, kKnownDevices> flags;
    const auto allow = [] {
        const auto most_bytes = static_cast<int>(DeviceTraits::current().shared_bytes);
        check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_bytes),
                   "asking for shared memory for the words of TUN12");
    };
    const auto index = static_cast<std::size_t>(current_device());
    if (index >= kKnownDevices) return allow();
    std::call_once(flags[index], allow);
}

/// How blocks share a matrix: as few of them side by side as hold its columns.
struct MatrixShape {
    BlockShape block;
    std::uint32_t row_blocks;
    std::uint32_t column_blocks;

    explicit MatrixShape(const KernelMatrix& matrix)
        : block{matrix.columns > kWarps / kMaxRowTiles * kSliceColumns ? 1 : kMaxRowTiles},
          row_blocks(quotient_up(matrix.rows, block.rows())),
          column_blocks(quotient_up(matrix.columns, block.columns())) {}
};

/// A launch that `begins_early` does so beside the kernel queued before, for which it waits.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), const MatrixShape& shape, std::size_t shared_bytes, bool begins_early,
            cudaStream_t stream, const Arguments&... arguments) {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(shape.row_blocks, shape.column_blocks, 1);
    config.blockDim = dim3(kThreads, 1, 1);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = begins_early ? 1 : 0;
    check_cuda(cudaLaunchKernelEx(&config, kernel, arguments...), "launching a kernel of TUN12");
}

/// Calls `use` with whether words are staged, as a constant, and the shared memory that takes.
template <typename Use>
void with_staging(const KernelMatrix& matrix, Use use) {
    const std::size_t bytes = staged_bytes(matrix);
    if (bytes <= DeviceTraits::current().shared_bytes) return use(std::true_type{}, bytes);
    use(std::false_type{}, sizeof(BlockRoom));
}

}  // namespace

PartialSums codeword_product_sums(const KernelMatrix& matrix) {
    const MatrixShape shape(matrix);
    return {.counter_count = shape.row_blocks, .slices = shape.column_blocks};
}

void launch_codeword_product(const KernelMatrix& matrix, const PlaneBlocks& x, const PartialSums& partial,
                             const ScaledSums& y, cudaStream_t stream) {
    const SumsTarget target{y, x.most_bits, x.planes, partial};
    const bool can_wait = DeviceTraits::current().can_wait;
    const MatrixShape shape(matrix);
    with_staging(matrix, [&](auto is_staged, std::size_t shared_bytes) {
        with_shape_of(x, [&](auto product) {
            constexpr auto kKernel = &product_kernel<decltype(product), decltype(is_staged)::value>;
            allow_shared_memory<kKernel>();
            launch(kKernel, shape, shared_bytes, can_wait, stream, matrix, x, shape.block, target);
        });
    });
}

void launch_tun12_decode(const KernelMatrix& matrix, const QuadRows& to, cudaStream_t stream) {
    const MatrixShape shape(matrix);
    with_staging(matrix, [&](auto is_staged, std::size_t shared_bytes) {
        constexpr auto kKernel = &decode_kernel<decltype(is_staged)::value>;
        allow_shared_memory<kKernel>();
        launch(kKernel, shape, shared_bytes, false, stream, matrix, shape.block, to);
    });
}

}  // namespace torch_offload
