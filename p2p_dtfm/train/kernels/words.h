/* The words of the kernels, for a device. The tests have others, for a processor.
 *
 * Kernels are C: no references, no templates. What the threads of a block share they touch within
 * EACH alone, and no thread reads there what another one writes in the same EACH. So it makes no
 * difference whether threads go side by side or one after the other, in any order. */
#define KERNEL extern "C" __global__ void
#define INLINE static __device__ __forceinline__
#define SHARED __shared__

/* The threads of a block: the body is each one's; at its end they wait for one another. */
#define EACH(thread) \
    for (int thread = threadIdx.x, once_ = 1; once_; once_ = 0, __syncthreads())

/* The elements 0 to count, shared out among all threads of all blocks. */
#define EACH_OF(index, count) \
    for (long long index = blockIdx.x * (long long)blockDim.x + threadIdx.x; index < (count); \
         index += gridDim.x * (long long)blockDim.x)
