// The boxed fallback on the keys that managed tensors carry. Layer autograd.
#pragma once

namespace torch_offload {

/// Torch takes a composite kernel for one of the lower key's own, and so passes the fallback by: names the fallback for
/// every operator that has such a kernel and not yet one of the lower key. Operators that a library defines later are
/// covered by the next call. Threads: any; takes some milliseconds.
void cover_composite_operators();

}  // namespace torch_offload
