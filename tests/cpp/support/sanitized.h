// Whether this program was built with a sanitizer, by g++ or clang.
#pragma once

#if defined(__has_feature)
#define OFFLOAD_HAS_FEATURE(name) __has_feature(name)
#else
#define OFFLOAD_HAS_FEATURE(name) 0
#endif

#if defined(__SANITIZE_ADDRESS__) || OFFLOAD_HAS_FEATURE(address_sanitizer)
#define OFFLOAD_UNDER_ASAN 1
#elif defined(__SANITIZE_THREAD__) || OFFLOAD_HAS_FEATURE(thread_sanitizer)
#define OFFLOAD_UNDER_TSAN 1
#endif

enum class Sanitizer { none, address, thread };

#if defined(OFFLOAD_UNDER_ASAN)
inline constexpr Sanitizer kSanitizer = Sanitizer::address;
#elif defined(OFFLOAD_UNDER_TSAN)
inline constexpr Sanitizer kSanitizer = Sanitizer::thread;
#else
inline constexpr Sanitizer kSanitizer = Sanitizer::none;
#endif

inline constexpr bool kSanitized = kSanitizer != Sanitizer::none;

/// How often something is repeated: fewer times where every access is looked at.
constexpr int repetitions(int usual) { return kSanitized ? usual / 10 : usual; }
