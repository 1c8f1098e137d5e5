#include "autograd/coded_arguments.h"

#include <ATen/core/Formatting.h>

#include <vector>

namespace torch_offload {
namespace {

/// [count] floats.
at::Tensor scale_of(const char* name, const at::Tensor& scale, std::size_t count) {
    TORCH_CHECK_VALUE(scale.dim() == 1 && scale.numel() == static_cast<std::int64_t>(count), "coded_linear: ", name,
                      " must have ", count, " elements like the coded matrix, got sizes ", scale.sizes());
    return scale.to(at::kFloat).contiguous();
}

}  // namespace

void check_page(const at::Tensor& page) {
    TORCH_CHECK_TYPE(page.scalar_type() == at::kByte, "a coded page is uint8, got ", page.scalar_type());
    TORCH_CHECK_VALUE(page.dim() == 1 && page.is_contiguous(), "a coded page has one dimension and no gaps, got sizes ",
                      page.sizes(), " and strides ", page.strides());
}

std::span<const std::byte> page_bytes(const at::Tensor& page) {
    check_page(page);
    return {static_cast<const std::byte*>(page.const_data_ptr()), static_cast<std::size_t>(page.numel())};
}

CodedScales::CodedScales(std::size_t row_count, std::size_t column_count, const at::Tensor& row_scale,
                         const at::Tensor& column_scale)
    : rows(scale_of("row_scale", row_scale, row_count)),
      columns(scale_of("column_scale", column_scale, column_count)) {}

at::Tensor token_rows(const char* name, const at::Tensor& tensor, std::size_t width) {
    const at::ScalarType type = tensor.scalar_type();
    TORCH_CHECK_TYPE(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, "coded_linear: ", name,
                     " must be float32, bfloat16 or float16, got ", type);
    TORCH_CHECK_VALUE(tensor.dim() >= 1 && tensor.size(-1) == static_cast<std::int64_t>(width), "coded_linear: ", name,
                      " must have ", width, " elements in its last dimension, got sizes ", tensor.sizes());
    return tensor.reshape({-1, static_cast<std::int64_t>(width)}).contiguous();
}

at::Tensor coded_tokens(const char* name, const at::Tensor& tensor, std::size_t width) {
    return token_rows(name, tensor, width).to(at::kFloat);
}

at::Tensor tokens_like(const at::Tensor& from, const at::Tensor& tokens) {
    std::vector<std::int64_t> sizes = from.sizes().vec();
    sizes.back() = tokens.size(1);
    return tokens.to(from.scalar_type()).view(sizes);
}

}  // namespace torch_offload
