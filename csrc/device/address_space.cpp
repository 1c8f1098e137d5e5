#include "device/address_space.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/units.h"
#include "device/address_arena.h"
#include "device/fault_access.h"
#include "device/mapping_seams.h"
#include "device/process_limits.h"

namespace torch_offload {
namespace {

#if defined(__SANITIZE_THREAD__)
constexpr std::size_t kFirstArenaBytes = 256 * kGiB;  // ThreadSanitizer leaves the program about 1 TiB of addresses
#else
constexpr std::size_t kFirstArenaBytes = 16 * 1024 * kGiB;
#endif
constexpr std::size_t kSmallestArenaBytes = 16 * kGiB;
constexpr std::uint32_t kMaxRepeats = 1u << 16;

// ---- SIGSEGV: everything below runs in signal handlers, so its state is global, constant-initialized and atomic.

/// A disposition that was in place before ours. Kept for ever: a handler may be reading it.
struct PreviousHandler {
    struct sigaction action;
    const PreviousHandler* older;
    mutable std::atomic<bool> spent{false};  // SA_RESETHAND: has been called once
};

/// The arena as the handler sees it.
struct ManagedAddresses {
    std::byte* begin;
    std::byte* end;
    FaultTable table;

    bool contains(const void* address) const noexcept { return begin <= address && address < end; }
    std::size_t offset_of(const void* address) const noexcept { return static_cast<const std::byte*>(address) - begin; }
};

/// What this thread last handed to a previous handler.
struct Forwarded {
    const PreviousHandler* running;  // is being called right now
    const PreviousHandler* chosen;
    const void* address;
    std::uintptr_t instruction;
    std::uint32_t repeats;
};

constinit std::atomic<const ManagedAddresses*> managed{nullptr};
constinit std::atomic<const PreviousHandler*> previous_handler{nullptr};
constinit std::atomic<std::uint64_t> answered_faults{0};
constinit std::atomic<bool> in_forked_child{false};
constinit std::atomic<bool> child_was_told{false};
// initial-exec: the general model may allocate at a thread's first use, which a signal handler must not.
[[gnu::tls_model("initial-exec")]] constinit thread_local Forwarded forwarded{};

/// A signal sent by kill() or raise() has no address: si_addr shares its bytes with the sender's id.
bool was_sent(const siginfo_t& info) noexcept { return info.si_code <= 0; }

FaultTarget* find_target(const siginfo_t& info) noexcept {
    const ManagedAddresses* addresses = managed.load(std::memory_order_acquire);
    if (was_sent(info) || addresses == nullptr || !addresses->contains(info.si_addr)) return nullptr;
    return addresses->table.find(addresses->offset_of(info.si_addr));
}

/// Ends the process as if nobody handled SIGSEGV: a fault happens again on return, a sent signal is sent again.
void take_default_action(const siginfo_t& info) noexcept {
    struct sigaction by_default = {};
    by_default.sa_handler = SIG_DFL;
    sigaction(SIGSEGV, &by_default, nullptr);
    if (was_sent(info)) raise(SIGSEGV);
}

/// Calls a previous handler under the signal mask that the kernel would have given it.
void call(const PreviousHandler& previous, int signal, siginfo_t* info, ucontext_t* context) noexcept {
    const struct sigaction& action = previous.action;
    const bool once = (action.sa_flags & SA_RESETHAND) != 0;
    if (once && previous.spent.exchange(true)) return take_default_action(*info);
    sigset_t during;
    sigorset(&during, &context->uc_sigmask, &action.sa_mask);
    if ((action.sa_flags & SA_NODEFER) == 0) sigaddset(&during, signal);
    sigset_t before;
    pthread_sigmask(SIG_SETMASK, &during, &before);
    const PreviousHandler* outer = std::exchange(forwarded.running, &previous);
    if ((action.sa_flags & SA_SIGINFO) != 0) {
        action.sa_sigaction(signal, info, context);
    } else {
        action.sa_handler(signal);
    }
    pthread_sigmask(SIG_SETMASK, &context->uc_sigmask, nullptr);  // a signal it raised while blocked arrives here
    forwarded.running = outer;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

/// Who gets a fault that is not ours. Normally the newest previous handler, but an older one where that would loop:
/// - it raises the signal again to reach the handler it displaced, which is ours (faulthandler does);
/// - it returns without effect, kMaxRepeats times for one access (a faulthandler that was disabled does).
const PreviousHandler* choose_previous(const siginfo_t& info, const ucontext_t& context) noexcept {
    Forwarded& mine = forwarded;
    const PreviousHandler* newest = previous_handler.load(std::memory_order_acquire);
    if (was_sent(info)) return mine.running != nullptr ? mine.running->older : newest;
    const std::uintptr_t instruction = faulting_instruction(context);
    if (mine.address != info.si_addr || mine.instruction != instruction || mine.chosen == nullptr) {
        mine = {mine.running, newest, info.si_addr, instruction, 0};
    } else if (++mine.repeats == kMaxRepeats) {
        mine.chosen = mine.chosen->older;
        mine.repeats = 0;
        if (mine.chosen == nullptr) return nullptr;
    }
    return mine.chosen;
}

void forward(int signal, siginfo_t* info, ucontext_t* context) noexcept {
    const PreviousHandler* previous = choose_previous(*info, *context);
    if (previous == nullptr || previous->action.sa_handler == SIG_DFL) return take_default_action(*info);
    if (previous->action.sa_handler == SIG_IGN) {
        if (!was_sent(*info)) take_default_action(*info);  // the kernel ignores a sent signal, never a fault
        return;
    }
    call(*previous, signal, info, context);
}

void write_to_stderr(const char* text) noexcept {
    [[maybe_unused]] const ssize_t written =
        write(STDERR_FILENO, text, std::strlen(text));  // nobody to tell if it fails
}

void on_sigsegv(int signal, siginfo_t* info, void* opaque_context) {
    const int saved_errno = errno;
    auto* context = static_cast<ucontext_t*>(opaque_context);
    FaultTarget* target = find_target(*info);
    if (target != nullptr && !in_forked_child.load(std::memory_order_relaxed)) {
        answered_faults.fetch_add(1, std::memory_order_relaxed);
        target->resolve_fault(static_cast<std::byte*>(info->si_addr), access_was_write(*context));
    } else {
        if (target != nullptr && !child_was_told.exchange(true)) {
            write_to_stderr(
                "torch_offload: a forked child touched a managed tensor; paged memory stays with the process that made "
                "it. Copy the tensor before the fork (tensor.clone()), or start the child with the multiprocessing "
                "context \"spawn\".\n");
        }
        forward(signal, info, context);
    }
    errno = saved_errno;
}

/// SA_NODEFER: a defect while a fault is answered reaches the previous handler instead of killing without a word, and
/// handlers down the chain may raise again. SA_ONSTACK: a stack overflow, which is not ours, still reaches a previous
/// handler that runs on an alternate stack. SA_RESTART: an answered fault interrupts nothing.
struct sigaction our_action() noexcept {
    struct sigaction action = {};
    action.sa_sigaction = on_sigsegv;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK | SA_RESTART;
    sigemptyset(&action.sa_mask);
    return action;
}

/// Returns true if another handler was in place; it is now the previous one.
bool install_handler() {
    struct sigaction current = {};
    OFFLOAD_CHECK(sigaction(SIGSEGV, nullptr, &current) == 0, LogicError,
                  "reading the SIGSEGV handler: ", std::strerror(errno));
    if ((current.sa_flags & SA_SIGINFO) != 0 && current.sa_sigaction == on_sigsegv) return false;
    // Published first: from the moment ours is in place there must be one to hand a foreign fault to.
    previous_handler.store(new PreviousHandler{current, previous_handler.load(std::memory_order_relaxed)},
                           std::memory_order_release);
    const struct sigaction ours = our_action();
    OFFLOAD_CHECK(sigaction(SIGSEGV, &ours, nullptr) == 0, LogicError,
                  "installing the SIGSEGV handler: ", std::strerror(errno));
    return true;
}

// ---- Memory

std::span<std::byte> map_anonymous(void* address, std::size_t size_bytes, int protection, int placement) noexcept {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | placement;
    void* mapped = mmap(address, size_bytes, protection, flags, -1, 0);
    if (mapped == MAP_FAILED) return {};
    return {static_cast<std::byte*>(mapped), size_bytes};
}

/// Puts a new empty mapping over `range`, at one instant: what lay there is gone, with its MADV_* flags.
bool map_fresh(std::span<std::byte> range, int protection) noexcept {
    return !map_anonymous(range.data(), range.size(), protection, MAP_FIXED).empty();
}

bool remap(std::span<std::byte> from, std::byte* to) noexcept {
    constexpr int kMoveAndKeepAddresses = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
    return mremap(from.data(), from.size(), from.size(), kMoveAndKeepAddresses, to) != MAP_FAILED;
}

/// False, with errno, where it is refused. Some kernels have unmapped `to` by then; nobody else's mapping may come to
/// lie in the arena.
bool remap_or_cover(std::span<std::byte> from, std::byte* to) noexcept {
    if (remap(from, to)) return true;
    const int error_number = errno;
    map_anonymous(to, from.size(), PROT_NONE, MAP_FIXED_NOREPLACE);
    errno = error_number;
    return false;
}

/// Moving smaller pieces, a call each whenever they move, costs more than new memory in one, which costs a fault for
/// each page once.
constexpr std::size_t kMinPieceBytes = 256 * kKiB;

constexpr int protection_bits(Protection protection) noexcept {
    switch (protection) {
        case Protection::none:
            return PROT_NONE;
        case Protection::read:
            return PROT_READ;
        case Protection::read_write:
            return PROT_READ | PROT_WRITE;
    }
    return PROT_NONE;
}

/// The kernel reports a lack of memory or of mappings as ENOMEM, from madvise as EAGAIN. The rest are defects.
[[noreturn]] void throw_mapping_error(const char* what, std::span<const std::byte> range, int error_number) {
    const std::string message = concat(what, " ", range.size(), " bytes at ", static_cast<const void*>(range.data()),
                                       ": ", std::strerror(error_number));
    if (error_number != ENOMEM && error_number != EAGAIN) throw LogicError(message);
    throw OutOfTierMemory(concat(message, "; ", memory_remedy()));
}

void set_protection(std::span<std::byte> range, int protection, const char* what) {
    if (mprotect(range.data(), range.size(), protection) != 0) throw_mapping_error(what, range, errno);
}

bool kernel_moves_mappings() noexcept {
    const std::span<std::byte> scratch = map_anonymous(nullptr, 2 * kSectorBytes, PROT_READ | PROT_WRITE, 0);
    if (scratch.empty()) return false;
    const bool moved = remap(scratch.first(kSectorBytes), scratch.data() + kSectorBytes);
    munmap(scratch.data(), scratch.size());
    return moved;
}

/// Mappings in reserve. Memory that a move has hidden may have become one mapping with its neighbors, and at the limit
/// of the process it could not be opened again where the move fails: that takes two more.
class SpareMappings {
public:
    SpareMappings() {
        if (sectors_.empty()) throw OutOfTierMemory(concat("reserving mappings: ", memory_remedy()));
        hold();
    }

    bool are_held() const noexcept { return held_.load(std::memory_order_acquire); }

    /// Returns false at the limit. Calls of this and of release() exclude one another.
    bool hold() noexcept {
        for (std::size_t i = 1; i < kSectors; i += 2) {
            if (mprotect(sectors_.data() + i * kSectorBytes, kSectorBytes, PROT_READ) == 0) continue;
            release();
            return false;
        }
        held_.store(true, std::memory_order_release);
        return true;
    }

    void release() noexcept {
        mprotect(sectors_.data(), sectors_.size(), PROT_NONE);  // takes no mapping, so it cannot fail
        held_.store(false, std::memory_order_release);
    }

private:
    static constexpr std::size_t kSectors = 5;  // each a mapping of its own while every other one is readable
    std::span<std::byte> sectors_ = map_anonymous(nullptr, kSectors* kSectorBytes, PROT_NONE, 0);
    std::atomic<bool> held_{false};
};

using Pieces = std::vector<std::span<std::byte>>;  // neighbors, in order, of which each is one mapping

/// The first `count` have moved to `to` and have to be where they are looked for.
void move_back(const Pieces& pieces, std::size_t count, std::byte* to) noexcept {
    for (std::size_t i = 0; i < count; to += pieces[i++].size()) {
        if (remap({to, pieces[i].size()}, pieces[i].data())) continue;
        write_to_stderr("torch_offload: no mappings left to move memory back to where it is looked for\n");
        std::abort();
    }
}

/// All move or, with errno, none.
bool move_all(const Pieces& pieces, std::byte* to) noexcept {
    std::byte* next = to;
    for (std::size_t i = 0; i < pieces.size(); next += pieces[i++].size()) {
        if (remap_or_cover(pieces[i], next)) continue;
        const int error_number = errno;
        move_back(pieces, i, to);
        errno = error_number;
        return false;
    }
    return true;
}

struct Reserved {
    std::span<std::byte> arena;
    std::span<std::byte> table;
};

/// As many addresses as the process may have, with the table for them. Neither uses memory.
Reserved reserve_arena() {
    for (std::size_t size = kFirstArenaBytes; size >= kSmallestArenaBytes; size /= 2) {
        const std::span<std::byte> addresses = map_anonymous(nullptr, size + kHugePageBytes, PROT_NONE, 0);
        if (addresses.empty()) continue;
        const std::span<std::byte> table =
            map_anonymous(nullptr, FaultTable::bytes_for(size), PROT_READ | PROT_WRITE, 0);
        if (!table.empty()) {
            const auto begin = reinterpret_cast<std::uintptr_t>(addresses.data());
            return {addresses.subspan(round_up(begin, kHugePageBytes) - begin, size), table};
        }
        munmap(addresses.data(), addresses.size());
    }
    throw OutOfTierMemory(concat("no ", kSmallestArenaBytes / kGiB, " GiB of addresses could be reserved; ",
                                 "this process may have ", address_limit(),
                                 "; raise the address space limit (ulimit -v)"));
}

}  // namespace

struct AddressSpace::State {
    explicit State(const Reserved& reserved)
        : addresses{reserved.arena.data(), reserved.arena.data() + reserved.arena.size(),
                    FaultTable(reserved.table.data(), reserved.arena.size())},
          arena(reserved.arena.size()) {}

