// The error types of the engine and the check that throws them. Layer base: includes nothing of this project.
#pragma once

#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>

namespace torch_offload {

/// Root of every error the engine raises. Maps to Python's `OffloadError`.
class OffloadError : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

/// An argument that cannot be served: from a user, a file or the kernel.
class InvalidArgument : public OffloadError {
public:
    using OffloadError::OffloadError;
};

/// A defect of this project: a state that its own rules exclude.
class LogicError : public OffloadError {
public:
    using OffloadError::OffloadError;
};

/// A tier's budget cannot hold what is asked for. Maps to a Python `MemoryError`.
class OutOfTierMemory : public OffloadError {
public:
    using OffloadError::OffloadError;
};

/// A transfer to or from a tier failed. Maps to a Python `OSError`.
class TierIoError : public OffloadError {
public:
    TierIoError(const std::string& message, int error_number) : OffloadError(message), error_number_(error_number) {}

    /// The positive `errno` value, 0 where there is none.
    int error_number() const noexcept { return error_number_; }

private:
    int error_number_;
};

/// Bytes that came back are not the bytes that were written.
class CorruptPage : public TierIoError {
public:
    explicit CorruptPage(const std::string& message) : TierIoError(message, 0) {}
};

/// The exception that `make` returns, or why it could not be made: there may be no memory for its message.
template <typename Make>
std::exception_ptr exception_from(const Make& make) noexcept {
    try {
        return std::make_exception_ptr(make());
    } catch (...) {
        return std::current_exception();
    }
}

/// Joins its arguments into one string with `operator<<`.
template <typename... Parts>
std::string concat(const Parts&... parts) {
    std::ostringstream stream;
    (stream << ... << parts);
    return stream.str();
}

}  // namespace torch_offload

/// Throws `Type` with the joined message parts unless `condition` holds; active in release builds.
#define OFFLOAD_CHECK(condition, Type, ...)                   \
    do {                                                      \
        if (!(condition)) [[unlikely]] {                      \
            throw Type(::torch_offload::concat(__VA_ARGS__)); \
        }                                                     \
    } while (false)
