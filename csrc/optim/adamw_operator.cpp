#include "optim/adamw_operator.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>

#include <cstdint>
#include <vector>

#include "optim/adamw_kernels.h"

namespace torch_offload {
namespace {

/// Elements per task of a thread.
constexpr std::int64_t kGrain = 1 << 15;

void check_length(const char* name, at::TensorList list, std::size_t length) {
    TORCH_CHECK_VALUE(list.size() == length, "fused_adamw_: ", name, " has ", list.size(), " tensors, expected ",
                      length);
}

void check_state(const char* name, const at::Tensor& state, const at::Tensor& parameter, c10::ScalarType dtype) {
    TORCH_CHECK_TYPE(state.scalar_type() == dtype, "fused_adamw_: ", name, " must be ", dtype, ", got ",
                     state.scalar_type());
    TORCH_CHECK_VALUE(state.device() == parameter.device() && state.sizes() == parameter.sizes() &&
                          state.strides() == parameter.strides(),
                      "fused_adamw_: ", name, " must have the device, sizes ", parameter.sizes(), " and strides ",
                      parameter.strides(), " of its parameter, got ", state.sizes(), " and ", state.strides());
}

void check_parameter(const at::Tensor& parameter, const at::Tensor& gradient) {
    TORCH_CHECK_TYPE(parameter.scalar_type() == at::kBFloat16 || parameter.scalar_type() == at::kFloat,
                     "fused_adamw_: a parameter must be bfloat16 or float32, got ", parameter.scalar_type());
    TORCH_CHECK_VALUE(parameter.device().is_cpu(), "fused_adamw_: a parameter must be on the CPU, got ",
                      parameter.device());
    TORCH_CHECK_VALUE(parameter.is_non_overlapping_and_dense(),
                      "fused_adamw_: a parameter must be dense in memory, got sizes ", parameter.sizes(),
                      " and strides ", parameter.strides(), "; clone it with torch.contiguous_format first");
    TORCH_CHECK_TYPE(gradient.scalar_type() == parameter.scalar_type() || gradient.scalar_type() == at::kFloat,
                     "fused_adamw_: a gradient must be float32 or of its parameter's dtype, got ",
                     gradient.scalar_type());
    TORCH_CHECK_VALUE(gradient.device().is_cpu() && gradient.sizes() == parameter.sizes(),
                      "fused_adamw_: a gradient must have the device and sizes ", parameter.sizes(),
                      " of its parameter, got ", gradient.sizes());
}

/// Tensors of one parameter, checked; the gradient lies as the parameter does.
struct Element {
    at::Tensor parameter, gradient, exp_avg, exp_avg_sq, max_exp_avg_sq, master;
    double step = 0;

