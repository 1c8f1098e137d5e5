// Linear layers whose weights are coded matrices, as torch operators. Layer autograd: may include torch.
//
// A page holds coded extents one behind the other (codec/FORMAT.md); `matrix` counts them from 0. The weight is
// W = diag(row_scale) T diag(column_scale) and is never in memory: a few rows of T at a time are decoded into the cache
// and used at once; on a GPU, for many tokens, with two bits for each value. Sums are exact (codec/fixed_point.h): a
// token's result does not depend on those it came with, nor on the number of threads, nor on the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace torch_offload {

/// y = x W^T in the dtype of x, with integers of kPlanesOfFloat bytes where x is float32, else of kPlanesOfHalf.
/// Gradients flow to x alone (coded_linear.py).
inline constexpr const char* kCodedLinearSchema =
    "coded_linear(Tensor x, Tensor page, int matrix, Tensor row_scale, Tensor column_scale) -> Tensor";
/// z = g W, its backward.
inline constexpr const char* kCodedLinearTransposedSchema =
    "coded_linear_transposed(Tensor g, Tensor page, int matrix, Tensor row_scale, Tensor column_scale) -> Tensor";
/// A matrix of -1, 0 and +1, int8 [rows, columns], to its coded extent, uint8. `classes`: the first column of each
/// class of columns of like odds. `coder`: "tun12", "rans4", "qmoe" or "smallest". `most_classes`: more than 1 sorts
/// columns into so many.
inline constexpr const char* kEncodeTernarySchema =
    "encode_ternary(Tensor values, int[] classes=[0], str coder='smallest', int most_classes=1) -> Tensor";
/// The matrix again.
inline constexpr const char* kDecodeTernarySchema = "decode_ternary(Tensor page, int matrix=0) -> Tensor";
/// One line of int64 for each extent of a page, all checked: offset, size, coded bytes, rows, columns, classes, and how
/// many tiles are of TUN12, of RANS4 and of QMoE.
inline constexpr const char* kCodedExtentsSchema = "coded_extents(Tensor page) -> Tensor";
/// How many values of a matrix are zero. All of it is decoded, a few rows at a time.
inline constexpr const char* kCountZerosSchema = "count_zeros(Tensor page, int matrix) -> int";

/// Kernels for the CPU.
/// `x`: float32, bfloat16 or float16 [..., columns]. `g`: the same [..., rows]. `page`: uint8, contiguous, one
/// dimension. `row_scale`: any of these types, [rows]. `column_scale`: [columns].
/// Throws: c10::Error for a type or a shape that does not fit; CorruptPage, as Python's PageCorruptError, unless the
///         extent is, to the byte, what was written.
/// A token that is not finite has results that are all not-a-number.
/// Threads: any. They share torch's pool, tile by tile.
at::Tensor coded_linear(const at::Tensor& x, const at::Tensor& page, std::int64_t matrix, const at::Tensor& row_scale,
                        const at::Tensor& column_scale);
at::Tensor coded_linear_transposed(const at::Tensor& g, const at::Tensor& page, std::int64_t matrix,
                                   const at::Tensor& row_scale, const at::Tensor& column_scale);
at::Tensor encode_ternary(const at::Tensor& values, at::IntArrayRef classes, c10::string_view coder,
                          std::int64_t most_classes);
at::Tensor decode_ternary(const at::Tensor& page, std::int64_t matrix);
at::Tensor coded_extents(const at::Tensor& page);
std::int64_t count_zeros(const at::Tensor& page, std::int64_t matrix);

/// Kernels for CUDA: the same of tensors on one GPU, in a CUDA build only. Pages are of TUN12 and RANS4.
/// Sums have the same bits.
/// Queued on the current stream. The host waits when it first meets a page, and then never (opened_pages.h has what is
/// asked of pages); so a page that is used in a CUDA graph has been used before. For a page that is an inference tensor
/// the host waits each time.
/// Throws: as the CPU's; OffloadError if a launch is refused.
at::Tensor coded_linear_cuda(const at::Tensor& x, const at::Tensor& page, std::int64_t matrix,
                             const at::Tensor& row_scale, const at::Tensor& column_scale);
at::Tensor coded_linear_transposed_cuda(const at::Tensor& g, const at::Tensor& page, std::int64_t matrix,
                                        const at::Tensor& row_scale, const at::Tensor& column_scale);
at::Tensor decode_ternary_cuda(const at::Tensor& page, std::int64_t matrix);

}  // namespace torch_offload
