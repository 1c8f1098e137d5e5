#include "optim/adamw_operator.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "optim/adamw_kernels.h"
#include "optim/packed_moments.h"

namespace torch_offload {
namespace {

/// Elements that a thread takes at a time: whole blocks of packed moments, and many of them.
constexpr std::int64_t kTaskElements = 16 * kPackedBlock;

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

void check_parameter(const at::Tensor& parameter, const at::Tensor& gradient, at::Device device) {
    TORCH_CHECK_TYPE(parameter.scalar_type() == at::kBFloat16 || parameter.scalar_type() == at::kFloat,
                     "fused_adamw_: a parameter must be bfloat16 or float32, got ", parameter.scalar_type());
    TORCH_CHECK_VALUE(parameter.device() == device, "fused_adamw_: a parameter must be on ", device, ", got ",
                      parameter.device());
    TORCH_CHECK_VALUE(parameter.is_non_overlapping_and_dense(),
                      "fused_adamw_: a parameter must be dense in memory, got sizes ", parameter.sizes(),
                      " and strides ", parameter.strides(), "; clone it with torch.contiguous_format first");
    TORCH_CHECK_TYPE(gradient.scalar_type() == parameter.scalar_type() || gradient.scalar_type() == at::kFloat,
                     "fused_adamw_: a gradient must be float32 or of its parameter's dtype, got ",
                     gradient.scalar_type());
    TORCH_CHECK_VALUE(gradient.device() == device && gradient.sizes() == parameter.sizes(),
                      "fused_adamw_: a gradient must have the device and sizes ", parameter.sizes(),
                      " of its parameter, got ", gradient.sizes());
}

/// Tensors of one parameter, checked; the gradient lies as the parameter does.
struct Element {
    at::Tensor parameter, gradient, exp_avg, exp_avg_sq, max_exp_avg_sq, master;
    double step = 0;

