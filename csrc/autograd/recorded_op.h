// Calls of list operators taken apart, and single elements of them kept to be run later, page by page.
// Layer autograd.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "autograd/kernel_scope.h"
#include "pager/page_table.h"

namespace torch_offload {

/// True for the list operators that work element by element, by exact name: run on slices that start at multiples of
/// 64 elements they give the bits of one run on the whole.
bool works_by_element(const c10::OperatorHandle& op);

/// What all elements of a recorded call share.
struct RecordedCall {
    c10::OperatorHandle op;
    c10::Device torch_device;  // where pages are when it runs
    FloatEnvironment environment;
    std::vector<c10::IValue> arguments;  // None where each element has its own
};

/// One element of a recorded call: tensors as positions in a list of segments, everything else by value.
/// Threads: immutable; run from any.
class RecordedOp {
public:
    /// A tensor of the element: which argument lists it, and how its bytes are read. They are the first of its pages:
    /// behind a shard there may be padding.
    struct Member {
        std::size_t position;
        c10::ScalarType dtype;
        std::size_t size_bytes;
        std::size_t page_bytes;

        std::size_t bytes_on(std::size_t index) const noexcept;
    };
    struct OwnValue {
        std::size_t position;
        c10::IValue value;
    };

    RecordedOp(std::shared_ptr<const RecordedCall> call, std::vector<Member> members, std::vector<OwnValue> values)
        : call_(std::move(call)), members_(std::move(members)), values_(std::move(values)) {}

    /// Runs the operator's kernel on page `index` of each tensor. `pages`: its bytes, in the order of the members.
    void run(std::span<const std::span<std::byte>> pages, std::size_t index, KernelThreads threads) const;

    /// What it does to page `index`, as a value that torch can pickle, and the operator of one, for a first and only
    /// page. Throws: InvalidArgument for a value that is none.
    c10::IValue to_value(std::size_t index) const;
    static RecordedOp from_value(const c10::IValue& value);
    /// Whether there is a page for each of its tensors, as large as that. Of the operator of a value.
    bool fits(std::span<const std::span<std::byte>> pages) const noexcept;
    /// Pages that its tensors have, from the first of their segments on.
    std::size_t page_count() const noexcept;

private:
    std::shared_ptr<const RecordedCall> call_;
    std::vector<Member> members_;
    std::vector<OwnValue> values_;
};

/// A call of an operator that works by element, while it is being recorded.
class RecordableCall {
public:
    /// Nothing if the call as a whole must run in the ordinary way: lists of different lengths, arguments that autograd
    /// differentiates, a tensor argument that is not one number or that the call itself writes. `torch_device`: where
    /// the pages will be when it runs; numbers are kept there.
    static std::optional<RecordableCall> parse(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments,
                                               c10::Device torch_device);

    /// List elements. The tensors of an element that are its members are all managed by one pager, begin with their
    /// storage, and have the same sizes, strides and pages, and the same dtype unless the operator mixes dtypes; no
    /// other element uses their storage.
    std::span<const std::size_t> recordable() const noexcept { return recordable_; }
    const std::vector<std::shared_ptr<Segment>>& segments(std::size_t element) const {
        return elements_[element].segments;
    }
    /// Pages of an element's tensors.
    std::size_t page_count(std::size_t element) const { return elements_[element].page_count; }

    /// Tries the operator on empty tensors and returns whether it accepted the captured values and dtypes; if not, the
    /// ordinary way raises the error. Pre: before the first record().
    bool rehearse();
    /// The element as it can be kept; raises the versions of what it writes, as the operator would.
    RecordedOp record(std::size_t element);

    /// The arguments with those list elements only that are not recordable; nothing if there are none.
    std::optional<std::vector<c10::IValue>> rest() const;

private:
    struct ListArgument {
        std::size_t position;
        bool is_written;
        std::vector<at::Tensor> tensors;
    };
    struct Element {
        std::vector<std::size_t> member_lists;  // into lists_
        std::vector<std::shared_ptr<Segment>> segments;
        std::size_t page_count = 0;
    };
    using Dtypes = std::vector<c10::ScalarType>;  // by list
    struct Rehearsal {
        Dtypes dtypes;
        std::vector<std::uint32_t> version_steps;  // by list
    };

    RecordableCall(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, c10::Device torch_device)
        : op_(op), arguments_(arguments.begin(), arguments.end()), torch_device_(torch_device) {}
    at::Tensor copy_of_value(const at::Tensor& tensor) const;
    bool take_lists();
    bool has_plain_values() const;
    bool is_differentiated() const;
    bool is_value(const ListArgument& list, std::size_t element) const;
    void find_recordable();
    std::optional<Element> as_element(std::size_t index) const;
    const at::Tensor& first_member(const Element& element, std::size_t index) const;
    bool slices_exactly(c10::ScalarType dtype) const;
    void capture();
    std::vector<RecordedOp::OwnValue> own_values(std::size_t element) const;
    Rehearsal rehearse(std::size_t element) const;
    Dtypes dtypes_of(std::size_t element) const;
    std::vector<Rehearsal>::const_iterator rehearsal_of(std::size_t element) const;

    c10::OperatorHandle op_;
    std::vector<c10::IValue> arguments_;
    c10::Device torch_device_;
    std::size_t count_ = 0;  // elements of the lists
    std::vector<ListArgument> lists_;
    std::vector<std::size_t> scalar_lists_;  // positions of lists of numbers
    std::vector<Element> elements_;
    std::vector<std::size_t> recordable_;
    std::shared_ptr<const RecordedCall> captured_;
    std::vector<Rehearsal> rehearsals_;
};

}  // namespace torch_offload
