#include "autograd/encoded_work.h"

#include <ATen/Version.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "autograd/register_allocator.h"
#include "base/check.h"

namespace torch_offload {
namespace {

using Pages = std::vector<std::span<std::byte>>;

/// An operator, and the pages that it runs on.
struct RunnableOp {
    RecordedOp op;
    Pages pages;
};

/// Throws: InvalidArgument, c10::Error for a value that is no work on these pages.
std::vector<RunnableOp> operators_of(const c10::IValue& value, std::span<const std::span<std::byte>> pages) {
    std::vector<RunnableOp> operators;
    for (const c10::IValue& pair : value.toTupleRef().elements()) {
        const auto& parts = pair.toTupleRef().elements();
        OFFLOAD_CHECK(parts.size() == 2, InvalidArgument, "an operator of ", parts.size(), " parts");
        RunnableOp one{RecordedOp::from_value(parts[0]), {}};
        for (const std::int64_t position : parts[1].toIntVector()) {
            OFFLOAD_CHECK(position >= 0 && static_cast<std::size_t>(position) < pages.size(), InvalidArgument,
                          "there is no page ", position, " of ", pages.size());
            one.pages.push_back(pages[static_cast<std::size_t>(position)]);
        }
        OFFLOAD_CHECK(one.op.fits(one.pages), InvalidArgument, "an operator on other pages than the ", one.pages.size(),
                      " that there are");
        operators.push_back(std::move(one));
    }
    return operators;
}

std::vector<RunnableOp> decode_work(std::span<const std::byte> work, std::span<const std::span<std::byte>> pages) {
    const auto* const begin = reinterpret_cast<const char*>(work.data());
    try {
        return operators_of(torch::jit::pickle_load({begin, begin + work.size()}), pages);
    } catch (const c10::Error& error) {
        throw InvalidArgument(concat("this is no update: ", error.what_without_backtrace()));
    }
}

}  // namespace

std::vector<std::byte> encode_work(std::span<const PlacedOp> operations, std::size_t index) {
    std::vector<c10::IValue> pairs;
    for (const PlacedOp& placed : operations) {
        const std::vector<std::int64_t> positions(placed.positions.begin(), placed.positions.end());
        pairs.emplace_back(c10::ivalue::Tuple::create(placed.op->to_value(index), positions));
    }
    const std::vector<char> bytes = torch::jit::pickle_save(c10::ivalue::Tuple::create(std::move(pairs)));
    std::vector<std::byte> work(bytes.size());
    std::ranges::copy(std::as_bytes(std::span(bytes)), work.begin());
    return work;
}

std::size_t run_encoded_work(std::span<const std::byte> work, std::span<const std::span<std::byte>> pages,
                             std::exception_ptr& error) {
    const AllocatorBypass bypass;
    std::size_t ran = 0;
    const std::vector<RunnableOp> operators = decode_work(work, pages);
    try {
        for (const RunnableOp& one : operators) {
            one.op.run(one.pages, 0, KernelThreads::all);
            ++ran;
        }
    } catch (...) {
        error = std::current_exception();
    }
    return ran;
}

std::string kernels_here() { return concat("torch ", TORCH_VERSION, ", ", at::get_cpu_capability()); }

}  // namespace torch_offload
