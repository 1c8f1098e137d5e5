// Kernels for CUDA over coded matrices, queued on a stream. Layer codec; for sources of the CUDA build only.
//
// Pre, for all: pointers are to memory of the current device, valid until the stream comes by. Throws: OffloadError if
// a launch is refused. Threads: any; nothing here waits for the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "codec/integer_products.h"
#include "codec/kernel_matrix.h"
#include "codec/plane_blocks.h"

namespace torch_offload {

/// T as two bits for each value: the rows of tiles that have the coder. `to`: of all rows.
void launch_tun12_decode(const KernelMatrix& matrix, const QuadRows& to, cudaStream_t stream);
void launch_rans4_decode(const KernelMatrix& matrix, const QuadRows& to, cudaStream_t stream);
/// One byte for each value, columns in their own order. `to`: [rows, columns].
void launch_expand(const KernelMatrix& matrix, const QuadRows& from, std::int8_t* to, cudaStream_t stream);

/// Sums that several blocks add to before one of them writes what they are worth. Without slices none are needed.
struct PartialSums {
    unsigned long long* sums = nullptr;  // [8 groups of tokens, to.width]
    std::uint32_t* counters = nullptr;   // [counter_count]
    std::uint32_t counter_count = 0;
    std::uint32_t slices = 1;  // blocks that add to one sum

    std::size_t sum_count(std::uint32_t groups, std::uint32_t width) const noexcept {
        return slices == 1 ? 0 : std::size_t{groups} * kGroupTokens * width;
    }
};

/// How a product is cut: without pointers.
PartialSums codeword_product_sums(const KernelMatrix& matrix);
PartialSums product_sums(const KernelMatrix& matrix, const PlaneBlocks& x);
PartialSums transposed_product_sums(const KernelMatrix& matrix, const PlaneBlocks& g);

/// Writes planes and most_bits of tokens, and clears the sums that are added to afterwards, of `width` for each token.
void launch_planes(const ScaledTokens& from, const PlaneBlocks& to, const PartialSums& partial, std::uint32_t width,
                   cudaStream_t stream);

/// y = T x from codewords: T is never in memory. Pre: all tiles are of TUN12, launch_planes was queued just before.
void launch_codeword_product(const KernelMatrix& matrix, const PlaneBlocks& x, const PartialSums& partial,
                             const ScaledSums& y, cudaStream_t stream);
/// y = T x and z = T^T g from decoded rows.
void launch_product(const KernelMatrix& matrix, const QuadRows& rows, const PlaneBlocks& x, const PartialSums& partial,
                    const ScaledSums& y, cudaStream_t stream);
void launch_transposed_product(const KernelMatrix& matrix, const QuadRows& rows, const PlaneBlocks& g,
                               const PartialSums& partial, const ScaledSums& z, cudaStream_t stream);

}  // namespace torch_offload
