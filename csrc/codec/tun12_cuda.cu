// TUN12 on CUDA: a warp decodes two rows at a time, with the words of the class in shared memory. Read are the
// codewords, once, and per block the words of each class (32 KiB, or 64 KiB of long ones), which stay there while one
// class is all there is.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#include "base/launch_check.cuh"
#include "codec/coded_kernels.cuh"
#include "codec/tun12_decode_warp.h"
#include "codec/tun12_product_warp.h"

namespace torch_offload {
namespace {

constexpr unsigned kBlockWarps = 8;
constexpr unsigned kBlockThreads = kBlockWarps * kWarpLanes;
constexpr std::uint32_t kBlockRows = kBlockWarps * kRowsOfWarp;
constexpr std::uint32_t kNoClass = ~0U;
constexpr std::size_t kCodewordCount = 4096;
constexpr std::size_t kMaxStagedBytes = kCodewordCount * sizeof(SignedWord<std::uint64_t>);  // of long words
constexpr std::size_t kKnownDevices = 64;                                                    // whose occupancy is kept

/// The words of one class in shared memory. All threads of a block come by together.
class StagedWords {
public:
    __device__ explicit StagedWords(uint4* to) : to_(to) {}

    __device__ const std::byte* of(const KernelMatrix& matrix, std::uint32_t index) {
        if (index == staged_) return reinterpret_cast<const std::byte*>(to_);
        const KernelClass& one = matrix.classes[index];
        const auto* const from = reinterpret_cast<const uint4*>(one.words);
        __syncthreads();
        for (std::size_t i = threadIdx.x; i < kCodewordCount * one.word_bytes / sizeof(uint4); i += kBlockThreads) {
            to_[i] = from[i];
        }
        __syncthreads();
        staged_ = index;
        return reinterpret_cast<const std::byte*>(to_);
    }

private:
    uint4* to_;
    std::uint32_t staged_ = kNoClass;
};

/// Clears what each warp has for itself. Pre: whole words.
template <typename Shared>
__device__ Shared& cleared(Shared (&all)[kBlockWarps]) {
    Shared& own = all[threadIdx.x / kWarpLanes];
    auto* const words = reinterpret_cast<std::uint32_t*>(&own);
    for (std::size_t i = threadIdx.x % kWarpLanes; i < sizeof(Shared) / sizeof(std::uint32_t); i += kWarpLanes) {
        words[i] = 0;
    }
    __syncwarp();
    return own;
}

/// Runs `use(first_row, cursors)` for the rows of each warp, all warps of a block as often.
template <typename Use>
__device__ void for_row_pairs(const KernelMatrix& matrix, Use use) {
    for (std::uint64_t row = blockIdx.x * kBlockRows; row < matrix.rows; row += gridDim.x * kBlockRows) {
        const auto first = static_cast<std::uint32_t>(row) + threadIdx.x / kWarpLanes * kRowsOfWarp;
        CudaWarp::PerLane<Tun12Cursor> cursors;
        cursors.value = first_cursor(matrix, first + threadIdx.x % kWarpLanes / kHalfLanes);
        use(first, cursors);
    }
}

template <unsigned kTokens>
__global__ void __launch_bounds__(kBlockThreads)
    product_kernel(const __grid_constant__ KernelMatrix matrix, const float* panel, const ScaledSums y) {
    extern __shared__ uint4 words[];
    __shared__ SumBits all_bits[kBlockWarps];
    SumBits& bits = cleared(all_bits);
    StagedWords staged(words);
    const CudaWarp warp;
    for_row_pairs(matrix, [&](std::uint32_t first_row, CudaWarp::PerLane<Tun12Cursor>& cursors) {
        CudaWarp::PerLane<TokenSums<kTokens>> sums;
        for (std::uint32_t i = 0; i < matrix.class_count; ++i) {
            add_class<kTokens>(warp, matrix, matrix.classes[i], staged.of(matrix, i), panel, cursors, bits, sums);
        }
        const unsigned lane = threadIdx.x % kWarpLanes;
        const std::uint32_t row = first_row + lane / kHalfLanes;
        for (unsigned t = 0; t < kTokens; ++t) {
            const auto sum = joined_sums(warp, CudaWarp::PerLane<float>{sums.value.of[t]});
            if (lane % kHalfLanes == 0 && row < matrix.rows) write_sum(y, t, row, sum.value);
        }
    });
}

__global__ void __launch_bounds__(kBlockThreads)
    decode_kernel(const __grid_constant__ KernelMatrix matrix, const QuadRows to) {
    extern __shared__ uint4 words[];
    __shared__ QuadWindow windows[kBlockWarps];
    QuadWindow& window = cleared(windows);
    StagedWords staged(words);
    const CudaWarp warp;
    for_row_pairs(matrix, [&](std::uint32_t first_row, CudaWarp::PerLane<Tun12Cursor>& cursors) {
        for (std::uint32_t i = 0; i < matrix.class_count; ++i) {
            write_class(warp, matrix, matrix.classes[i], staged.of(matrix, i), first_row, cursors, window, to);
        }
        fill_rows(warp, matrix, first_row, cursors, window, to);
    });
}

std::size_t most_word_bytes(const KernelMatrix& matrix) {
    std::size_t most = 0;
    for (const KernelClass& one : matrix.classes) most = std::max<std::size_t>(most, one.word_bytes);
    return most * kCodewordCount;
}

/// Blocks that the current device holds at a time with the words in shared memory. The runtime is asked once per
/// kernel, device and length of words. What a kernel may ask for belongs to the kernel and the device, not to a launch:
/// it is always the most, so that threads that launch with short and with long words leave each other alone.
template <auto kKernel>
unsigned held_blocks(std::size_t shared_bytes) {
    constexpr std::size_t kLengths = 3;  // no words, short and long ones
    static std::array<std::array<std::atomic<unsigned>, kLengths>, kKnownDevices> known{};  // 0: not asked yet
    int device = 0;
    check_cuda(cudaGetDevice(&device), "asking for the current device");
    const auto index = static_cast<std::size_t>(device);
    const std::size_t length = shared_bytes * (kLengths - 1) / kMaxStagedBytes;
    std::atomic<unsigned>* const kept = index < known.size() ? &known[index][length] : nullptr;
    if (const unsigned blocks = kept ? kept->load(std::memory_order_relaxed) : 0; blocks > 0) return blocks;
    check_cuda(
        cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kMaxStagedBytes)),
        "asking for shared memory for the words of TUN12");
    const unsigned blocks = blocks_for(kKernel, kBlockThreads, SIZE_MAX, shared_bytes);
    if (kept) kept->store(blocks, std::memory_order_relaxed);
    return blocks;
}

