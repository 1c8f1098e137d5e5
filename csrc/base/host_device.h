// Marks functions that CUDA kernels share with the processor. Layer base: includes nothing.
#pragma once

#ifdef __CUDACC__
#define OFFLOAD_HOST_DEVICE __host__ __device__  // for both
#define OFFLOAD_DEVICE __device__                // for kernels, and for the processor where no CUDA is compiled
#define OFFLOAD_UNROLL _Pragma("unroll")         // a loop that indexes what is to stay in registers of a kernel
#else
#define OFFLOAD_HOST_DEVICE
#define OFFLOAD_DEVICE
#define OFFLOAD_UNROLL
#endif
