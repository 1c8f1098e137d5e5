#include "support/sim_engine.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/units.h"

namespace torch_offload::test {
namespace {

std::byte& byte_of(const IoRequest& request, std::size_t index) {
    return index < request.buffer.size() ? request.buffer[index] : request.tail[index - request.buffer.size()];
}

}  // namespace

std::size_t SimEngine::submit(std::span<IoRequest* const> requests) {
    for (const IoRequest* request : requests) check_request(*request);
    const std::size_t taken_count = std::min(requests.size(), capacity_ - pending_.size());
    for (IoRequest* request : requests.first(taken_count)) {
        start_over(*request);
        pending_.push_back({request, tick_});
    }
    return taken_count;
}

/// The fault of the next attempt: scripted, or by chance. One that does not apply to the direction is none.
std::optional<SimFault> SimEngine::draw(const IoRequest& request) {
    std::optional<SimFault> fault;
    if (!scripted_.empty()) {
        fault = scripted_.front();
        scripted_.pop_front();
    }
    for (std::size_t i = 0; i < kSimFaultCount && !fault; ++i) {
        if (below(1000) < chances_[i]) fault = static_cast<SimFault>(i);
    }
    const bool is_read = request.direction == IoDirection::read;
    const bool for_writes =
        fault == SimFault::no_space || fault == SimFault::torn_write || fault == SimFault::silent_torn_write;
    if ((is_read && for_writes) || (!is_read && fault == SimFault::silent_bit_flip)) return std::nullopt;
    if (fault) ++injected_[static_cast<std::size_t>(*fault)];
    return fault;
}

/// Copies the first `size_bytes` of what is left of `request`; returns how many the file has.
std::int64_t SimEngine::move_bytes(IoRequest& request, std::size_t size_bytes) {
    std::vector<std::byte>& file = (*files_)[request.file_descriptor];
    const std::uint64_t offset_bytes = request.offset_bytes + request.done_bytes;
    const bool is_write = request.direction == IoDirection::write;
    if (is_write) make_as_long_as(request.file_descriptor, offset_bytes + size_bytes);
    const std::size_t there_bytes = file.size() - std::min<std::size_t>(offset_bytes, file.size());
    const std::size_t most_bytes = std::min(size_bytes, there_bytes);
    std::size_t moved_bytes = 0;
    for (const iovec& piece : pieces_left(request)) {
        const std::size_t count = std::min(piece.iov_len, most_bytes - moved_bytes);
        if (count == 0) break;
        std::byte* const in_file = file.data() + offset_bytes + moved_bytes;
        is_write ? std::memcpy(in_file, piece.iov_base, count) : std::memcpy(piece.iov_base, in_file, count);
        moved_bytes += count;
    }
    return static_cast<std::int64_t>(moved_bytes);
}

void SimEngine::make_as_long_as(int file_descriptor, std::size_t size_bytes) {
    std::vector<std::byte>& file = (*files_)[file_descriptor];
    file.resize(std::max(file.size(), size_bytes));
}

std::int64_t SimEngine::attempt(IoRequest& request, std::optional<SimFault> fault) {
    if (request.file_descriptor < 0) return -EBADF;
    if (const int refusal = refusals_[static_cast<std::size_t>(request.direction)]) return -refusal;
    const std::size_t left_bytes = request.size_bytes() - request.done_bytes;
    const std::uint64_t first_byte = request.offset_bytes + request.done_bytes;
    if (fault == SimFault::io_error_forever) {
        bad_sectors_.insert({request.file_descriptor, first_byte + below(left_bytes / kSectorBytes) * kSectorBytes});
    }
    const auto bad = bad_sectors_.lower_bound({request.file_descriptor, first_byte});
    if (bad != bad_sectors_.end() && bad->first == request.file_descriptor && bad->second < first_byte + left_bytes) {
        return -EIO;
    }
    if (!fault) {
        const SimAnswer answer = answer_ ? answer_(request) : SimAnswer{};
        return answer.error != 0 ? -answer.error : move_bytes(request, std::min(left_bytes, answer.most_bytes));
    }
    switch (*fault) {
        case SimFault::short_transfer:
            return move_bytes(request, 1 + below(left_bytes));
        case SimFault::interrupted:
            return -EINTR;
        case SimFault::again:
            return -EAGAIN;
        case SimFault::io_error_once:
            return -EIO;
        case SimFault::no_space:
            return -ENOSPC;
        case SimFault::torn_write:
            move_bytes(request, below(left_bytes));
            return -EIO;
        case SimFault::silent_torn_write:
            move_bytes(request, below(left_bytes));
            make_as_long_as(request.file_descriptor, first_byte + left_bytes);  // as one that is preallocated
            return static_cast<std::int64_t>(left_bytes);
        case SimFault::silent_bit_flip: {
            const std::int64_t moved_bytes = move_bytes(request, left_bytes);
            byte_of(request, request.done_bytes + below(left_bytes)) ^= std::byte{1} << below(8);
            return moved_bytes;
        }
        case SimFault::late:
        case SimFault::io_error_forever:
            break;
    }
    return move_bytes(request, left_bytes);
}

/// One tick: every transfer that is due is attempted once.
std::size_t SimEngine::step(std::span<IoRequest*> finished) {
    std::size_t count = 0;
    ++tick_;
    for (std::size_t left = pending_.size(); left > 0 && count < finished.size(); --left) {
        const Pending pending = pending_.front();
        pending_.pop_front();
        if (pending.due_tick > tick_) {
            pending_.push_back(pending);
            continue;
        }
        IoRequest& request = *pending.request;
        const std::optional<SimFault> fault = draw(request);
        if (fault == SimFault::late) {
            pending_.push_back({&request, tick_ + 1 + below(8)});
        } else if (settle(request, attempt(request, fault)) == Next::resubmit) {
            pending_.push_back({&request, tick_});
        } else {
            ++(request.direction == IoDirection::write ? write_count_ : read_count_);
            finished[count++] = &request;
        }
    }
    return count;
}

std::size_t SimEngine::reap(std::span<IoRequest*> finished, std::chrono::milliseconds timeout) {
    event_.clear();
    for (std::size_t count = 0; !pending_.empty();) {
        count = step(finished);
        if (woken_.exchange(false) || count > 0 || timeout.count() <= 0) return count;
    }
    if (!woken_.load()) {
        pollfd event{event_.file_descriptor(), POLLIN, 0};
        ::poll(&event, 1, static_cast<int>(timeout.count()));
    }
    woken_.store(false);
    return 0;
}

void SimEngine::wake() noexcept {
    woken_.store(true);
    event_.raise();
}

}  // namespace torch_offload::test
