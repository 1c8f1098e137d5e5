#include "autograd/operator_table.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <utility>

#include "autograd/deferred_ops.h"

namespace torch_offload {
namespace {

using namespace std::string_view_literals;

// Read sizes, strides, types or options of their arguments, never elements; a result is a view or new memory.
constexpr std::array kMetadataOnly = {
    "_assert_tensor_metadata"sv,
    "_has_same_storage_numel"sv,
    "_new_zeros_with_same_feature_meta"sv,
    "_unsafe_view"sv,
    "dense_dim"sv,
    "empty_like"sv,
    "full_like"sv,
    "is_coalesced"sv,
    "is_pinned"sv,
    "is_same_size"sv,
    "is_set_to"sv,
    "lift"sv,
    "new_empty"sv,
    "new_empty_strided"sv,
    "new_full"sv,
    "new_ones"sv,
    "new_zeros"sv,
    "ones_like"sv,
    "qscheme"sv,
    "rand_like"sv,
    "randint_like"sv,
    "randn_like"sv,
    "sparse_dim"sv,
    "zeros_like"sv,
};

// Marked as writing because they change sizes, strides, history or the storage of self; its bytes stay as they are.
constexpr std::array kMetadataWriting = {
    "_resize_output_"sv, "as_strided_"sv, "detach_"sv,    "record_stream"sv, "resize_as_"sv, "set_"sv,
    "squeeze_"sv,        "t_"sv,          "transpose_"sv, "unsqueeze_"sv,
};

constexpr std::array kCounting = {
    "aten::_pad_packed_sequence"sv,
    "aten::ctc_loss.Tensor"sv,
    "aten::tensor_split.tensor_indices_or_sections"sv,
};

constexpr std::array kSplittable = {
    "_amp_foreach_non_finite_check_and_unscale_"sv,
    "_fused_adagrad_"sv,
    "_fused_adam_"sv,
    "_fused_adamw_"sv,
    "_fused_sgd_"sv,
};

struct NamedKind {
    std::string_view name;
    OperatorKind kind;
};
constexpr std::array kReadingRows = {
    NamedKind{"embedding", OperatorKind::row_lookup},
    NamedKind{"index_select", OperatorKind::row_select},
    NamedKind{"_embedding_bag", OperatorKind::row_sum},
    NamedKind{"_embedding_bag_forward_only", OperatorKind::row_sum},
};

struct NamedOverwrite {
    std::string_view name;
    Overwrite overwrite;
};
constexpr std::array kOverwriting = {
    NamedOverwrite{"aten::zero_", Overwrite::zero},       NamedOverwrite{"aten::fill_.Scalar", Overwrite::fill},
    NamedOverwrite{"aten::copy_", Overwrite::copy},       NamedOverwrite{"aten::normal_", Overwrite::normal},
    NamedOverwrite{"aten::uniform_", Overwrite::uniform},
};

struct NamedLikeness {
    std::string_view name;
    Likeness likeness;
};
constexpr std::array kLike = {
    NamedLikeness{"aten::zeros_like", Likeness::zeros}, NamedLikeness{"aten::empty_like", Likeness::zeros},
    NamedLikeness{"aten::full_like", Likeness::full},   NamedLikeness{"aten::ones_like", Likeness::copy},
    NamedLikeness{"aten::clone", Likeness::copy},       NamedLikeness{"aten::_to_copy", Likeness::copy},
};

template <typename Names>
bool contains(const Names& names, std::string_view name) {
    return std::find(names.begin(), names.end(), name) != names.end();
}

bool is_pure_view(const c10::FunctionSchema& schema) {
    bool has_alias = false;
    for (const c10::Argument& argument : schema.arguments()) {
        if (!argument.alias_info()) continue;
        if (argument.alias_info()->isWrite()) return false;
        has_alias = true;
    }
    return has_alias;
}

/// Functional collectives call these.
bool is_collective(std::string_view name) { return name.starts_with("c10d::"); }

/// Schemas that say less than the kernel does: batch norm updates its running statistics, collectives their tensors.
bool writes_unsaid(std::string_view name, const c10::Argument& argument) {
    return is_collective(name) || argument.name() == "running_mean" || argument.name() == "running_var";
}

/// Torch's own schemas say what is written, those of other libraries may not.
bool is_of_torch(std::string_view name) { return name.starts_with("aten::"); }

/// An operator that gives nothing back is there for what it writes. One that does not say what may write any of its
/// arguments.
std::vector<bool> written_arguments(std::string_view name, const c10::FunctionSchema& schema) {
    std::vector<bool> writes;
    writes.reserve(schema.arguments().size());
    for (const c10::Argument& argument : schema.arguments()) {
        const bool is_declared = argument.alias_info() && argument.alias_info()->isWrite();
        writes.push_back(is_declared || writes_unsaid(name, argument));
    }
    const bool says_none = std::find(writes.begin(), writes.end(), true) == writes.end();
    if (says_none && schema.returns().empty() && !is_of_torch(name)) writes.assign(writes.size(), true);
    return writes;
}

OperatorKind kind_of(const c10::OperatorHandle& op, bool writes) {
    const std::string& full_name = op.operator_name().name;
    if (full_name == "aten::set_data") return OperatorKind::set_data;
    if (full_name == "aten::_has_compatible_shallow_copy_type") return OperatorKind::data_query;
    if (contains(kCounting, c10::toString(op.operator_name()))) return OperatorKind::counting;
    // A composite operator with a kernel of its own for a device runs that one there.
    if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
        !op.hasKernelForDispatchKey(c10::DispatchKey::CPU) && !op.hasKernelForDispatchKey(c10::DispatchKey::CUDA)) {
        return OperatorKind::passing;
    }
    std::string_view name = full_name;
    if (!is_of_torch(name)) {  // what returns a view may have read it
        return DeferredOps::is_recordable(op) ? OperatorKind::list : OperatorKind::ordinary;
    }
    if (is_pure_view(op.schema())) return OperatorKind::passing;
    name.remove_prefix("aten::"sv.size());
    if (contains(writes ? std::span<const std::string_view>(kMetadataWriting)
                        : std::span<const std::string_view>(kMetadataOnly),
                 name)) {
        return OperatorKind::passing;
    }
    if (name == "resize_") return OperatorKind::resizing;
    if (name == "_to_copy") return OperatorKind::casting;
    if (op.operator_name().overload_name.empty()) {
        for (const auto& [reading, kind] : kReadingRows) {
            if (name == reading) return kind;
        }
    }
    if (name == "_foreach_norm" && op.operator_name().overload_name == "Scalar") return OperatorKind::list_norm;
    return name.starts_with("_foreach_") || contains(kSplittable, name) ? OperatorKind::list : OperatorKind::ordinary;
}

std::unique_ptr<const OperatorTraits> classify(const c10::OperatorHandle& op) {
    auto traits = std::make_unique<OperatorTraits>(op.operator_name());
    const std::string full_name = c10::toString(traits->name);
    traits->writes = written_arguments(full_name, op.schema());
    traits->kind = kind_of(op, std::find(traits->writes.begin(), traits->writes.end(), true) != traits->writes.end());
    traits->is_recordable = DeferredOps::is_recordable(op);
    traits->is_collective = is_collective(full_name);
    traits->uses_arguments_only = is_of_torch(full_name) && traits->kind != OperatorKind::counting;
    for (const auto& [name, overwrite] : kOverwriting) {
        if (full_name == name) traits->overwrite = overwrite;
    }
    for (const auto& [name, likeness] : kLike) {
        if (full_name == name) traits->likeness = likeness;
    }
    return traits;
}

/// Open addressing over atomic slots: readers probe without a lock, the one writer at a time publishes finished
/// entries. A table that fills up is replaced by a larger one; old tables and entries are kept for their readers.
class OperatorTable {
public:
    const OperatorTraits* find(const c10::OperatorName& name) const {
        const Slots& slots = *slots_.load(std::memory_order_acquire);
        const std::size_t mask = slots.entries.size() - 1;
        for (std::size_t i = hash(&name) & mask;; i = (i + 1) & mask) {
            const Entry* entry = slots.entries[i].load(std::memory_order_acquire);
            if (!entry) return nullptr;
            // The name is compared too: the address may since belong to another operator, of a library reloaded.
            if (entry->key == &name) return entry->traits->name == name ? entry->traits : nullptr;
        }
    }

