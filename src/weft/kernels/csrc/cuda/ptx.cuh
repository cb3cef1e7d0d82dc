// What the kernel needs of the machine and CUDA C++ has no name for.
#ifndef WEFT_PTX_CUH
#define WEFT_PTX_CUH

#include "call.h"

namespace weft {

// Named barriers: of so many threads of the block.
__device__ inline void meet(int barrier, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void arrive(int barrier, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Of the kernel before this one on the stream, and for the one after.
__device__ inline void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void let_next_kernel_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ inline Unit load_polled(const char* p) {
  Unit u;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(u.w[0]), "=r"(u.w[1]), "=r"(u.w[2]), "=r"(u.w[3])
               : "l"(p)
               : "memory");
  return u;
}
__device__ inline void store_now(char* p, const Unit& u) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(u.w[0]), "r"(u.w[1]), "r"(u.w[2]),
               "r"(u.w[3])
               : "memory");
}
// Of two words the smaller: the compiler would make two instructions of it.
__device__ inline uint32_t at_most(uint32_t w, uint32_t most) {
  asm("min.u32 %0, %0, %1;" : "+r"(w) : "r"(most));
  return w;
}

// Every thread of a cluster's blocks. It waits for what this one has pushed to other GPUs, too.
__device__ inline void meet_cluster() { asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory"); }
// Stores to what `place` of this block's shared memory is in another block of the cluster.
__device__ inline void store_in_block(uint32_t block, uint64_t* place, uint64_t value) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(uint32_t(__cvta_generic_to_shared(place))), "r"(block));
  asm volatile("st.shared::cluster.b64 [%0], %1;" ::"r"(there), "l"(value) : "memory");
}

}  // namespace weft

#endif
