#include "pager/served_update.h"

#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"

namespace torch_offload {
namespace {

std::span<const std::byte> operators_of(const PageRequest& request) {
    return std::span(request.body).subspan(request.question.count * sizeof(MemberPage));
}

/// Why an update failed, as much as there is room for; nothing if it did not.
void append_reason(std::string& text, const std::exception_ptr& error) {
    const auto append = [&](std::string_view reason) { text.append(reason.substr(0, kMaxTextBytes - text.size())); };
    try {
        if (error) std::rethrow_exception(error);
    } catch (const std::exception& failed) {
        const std::string_view reason = failed.what();
        append(reason.empty() ? "an operator failed" : reason);
    } catch (...) {
        append("an operator failed");
    }
}

/// Of each page, as what a client that reads it next will have it compared with. After an error none has been let go.
void append_checksums(PageRequest& request, std::uint64_t client, std::span<const std::span<std::byte>> pages,
                      bool has_failed) {
    for (std::size_t k = 0; k < pages.size(); ++k) {
        MessageHeader header = request.question;
        header.client = client;
        header.segment = request.members[k].segment;
        header.version = request.members[k].version;
        const bool is_gone = request.members[k].is_worthless != 0 && !has_failed;
        const std::uint64_t checksum = is_gone ? 0 : checksum_of_body(header, pages[k]);
        request.text.append(reinterpret_cast<const char*>(&checksum), sizeof(checksum));
    }
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
        request.text.reserve(kMaxTextBytes);  // now: an answer that cannot be made says that nothing has run
        request.ran = run_work(operators_of(request), pages, error);
        for (std::size_t k = 0; !error && k < pages.size(); ++k) {
            if (request.members[k].is_worthless != 0) latch.discard(k);
        }
        append_checksums(request, client, pages, error != nullptr);
        append_reason(request.text, error);
    } catch (...) {
        request.error = std::current_exception();
    }
    request.body.clear();
}

}  // namespace torch_offload
