// Leaves SIGSEGV to the engine when a test program runs under a sanitizer. Include it in one source of a program whose
// tests fault on purpose.
#pragma once

#include "support/sanitized.h"

#if defined(OFFLOAD_UNDER_ASAN)
extern "C" const char* __asan_default_options() { return "handle_segv=0:allow_user_segv_handler=1"; }
#elif defined(OFFLOAD_UNDER_TSAN)
extern "C" const char* __tsan_default_options() { return "handle_segv=0:allow_user_segv_handler=1"; }
// Exceptions that one thread keeps and another raises are counted in libstdc++, which is not compiled for this
// sanitizer.
extern "C" const char* __tsan_default_suppressions() {
    return "race:std::__exception_ptr::exception_ptr::_M_release\n";
}
#endif
