// Updates that a client has a store run, as bytes and as what is done. Layer pager: includes base, net.
#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <span>

#include "pager/pager.h"
#include "pager/request_lane.h"

namespace torch_offload {

/// Runs encoded operators on the bytes of pages, in the order in which the client names them. Returns how many of them
/// ran; `error`: why no more did. Throws: InvalidArgument for what nobody encoded, before any of them has run.
using RunWork = std::function<std::size_t(std::span<const std::byte> operators,
                                          std::span<const std::span<std::byte>> pages, std::exception_ptr& error)>;

/// The pages that an update's body names. Throws: InvalidArgument for a body that cannot be meant.
std::vector<MemberPage> members_of(const PageRequest& request);

/// Latches the pages of an update, runs it, and writes the text of the answer: checksums, and why no more ran.
/// `client`: the number that checksums are made with.
void run_update(Pager& pager, PageRequest& request, std::uint64_t client, const RunWork& run_work) noexcept;

}  // namespace torch_offload
