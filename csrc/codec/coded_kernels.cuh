// Kernels for CUDA over coded matrices, queued on a stream. Layer codec; for sources of the CUDA build only.
//
// Pre, for all: pointers are to memory of the current device, valid until the stream comes by. Throws: OffloadError if
// a launch is refused. Threads: any; nothing here waits for the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "codec/kernel_matrix.h"
#include "codec/mma_warp.h"
#include "codec/product_warp.h"

namespace torch_offload {

/// Tokens of a group, and how many groups: all there are in as few floats as possible, at most kMaxGroupTokens at
/// once. A token's sums do not depend on the group it is in.
struct TokenGroups {
    std::uint32_t group_tokens = 1;  // 1, 2, 4 or 8
    std::uint32_t count = 0;
};
inline TokenGroups groups_of(std::uint32_t tokens) noexcept {
    std::uint32_t group_tokens = 1;
    while (group_tokens < tokens && group_tokens < kMaxGroupTokens) group_tokens *= 2;
    return {group_tokens, (tokens + group_tokens - 1) / group_tokens};
}

/// Panels of all groups, [groups, from.width, group_tokens]: values times their scale. What has a matrix's columns,
/// here and below, is told its order (KernelMatrix).
void launch_panels(const ScaledTokens& from, const TokenGroups& groups, float* panels, cudaStream_t stream);

/// y = T x for one group, from codewords: T is never in memory. Order of the sums and what it means for infinities:
/// tun12_product_warp.h. Pre: all tiles are of TUN12; `y` has at most group_tokens tokens.
void launch_codeword_product(const KernelMatrix& matrix, const float* panel, std::uint32_t group_tokens,
                             const ScaledSums& y, cudaStream_t stream);

/// T, for kernels that use it more than once: the rows of tiles that have the coder. `to`: of all rows.
void launch_tun12_decode(const KernelMatrix& matrix, const QuadRows& to, cudaStream_t stream);
void launch_rans4_decode(const KernelMatrix& matrix, const QuadRows& to, cudaStream_t stream);
/// One byte for each value, columns in their own order. `to`: [rows, columns].
void launch_expand(const KernelMatrix& matrix, const QuadRows& from, std::int8_t* to, cudaStream_t stream);

/// y = T x and z = T^T g with the sums of product.h. `panels`: of x, [groups, columns, group_tokens]; of g, with rows.
void launch_product(const KernelMatrix& matrix, const QuadRows& rows, const float* panels, const TokenGroups& groups,
                    const ScaledSums& y, cudaStream_t stream);
void launch_transposed_product(const KernelMatrix& matrix, const QuadRows& rows, const float* panels,
                               const TokenGroups& groups, const ScaledSums& z, cudaStream_t stream);

/// Tokens up to the next count that launch_mma_product takes.
std::uint32_t padded_mma_tokens(std::uint32_t tokens) noexcept;
/// `to`: [padded_mma_tokens(from.tokens), to.stride], all of it.
void launch_split(const ScaledTokens& from, const SplitPanel& to, cudaStream_t stream);
/// y = T x on tensor cores; mma_warp.h says how near. Columns are added in one order for any count of tokens.
void launch_mma_product(const KernelMatrix& matrix, const QuadRows& rows, const SplitPanel& panel, const ScaledSums& y,
                        cudaStream_t stream);

}  // namespace torch_offload