    void check_inside(std::span<const std::byte> range, const char* what) const {
        const bool inside = !range.empty() && addresses.contains(range.data()) && addresses.contains(&range.back());
        const bool whole_sectors =
            reinterpret_cast<std::uintptr_t>(range.data()) % kSectorBytes == 0 && range.size() % kSectorBytes == 0;
        OFFLOAD_CHECK(inside && whole_sectors, LogicError, what, " needs whole sectors of reserved addresses, got ",
                      range.size(), " bytes at ", static_cast<const void*>(range.data()));
    }

    void check_move(std::span<const std::byte> from, std::span<const std::byte> to) const {
        check_inside(from, "move from");
        check_inside(to, "move to");
        const bool apart = from.data() + from.size() <= to.data() || to.data() + to.size() <= from.data();
        OFFLOAD_CHECK(apart, LogicError, "move between overlapping ranges of ", from.size(), " bytes");
    }

    bool hold_spares() {
        if (spares.are_held()) return true;
        const std::lock_guard lock(mutex);
        return spares.hold();
    }

    void release_spares() {
        const std::lock_guard lock(mutex);
        spares.release();
    }

    /// What `from` is made of, each of which moves by itself; `to` is noted to be made of the same.
    Pieces pieces_to_move(std::span<std::byte> from, const std::byte* to) {
        const std::lock_guard lock(mutex);
        seams.add_moved(from, to);
        return seams.pieces_of(from);
    }

