#include "autograd/recorded_op.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "autograd/compute_device.h"
#include "autograd/paged_storage.h"
#include "base/check.h"

namespace torch_offload {
namespace {

struct OperatorOverloads {
    std::string_view name;
    std::array<std::string_view, 4> overloads;
    std::size_t overload_count;
    bool mixes_dtypes = false;  // the tensors of an element may have different ones
    std::int64_t block = 0;     // bytes may stand for elements in memory order, filled up to whole blocks of so many
};

constexpr OperatorOverloads kByElement[] = {
    {"aten::_foreach_add_", {"Scalar", "Tensor", "ScalarList", "List"}, 4},
    {"aten::_foreach_sub_", {"Scalar", "ScalarList", "List"}, 3},
    {"aten::_foreach_mul_", {"Scalar", "Tensor", "ScalarList", "List"}, 4},
    {"aten::_foreach_div_", {"Scalar", "Tensor", "ScalarList", "List"}, 4},
    {"aten::_foreach_zero_", {""}, 1},
    {"aten::_fused_adam_", {"", "tensor_lr"}, 2},
    {"aten::_fused_adamw_", {"", "tensor_lr"}, 2},
    {"aten::_fused_sgd_", {"", "tensor_lr"}, 2},
    {"torch_offload::fused_adamw_", {""}, 1, true, 2048},
};

const OperatorOverloads* find_by_element(const c10::OperatorName& name) {
    const auto found = std::find_if(std::begin(kByElement), std::end(kByElement), [&](const OperatorOverloads& known) {
        const auto end = known.overloads.begin() + known.overload_count;
        return name.name == known.name && std::find(known.overloads.begin(), end, name.overload_name) != end;
    });
    return found == std::end(kByElement) ? nullptr : found;
}

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
    return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

c10::IValue sublist(const c10::IValue& list, std::span<const std::size_t> indices) {
    const auto elements = list.toListRef();
    c10::impl::GenericList part(list.toList().elementType());
    part.reserve(indices.size());
    for (const std::size_t i : indices) part.push_back(elements[i]);
    return part;
}

/// Nothing but the elements in memory order decides what an operator by element computes.
bool is_plain(const at::Tensor& tensor) {
    return leads_storage(tensor) && !tensor.is_conj() && !tensor.is_neg() && !tensor._fw_grad(0).defined();
}

bool is_full_precision(c10::ScalarType dtype) { return dtype == c10::kFloat || dtype == c10::kDouble; }

std::size_t pages_of(std::size_t size_bytes, std::size_t page_bytes) {
    return (size_bytes + page_bytes - 1) / page_bytes;
}

/// Whether page i of one covers the elements of page i of the other. Pre: both tensors have the same elements.
bool have_same_pages(const at::Tensor& one, const at::Tensor& other) {
    const Segment& segment = *segment_of(one);
    const Segment& other_segment = *segment_of(other);
    return &segment.pager() == &other_segment.pager() &&
           segment.page_bytes() * other.element_size() == other_segment.page_bytes() * one.element_size() &&
           pages_of(one.nbytes(), segment.page_bytes()) == pages_of(other.nbytes(), other_segment.page_bytes());
}

/// Whether the tensor is one byte for each element of the model, filled up to whole blocks. Pages are whole blocks.
bool is_blocked_like(const at::Tensor& tensor, const at::Tensor& model, std::int64_t block) {
    return block != 0 && tensor.scalar_type() == c10::kByte && tensor.dim() == 1 && is_plain(model) &&
           tensor.numel() == (model.numel() + block - 1) / block * block;
}

bool have_same_layout(const at::Tensor& one, const at::Tensor& other) {
    return one.sizes() == other.sizes() && one.strides() == other.strides();
}

/// Of a tuple that another process has pickled. Throws: c10::Error for a value that is none.
c10::ArrayRef<c10::IValue> elements_of(const c10::IValue& value) { return value.toTupleRef().elements(); }

c10::ArrayRef<c10::IValue> elements_of(const c10::IValue& value, std::size_t count) {
    const c10::ArrayRef<c10::IValue> elements = elements_of(value);
    OFFLOAD_CHECK(elements.size() == count, InvalidArgument, elements.size(), " parts, not ", count);
    return elements;
}

/// Of an argument, of `count`.
std::size_t position_of(const c10::IValue& value, std::size_t count) {
    const std::int64_t position = value.toInt();
    OFFLOAD_CHECK(position >= 0 && static_cast<std::size_t>(position) < count, InvalidArgument, "there is no argument ",
                  position, " of ", count);
    return static_cast<std::size_t>(position);
}

}  // namespace

bool works_by_element(const c10::OperatorHandle& op) { return find_by_element(op.operator_name()) != nullptr; }

// --- RecordedOp ---------------------------------------------------------------------------------------------------

std::size_t RecordedOp::Member::bytes_on(std::size_t index) const noexcept {
    return std::min(page_bytes, size_bytes - index * page_bytes);
}

std::size_t RecordedOp::page_count() const noexcept {
    return pages_of(members_.front().size_bytes, members_.front().page_bytes);
}

bool RecordedOp::fits(std::span<const std::span<std::byte>> pages) const noexcept {
    return std::ranges::equal(members_, pages, [](const Member& member, std::span<const std::byte> page) {
        return member.size_bytes <= page.size();
    });
}

void RecordedOp::run(std::span<const std::span<std::byte>> pages, std::size_t index, KernelThreads threads) const {
    const KernelScope scope(call_->environment, threads);
    torch::jit::Stack stack = call_->arguments;
    for (std::size_t k = 0; k < members_.size(); ++k) {
        const std::span<std::byte> bytes = pages[k].first(members_[k].bytes_on(index));
        stack[members_[k].position] =
            std::vector<at::Tensor>{tensor_over(bytes, members_[k].dtype, call_->torch_device)};
    }
    for (const OwnValue& own : values_) stack[own.position] = own.value;
    call_->op.callBoxed(&stack);
}

/// Every position of an argument comes with something: of a member its dtype and bytes, of a value of its own that
/// value.
c10::IValue RecordedOp::to_value(std::size_t index) const {
    using c10::ivalue::Tuple;
    std::vector<c10::IValue> members;
    for (const Member& member : members_) {
        members.emplace_back(Tuple::create(static_cast<std::int64_t>(member.position),
                                           static_cast<std::int64_t>(member.dtype),
                                           static_cast<std::int64_t>(member.bytes_on(index))));
    }
    std::vector<c10::IValue> values;
    for (const OwnValue& own : values_) {
        values.emplace_back(Tuple::create(static_cast<std::int64_t>(own.position), own.value));
    }
    const c10::OperatorName& name = call_->op.operator_name();
    return Tuple::create({name.name, name.overload_name, call_->environment.to_bytes(), Tuple::create(call_->arguments),
                          Tuple::create(std::move(members)), Tuple::create(std::move(values))});
}

RecordedOp RecordedOp::from_value(const c10::IValue& value) {
    const c10::ArrayRef<c10::IValue> parts = elements_of(value, 6);
    const c10::OperatorName name(parts[0].toStringRef(), parts[1].toStringRef());
    const std::optional<c10::OperatorHandle> op = c10::Dispatcher::singleton().findSchema(name);
    OFFLOAD_CHECK(find_by_element(name) && op, InvalidArgument, c10::toString(name), " is not run for others");
    const std::size_t count = op->schema().arguments().size();
    std::vector<Member> members;
    for (const c10::IValue& member : elements_of(parts[4])) {
        const c10::ArrayRef<c10::IValue> described = elements_of(member, 3);
        const std::int64_t dtype = described[1].toInt();
        OFFLOAD_CHECK(dtype >= 0 && dtype < static_cast<std::int64_t>(c10::ScalarType::Undefined), InvalidArgument,
                      "there is no dtype ", dtype);
        const auto size_bytes = static_cast<std::size_t>(described[2].toInt());
        members.push_back(
            {position_of(described[0], count), static_cast<c10::ScalarType>(dtype), size_bytes, size_bytes});
    }
    std::vector<OwnValue> values;
    for (const c10::IValue& own : elements_of(parts[5])) {
        const c10::ArrayRef<c10::IValue> pair = elements_of(own, 2);
        values.push_back({position_of(pair[0], count), pair[1]});
    }
    RecordedCall call{*op, c10::Device(c10::kCPU), FloatEnvironment::from_bytes(parts[2].toStringRef()),
                      elements_of(parts[3], count).vec()};
    return RecordedOp(std::make_shared<const RecordedCall>(std::move(call)), std::move(members), std::move(values));
}

// --- Taking a call apart ------------------------------------------------------------------------------------------

std::optional<RecordableCall> RecordableCall::parse(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments,
                                                    c10::Device torch_device) {
    RecordableCall call(op, arguments, torch_device);
    if (!call.take_lists() || call.is_differentiated() || !call.has_plain_values()) return std::nullopt;
    call.find_recordable();
    return call;
}

bool RecordableCall::take_lists() {
    count_ = arguments_.front().toListRef().size();
    for (std::size_t position = 0; position < arguments_.size(); ++position) {
        const c10::IValue& argument = arguments_[position];
        if (!argument.isList()) continue;
        const std::size_t size = argument.toListRef().size();
        if (size == 0) continue;  // a list that is not used, like max_exp_avg_sqs
        if (size != count_) return false;
        if (!argument.isTensorList()) {
            scalar_lists_.push_back(position);
            continue;
        }
        const c10::AliasInfo* alias = op_.schema().arguments()[position].alias_info();
        lists_.push_back({position, alias && alias->isWrite(), argument.toTensorVector()});
    }
    const auto all_defined = [](const ListArgument& list) {
        return std::all_of(list.tensors.begin(), list.tensors.end(), [](const at::Tensor& t) { return t.defined(); });
    };
    return count_ != 0 && std::all_of(lists_.begin(), lists_.end(), all_defined);
}

bool RecordableCall::is_differentiated() const {
    if (!c10::GradMode::is_enabled()) return false;
    return std::any_of(lists_.begin(), lists_.end(), [](const ListArgument& list) {
        return std::any_of(list.tensors.begin(), list.tensors.end(),
                           [](const at::Tensor& tensor) { return tensor.requires_grad(); });
    });
}

/// Tensors that every element shares must be numbers, and none of those that the call writes.
bool RecordableCall::has_plain_values() const {
    for (const c10::IValue& argument : arguments_) {
        if (!argument.isTensor()) continue;
        const at::Tensor& tensor = argument.toTensor();
        if (!tensor.defined() || tensor.dim() != 0 || !tensor.has_storage()) return false;
        for (const ListArgument& list : lists_) {
            for (const at::Tensor& other : list.tensors) {
                if (list.is_written && storage_of(other) == storage_of(tensor)) return false;
            }
        }
    }
    return true;
}

/// A number of the element, like its step counter, rather than a tensor of its size.
bool RecordableCall::is_value(const ListArgument& list, std::size_t element) const {
    const at::Tensor& tensor = list.tensors[element];
    return !list.is_written && tensor.numel() == 1 && tensor.dim() <= 1 && !segment_of(tensor);
}

std::optional<RecordableCall::Element> RecordableCall::as_element(std::size_t index) const {
    const at::Tensor& model = lists_.front().tensors[index];
    const OperatorOverloads& op = *find_by_element(op_.operator_name());
    Element element;
    for (std::size_t k = 0; k < lists_.size(); ++k) {
        if (is_value(lists_[k], index)) continue;
        const at::Tensor& tensor = lists_[k].tensors[index];
        if (!segment_of(tensor) || !is_plain(tensor)) return std::nullopt;
        if (!have_same_layout(tensor, model) && !is_blocked_like(tensor, model, op.block)) return std::nullopt;
        if (!op.mixes_dtypes && tensor.scalar_type() != model.scalar_type()) return std::nullopt;
        if (!element.segments.empty() && !have_same_pages(tensor, first_member(element, index))) return std::nullopt;
        element.member_lists.push_back(k);
        element.segments.push_back(segment_of(tensor));
        element.page_count = pages_of(tensor.nbytes(), segment_of(tensor)->page_bytes());
    }
    if (element.segments.empty() || !slices_exactly(model.scalar_type())) return std::nullopt;
    return element;
}

const at::Tensor& RecordableCall::first_member(const Element& element, std::size_t index) const {
    return lists_[element.member_lists.front()].tensors[index];
}

/// A few kernels give the last elements of a run other bits than the elements before, so that a cut shows: sums with
/// a factor (on half precision; with a tensor of one number, always), and SGD's momentum on half precision.
bool RecordableCall::slices_exactly(c10::ScalarType dtype) const {
    if (!c10::isFloatingType(dtype)) return false;
    const c10::OperatorName& name = op_.operator_name();
    if (name.name == "aten::_fused_sgd_") return is_full_precision(dtype);
    const std::optional<int> alpha = op_.schema().argumentIndexWithName("alpha");
    if (!alpha || arguments_[*alpha].toScalar().equal(1)) return true;
    return name.overload_name == "List" && is_full_precision(dtype);
}

void RecordableCall::find_recordable() {
    std::unordered_map<const c10::StorageImpl*, std::size_t> uses;
    std::unordered_map<const c10::StorageImpl*, std::size_t> writes;
    for (const ListArgument& list : lists_) {
        for (const at::Tensor& tensor : list.tensors) {
            ++uses[storage_of(tensor)];
            if (list.is_written) ++writes[storage_of(tensor)];
        }
    }
    const auto is_apart = [&](const ListArgument& list, std::size_t index) {
        const c10::StorageImpl* storage = storage_of(list.tensors[index]);
        return is_value(list, index) ? !writes.contains(storage) : uses[storage] == 1;
    };
    elements_.resize(count_);
    for (std::size_t i = 0; i < count_; ++i) {
        std::optional<Element> element = as_element(i);
        if (!element) continue;
        if (!std::all_of(lists_.begin(), lists_.end(), [&](const ListArgument& l) { return is_apart(l, i); })) continue;
        elements_[i] = std::move(*element);
        recordable_.push_back(i);
    }
}

/// A copy that nobody can change any more. A keyed tensor is read through the pager. A GPU's kernels take numbers from
/// the host, the host's take none from a GPU.
at::Tensor RecordableCall::copy_of_value(const at::Tensor& tensor) const {
    const c10::NoGradGuard no_grad;
    return torch_device_.is_cpu() && !tensor.device().is_cpu() ? tensor.detach().cpu() : tensor.detach().clone();
}

// --- Keeping it ---------------------------------------------------------------------------------------------------

void RecordableCall::capture() {
    std::vector<c10::IValue> shared = arguments_;
    for (const ListArgument& list : lists_) shared[list.position] = c10::IValue();
    for (const std::size_t position : scalar_lists_) shared[position] = c10::IValue();
    for (c10::IValue& argument : shared) {
        if (argument.isTensor()) argument = copy_of_value(argument.toTensor());
    }
    captured_ = std::make_shared<const RecordedCall>(
        RecordedCall{op_, torch_device_, FloatEnvironment::current(), std::move(shared)});
}

std::vector<RecordedOp::OwnValue> RecordableCall::own_values(std::size_t element) const {
    std::vector<RecordedOp::OwnValue> values;
    for (const ListArgument& list : lists_) {
        if (!is_value(list, element)) continue;
        values.push_back({list.position, std::vector<at::Tensor>{copy_of_value(list.tensors[element])}});
    }
    for (const std::size_t position : scalar_lists_) {
        values.push_back({position, sublist(arguments_[position], {&element, 1})});
    }
    return values;
}

RecordableCall::Dtypes RecordableCall::dtypes_of(std::size_t element) const {
    Dtypes dtypes;
    dtypes.reserve(lists_.size());
    for (const ListArgument& list : lists_) dtypes.push_back(list.tensors[element].scalar_type());
    return dtypes;
}

std::vector<RecordableCall::Rehearsal>::const_iterator RecordableCall::rehearsal_of(std::size_t element) const {
    const Dtypes dtypes = dtypes_of(element);
    return std::find_if(rehearsals_.begin(), rehearsals_.end(),
                        [&](const Rehearsal& known) { return known.dtypes == dtypes; });
}

bool RecordableCall::rehearse() {
    capture();
    try {
        for (const std::size_t element : recordable_) {
            if (rehearsal_of(element) == rehearsals_.end()) rehearsals_.push_back(rehearse(element));
        }
    } catch (const c10::Error&) {
        return false;
    }
    return true;
}

/// Through autograd's layer, because that is where versions are raised.
RecordableCall::Rehearsal RecordableCall::rehearse(std::size_t element) const {
    const c10::InferenceMode ordinary_mode(false);
    const c10::NoGradGuard no_grad;
    const c10::impl::ForceDispatchKeyGuard keys(c10::default_included_set, c10::default_excluded_set);
    Rehearsal result{dtypes_of(element), std::vector<std::uint32_t>(lists_.size())};
    torch::jit::Stack stack = captured_->arguments;
    std::vector<at::Tensor> members(lists_.size());
    for (const std::size_t k : elements_[element].member_lists) {
        members[k] = at::empty({0}, at::TensorOptions().dtype(result.dtypes[k]).device(torch_device_));
        stack[lists_[k].position] = std::vector<at::Tensor>{members[k]};
    }
    for (RecordedOp::OwnValue& own : own_values(element)) stack[own.position] = std::move(own.value);
    op_.callBoxed(&stack);
    for (const std::size_t k : elements_[element].member_lists) {
        result.version_steps[k] = static_cast<std::uint32_t>(members[k]._version());
    }
    return result;
}

RecordedOp RecordableCall::record(std::size_t element) {
    const auto rehearsal = rehearsal_of(element);
    std::vector<RecordedOp::Member> members;
    for (const std::size_t k : elements_[element].member_lists) {
        const at::Tensor& tensor = lists_[k].tensors[element];
        const std::uint32_t steps = tensor.is_inference() ? 0 : rehearsal->version_steps[k];
        for (std::uint32_t step = 0; step < steps; ++step) tensor.unsafeGetTensorImpl()->bump_version();
        members.push_back(
            {lists_[k].position, tensor.scalar_type(), tensor.nbytes(), segment_of(tensor)->page_bytes()});
    }
    return RecordedOp(captured_, std::move(members), own_values(element));
}

std::optional<std::vector<c10::IValue>> RecordableCall::rest() const {
    if (recordable_.size() == count_) return std::nullopt;
    std::vector<std::size_t> indices;
    for (std::size_t i = 0, next = 0; i < count_; ++i) {
        if (next < recordable_.size() && recordable_[next] == i) {
            ++next;
        } else {
            indices.push_back(i);
        }
    }
    std::vector<c10::IValue> arguments = arguments_;
    for (const ListArgument& list : lists_) arguments[list.position] = sublist(arguments_[list.position], indices);
    for (const std::size_t position : scalar_lists_) arguments[position] = sublist(arguments_[position], indices);
    return arguments;
}

}  // namespace torch_offload
