// Whether this program was built with a sanitizer.
#pragma once

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

/// How often something is repeated: fewer times where every access is looked at.
constexpr int repetitions(int usual) { return kSanitized ? usual / 10 : usual; }