    AdamWArrays arrays() const {
        AdamWArrays result;
        result.count = static_cast<std::size_t>(parameter.numel());
        if (parameter.scalar_type() == at::kBFloat16) {
            result.weights = static_cast<std::uint16_t*>(parameter.data_ptr());
        } else {
            result.masters = parameter.data_ptr<float>();
        }
        if (master.defined() && master.scalar_type() == at::kShort) result.low = master.data_ptr<std::int16_t>();
        if (master.defined() && master.scalar_type() == at::kFloat) result.masters = master.data_ptr<float>();
        result.gradients = gradient.const_data_ptr();
        result.gradient_type = gradient.scalar_type() == at::kFloat ? GradientType::f32 : GradientType::bf16;
        result.exp_avg = exp_avg.data_ptr<float>();
        result.exp_avg_sq = exp_avg_sq.data_ptr<float>();
        if (max_exp_avg_sq.defined()) result.max_exp_avg_sq = max_exp_avg_sq.data_ptr<float>();
        return result;
    }
};

void check_master(const at::Tensor& parameter, const at::Tensor& master) {
    if (parameter.scalar_type() == at::kFloat) {
        TORCH_CHECK_VALUE(!master.defined(), "fused_adamw_: a float32 parameter is its own master, got another one");
        return;
    }
    TORCH_CHECK_VALUE(master.defined(), "fused_adamw_: a bfloat16 parameter needs a master, masters is empty");
    check_state("masters", master, parameter, master.scalar_type() == at::kShort ? at::kShort : at::kFloat);
}

Element checked(Element element) {
    check_parameter(element.parameter, element.gradient);
    check_state("exp_avgs", element.exp_avg, element.parameter, at::kFloat);
    check_state("exp_avg_sqs", element.exp_avg_sq, element.parameter, at::kFloat);
    if (element.max_exp_avg_sq.defined()) {
        check_state("max_exp_avg_sqs", element.max_exp_avg_sq, element.parameter, at::kFloat);
    }
    check_master(element.parameter, element.master);
    if (element.gradient.strides() != element.parameter.strides()) {
        element.gradient = at::empty_like(element.parameter, element.gradient.scalar_type()).copy_(element.gradient);
    }
    return element;
}

AdamWArrays part(AdamWArrays arrays, std::int64_t begin, std::int64_t end) {
    const auto skip = [&](auto*& pointer) {
        if (pointer) pointer += begin;
    };
    arrays.count = static_cast<std::size_t>(end - begin);
    skip(arrays.weights);
    skip(arrays.low);
    skip(arrays.masters);
    skip(arrays.exp_avg);
    skip(arrays.exp_avg_sq);
    skip(arrays.max_exp_avg_sq);
    const std::int64_t gradient_bytes = arrays.gradient_type == GradientType::bf16 ? 2 : 4;
    arrays.gradients = static_cast<const char*>(arrays.gradients) + begin * gradient_bytes;
    return arrays;
}

float number(const at::Tensor& tensor) { return tensor.item().toFloat(); }

GradientScaling scaling_of(const std::optional<at::Tensor>& scale, const std::optional<at::Tensor>& clip) {
    GradientScaling scaling;
    scaling.has_scale = scale.has_value();
    scaling.has_clip = clip.has_value();
    if (scale) scaling.scale = number(*scale);
    if (clip) scaling.clip = number(*clip);
    return scaling;
}

}  // namespace

void fused_adamw(at::TensorList self, at::TensorList grads, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                 at::TensorList max_exp_avg_sqs, at::TensorList masters, at::TensorList state_steps, double lr,
                 double beta1, double beta2, double weight_decay, double eps, bool amsgrad, bool maximize,
                 const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf,
                 const std::optional<at::Tensor>& clip_coefficient) {
    check_length("grads", grads, self.size());
    check_length("exp_avgs", exp_avgs, self.size());
    check_length("exp_avg_sqs", exp_avg_sqs, self.size());
    check_length("max_exp_avg_sqs", max_exp_avg_sqs, amsgrad ? self.size() : 0);
    check_length("masters", masters, masters.empty() ? 0 : self.size());
    check_length("state_steps", state_steps, self.size());
    std::vector<Element> elements;
    for (std::size_t i = 0; i < self.size(); ++i) {
        elements.push_back(
            checked({self[i], grads[i], exp_avgs[i], exp_avg_sqs[i], amsgrad ? max_exp_avg_sqs[i] : at::Tensor(),
                     masters.empty() ? at::Tensor() : masters[i], number(state_steps[i])}));
    }
    if (found_inf && number(*found_inf) == 1.0F) return;
    const AdamWOptions options{lr, beta1, beta2, eps, weight_decay, maximize};
    const GradientScaling scaling = scaling_of(grad_scale, clip_coefficient);
    for (const Element& element : elements) {
        const AdamWArrays arrays = element.arrays();
        const AdamWFactors factors = adamw_factors(options, element.step);
        at::parallel_for(0, element.parameter.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
            adamw_update(part(arrays, begin, end), factors, scaling);
        });
    }
}

}  // namespace torch_offload
