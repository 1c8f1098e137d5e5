// What the operators over coded pages ask of their arguments, on any device. Layer autograd: may include torch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>

namespace torch_offload {

/// Throws: c10::Error, also in the other functions here, for a type or a shape that does not fit.
void check_page(const at::Tensor& page);
/// Pre: in memory of the host.
std::span<const std::byte> page_bytes(const at::Tensor& page);

/// Both scales of a weight, as floats.
struct CodedScales {
    at::Tensor rows;     // [rows]
    at::Tensor columns;  // [columns]

    CodedScales(std::size_t row_count, std::size_t column_count, const at::Tensor& row_scale,
                const at::Tensor& column_scale);
};

/// The last dimension is `width`, the others are tokens: [tokens, width], float32, bfloat16 or float16.
at::Tensor token_rows(const char* name, const at::Tensor& tensor, std::size_t width);
/// The same as floats.
at::Tensor coded_tokens(const char* name, const at::Tensor& tensor, std::size_t width);

/// The result for `from`: its sizes but for the last, its type. `tokens`: [tokens, width].
at::Tensor tokens_like(const at::Tensor& from, const at::Tensor& tokens);

}  // namespace torch_offload
