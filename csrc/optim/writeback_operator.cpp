#include "optim/writeback_operator.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace torch_offload {
namespace {

static_assert(sizeof(WritebackSum) == 2 * sizeof(double) && std::is_standard_layout_v<WritebackSum>);

GradientType type_of(const char* name, const at::Tensor& tensor) {
    TORCH_CHECK_TYPE(tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kFloat,
                     "write_back_gradient: ", name, " must be bfloat16 or float32, got ", tensor.scalar_type());
    return tensor.scalar_type() == at::kFloat ? GradientType::f32 : GradientType::bf16;
}

WritebackArrays part(WritebackArrays arrays, std::size_t begin, std::size_t end) {
    const auto bytes_each = [](GradientType type) { return type == GradientType::bf16 ? 2 : 4; };
    arrays.count = end - begin;
    arrays.gradients = static_cast<const char*>(arrays.gradients) + begin * bytes_each(arrays.gradient_type);
    if (arrays.to) arrays.to = static_cast<char*>(arrays.to) + begin * bytes_each(arrays.to_type);
    return arrays;
}

}  // namespace

WritebackArrays checked_writeback(const at::Tensor& gradient, const std::optional<at::Tensor>& to) {
    WritebackArrays arrays;
    arrays.count = static_cast<std::size_t>(gradient.numel());
    arrays.gradient_type = type_of("gradient", gradient);
    TORCH_CHECK_VALUE(gradient.is_non_overlapping_and_dense(),
                      "write_back_gradient: a gradient must be dense in memory, ", "got sizes ", gradient.sizes(),
                      " and strides ", gradient.strides());
    arrays.gradients = gradient.const_data_ptr();
    if (!to) return arrays;
    arrays.to_type = type_of("to", *to);
    TORCH_CHECK_VALUE(
        to->device() == gradient.device() && to->sizes() == gradient.sizes() && to->strides() == gradient.strides(),
        "write_back_gradient: to must have the device, sizes ", gradient.sizes(), " and strides ", gradient.strides(),
        " of the gradient, got ", to->sizes(), " and ", to->strides(), " on ", to->device());
    arrays.to = to->mutable_data_ptr();
    return arrays;
}

at::Tensor writeback_sums(const at::Tensor& gradient, std::size_t count) {
    return at::empty({static_cast<std::int64_t>(count), 2}, gradient.options().dtype(at::kDouble));
}

std::tuple<at::Tensor, at::Tensor> writeback_numbers(const at::Tensor& sums) {
    return {sums.select(0, 0).select(0, 0).clone(), sums.view(at::kLong).select(0, 0).select(0, 1).clone()};
}

std::tuple<at::Tensor, at::Tensor> write_back_gradient(const at::Tensor& gradient,
                                                       const std::optional<at::Tensor>& to) {
    const WritebackArrays arrays = checked_writeback(gradient, to);
    const std::size_t chunks = writeback_chunks(arrays.count);
    std::vector<WritebackSum> sums(chunks);
    at::parallel_for(0, static_cast<std::int64_t>(chunks), 1, [&](std::int64_t first, std::int64_t last) {
        const std::size_t begin = static_cast<std::size_t>(first) * kWritebackChunk;
        const std::size_t end = std::min(static_cast<std::size_t>(last) * kWritebackChunk, arrays.count);
        write_back_gradients(part(arrays, begin, end), sums.data() + first);
    });
    at::Tensor total = writeback_sums(gradient, 1);
    *static_cast<WritebackSum*>(total.mutable_data_ptr()) = total_writeback(sums.data(), chunks);
    return writeback_numbers(total);
}

}  // namespace torch_offload