    const OperatorTraits& add(const c10::OperatorHandle& op) {
        std::unique_ptr<const OperatorTraits> traits = classify(op);
        const std::lock_guard lock(mutex_);
        traits_.push_back(std::move(traits));
        entries_.push_back(std::make_unique<Entry>(&op.operator_name(), traits_.back().get()));
        if (entries_.size() * 2 > slots_.load(std::memory_order_relaxed)->entries.size()) grow();
        insert(*slots_.load(std::memory_order_relaxed), entries_.back().get());
        return *traits_.back();
    }

private:
    struct Entry {
        Entry(const c10::OperatorName* k, const OperatorTraits* t) : key(k), traits(t) {}
        const c10::OperatorName* key;  // an identity, never followed
        const OperatorTraits* traits;
    };
    struct Slots {
        explicit Slots(std::size_t size) : entries(size) {}
        std::vector<std::atomic<const Entry*>> entries;
    };

    static std::size_t hash(const void* key) noexcept {
        return (reinterpret_cast<std::uintptr_t>(key) >> 4) * 0x9E3779B97F4A7C15ull >> 20;
    }

    static void insert(Slots& slots, const Entry* entry) {
        const std::size_t mask = slots.entries.size() - 1;
        std::size_t i = hash(entry->key) & mask;
        for (const Entry* held = nullptr; (held = slots.entries[i].load(std::memory_order_relaxed));
             i = (i + 1) & mask) {
            if (held->key == entry->key) break;
        }
        slots.entries[i].store(entry, std::memory_order_release);
    }

    void grow() {
        const Slots& former = *tables_.back();
        auto larger = std::make_unique<Slots>(former.entries.size() * 2);
        for (const auto& slot : former.entries) {
            if (const Entry* entry = slot.load(std::memory_order_relaxed)) insert(*larger, entry);
        }
        tables_.push_back(std::move(larger));
        slots_.store(tables_.back().get(), std::memory_order_release);
    }

    std::mutex mutex_;
    std::vector<std::unique_ptr<const OperatorTraits>> traits_;
    std::vector<std::unique_ptr<const Entry>> entries_;
    std::vector<std::unique_ptr<Slots>> tables_ = [] {
        std::vector<std::unique_ptr<Slots>> tables;
        tables.push_back(std::make_unique<Slots>(1024));
        return tables;
    }();
    std::atomic<Slots*> slots_{tables_.back().get()};
};

}  // namespace

const OperatorTraits& traits_of(const c10::OperatorHandle& op) {
    static OperatorTable* const table = new OperatorTable;  // never destroyed: tensors outlive static objects
    const OperatorTraits* known = table->find(op.operator_name());
    return known ? *known : table->add(op);
}

}  // namespace torch_offload
