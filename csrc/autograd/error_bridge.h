// How an engine error leaves through torch's frames with its Python type. Layer autograd: includes base only.
#pragma once

#include "base/check.h"

namespace torch_offload {

/// Throws what carries `error` across the dispatcher; returns only if it cannot.
using ErrorRaiser = void (*)(const OffloadError& error);

/// The layer above, which knows Python, says how. Without one the error crosses as it is.
void set_error_raiser(ErrorRaiser raiser) noexcept;

/// Calls `body`; an engine error that it throws goes through the raiser. Everything that torch calls is wrapped in it.
template <typename Body>
decltype(auto) across_torch(Body&& body);

[[noreturn]] void raise_across_torch(const OffloadError& error);

template <typename Body>
decltype(auto) across_torch(Body&& body) {
    try {
        return body();
    } catch (const OffloadError& error) {
        raise_across_torch(error);
    }
}

}  // namespace torch_offload