    bool is_in_small_pieces(std::span<std::byte> range) {
        const std::lock_guard lock(mutex);
        const std::size_t count = seams.pieces_of(range).size();
        return count > 1 && range.size() / count < kMinPieceBytes;
    }

    void note_seams(std::span<const std::byte> range) {
        const std::lock_guard lock(mutex);
        seams.add(range);
    }

    void note_ends(std::span<const std::byte> range) {
        const std::lock_guard lock(mutex);
        seams.add_ends(range);
    }

    void forget_seams(std::span<const std::byte> range) noexcept {
        const std::lock_guard lock(mutex);
        seams.forget(range);
    }

    ManagedAddresses addresses;
    // Guards arena, seams, spares, the writing of addresses.table and the installing of the handler; a leaf.
    std::mutex mutex;
    AddressArena arena;
    MappingSeams seams;
    SpareMappings spares;
};

namespace {

std::mutex* fork_mutex = nullptr;

/// A child must not inherit a mutex that a thread it does not have was holding.
void watch_forks(std::mutex& mutex) {
    fork_mutex = &mutex;
    const int error = pthread_atfork([] { fork_mutex->lock(); }, [] { fork_mutex->unlock(); },
                                     [] {
                                         in_forked_child.store(true, std::memory_order_relaxed);
                                         fork_mutex->unlock();
                                     });
    OFFLOAD_CHECK(error == 0, LogicError, "registering the fork handlers: ", std::strerror(error));
}

}  // namespace

AddressSpace& AddressSpace::process() {
    static AddressSpace* const space = new AddressSpace;  // never destroyed: faults come until the process ends
    return *space;
}

AddressSpace::AddressSpace() {
    OFFLOAD_CHECK(kernel_moves_mappings(), InvalidArgument,
                  "the kernel cannot move memory and keep its addresses (mremap with MREMAP_DONTUNMAP: ",
                  std::strerror(errno), "); Linux 5.7 or newer is needed, without a sandbox that forbids mremap");
    state_ = std::make_unique<State>(reserve_arena());
    managed.store(&state_->addresses, std::memory_order_release);
    watch_forks(state_->mutex);
    install_handler();
}

AddressSpace::~AddressSpace() = default;

std::span<std::byte> AddressSpace::reserve(std::size_t size_bytes, FaultTarget* target) {
    OFFLOAD_CHECK(size_bytes > 0, InvalidArgument, "a range of addresses needs at least 1 byte");
    const std::lock_guard lock(state_->mutex);
    const std::size_t capacity_bytes = state_->arena.capacity_bytes();
    const std::size_t rounded_bytes = size_bytes <= capacity_bytes ? round_up(size_bytes, kSectorBytes) : size_bytes;
    const std::optional<std::size_t> offset = state_->arena.take(rounded_bytes);
    OFFLOAD_CHECK(offset.has_value(), OutOfTierMemory, "no addresses left for ", size_bytes, " bytes: all ",
                  capacity_bytes, " are in use by ", state_->arena.taken_count(),
                  " ranges; raise the address space limit (ulimit -v)");
    state_->addresses.table.set(*offset, rounded_bytes, target);
    return {state_->addresses.begin + *offset, rounded_bytes};
}

void AddressSpace::set_target(std::span<std::byte> range, FaultTarget* target) {
    state_->check_inside(range, "set_target");
    const std::lock_guard lock(state_->mutex);
    const std::size_t offset = state_->addresses.offset_of(range.data());
    OFFLOAD_CHECK(state_->arena.is_part_of_taken(offset, range.size()), LogicError,
                  "set_target needs reserved addresses");
    state_->addresses.table.set(offset, range.size(), target);
}

void AddressSpace::release(std::span<std::byte> range) noexcept try {
    state_->check_inside(range, "release");
    const std::lock_guard lock(state_->mutex);
    const std::size_t offset = state_->addresses.offset_of(range.data());
    OFFLOAD_CHECK(state_->arena.is_taken(offset, range.size()), LogicError, "release needs a whole reserved range");
    state_->addresses.table.set(offset, range.size(), nullptr);
    if (!map_fresh(range, PROT_NONE)) throw_mapping_error("releasing", range, errno);
    state_->seams.forget(range);
    state_->arena.give_back(offset, range.size());
} catch (const std::exception& error) {
    OFFLOAD_LOG(error, "addresses are lost: ", error.what());
}

void AddressSpace::commit(std::span<std::byte> range, HugePages huge_pages) {
    state_->check_inside(range, "commit");
    if (!map_fresh(range, PROT_READ | PROT_WRITE)) throw_mapping_error("committing", range, errno);
    state_->note_seams(range);
    // Over the whole range, though huge pages only fit its aligned body: two kinds of flags would be two mappings, and
    // kernels before 6.17 move one mapping a call. Refused (EINVAL: built without them) costs speed only.
    if (huge_pages == HugePages::never || range.size() < kHugePageBytes) return;
    if (madvise(range.data(), range.size(), MADV_HUGEPAGE) != 0) {
        OFFLOAD_LOG(debug, "no huge pages for ", range.size(), " bytes: ", std::strerror(errno));
    }
}

/// By touching it: MADV_POPULATE_WRITE would have all other mappings of the process wait, a fault locks only its own.
void AddressSpace::populate(std::span<std::byte> range) noexcept {
    for (std::size_t i = 0; i < range.size(); i += kSectorBytes) {
        *static_cast<volatile std::byte*>(&range[i]) = std::byte{0};
    }
}

void AddressSpace::map_file(std::span<std::byte> range, int file, std::uint64_t offset, Protection protection) {
    state_->check_inside(range, "map_file");
    const int bits = protection_bits(protection);
    if (mmap(range.data(), range.size(), bits, MAP_SHARED | MAP_FIXED, file, static_cast<off_t>(offset)) ==
        MAP_FAILED) {
        throw_mapping_error("mapping a file to", range, errno);
    }
    state_->note_seams(range);
}

void AddressSpace::decommit(std::span<std::byte> range) {
    state_->check_inside(range, "decommit");
    if (!map_fresh(range, PROT_NONE)) {
        state_->release_spares();  // at the limit: the range may take a mapping of its own before it joins others
        if (!map_fresh(range, PROT_NONE)) throw_mapping_error("decommitting", range, errno);
    }
    state_->forget_seams(range);
}

void AddressSpace::move(std::span<std::byte> from, std::byte* to, Protection protection) {
    const std::span<std::byte> target(to, from.size());
    state_->check_move(from, target);
    // Both addresses fault from before the move until after it: what stays behind are readable zeros otherwise, and
    // what arrives would be writable before it is read-only. Making PROT_NONE of PROT_NONE costs next to nothing.
    if (!state_->hold_spares()) throw_mapping_error("moving", from, ENOMEM);
    const Pieces pieces = state_->pieces_to_move(from, to);
    set_protection(from, PROT_NONE, "hiding");
    if (!move_all(pieces, to)) {
        const int error_number = errno;
        state_->release_spares();  // for the caller, who opens `from` again
        throw_mapping_error("moving", from, error_number);
    }
    if (mprotect(to, from.size(), protection_bits(protection)) != 0) {
        const int error_number = errno;
        state_->release_spares();
        move_back(pieces, pieces.size(), to);
        throw_mapping_error("uncovering", target, error_number);
    }
    state_->forget_seams(from);
}

void AddressSpace::move_unused(std::span<std::byte> from, std::byte* to) {
    const std::span<std::byte> target(to, from.size());
    state_->check_move(from, target);
    if (state_->is_in_small_pieces(from)) {
        decommit(from);
        return commit(target, HugePages::never);
    }
    if (!move_all(state_->pieces_to_move(from, to), to)) throw_mapping_error("moving", from, errno);
    state_->forget_seams(from);
}

void AddressSpace::protect(std::span<std::byte> range, Protection protection) {
    state_->check_inside(range, "protect");
    set_protection(range, protection_bits(protection), "protecting");
}

void AddressSpace::hide_from_fork(std::span<std::byte> range, bool hidden) {
    state_->check_inside(range, "hide_from_fork");
    // What is first touched while it is hidden does not become one mapping with its neighbors again.
    state_->note_ends(range);
    if (madvise(range.data(), range.size(), hidden ? MADV_DONTFORK : MADV_DOFORK) != 0) {
        throw_mapping_error("hiding from forks", range, errno);
    }
}

void AddressSpace::poison(std::span<std::byte> range) noexcept {
    // Filled elsewhere and moved in whole: another thread must not see zeros in between.
    std::span<std::byte> bytes = map_anonymous(nullptr, range.size(), PROT_READ | PROT_WRITE, 0);
    if (!bytes.empty()) {
        std::memset(bytes.data(), 0xFF, bytes.size());
        if (mremap(bytes.data(), bytes.size(), bytes.size(), MREMAP_MAYMOVE | MREMAP_FIXED, range.data()) != MAP_FAILED)
            return;
    }
    write_to_stderr("torch_offload: no memory left to end an access that cannot be served\n");
    std::abort();
}

void AddressSpace::fill_zero(std::span<std::byte> range) { std::memset(range.data(), 0, range.size()); }

bool AddressSpace::contains(const void* address) const noexcept { return state_->addresses.contains(address); }

bool AddressSpace::ensure_handler_installed() {
    const std::lock_guard lock(state_->mutex);
    return install_handler();
}

std::uint64_t AddressSpace::fault_count() const noexcept { return answered_faults.load(std::memory_order_relaxed); }

}  // namespace torch_offload
