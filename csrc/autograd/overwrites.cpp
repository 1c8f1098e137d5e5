#include "autograd/overwrites.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <cmath>

#include "autograd/managed_arguments.h"
#include "autograd/paged_storage.h"

namespace torch_offload {
namespace {

constexpr double kMaxHalf = 65504.0;  // fits every floating type accepted here

bool is_common_floating(c10::ScalarType type) {
    return type == c10::kFloat || type == c10::kDouble || type == c10::kHalf || type == c10::kBFloat16;
}

bool is_common(c10::ScalarType type) {
    return is_common_floating(type) || type == c10::kLong || type == c10::kInt || type == c10::kShort ||
           type == c10::kChar || type == c10::kByte || type == c10::kBool;
}

/// Autograd refuses in-place writes to leaves that require gradients, and to some views.
bool autograd_agrees(const at::Tensor& self) {
    return !c10::GradMode::is_enabled() || (!self.requires_grad() && !self.is_view());
}

bool fill_cannot_fail(const at::Tensor& self, const c10::IValue& value) {
    if (!is_common_floating(self.scalar_type())) return false;
    if (value.isInt()) return std::abs(static_cast<double>(value.toInt())) <= kMaxHalf;
    if (!value.isDouble()) return false;
    return !std::isfinite(value.toDouble()) || std::abs(value.toDouble()) <= kMaxHalf;
}

/// Between devices torch casts and permutes by way of other tensors, for which memory may be short.
bool is_plain_transfer(const at::Tensor& self, const at::Tensor& source) {
    return source.device().is_cpu() && source.scalar_type() == self.scalar_type() && source.is_contiguous() &&
           self.is_contiguous() && source.sizes() == self.sizes();
}

/// Torch's own question asks for addresses.
bool share_storage(const at::Tensor& one, const at::Tensor& other) {
    return one.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() ==
           other.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

bool copy_cannot_fail(const at::Tensor& self, const c10::IValue& argument) {
    if (!argument.isTensor() || !argument.toTensor().defined()) return false;
    const at::Tensor& source = argument.toTensor();
    return (source.device() == self.device() || is_plain_transfer(self, source)) && source.layout() == c10::kStrided &&
           source.has_storage() && !source.key_set().has(c10::DispatchKey::Python) && is_common(self.scalar_type()) &&
           is_common(source.scalar_type()) && at::is_expandable_to(source.sizes(), self.sizes()) &&
           !share_storage(source, self);
}

bool is_usual_generator(const at::Tensor& self, const c10::IValue& argument) {
    return argument.isNone() ||
           (argument.isGenerator() && argument.toGenerator().device().type() == self.device().type());
}

bool random_cannot_fail(const at::Tensor& self, c10::ArrayRef<c10::IValue> arguments, Overwrite overwrite) {
    if (!is_common_floating(self.scalar_type()) || !arguments[1].isDouble() || !arguments[2].isDouble() ||
        !is_usual_generator(self, arguments[3])) {
        return false;
    }
    const double first = arguments[1].toDouble();
    const double second = arguments[2].toDouble();
    if (overwrite == Overwrite::normal) return std::isfinite(first) && std::isfinite(second) && second >= 0;
    return std::abs(first) <= kMaxHalf / 2 && std::abs(second) <= kMaxHalf / 2 && first <= second;
}

}  // namespace

bool overwrites_storage(const OperatorTraits& traits, c10::ArrayRef<c10::IValue> arguments, c10::DispatchKeySet keys) {
    if (traits.overwrite == Overwrite::none || !is_plain_call(keys)) return false;
    const at::Tensor& self = arguments[0].toTensor();
    if (self.is_inference() || !autograd_agrees(self) || !covers_storage(self)) return false;
    switch (traits.overwrite) {
        case Overwrite::zero:
            return true;
        case Overwrite::fill:
            return fill_cannot_fail(self, arguments[1]);
        case Overwrite::copy:
            return copy_cannot_fail(self, arguments[1]);
        case Overwrite::normal:
        case Overwrite::uniform:
            return random_cannot_fail(self, arguments, traits.overwrite);
        case Overwrite::none:
            break;
    }
    return false;
}

}  // namespace torch_offload
