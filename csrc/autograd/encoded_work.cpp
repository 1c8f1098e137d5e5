#include "autograd/encoded_work.h"

#include <ATen/Version.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "autograd/register_allocator.h"
#include "base/check.h"

namespace torch_offload {
namespace {

/// Throws: InvalidArgument for a value that is no work on so many pages.
std::vector<PlacedOp> operations_of(const c10::IValue& value, std::size_t page_count) {
    std::vector<PlacedOp> operations;
    for (const c10::IValue& pair : value.toTupleRef().elements()) {
        const auto& parts = pair.toTupleRef().elements();
        OFFLOAD_CHECK(parts.size() == 2, InvalidArgument, "an operator of ", parts.size(), " parts");
        PlacedOp placed{std::make_shared<const RecordedOp>(RecordedOp::from_value(parts[0])), {}};
        for (const std::int64_t position : parts[1].toIntVector()) {
            OFFLOAD_CHECK(position >= 0 && static_cast<std::size_t>(position) < page_count, InvalidArgument,
                          "there is no page ", position, " of ", page_count);
            placed.positions.push_back(static_cast<std::size_t>(position));
        }
        OFFLOAD_CHECK(placed.positions.size() == placed.op->member_count(), InvalidArgument, "an operator on ",
                      placed.op->member_count(), " tensors, for which there are ", placed.positions.size(), " pages");
        operations.push_back(std::move(placed));
    }
    return operations;
}

std::vector<PlacedOp> decode_work(std::span<const std::byte> work, std::size_t page_count) {
    const auto* const begin = reinterpret_cast<const char*>(work.data());
    try {
        return operations_of(torch::jit::pickle_load({begin, begin + work.size()}), page_count);
    } catch (const c10::Error& error) {
        throw InvalidArgument(concat("this is no update: ", error.what_without_backtrace()));
    }
}

}  // namespace

std::vector<std::byte> encode_work(std::span<const PlacedOp> operations) {
    std::vector<c10::IValue> pairs;
    for (const PlacedOp& placed : operations) {
        const std::vector<std::int64_t> positions(placed.positions.begin(), placed.positions.end());
        pairs.emplace_back(c10::ivalue::Tuple::create(placed.op->to_value(), positions));
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
    const std::vector<PlacedOp> operations = decode_work(work, pages.size());
    try {
        for (const PlacedOp& placed : operations) {
            std::vector<std::span<std::byte>> own;
            for (const std::size_t position : placed.positions) own.push_back(pages[position]);
            placed.op->run(own, KernelThreads::all);
            ++ran;
        }
    } catch (...) {
        error = std::current_exception();
    }
    return ran;
}

std::string kernels_here() { return concat("torch ", TORCH_VERSION, ", ", at::get_cpu_capability()); }

}  // namespace torch_offload
