// What each operator does to the bytes of its arguments, decided once per operator. Layer autograd.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace torch_offload {

enum class OperatorKind : std::uint8_t {
    passing,     // composite, pure view or metadata: touches no bytes itself
    counting,    // composite, but reads the integers among its arguments itself: lengths, places to cut
    ordinary,    // reads and writes what its schema says
    list,        // elementwise over lists, so that lists may be cut anywhere
    list_norm,   // _foreach_norm.Scalar: a list operator that may be answered from the cache
    set_data,    // makes self another tensor
    data_query,  // _has_compatible_shallow_copy_type: asked just before self is made another tensor
    resizing,    // touches bytes only when the storage grows
    casting,     // _to_copy: touches no bytes when it goes to the meta device
    row_lookup,  // embedding: reads some rows of its first argument
    row_select,  // index_select: the same, if it is rows that it selects
    row_sum,     // _embedding_bag: reads some rows of its first argument, and returns sums of them
};

/// How an operator writes all of its first argument without reading it.
enum class Overwrite : std::uint8_t { none, zero, fill, copy, normal, uniform };

/// What an operator makes from its first argument, of interest inside an optimizer step.
enum class Likeness : std::uint8_t { none, zeros, full, copy };

struct OperatorTraits {
    explicit OperatorTraits(c10::OperatorName operator_name) : name(std::move(operator_name)) {}

    c10::OperatorName name;
    OperatorKind kind = OperatorKind::ordinary;
    Overwrite overwrite = Overwrite::none;
    Likeness likeness = Likeness::none;
    bool is_recordable = false;
    bool is_collective = false;        // uses its arguments until the work that it returns has completed
    bool uses_arguments_only = false;  // no other tensors of the program
    std::vector<bool> writes;          // per argument
};

/// The traits of an operator; they live as long as the process.
/// Threads: any; a known operator is found without a lock.
const OperatorTraits& traits_of(const c10::OperatorHandle& op);

}  // namespace torch_offload