    bool is_packed() const { return exp_avg.scalar_type() == at::kByte; }
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
        if (is_packed()) {
            result.packed_exp_avg = exp_avg.data_ptr<std::uint8_t>();
            result.packed_exp_avg_sq = exp_avg_sq.data_ptr<std::uint8_t>();
            return result;
        }
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

std::int64_t packed_numel(const at::Tensor& values) {
    return static_cast<std::int64_t>(packed_size(static_cast<std::size_t>(values.numel())));
}

void check_packed(const char* name, const at::Tensor& packed, const at::Tensor& values) {
    TORCH_CHECK_TYPE(packed.scalar_type() == at::kByte, name, " must be packed (Byte), got ", packed.scalar_type());
    TORCH_CHECK_VALUE(packed.device() == values.device() && packed.dim() == 1 && packed.is_contiguous() &&
                          packed.numel() == packed_numel(values),
                      name, " must be ", packed_numel(values), " contiguous bytes for ", values.numel(),
                      " elements, got sizes ", packed.sizes());
}

void check_moments(const Element& element) {
    if (element.is_packed()) {
        check_packed("fused_adamw_: exp_avgs", element.exp_avg, element.parameter);
        check_packed("fused_adamw_: exp_avg_sqs", element.exp_avg_sq, element.parameter);
        TORCH_CHECK_VALUE(!element.max_exp_avg_sq.defined(), "fused_adamw_: amsgrad needs float32 moments");
        return;
    }
    check_state("exp_avgs", element.exp_avg, element.parameter, at::kFloat);
    check_state("exp_avg_sqs", element.exp_avg_sq, element.parameter, at::kFloat);
    if (element.max_exp_avg_sq.defined()) {
        check_state("max_exp_avg_sqs", element.max_exp_avg_sq, element.parameter, at::kFloat);
    }
}

Element checked(Element element, at::Device device) {
    check_parameter(element.parameter, element.gradient, device);
    check_moments(element);
    check_master(element.parameter, element.master);
    if (element.gradient.strides() != element.parameter.strides()) {
        element.gradient =
            at::empty_like(element.parameter, element.parameter.options().dtype(element.gradient.scalar_type()))
                .copy_(element.gradient);
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
    skip(arrays.packed_exp_avg);
    skip(arrays.packed_exp_avg_sq);
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
    // A GPU's kernel reads it where it is.
    TORCH_CHECK_VALUE(!clip || clip->scalar_type() == at::kFloat,
                      "fused_adamw_: clip_coefficient must be one float32, got ", clip->scalar_type());
    if (clip) scaling.clip = number(*clip);
    return scaling;
}

}  // namespace

std::vector<AdamWUpdate> checked_updates(const AdamWLists& lists, const AdamWOptions& options, at::Device device) {
    const std::size_t count = lists.self.size();
    check_length("grads", lists.grads, count);
    check_length("exp_avgs", lists.exp_avgs, count);
    check_length("exp_avg_sqs", lists.exp_avg_sqs, count);
    check_length("max_exp_avg_sqs", lists.max_exp_avg_sqs, lists.is_amsgrad ? count : 0);
    check_length("masters", lists.masters, lists.masters.empty() ? 0 : count);
    check_length("state_steps", lists.state_steps, count);
    std::vector<AdamWUpdate> updates;
    for (std::size_t i = 0; i < count; ++i) {
        const Element element =
            checked({lists.self[i], lists.grads[i], lists.exp_avgs[i], lists.exp_avg_sqs[i],
                     lists.is_amsgrad ? lists.max_exp_avg_sqs[i] : at::Tensor(),
                     lists.masters.empty() ? at::Tensor() : lists.masters[i], number(lists.state_steps[i])},
                    device);
        updates.push_back({element.arrays(), adamw_factors(options, element.step), element.gradient});
    }
    return updates;
}

void fused_adamw(at::TensorList self, at::TensorList grads, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                 at::TensorList max_exp_avg_sqs, at::TensorList masters, at::TensorList state_steps, double lr,
                 double beta1, double beta2, double weight_decay, double eps, bool amsgrad, bool maximize,
                 const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf,
                 const std::optional<at::Tensor>& clip_coefficient) {
    const std::vector<AdamWUpdate> updates =
        checked_updates({self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters, state_steps, amsgrad},
                        {lr, beta1, beta2, eps, weight_decay, maximize}, at::kCPU);
    if (found_inf && number(*found_inf) == 1.0F) return;
    const GradientScaling scaling = scaling_of(grad_scale, clip_coefficient);
    for (const AdamWUpdate& update : updates) {
        const auto count = static_cast<std::int64_t>(update.arrays.count);
        const std::int64_t tasks = (count + kTaskElements - 1) / kTaskElements;
        at::parallel_for(0, tasks, 1, [&](std::int64_t first, std::int64_t last) {
            const std::int64_t end = std::min(last * kTaskElements, count);
            adamw_update(part(update.arrays, first * kTaskElements, end), update.factors, scaling);
        });
    }
}

at::Tensor packed_moment(const at::Tensor& values, bool is_second) {
    TORCH_CHECK_TYPE(values.scalar_type() == at::kFloat, "pack_moment: values must be Float, got ",
                     values.scalar_type());
    TORCH_CHECK_VALUE(values.is_non_overlapping_and_dense(), "pack_moment: values must be dense in memory, got sizes ",
                      values.sizes(), " and strides ", values.strides());
    at::Tensor packed = at::empty({packed_numel(values)}, values.options().dtype(at::kByte));
    pack_moment(is_second ? Moment::second : Moment::first, values.const_data_ptr<float>(),
                static_cast<std::size_t>(values.numel()), packed.data_ptr<std::uint8_t>());
    return packed;
}

at::Tensor unpacked_moment(const at::Tensor& packed, const at::Tensor& like, bool is_second) {
    check_packed("unpack_moment: packed", packed, like);
    at::Tensor values = at::empty_like(like, like.options().dtype(at::kFloat));
    TORCH_CHECK_VALUE(values.is_non_overlapping_and_dense(), "unpack_moment: like must be dense in memory");
    unpack_moment(is_second ? Moment::second : Moment::first, packed.const_data_ptr<std::uint8_t>(),
                  static_cast<std::size_t>(values.numel()), values.data_ptr<float>());
    return values;
}

}  // namespace torch_offload
