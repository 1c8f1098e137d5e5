#include "autograd/list_call.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "autograd/applied_gradient.h"
#include "autograd/derived_tensors.h"
#include "autograd/gradient_hook.h"
#include "autograd/managed_arguments.h"

namespace torch_offload {
namespace {

/// A chunk may pin this share of the memory that pages can have.
constexpr std::size_t kChunkShare = 4;

using Arguments = std::vector<c10::IValue>;

/// One call of a list operator, taken off the stack.
struct ListCall {
    const c10::OperatorHandle& op;
    const OperatorTraits& traits;
    c10::DispatchKeySet keys;
    Arguments arguments;
    std::size_t length = 0;  // of the lists
};

bool is_tensor_list(const c10::IValue& argument) { return argument.isTensorList(); }

/// The common length of the tensor lists; 0 if they differ (the kernel then says so) or there is none.
std::size_t common_length(c10::ArrayRef<c10::IValue> arguments) {
    std::size_t length = 0;
    for (const c10::IValue& argument : arguments) {
        if (!is_tensor_list(argument)) continue;
        const std::size_t size = argument.toListRef().size();
        if (size == 0) continue;  // an optional list that is not used, like max_exp_avg_sqs
        if (length != 0 && length != size) return 0;
        length = size;
    }
    return length;
}

/// Elements [begin, end) of a list argument; `scalars` may also be a tensor of one value per element.
c10::IValue slice(const ListCall& call, std::size_t position, std::size_t begin, std::size_t end) {
    const c10::IValue& argument = call.arguments[position];
    if (argument.isList()) {
        const auto elements = argument.toListRef();
        if (elements.size() != call.length) return argument;
        c10::impl::GenericList part(argument.toList().elementType());
        part.reserve(end - begin);
        for (std::size_t i = begin; i < end; ++i) part.push_back(elements[i]);
        return part;
    }
    const bool is_per_element = argument.isTensor() && argument.toTensor().defined() &&
                                call.op.schema().arguments()[position].name() == "scalars" &&
                                argument.toTensor().dim() == 1;
    if (!is_per_element) return argument;
    return argument.toTensor().narrow(0, static_cast<std::int64_t>(begin), static_cast<std::int64_t>(end - begin));
}

/// Bytes that element `index` needs in memory: its managed tensors, and as much again for a result.
std::size_t element_bytes(const ListCall& call, std::size_t index) {
    std::size_t bytes = 0;
    std::size_t largest = 0;
    for (const c10::IValue& argument : call.arguments) {
        if (!is_tensor_list(argument) || argument.toListRef().size() != call.length) continue;
        const at::Tensor& tensor = argument.toListRef()[index].toTensor();
        if (!block_of(tensor)) continue;
        bytes += tensor.nbytes();
        largest = std::max(largest, tensor.nbytes());
    }
    const bool has_results = !call.op.schema().returns().empty() && call.traits.kind != OperatorKind::list_norm;
    return bytes + (has_results ? largest : 0);
}

/// Where to cut the lists: the ends of the chunks.
std::vector<std::size_t> chunk_ends(const ListCall& call, Engine& engine) {
    std::vector<std::size_t> sizes(call.length);
    std::size_t total = 0;
    for (std::size_t i = 0; i < call.length; ++i) total += sizes[i] = element_bytes(call, i);
    if (total <= engine.pager().options().budget_bytes / (4 * kChunkShare)) return {call.length};
    const ArenaUsage usage = engine.pager().statistics().memory;
    const std::size_t chunk_bytes = (usage.available_bytes() + usage.frame_bytes) / kChunkShare;
    std::vector<std::size_t> ends;
    std::size_t filled = 0;
    for (std::size_t i = 0; i < call.length; ++i) {
        if (filled != 0 && filled + sizes[i] > chunk_bytes) {
            ends.push_back(i);
            filled = 0;
        }
        filled += sizes[i];
    }
    ends.push_back(call.length);
    return ends;
}

/// In an optimizer step results become pages, so that the next chunk, or the next operator, can push them out.
void manage_results(const ListCall& call, c10::ArrayRef<c10::IValue> sources, torch::jit::Stack& results) {
    for (const c10::IValue& result : results) {
        if (!is_tensor_list(result) || result.toListRef().size() != sources.size()) continue;
        for (std::size_t i = 0; i < sources.size(); ++i) {
            const Block* source = derivation_source(call.keys, sources[i]);
            if (!source) continue;
            manage_derived(source->engine, result.toListRef()[i].toTensor(), *source->segment,
                           Engine::Derived::temporary);
        }
    }
}

torch::jit::Stack run_chunk(const ListCall& call, std::size_t begin, std::size_t end) {
    torch::jit::Stack stack;
    stack.reserve(call.arguments.size());
    for (std::size_t i = 0; i < call.arguments.size(); ++i) stack.push_back(slice(call, i, begin, end));
    ManagedArguments managed(call.traits, stack, call.keys);
    managed.empty() ? managed.open() : managed.pin();
    const c10::IValue sources = stack.front();
    call_kernel(call.op, call.traits, call.keys, &stack);
    if (is_tensor_list(sources)) manage_results(call, sources.toListRef(), stack);
    managed.manage_replaced();
    return stack;
}

void append(torch::jit::Stack& results, torch::jit::Stack part) {
    if (results.empty()) {
        results = std::move(part);
        return;
    }
    for (std::size_t i = 0; i < results.size(); ++i) {
        if (!results[i].isList()) continue;
        c10::impl::GenericList joined = results[i].toList();
        for (const c10::IValue& element : part[i].toListRef()) joined.push_back(element);
    }
}

torch::jit::Stack run_chunks(const ListCall& call, Engine& engine) {
    const std::vector<std::size_t> ends = chunk_ends(call, engine);
    if (ends.size() > 1) engine.counters.split_list_calls.increment();
    torch::jit::Stack results;
    std::size_t begin = 0;
    for (const std::size_t end : ends) {
        append(results, run_chunk(call, begin, end));
        begin = end;
    }
    return results;
}

// --- Norms --------------------------------------------------------------------------------------------------------

bool is_two(const c10::IValue& order) {
    return (order.isInt() && order.toInt() == 2) || (order.isDouble() && order.toDouble() == 2.0);
}

/// A GPU's kernels are others for the whole list where one tensor is unlike the rest; what is kept was made from one.
bool have_kernels_of_one(c10::ArrayRef<c10::IValue> tensors) {
    const at::Tensor& first = tensors[0].toTensor();
    return first.device().is_cpu() || std::all_of(tensors.begin(), tensors.end(), [&](const c10::IValue& value) {
               const at::Tensor& tensor = value.toTensor();
               return tensor.scalar_type() == first.scalar_type() && tensor.device() == first.device() &&
                      tensor.is_non_overlapping_and_dense();
           });
}

/// What is kept is kept for the plain 2-norm outside of autograd.
bool may_answer(const ListCall& call) {
    const auto tensors = call.arguments[0].toListRef();
    const bool is_differentiated =
        c10::GradMode::is_enabled() && std::any_of(tensors.begin(), tensors.end(), [](const c10::IValue& tensor) {
            return tensor.toTensor().requires_grad();
        });
    return is_two(call.arguments[1]) && call.arguments[2].isNone() && !is_differentiated &&
           have_kernels_of_one(tensors);
}

torch::jit::Stack run_norms(ListCall call, Engine& engine) {
    engine.note_norm_asked();
    if (!may_answer(call)) return run_chunks(call, engine);
    const c10::List<at::Tensor> tensors = call.arguments[0].toTensorList();
    std::vector<at::Tensor> norms(call.length);
    c10::List<at::Tensor> rest;
    std::vector<std::size_t> rest_positions;
    for (std::size_t i = 0; i < call.length; ++i) {
        const at::Tensor tensor = tensors.get(i);
        if (std::optional<at::Tensor> norm = kept_norm(tensor)) {
            norms[i] = std::move(*norm);
        } else {
            rest.push_back(tensor);
            rest_positions.push_back(i);
        }
    }
    if (!rest.empty()) {
        call.arguments[0] = rest;
        call.length = rest.size();
        const torch::jit::Stack computed = run_chunks(call, engine);
        const auto values = computed.front().toListRef();
        for (std::size_t k = 0; k < rest_positions.size(); ++k) norms[rest_positions[k]] = values[k].toTensor();
    }
    return {c10::IValue(std::move(norms))};
}

// --- Recording ----------------------------------------------------------------------------------------------------

/// Marks what the call writes as written, and tells whether autograd would let it.
bool note_writes(const OperatorTraits& traits, c10::ArrayRef<c10::IValue> arguments) {
    bool is_allowed = true;
    for_each_tensor(arguments, [&](std::size_t position, const at::Tensor& tensor) {
        if (!traits.writes[position]) return;
        is_allowed = is_allowed && !(c10::GradMode::is_enabled() && (tensor.requires_grad() || tensor.is_view()));
        if (Block* block = block_of(tensor)) block->write_count.fetch_add(1, std::memory_order_relaxed);
    });
    return is_allowed;
}

Engine* engine_among(c10::ArrayRef<c10::IValue> arguments) {
    Engine* engine = nullptr;
    for_each_tensor(arguments, [&](std::size_t, const at::Tensor& tensor) {
        if (const Block* block = engine ? nullptr : block_of(tensor)) engine = block->engine.get();
    });
    return engine;
}

}  // namespace

void call_list(const c10::OperatorHandle& op, const OperatorTraits& traits, c10::DispatchKeySet keys,
               torch::jit::Stack* stack) {
    const std::size_t count = op.schema().arguments().size();
    const c10::ArrayRef<c10::IValue> on_stack = torch::jit::last(*stack, count);
    Engine* engine = engine_among(on_stack);
    if (!engine) {
        op.redispatchBoxed(keys_below(keys), stack);
        return;
    }
    const bool is_plain = is_plain_call(keys);
    if (is_plain && traits.kind == OperatorKind::list && leave_out_applied(op, stack)) return;
    if (is_plain && traits.is_recordable && note_writes(traits, on_stack) &&
        engine->deferred().try_record(op, keys, stack)) {
        return;
    }
    const std::shared_ptr<Engine> keeper = engine->shared_from_this();
    const c10::ArrayRef<c10::IValue> rest = torch::jit::last(*stack, count);  // without what was recorded
    ListCall call{op, traits, keys, Arguments(rest.begin(), rest.end()), common_length(rest)};
    torch::jit::drop(*stack, count);
    torch::jit::Stack results;
    if (call.length == 0) {  // nothing to do, or lists of different lengths: the kernel says so before it reads
        results = std::move(call.arguments);
        op.redispatchBoxed(keys_below(keys), &results);
    } else if (!is_plain) {
        results = run_chunk(call, 0, call.length);
    } else if (traits.kind == OperatorKind::list_norm) {
        results = run_norms(std::move(call), *engine);
    } else {
        results = run_chunks(call, *engine);
    }
    stack->insert(stack->end(), std::make_move_iterator(results.begin()), std::make_move_iterator(results.end()));
}

}  // namespace torch_offload
