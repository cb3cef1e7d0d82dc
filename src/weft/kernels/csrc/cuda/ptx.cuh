// Machine instructions that CUDA C++ has no name for. Each primitive states its memory-order contract, in the terms of
// PTX's memory consistency model.
//
// The kernels have two forms, and the architecture that they are compiled for chooses. From Hopper on (sm_90), blocks
// form clusters and a kernel may begin early. Older GPUs, from sm_80 on, run the plain form: a row to be normalised has
// one block, and a kernel begins when the previous one has ended. Both give the same bits. The host finds out which form
// a device runs (`plain_here` in peer.cu), and requests no clusters and no early launch of the plain one.
#ifndef WEFT_PTX_CUH
#define WEFT_PTX_CUH

#include "call.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define WEFT_PLAIN 1
#else
#define WEFT_PLAIN 0
#endif

namespace weft {

// --- named barriers of a block, for some of its threads ----------------------------------------------------------------

// Waits for all these threads. Each sees after it what any of them did in the block's memory before (acquire and
// release, block).
__device__ inline void sync_named(int barrier, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Counts as one of these threads without waiting (release, block).
__device__ inline void arrive_named(int barrier, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// --- units in memory that GPUs share ---------------------------------------------------------------------------------------

// Volatile, which is relaxed at system scope, for each of the four words. The words of a unit may be seen at different
// times, so a poll checks each. Nothing else is ordered: the data is its own flag.
__device__ inline Unit load_polled(const char* p) {
  Unit u;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(u.w[0]), "=r"(u.w[1]), "=r"(u.w[2]), "=r"(u.w[3])
               : "l"(p)
               : "memory");
  return u;
}
// As above: relaxed at system scope, word by word, ordering nothing else.
__device__ inline void store_published(char* p, const Unit& u) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(u.w[0]), "r"(u.w[1]), "r"(u.w[2]),
               "r"(u.w[3])
               : "memory");
}
// The same two for a unit's mark, one byte.
__device__ inline uint32_t load_polled_mark(const char* p) {
  uint32_t mark;
  asm volatile("ld.volatile.global.u8 %0, [%1];" : "=r"(mark) : "l"(p) : "memory");
  return mark;
}
__device__ inline void store_published(char* p, uint8_t mark) {
  asm volatile("st.volatile.global.u8 [%0], %1;" ::"l"(p), "r"(uint32_t(mark)) : "memory");
}
// The smaller of two words: the compiler would make two instructions of it.
__device__ inline uint32_t min_of(uint32_t w, uint32_t limit) {
  asm("min.u32 %0, %0, %1;" : "+r"(w) : "r"(limit));
  return w;
}

// --- barriers in shared memory (mbarrier) ---------------------------------------------------------------------------------

__device__ inline uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }
// Called by one thread of a block. Others of the block see it after a __syncthreads, other blocks after sync_cluster.
__device__ inline void init_barrier(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
#if !WEFT_PLAIN
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// Release, block: a thread that sees the phase pass sees what this thread did before in the block's memory.
__device__ inline void arrive_at(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// True if the phase of this parity has passed; may wait for a moment. Acquire, block: then the data that came with
// it is visible.
#if WEFT_PLAIN
#define WEFT_LOOK "test_wait"
#else
#define WEFT_LOOK "try_wait"
#endif
__device__ inline bool has_passed(uint64_t* barrier, uint32_t parity) {
  uint32_t passed;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier." WEFT_LOOK ".parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(passed)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return passed;
}
#undef WEFT_LOOK

#if !WEFT_PLAIN
// --- programmatic dependent launch ---------------------------------------------------------------------------------------

// Waits until the previous kernel of the stream has ended, and sees all that it wrote.
__device__ inline void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The next kernel's blocks may start. Orders nothing: they wait for the data that they read by the call above.
__device__ inline void let_next_kernel_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// --- clusters of blocks ------------------------------------------------------------------------------------------------------

// Waits for all threads of a cluster's blocks. Relaxed except for init_barrier: a release would wait until data that was
// pushed to other GPUs has arrived.
__device__ inline void sync_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}
// The address in another block of the variable at p in this block's shared memory.
__device__ inline uint32_t shared_address_in(uint32_t block, const void* p) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(block));
  return there;
}
// As arrive_at, and the phase also waits for `bytes` bytes of store_in_block. They may arrive before it.
__device__ inline void arrive_expecting(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// Stores to the variable of another block that `place` is in this one, and adds four bytes to the barrier there: a thread
// that sees that phase pass sees the value (release, cluster, for the value alone, not for this thread's other stores).
__device__ inline void store_in_block(uint32_t block, float* place, float value, uint64_t* barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                   shared_address_in(block, place)),
               "r"(__float_as_uint(value)), "r"(shared_address_in(block, barrier))
               : "memory");
}
#else
__device__ inline void wait_for_kernel_before() {}
__device__ inline void let_next_kernel_begin() {}
// Calls that a cluster of one block never makes.
__device__ inline void sync_cluster() { __trap(); }
__device__ inline void arrive_expecting(uint64_t*, uint32_t) { __trap(); }
__device__ inline void store_in_block(uint32_t, float*, float, uint64_t*) { __trap(); }
#endif

}  // namespace weft

#endif
