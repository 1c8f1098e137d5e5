#include "autograd/error_feedback_operator.h"

#include <ATen/Parallel.h>
#include <ATen/core/Formatting.h>
#include <ATen/ops/empty_like.h>

#include <vector>

#include "autograd/error_bridge.h"
#include "codec/error_feedback.h"

namespace torch_offload {
namespace {

/// Returns it without gaps.
at::Tensor checked(const char* name, const at::Tensor& tensor, const std::vector<std::int64_t>& sizes) {
    TORCH_CHECK_TYPE(tensor.scalar_type() == at::kFloat, "rounding: ", name, " must be float32, got ",
                     tensor.scalar_type());
    TORCH_CHECK_VALUE(tensor.sizes() == at::IntArrayRef(sizes), "rounding: ", name, " must have sizes ",
                      at::IntArrayRef(sizes), ", got ", tensor.sizes());
    return tensor.contiguous();
}

/// Matrices of one shape, with a square matrix, steps and thresholds each.
class RoundedMatrices {
public:
    RoundedMatrices(const at::Tensor& exact, const at::Tensor& square, const at::Tensor& step,
                    const at::Tensor& threshold) {
        TORCH_CHECK_VALUE(exact.dim() == 3, "rounding: exact must be [matrices, columns, rows], got sizes ",
                          exact.sizes());
        const std::int64_t count = exact.size(0);
        const std::int64_t columns = exact.size(1);
        exact_ = checked("exact", exact, exact.sizes().vec());
        square_ = checked("the square matrix", square, {count, columns, columns});
        step_ = checked("step", step, {count, columns});
        threshold_ = checked("threshold", threshold, {count, columns});
    }

    /// Calls `work` with a matrix, its square matrix and the first of some rows, on torch's threads.
    template <typename Work>
    void for_rows(const at::Tensor& values, Work work) const {
        constexpr auto kRows = static_cast<std::int64_t>(kRoundedRows);
        const std::int64_t parts = (exact_.size(2) + kRows - 1) / kRows;
        at::parallel_for(0, exact_.size(0) * parts, 1, [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t i = first; i < last; ++i) {
                const std::int64_t matrix = i / parts;
                const float* const square = square_.const_data_ptr<float>() + matrix * square_.stride(0);
                work(view_of(values, matrix), square, static_cast<std::size_t>(i % parts * kRows));
            }
        });
    }

private:
    RoundedMatrix view_of(const at::Tensor& values, std::int64_t matrix) const {
        return {exact_.const_data_ptr<float>() + matrix * exact_.stride(0),
                static_cast<std::size_t>(exact_.size(1)),
                static_cast<std::size_t>(exact_.size(2)),
                step_.const_data_ptr<float>() + matrix * step_.stride(0),
                threshold_.const_data_ptr<float>() + matrix * threshold_.stride(0),
                values.mutable_data_ptr<float>() + matrix * values.stride(0)};
    }

    at::Tensor exact_;
    at::Tensor square_;
    at::Tensor step_;
    at::Tensor threshold_;
};

}  // namespace

at::Tensor round_with_feedback(const at::Tensor& exact, const at::Tensor& factor, const at::Tensor& step,
                               const at::Tensor& threshold) {
    return across_torch([&] {
        const RoundedMatrices matrices(exact, factor, step, threshold);
        at::Tensor values = at::empty_like(exact, at::MemoryFormat::Contiguous);
        matrices.for_rows(values, [](const RoundedMatrix& matrix, const float* square, std::size_t first) {
            round_rows(matrix, square, first);
        });
        return values;
    });
}

at::Tensor refine_values(const at::Tensor& exact, const at::Tensor& values, const at::Tensor& moment,
                         const at::Tensor& step, const at::Tensor& threshold) {
    return across_torch([&] {
        const RoundedMatrices matrices(exact, moment, step, threshold);
        at::Tensor chosen = checked("values", values, exact.sizes().vec()).clone();
        matrices.for_rows(chosen, [](const RoundedMatrix& matrix, const float* square, std::size_t first) {
            refine(matrix, square, first);
        });
        return chosen;
    });
}

}  // namespace torch_offload
