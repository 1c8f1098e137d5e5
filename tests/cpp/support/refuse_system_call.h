// Makes a system call fail for the calling thread, as a container's profile or another filesystem would.
#pragma once

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <thread>

namespace torch_offload::test {

/// Which calls fail: those of `number` whose argument number `argument` has `value` under `mask`; by default all.
struct RefusedCall {
    std::uint32_t number = 0;
    int error = 0;
    unsigned argument = 0;
    std::uint32_t mask = 0;
    std::uint32_t value = 0;
};

/// For the rest of this thread's life. False where the system has no seccomp.
inline bool refuse_system_call(const RefusedCall& call) {
    const auto argument_offset =
        static_cast<std::uint32_t>(offsetof(seccomp_data, args) + call.argument * sizeof(std::uint64_t));
    sock_filter program[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call.number, 0, 4),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, argument_offset),
        BPF_STMT(BPF_ALU | BPF_AND | BPF_K, call.mask),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call.value, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<std::uint32_t>(call.error)),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog filter{std::size(program), program};
    return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

/// Runs `body` in a thread that may refuse system calls without harm to the others.
inline void in_own_thread(const std::function<void()>& body) { std::thread(body).join(); }

}  // namespace torch_offload::test