/// Launches as many blocks as the device holds, not more than there are rows for.
template <auto kKernel, typename... Arguments>
void launch_over_rows(const KernelMatrix& matrix, cudaStream_t stream, const Arguments&... arguments) {
    const std::size_t shared_bytes = most_word_bytes(matrix);
    const std::size_t pieces = (std::size_t{matrix.rows} + kBlockRows - 1) / kBlockRows;
    const auto blocks = static_cast<unsigned>(std::clamp<std::size_t>(pieces, 1, held_blocks<kKernel>(shared_bytes)));
    kKernel<<<blocks, kBlockThreads, shared_bytes, stream>>>(matrix, arguments...);
    check_cuda(cudaGetLastError(), "launching a kernel of TUN12");
}

}  // namespace

void launch_codeword_product(const KernelMatrix& matrix, const float* panel, std::uint32_t group_tokens,
                             const ScaledSums& y, cudaStream_t stream) {
    if (group_tokens == 1) return launch_over_rows<product_kernel<1>>(matrix, stream, panel, y);
    if (group_tokens == 2) return launch_over_rows<product_kernel<2>>(matrix, stream, panel, y);
    if (group_tokens == 4) return launch_over_rows<product_kernel<4>>(matrix, stream, panel, y);
    launch_over_rows<product_kernel<8>>(matrix, stream, panel, y);
}

void launch_tun12_decode(const KernelMatrix& matrix, const QuadRows& to, cudaStream_t stream) {
    launch_over_rows<decode_kernel>(matrix, stream, to);
}

}  // namespace torch_offload
