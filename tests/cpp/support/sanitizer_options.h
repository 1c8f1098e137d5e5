// Leaves SIGSEGV to the engine when a test program runs under a sanitizer. Include it in one source of a program whose
// tests fault on purpose.
#pragma once

#if defined(__SANITIZE_ADDRESS__)
extern "C" const char* __asan_default_options() { return "handle_segv=0:allow_user_segv_handler=1"; }
#elif defined(__SANITIZE_THREAD__)
extern "C" const char* __tsan_default_options() { return "handle_segv=0:allow_user_segv_handler=1"; }
#endif
