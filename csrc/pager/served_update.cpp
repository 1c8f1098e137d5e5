#include "pager/served_update.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/check.h"

namespace torch_offload {
namespace {

std::span<const std::byte> operators_of(const PageRequest& request) {
    return std::span(request.body).subspan(request.question.count * sizeof(MemberPage));
}

std::string text_of(const std::exception_ptr& error) {
    try {
        if (error) std::rethrow_exception(error);
    } catch (const std::exception& failed) {
        const std::string text = failed.what();
        return text.empty() ? "an operator failed" : text;
    }
    return {};
}

/// Of each page, as what a client that reads it next will have it compared with.
std::string checksums_of(const PageRequest& request, std::uint64_t client,
                         std::span<const std::span<std::byte>> pages) {
    std::vector<std::uint64_t> checksums;
    for (std::size_t k = 0; k < pages.size(); ++k) {
        MessageHeader header = request.question;
        header.client = client;
        header.segment = request.members[k].segment;
        header.version = request.members[k].version;
        checksums.push_back(request.members[k].is_worthless != 0 ? 0 : checksum_of_body(header, pages[k]));
    }
    const auto bytes = std::as_bytes(std::span(checksums));
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

std::vector<MemberPage> members_of(const PageRequest& request) {
    const std::uint64_t count = request.question.count;
    OFFLOAD_CHECK(count > 0 && count <= kMaxMembers && request.body.size() >= count * sizeof(MemberPage),
                  InvalidArgument, "an update of ", count, " pages in ", request.body.size(), " bytes");
    std::vector<MemberPage> members(count);
    std::memcpy(members.data(), request.body.data(), count * sizeof(MemberPage));
    return members;
}

void run_update(Pager& pager, PageRequest& request, std::uint64_t client, const RunWork& run_work) noexcept {
    try {
        for (const std::shared_ptr<Segment>& segment : request.segments) pager.touch(segment);
        UpdateLatch latch = pager.latch_for_update(request.segments, request.question.page, true);
        std::vector<std::span<std::byte>> pages;
        for (std::size_t k = 0; k < request.segments.size(); ++k) pages.push_back(latch.bytes(k));
        std::exception_ptr error;
        request.ran = run_work(operators_of(request), pages, error);
        for (std::size_t k = 0; !error && k < pages.size(); ++k) {
            if (request.members[k].is_worthless != 0) latch.discard(k);
        }
        request.text = checksums_of(request, client, pages) + text_of(error);
        request.text.resize(std::min(request.text.size(), kMaxTextBytes));
    } catch (...) {
        request.error = std::current_exception();
    }
    request.body.clear();
}

}  // namespace torch_offload
