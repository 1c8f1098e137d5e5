// The managed tensors among the arguments of one operator call: found, pinned, and managed again afterwards if the
// operator gave them other memory. Layer autograd.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <vector>

#include "autograd/engine.h"
#include "autograd/operator_table.h"
#include "autograd/storage_uses.h"

namespace torch_offload {

/// The keys left for the kernels below the fallback, of either key.
inline c10::DispatchKeySet keys_below(c10::DispatchKeySet keys) {
    constexpr c10::DispatchKeySet below = c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kPagedKey);
    return keys & below.remove(kNestedKey);
}

/// True if nothing but autograd, autocast and the kernel of the CPU or a GPU will see the call: no mode, transform or
/// tracer. Only then may a call be answered in another way than by running it as it is.
bool is_plain_call(c10::DispatchKeySet keys) noexcept;

/// Runs what is below the fallback, for arguments that are pinned. An operator that torch's kernel calls on them does
/// not come here again: it is given the same references as without paging, where `&self == &out` may decide.
void call_kernel(const c10::OperatorHandle& op, const OperatorTraits& traits, c10::DispatchKeySet keys,
                 torch::jit::Stack* stack);

/// Calls `visit(tensor)` for every defined tensor in the value: one, or those of a list, of optional ones or of lists.
template <typename Visit>
void for_each_tensor_in(const c10::IValue& value, const Visit& visit) {
    if (value.isTensor()) {
        if (value.toTensor().defined()) visit(value.toTensor());
    } else if (value.isList() && !value.isIntList() && !value.isDoubleList() && !value.isBoolList()) {
        for (const c10::IValue& element : value.toListRef()) for_each_tensor_in(element, visit);
    }
}

/// The same for all arguments of a call: `visit(position, tensor)`.
template <typename Visit>
void for_each_tensor(c10::ArrayRef<c10::IValue> arguments, const Visit& visit) {
    for (std::size_t position = 0; position < arguments.size(); ++position) {
        for_each_tensor_in(arguments[position], [&](const at::Tensor& tensor) { visit(position, tensor); });
    }
}

/// Lives while the kernel runs. Pins are dropped on destruction.
class ManagedArguments {
public:
    ManagedArguments(const OperatorTraits& traits, c10::ArrayRef<c10::IValue> arguments, c10::DispatchKeySet keys);
    ~ManagedArguments();
    ManagedArguments(const ManagedArguments&) = delete;
    ManagedArguments& operator=(const ManagedArguments&) = delete;

    bool empty() const noexcept { return spans_.empty(); }
    /// Pre: not empty.
    Engine& engine() const noexcept { return *spans_.front().engine; }
    /// True if bytes are lost unless the kernel succeeds: nothing that it allocates may be refused.
    bool must_succeed() const noexcept;

    /// Without a pin, where `empty()`: kernels ask for the addresses of tensors without elements as well.
    void open();
    /// Notes the use in the trace and brings everything in. Throws what a pin throws; OffloadError in a forked child.
    void pin();

    /// After the kernel: a written tensor whose storage was replaced (resized, say) becomes managed again.
    void manage_replaced();

    /// After a collective began: keeps the pins until the work among its results has completed.
    void hold_for(c10::ArrayRef<c10::IValue> results);

private:
    /// Pages of one segment that the call touches.
    struct Span {
        std::shared_ptr<Engine> engine;
        std::shared_ptr<Segment> segment;
        Access access = Access::read;
        std::size_t first_page = 0;
        std::size_t end_page = 0;

        bool is_whole() const noexcept { return first_page == 0 && end_page == segment->page_count(); }
    };
    struct Written {
        at::Tensor tensor;
        std::shared_ptr<Engine> engine;
        std::shared_ptr<Segment> segment;
    };
    void add(const at::Tensor& tensor, Block& block, Access access);
    void add_whole(const at::Tensor& tensor, Block& block);
    Span& span_of(const Block& block);
    bool is_in_memory() const noexcept;
    void pin_all();
    void pin_parts();
    void pin_whole(Engine& engine);

    c10::SmallVector<Span, 4> spans_;
    std::unordered_map<const Segment*, std::size_t> index_;  // used once there are many
    c10::SmallVector<Written, 2> written_;
    c10::SmallVector<PinGuard, 2> guards_;
    c10::SmallVector<at::Tensor, 4> to_open_;
    OpenStorages open_;  // ends before the pins do
    bool is_counted_ = false;
};

}  // namespace torch_offload
